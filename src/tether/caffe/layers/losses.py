"""Losses, and what measures predictions."""

from __future__ import annotations

import math
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional

from tether.caffe.blobs import blob_array, parse_binary
from tether.caffe.layers.base import Layer, canonical, shapes
from tether.caffe.reading import find_file
from tether.caffe.schema import enum_name
from tether.errors import UsageError

#: the loss of a prediction whose probability is the smallest float
_MOST = -math.log(torch.finfo(torch.float32).tiny)


class Softmax(Layer):
    def set_up(self, spec: Any, bottoms: list[Tensor]) -> None:
        self.axis = canonical(spec.softmax_param.axis, bottoms[0].ndim)

    def forward(self, bottom: Tensor) -> Tensor:
        return bottom.softmax(self.axis)


def _normalization(param: Any, default: str) -> str:
    if param.HasField("normalization"):
        return enum_name("NormalizationMode", param.normalization)
    if param.HasField("normalize"):
        return "VALID" if param.normalize else "BATCH_SIZE"
    return default


def _normalizer(mode: str, outer: int, every: int, valid: Tensor) -> Tensor | float:
    if mode == "VALID":
        return valid.sum().clamp(min=1)
    return max(1.0, {"FULL": float(every), "BATCH_SIZE": float(outer), "NONE": 1.0}[mode])


def _check_labels(scores: Tensor, labels: Tensor, axis: int) -> None:
    count = scores.numel() // max(1, scores.shape[axis])
    if labels.numel() != count:
        raise UsageError(
            f"{labels.numel()} labels of the shape {tuple(labels.shape)} for {count} predictions of the shape "
            f"{tuple(scores.shape)}: there must be one for each, and classes are axis {axis}"
        )


def _picked(values: Tensor, labels: Tensor) -> Tensor:
    """Of each row of values, that of its label."""
    try:
        return values.gather(1, labels.unsqueeze(1))
    except (RuntimeError, IndexError):
        raise UsageError(
            f"labels are from {int(labels.min())} to {int(labels.max())}, and there are {values.shape[1]} classes: "
            "labels must be less than that, and not negative"
        ) from None


def _rows(scores: Tensor, axis: int) -> Tensor:
    """A row of scores for each label; the axis is that of the classes."""
    moved = scores.movedim(axis, -1)
    return moved.reshape(-1, moved.shape[-1])


class SoftmaxWithLoss(Layer):
    bottoms_range, tops_range = (2, 3), (1, 2)
    default_loss_weight = 1.0

    def set_up(self, spec: Any, bottoms: list[Tensor]) -> None:
        if len(bottoms) > 2:
            raise UsageError("a third bottom, with weights, is not supported")
        self.axis = canonical(spec.softmax_param.axis, bottoms[0].ndim)
        self.ignored: int | None = spec.loss_param.ignore_label if spec.loss_param.HasField("ignore_label") else None
        self.normalization = _normalization(spec.loss_param, "VALID")
        _check_labels(bottoms[0], bottoms[1], self.axis)

    def forward(self, scores: Tensor, labels: Tensor) -> Tensor | tuple[Tensor, ...]:
        logs = _rows(scores, self.axis).log_softmax(1)
        wanted = labels.reshape(-1).long()
        valid = torch.ones_like(wanted, dtype=torch.bool) if self.ignored is None else wanted != self.ignored
        found = -_picked(logs, torch.where(valid, wanted, 0)).squeeze(1)
        # Caffe's probabilities are never less than the smallest float, which bounds the loss and not its gradient
        found = found - (found - _MOST).clamp(min=0).detach()
        outer = math.prod(scores.shape[: self.axis])
        total = torch.where(valid, found, 0.0).sum()
        loss = total / _normalizer(self.normalization, outer, wanted.numel(), valid)
        return loss if self.top_count == 1 else (loss, scores.softmax(self.axis))


