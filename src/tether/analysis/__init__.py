"""Reading finished runs: reports, plots, and the speedup model.

`runs` reads run directories. `report` shows them side by side, with the panels of `plots` and the predictions of
`speedup`. `tuning` and `sweep_plots` are for sweeps: what a search for alpha found, and the pictures.
"""
