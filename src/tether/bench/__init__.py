"""Benchmarks that a user can repeat, one in each file: ratios of things that are measured in turns within one run.

The function that a file is named after is the benchmark. Its parameters are the options of `tether bench NAME`, and its
docstring is the help of that command. `common` has what several benchmarks share.
"""