class MultinomialLogisticLoss(Layer):
    bottoms_range = (2, 2)
    default_loss_weight = 1.0

    def set_up(self, spec: Any, bottoms: list[Tensor]) -> None:
        _check_labels(bottoms[0].flatten(1), bottoms[1], 1)

    def forward(self, probabilities: Tensor, labels: Tensor) -> Tensor:
        found = _picked(probabilities.flatten(1), labels.reshape(-1).long())
        return -found.clamp(min=1e-20).log().sum() / len(probabilities)


class InfogainLoss(Layer):
    """Softmax with loss where a matrix says what each pair of a label and a prediction counts."""

    bottoms_range, tops_range = (2, 3), (1, 2)
    default_loss_weight = 1.0

    def set_up(self, spec: Any, bottoms: list[Tensor]) -> None:
        param = spec.infogain_loss_param
        self.axis = canonical(param.axis, bottoms[0].ndim)
        self.ignored: int | None = spec.loss_param.ignore_label if spec.loss_param.HasField("ignore_label") else None
        self.normalization = _normalization(spec.loss_param, "VALID")
        _check_labels(bottoms[0], bottoms[1], self.axis)
        classes = bottoms[0].shape[self.axis]
        self.matrix: Tensor | None = None
        if len(bottoms) == 2:
            if not param.source:
                raise UsageError("give infogain_loss_param a source, or a third bottom with the matrix")
            if (path := find_file(param.source, self.near)) is None:
                raise UsageError(f"there is no source {param.source!r}: make it, or correct the name")
            self.matrix = torch.from_numpy(blob_array(parse_binary(path, "BlobProto"), str(path)).copy())
        matrix = bottoms[2] if self.matrix is None else self.matrix
        if matrix.numel() != classes * classes:
            raise UsageError(f"the matrix has the shape {tuple(matrix.shape)}, and there are {classes} classes")

    def forward(self, scores: Tensor, labels: Tensor, matrix: Tensor | None = None) -> Tensor | tuple[Tensor, ...]:
        logs = _rows(scores, self.axis).log_softmax(1)
        # the smallest probability, as in SoftmaxWithLoss
        logs = logs + (math.log(1e-20) - logs).clamp(min=0).detach()
        given = self.matrix if matrix is None else matrix
        assert given is not None
        wanted = labels.reshape(-1).long()
        valid = torch.ones_like(wanted, dtype=torch.bool) if self.ignored is None else wanted != self.ignored
        wanted = torch.where(valid, wanted, 0)
        _picked(logs, wanted)  # refuses labels that no class has
        factors = given.to(logs).view(logs.shape[1], -1).detach().index_select(0, wanted)
        total = torch.where(valid, -(factors * logs).sum(1), 0.0).sum()
        loss = total / _normalizer(self.normalization, math.prod(scores.shape[: self.axis]), wanted.numel(), valid)
        return loss if self.top_count == 1 else (loss, scores.softmax(self.axis))


class SigmoidCrossEntropyLoss(Layer):
    bottoms_range, tops_range = (2, 2), (1, 2)
    default_loss_weight = 1.0

    def set_up(self, spec: Any, bottoms: list[Tensor]) -> None:
        self.ignored: int | None = spec.loss_param.ignore_label if spec.loss_param.HasField("ignore_label") else None
        self.normalization = _normalization(spec.loss_param, "BATCH_SIZE")
        if bottoms[0].numel() != bottoms[1].numel():
            raise UsageError(f"bottoms must have as many values each, and not the shapes {shapes(bottoms)}")

    def forward(self, scores: Tensor, targets: Tensor) -> Tensor | tuple[Tensor, ...]:
        targets = targets.reshape(scores.shape)
        each = functional.binary_cross_entropy_with_logits(scores, targets, reduction="none")
        valid = torch.ones_like(scores, dtype=torch.bool)
        if self.ignored is not None:
            valid = targets.to(torch.int64) != self.ignored
        total = torch.where(valid, each, 0.0).sum()
        loss = total / _normalizer(self.normalization, scores.shape[0], scores.numel(), valid)
        return loss if self.top_count == 1 else (loss, scores.sigmoid())


