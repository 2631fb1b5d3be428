"""One replica of the model: reads mini-batches, computes gradients, steps the optimizer."""
