"""Many runs over a grid of settings: `tether study` and `tether tune`.

`sweep` holds what both share: running and measuring one cell of the grid, the file of finished cells, and the display.
"""
