"""The task of learning one column of a Spark DataFrame from others.

`TetherEstimator` trains it; people who call `tether.run` themselves make one.
"""

from __future__ import annotations

import copy
from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn
from torch.nn import functional
from torch.utils.data import TensorDataset

from tether.errors import TaskError, UsageError, unknown
from tether.runtimes.spark.feed import Columns, RowSource, as_frame
from tether.runtimes.spark.store import Field
from tether.task import Task

if TYPE_CHECKING:
    from pyspark import RDD
    from pyspark.sql import DataFrame

#: losses by name, and whether their labels are classes
LOSSES: dict[str, tuple[Callable[[Tensor, Tensor], Tensor], bool]] = {
    "cross_entropy": (functional.cross_entropy, True),
    "mse": (lambda outputs, labels: functional.mse_loss(outputs.flatten(), labels), False),
}
#: how many rows go through the model at once in a prediction: bounds its memory
CHUNK_ROWS = 1000


class FrameTask(Task):
    """Learn the label of a row from its features.

    Features are one column of vectors, arrays of numbers, or bytes, or several columns of numbers; the model gets a
    batch of them as floats in the given `shape`, bytes as fractions of 255. With `dtype="int64"` it gets whole numbers,
    such as the numbers of words. With the loss "cross_entropy" the label is a class, a whole number from 0; with "mse"
    and losses of your own it is any number.

    Rows are checked when the task is made. The frame is computed once for that and once for training: cache it if that
    is much work, or if its rows differ each time.
    """

    def __init__(
        self,
        frame: DataFrame | RDD[Any],
        *,
        features: str | Sequence[str] = "features",
        label: str = "label",
        model: nn.Module | Callable[[], nn.Module],
        loss: str | Callable[[Tensor, Tensor], Tensor] = "cross_entropy",
        optimizer: Callable[[nn.Module], torch.optim.Optimizer] | None = None,
        batch_size: int = 32,
        epochs: float = 5,
        validation: DataFrame | float | None = None,
        validation_rows: int = 10_000,
        shape: Sequence[int] | None = None,
        dtype: str = "float32",
        seed: int = 0,
    ) -> None:
        """Metrics are computed on `validation`: a frame, or a fraction of rows to hold out; at most `validation_rows`.

        model: a module, or a function that makes one.
        loss: "cross_entropy", "mse", or a function of the model's outputs and the labels.
        optimizer: a function that makes one for a model; the default is Adam with a rate of 0.001.
        """
        if isinstance(loss, str) and loss not in LOSSES:
            raise unknown("loss", loss, LOSSES)
        if not isinstance(model, nn.Module) and not callable(model):
            raise UsageError(f"model must be a torch module or a function that makes one, not {model!r}")
        self._loss, classes = LOSSES[loss] if isinstance(loss, str) else (loss, False)
        self._model = model
        self._optimizer = optimizer
        self.batch_size = batch_size
        self.epochs = epochs
        self.columns = Columns(
            (features,) if isinstance(features, str) else tuple(features),
            label,
            classes,
            dtype,
            tuple(shape) if shape is not None else None,
        )
        frame, held_out = _split(as_frame(frame), validation, seed)
        self.source = RowSource(frame, self.columns)
        #: the fields of a row
        self.fields: tuple[Field, ...] = self.source.fields
        self._with_last_class: RowSource | None = self.source
        self._held_out: TensorDataset | None = None
        if held_out is not None:
            # its rows must be like those that are trained on
            source = RowSource(held_out, replace(self.columns, shape=self.fields[0].shape))
            self._with_last_class = max(self.source, source, key=lambda each: each.classes)
            self._held_out = source.collect(validation_rows, seed)
        self.classes = self._with_last_class.classes

    @property
    def name(self) -> str:
        return "frame"

    def model(self) -> nn.Module:
        return copy.deepcopy(self._model) if isinstance(self._model, nn.Module) else self._model()

    def optimizer(self, model: nn.Module) -> torch.optim.Optimizer:
        return super().optimizer(model) if self._optimizer is None else self._optimizer(model)

    def train_data(self) -> Any:
        if self.source is None:
            raise TaskError("Spark brings a FrameTask its rows: run it with on=tether.Spark(...)")
        self._check_model()
        return range(self.source.rows)

    def loss(self, model: nn.Module, batch: Any) -> Tensor:
        features, labels = batch
        return self._loss(model(inputs(features)), labels)

    def evaluate(self, model: nn.Module) -> dict[str, float]:
        if self._held_out is None:
            return {}
        features, labels = self._held_out.tensors
        outputs = predict(model, features)
        metrics = {"loss": float(self._loss(outputs, labels))}
        if self.columns.classes:
            metrics["error"] = float((outputs.argmax(1) != labels).double().mean())
        return metrics

    def _check_model(self) -> None:
        """Check that the model accepts a batch, and has an output for every class."""
        field = self.fields[0]
        try:
            outputs = predict(self.model(), torch.zeros(2, *field.shape, dtype=getattr(torch, field.dtype)))
        except (RuntimeError, ValueError, TypeError) as error:
            raise TaskError(
                f"the model does not accept a batch of shape {(2, *field.shape)}, which is two rows of "
                f"{', '.join(self.columns.features)}: {error}"
            ) from error
        if self.columns.classes and (outputs.dim() != 2 or outputs.shape[1] < self.classes):
            assert self._with_last_class is not None
            raise TaskError(
                f"label column {self.columns.label!r} has classes up to {self.classes - 1}, as in "
                f"{self._with_last_class.describe_last_class()}, for which the model must have {self.classes} "
                f"outputs; two rows gave the shape {tuple(outputs.shape)}"
            )

    def __getstate__(self) -> dict[str, Any]:
        """Without the frame and the rows held out, which stay at the driver."""
        return {**vars(self), "source": None, "_with_last_class": None, "_held_out": None}


def inputs(features: Tensor) -> Tensor:
    """The input of a model: bytes become fractions of 255, anything else stays as it is."""
    return features.float() / 255 if features.dtype == torch.uint8 else features


@torch.no_grad()
def predict(model: nn.Module, features: Tensor) -> Tensor:
    """The outputs of a model in evaluation mode."""
    training = model.training
    model.eval()
    try:
        return torch.cat([model(inputs(part)) for part in torch.split(features, CHUNK_ROWS)])
    finally:
        model.train(training)


def _split(frame: DataFrame, validation: DataFrame | float | None, seed: int) -> tuple[DataFrame, DataFrame | None]:
    if isinstance(validation, int | float):
        if not 0 < validation < 1:
            raise UsageError(f"validation must be a frame or a fraction between 0 and 1, not {validation}")
        train, held_out = frame.randomSplit([1.0 - validation, float(validation)], seed)
        return train, held_out
    return frame, None if validation is None else as_frame(validation)