class EuclideanLoss(Layer):
    bottoms_range = (2, 2)
    default_loss_weight = 1.0

    def set_up(self, spec: Any, bottoms: list[Tensor]) -> None:
        if bottoms[0].numel() != bottoms[1].numel() or not bottoms[0].ndim:
            raise UsageError(f"bottoms must have as many values each, and not the shapes {shapes(bottoms)}")

    def forward(self, one: Tensor, other: Tensor) -> Tensor:
        return (one - other.reshape(one.shape)).square().sum() / (2 * one.shape[0])


class HingeLoss(Layer):
    bottoms_range = (2, 2)
    default_loss_weight = 1.0

    def set_up(self, spec: Any, bottoms: list[Tensor]) -> None:
        self.norm = enum_name("Norm", spec.hinge_loss_param.norm)
        _check_labels(bottoms[0].flatten(1), bottoms[1], 1)

    def forward(self, scores: Tensor, labels: Tensor) -> Tensor:
        flat = scores.flatten(1)
        wanted = labels.reshape(-1).long()
        own = _picked(flat, wanted)
        margins = (1 + flat).clamp(min=0).scatter(1, wanted.unsqueeze(1), (1 - own).clamp(min=0))
        return (margins if self.norm == "L1" else margins.square()).sum() / scores.shape[0]


class ContrastiveLoss(Layer):
    bottoms_range = (3, 3)
    default_loss_weight = 1.0

    def set_up(self, spec: Any, bottoms: list[Tensor]) -> None:
        self.margin, self.legacy = spec.contrastive_loss_param.margin, spec.contrastive_loss_param.legacy_version
        if bottoms[0].shape != bottoms[1].shape or bottoms[2].numel() != bottoms[0].shape[0]:
            raise UsageError(f"bottoms must be two of equal shape and a label for each pair, and not {shapes(bottoms)}")

    def forward(self, one: Tensor, other: Tensor, similar: Tensor) -> Tensor:
        squares = (one - other).flatten(1).square().sum(1)
        if self.legacy:
            apart = (self.margin - squares).clamp(min=0)
        else:
            # the root has no derivative at 0
            distance = torch.where(squares > 0, torch.where(squares > 0, squares, 1.0).sqrt(), 0.0)
            apart = (self.margin - distance).clamp(min=0).square()
        return torch.where(similar.reshape(-1) != 0, squares, apart).sum() / (2 * len(one))


class Accuracy(Layer):
    bottoms_range, tops_range = (2, 2), (1, 2)

    def set_up(self, spec: Any, bottoms: list[Tensor]) -> None:
        param = spec.accuracy_param
        self.top_k = param.top_k
        self.axis = canonical(param.axis, bottoms[0].ndim)
        self.ignored: int | None = param.ignore_label if param.HasField("ignore_label") else None
        _check_labels(bottoms[0], bottoms[1], self.axis)
        if not 1 <= self.top_k <= bottoms[0].shape[self.axis]:
            raise UsageError(f"top_k is {self.top_k}; it must be from 1 to {bottoms[0].shape[self.axis]}, the classes")

    def forward(self, scores: Tensor, labels: Tensor) -> Tensor | tuple[Tensor, ...]:
        flat = _rows(scores.detach(), self.axis)
        wanted = labels.reshape(-1).long()
        valid = torch.ones_like(wanted, dtype=torch.bool) if self.ignored is None else wanted != self.ignored
        wanted = torch.where(valid, wanted, 0)
        # a class that scores as much as the right one counts as better, as in Caffe
        better = (flat >= _picked(flat, wanted)).sum(1) - 1
        right = ((better < self.top_k) & valid).to(scores.dtype)
        accuracy = right.sum() / valid.sum().clamp(min=1)
        if self.top_count == 1:
            return accuracy
        zeros = torch.zeros(flat.shape[1], dtype=scores.dtype, device=scores.device)
        counts = zeros.index_add(0, wanted, valid.to(scores.dtype))
        return accuracy, zeros.index_add(0, wanted, right) / counts.clamp(min=1)
