"""A cluster simulated in virtual time, in one process."""
