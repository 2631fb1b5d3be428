"""One run from plan to result: goals, evaluation, checkpoints and the run directory."""
