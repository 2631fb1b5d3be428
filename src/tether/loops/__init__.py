"""A user's own loop: two lines make a script train with any protocol whose workers step.

`join` ties a model and its optimizer to those of the other processes that `tether launch` has started with the same
script. In a script that was started alone, every function here does what the script would do without it.
"""

from tether.loops.loop import Loop, evaluate, is_main, join, rank, sampler, save, world_size

__all__ = ["Loop", "evaluate", "is_main", "join", "rank", "sampler", "save", "world_size"]
