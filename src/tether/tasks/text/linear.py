"""A linear classifier of sparse vectors: one against the rest, squared hinge loss, by dual coordinate descent.

For each class it minimizes half the squared norm of the weights plus the weighted sum over rows of max(0, 1 - y s)^2,
where s is the row's score and y is 1 for rows of the class and -1 for others: the linear SVM of LIBLINEAR (Hsieh et
al., 2008). A sweep visits the rows in random order. Each visit solves for the row's dual variables exactly, for all
classes at once, and changes only the weights of the row's features.

With two classes, features count half by how differently the classes use them: the logarithm of the ratio of their
frequencies, as in NB-SVM (Wang and Manning, 2012), which is strong on opinions.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from tether.tasks.text.features import Floats, Integers, Matrix

#: of a fitted model; half precision is enough to answer
Weights = NDArray[np.float32] | NDArray[np.float16]
#: sweeps at most, and the mean change of a row's dual variables below which they end
_SWEEPS, _TOLERANCE = 20, 0.02
#: the weight of the loss with several classes, and with two
_COST, _COST_OF_TWO = 1.0, 0.3
#: a smaller change of a dual variable is not worth the work
_CHANGE_MIN = 1e-4


@dataclass
class Linear:
    """A fitted model, which can go on with more rows of the same matrix."""

    #: of each feature (row) for each class (column); with two classes there is one column, of the second
    weights: Floats
    #: of each row of the matrix for each class
    duals: Floats
    #: what the values of each feature are multiplied by
    scale: Floats

    @staticmethod
    def fit(matrix: Matrix, targets: Floats, rows: Integers, features: int, begin: Linear | None = None) -> Linear:
        """Fitted on some rows of a matrix; `targets` has 1 or -1 of every row for each class.

        `begin` is a model of fewer rows of the same matrix to begin with, which is changed.
        """
        classes = targets.shape[1]
        if begin is None:
            scale = _log_ratios(matrix, targets[:, 0], rows, features) if classes == 1 else None
            begin = Linear(
                np.zeros((features, classes), np.float32),
                np.zeros_like(targets),
                np.ones(features, np.float32) if scale is None else scale,
            )
        weights, duals, scale = begin.weights, begin.duals, begin.scale
        scaled = matrix.values * scale[matrix.columns]
        # what a dual variable adds to its own derivative
        diagonal = np.float32(0.5 / (_COST_OF_TWO if classes == 1 else _COST))
        norms = np.add.reduceat(scaled * scaled, matrix.starts[:-1]) + diagonal
        random = np.random.default_rng(0)
        bounds = matrix.starts.tolist()
        for _ in range(_SWEEPS):
            changed = 0.0
            for row in random.permutation(rows).tolist():
                start, stop = bounds[row], bounds[row + 1]
                columns, values = matrix.columns[start:stop], scaled[start:stop]
                own = weights.take(columns, 0)
                dual, target = duals[row], targets[row]
                slope = target * (values @ own) - 1 + diagonal * dual
                change = np.maximum(dual - slope / norms[row], 0) - dual
                most = float(np.abs(change).max())
                if most < _CHANGE_MIN:
                    continue
                changed += most
                dual += change
                own += values[:, None] * (change * target)
                weights[columns] = own
            if changed < _TOLERANCE * len(rows):
                break
        return Linear(weights, duals, scale)

    def final_weights(self) -> Floats:
        """Weights for values that are not scaled."""
        return self.weights * self.scale[:, None]


def scores(matrix: Matrix, weights: Weights) -> Floats:
    """The score of every row for each class; for two classes, the score of the second and its negative."""
    found = np.empty((len(matrix), weights.shape[1]), np.float32)
    bounds = matrix.starts.tolist()
    for row in range(len(matrix)):
        start, stop = bounds[row], bounds[row + 1]
        own = weights.take(matrix.columns[start:stop], 0).astype(np.float32, copy=False)
        found[row] = matrix.values[start:stop] @ own
    return np.hstack((-found, found)) if weights.shape[1] == 1 else found


def _log_ratios(matrix: Matrix, targets: Floats, rows: Integers, features: int) -> Floats:
    """Half 1, half by how differently the classes use a feature, with a mean square of 1."""
    chosen = np.isin(np.arange(len(matrix)), rows)
    row = np.repeat(np.arange(len(matrix)), np.diff(matrix.starts))
    counts = [
        1.0 + np.bincount(matrix.columns[chosen[row] & (targets[row] == sign)], minlength=features) for sign in (1, -1)
    ]
    ratios = np.abs(np.log(counts[0] / counts[0].sum()) - np.log(counts[1] / counts[1].sum()))
    # what every row has, a constant and dense vectors, is used alike
    ratios[counts[0] + counts[1] - 2 == len(rows)] = 1.0
    mean = np.sqrt((ratios[matrix.columns] ** 2).mean())
    scale: Floats = (0.5 + 0.5 * ratios / mean).astype(np.float32)
    return scale
