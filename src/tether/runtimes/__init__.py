"""Where nodes run: virtual time in one process, or processes on one machine."""
