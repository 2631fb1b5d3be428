"""A net: the layers of a file in one phase, connected by their blobs, as one torch module."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from tether.caffe.layers import LAYERS, SOURCES
from tether.caffe.layers.base import Layer, as_tuple, check_count
from tether.caffe.layers.values import DummyData
from tether.caffe.reading import NetFile, State, included
from tether.caffe.schema import enum_name
from tether.errors import TetherError, UsageError, guess

Shape = tuple[int, ...]


@dataclass(frozen=True)
class Source:
    """A layer that brings data from outside."""

    name: str
    type: str
    tops: tuple[str, ...]
    #: of each top, the first length is that of the mini-batch
    shapes: tuple[Shape, ...]


@dataclass(frozen=True)
class Node:
    """A layer in the graph."""

    name: str
    type: str
    #: the name of its module
    module: str
    bottoms: tuple[str, ...]
    tops: tuple[str, ...]
    loss_weights: tuple[float, ...]
    #: which bottoms a gradient is passed to
    propagates: tuple[bool, ...]
    bottom_shapes: tuple[Shape, ...]
    shapes: tuple[Shape, ...]


@dataclass(frozen=True)
class Blob:
    """A parameter or statistic of a layer."""

    layer: str
    module: str
    name: str
    shape: Shape
    lr_mult: float
    decay_mult: float
    #: the module and name of the parameter that this one is, if it is shared
    owner: tuple[str, str]


class Net(nn.Module):
    """A net in one state. It has shapes at once, and values after `fill`.

    Called with its inputs by name, it returns its outputs by name: blobs that no layer takes.
    """

    def __init__(self, source: NetFile, state: State, shapes: Mapping[str, Sequence[Shape]] | None = None) -> None:
        """`shapes`: those of the tops of layers that bring data, by the layer's name."""
        super().__init__()
        self.title: str = source.net.name
        self.state = state
        self.near = source.path
        self.sources: list[Source] = []
        self.nodes: list[Node] = []
        #: every parameter and statistic, in Caffe's order
        self.blobs: list[Blob] = []
        self.layers = nn.ModuleDict()
        self._free: dict[str, None] = {}
        values: dict[str, Tensor] = {}
        owners: dict[str, Blob] = {}
        numbers = list(included(source, state))
        self._makers = _makers(source, numbers, state)
        if not numbers:
            raise UsageError(f"{source.path} has no layers in phase {state.phase}")
        for index in numbers:
            try:
                self._add(source.net.layer[index], values, owners, shapes or {})
            except TetherError as error:
                raise UsageError(f"{source.where(index)}: {error}") from None
            except (RuntimeError, ValueError, IndexError, TypeError, OverflowError, ArithmeticError) as error:
                lines = str(error).strip().splitlines() or [type(error).__name__]
                raise UsageError(f"{source.where(index)}: its settings and the shapes do not fit: {lines[0]}") from None
        self.outputs = tuple(self._free)
        del self._makers

    def _add(
        self, spec: Any, values: dict[str, Tensor], owners: dict[str, Blob], shapes: Mapping[str, Sequence[Shape]]
    ) -> None:
        tops = tuple(spec.top)
        if len(set(tops)) != len(tops):
            raise UsageError(f"it has the same top twice: {', '.join(tops)}")
        for name in spec.bottom:
            if name not in values:
                hint = self._makers.get(name) or f"there are {', '.join(values) or 'none'}.{guess(name, values)}"
                raise UsageError(f"there is no blob {name!r} above it; {hint}")
        for name in tops:
            if name in values and name not in spec.bottom:
                raise UsageError(f"an earlier layer has the top {name!r} too: give each its own name")
        if spec.type in SOURCES:
            self._add_source(spec, values, shapes)
            return
        if spec.type not in LAYERS:
            known = sorted([*LAYERS, *SOURCES])
            raise UsageError(f"this type is not supported; supported are {', '.join(known)}.{guess(spec.type, known)}")
        kind = LAYERS[spec.type]
        for what, count, (least, most) in (
            ("bottom", len(spec.bottom), kind.bottoms_range),
            ("top", len(tops), kind.tops_range),
        ):
            # a loss or an accuracy may be without a top, which then has no name
            if not least <= count <= most and not (what == "top" and count == 0 and kind.default_loss_weight):
                wanted = str(least) if least == most else f"at least {least}" if most > 100 else f"{least} to {most}"
                raise UsageError(f"it has {count} {what}s, and needs {wanted}")
        bottoms = [values[name] for name in spec.bottom]
        phase = enum_name("Phase", spec.phase) if spec.HasField("phase") else self.state.phase
        if not tops and kind.default_loss_weight:
            tops = (f"{spec.name} (loss)",)
            spec = _with_top(spec, tops[0])
        layer = kind(spec, bottoms, phase, self.near)
        with torch.no_grad():
            found = layer.infer(bottoms)
        for name, top in zip(tops, found, strict=True):
            check_count(tuple(top.shape), f"top {name!r}")
        module = _module_name(spec.name, self.layers)
        self.layers[module] = layer
        self._add_blobs(spec, layer, module, owners)
        if len(spec.loss_weight) not in (0, len(tops)):
            raise UsageError(f"it has {len(spec.loss_weight)} loss_weight for {len(tops)} tops: give one for each")
        weights = tuple(spec.loss_weight) or (kind.default_loss_weight, *[0.0] * (len(tops) - 1))[: len(tops)]
        if len(spec.propagate_down) not in (0, len(bottoms)):
            raise UsageError(f"it has {len(spec.propagate_down)} propagate_down for {len(bottoms)} bottoms")
        self.nodes.append(
            Node(
                spec.name,
                spec.type,
                module,
                tuple(spec.bottom),
                tops,
                weights,
                tuple(spec.propagate_down) or (True,) * len(bottoms),
                tuple(tuple(bottom.shape) for bottom in bottoms),
                tuple(tuple(top.shape) for top in found),
            )
        )
        for name in spec.bottom:
            self._free.pop(name, None)
        for name, top in zip(tops, found, strict=True):
            values[name] = top
            self._free[name] = None

    def _add_source(self, spec: Any, values: dict[str, Tensor], shapes: Mapping[str, Sequence[Shape]]) -> None:
        tops = tuple(spec.top)
        if spec.name in shapes:
            given: Sequence[Sequence[int]] = shapes[spec.name]
        elif spec.type == "Input":
            given = [list(shape.dim) for shape in spec.input_param.shape]
            given = list(given) * len(tops) if len(given) == 1 else given
        else:
            raise UsageError(
                "the shape of its data is not known: name the data with --data NAME=PATH, or the shape with --input "
                f"{tops[0] if tops else spec.name}=N,C,H,W"
            )
        if len(given) != len(tops):
            raise UsageError(f"it has {len(tops)} tops and {len(given)} shapes: give one for each")
        checked = tuple(check_count(shape, f"top {name!r}") for name, shape in zip(tops, given, strict=True))
        self.sources.append(Source(spec.name, spec.type, tops, checked))
        for name, shape in zip(tops, checked, strict=True):
            values[name] = torch.empty(shape, device="meta")
            self._free[name] = None

    def _add_blobs(self, spec: Any, layer: Layer, module: str, owners: dict[str, Blob]) -> None:
        statistics = {name for name, _ in layer.named_buffers(recurse=False)}
        if len(spec.param) > len(layer.blobs) and not statistics:
            raise UsageError(
                f"it has {len(spec.param)} param for {len(layer.blobs)} parameters: leave out what is too much"
            )
        for number, name in enumerate(layer.blobs):
            shape = tuple(getattr(layer, name).shape)
            given = spec.param[number] if number < len(spec.param) and not statistics else None
            lr_mult = given.lr_mult if given is not None else 1.0
            decay_mult = given.decay_mult if given is not None else 1.0
            if name in statistics:
                lr_mult = decay_mult = 0.0
            blob = Blob(spec.name, module, name, shape, lr_mult, decay_mult, (module, name))
            if given is not None and given.name:
                first = owners.setdefault(given.name, blob)
                if first is not blob:
                    permissive = enum_name("DimCheckMode", given.share_mode) == "PERMISSIVE"
                    if permissive and math.prod(shape) != math.prod(first.shape):
                        raise UsageError(
                            f"parameter {given.name!r} has the shape {first.shape} in layer {first.layer!r} and "
                            f"{shape} here: shared parameters have as many values each"
                        )
                    if not permissive and shape != first.shape:
                        raise UsageError(
                            f"parameter {given.name!r} has the shape {first.shape} in layer {first.layer!r} and "
                            f"{shape} here: shared parameters have one shape, unless share_mode is PERMISSIVE"
                        )
                    if shape != first.shape:
                        layer.views[name] = shape
                    for what, one, other in (
                        ("lr_mult", given.HasField("lr_mult"), lr_mult != first.lr_mult),
                        ("decay_mult", given.HasField("decay_mult"), decay_mult != first.decay_mult),
                    ):
                        if one and other:
                            raise UsageError(f"shared parameter {given.name!r} has two values of {what}: give one")
                    blob = Blob(spec.name, module, name, shape, first.lr_mult, first.decay_mult, first.owner)
            self.blobs.append(blob)

    # ---- values ----

    def fill(self) -> Net:
        """Give every parameter a value as its filler says; shared ones become one tensor."""
        self._materialize()
        for blob in self.blobs:
            if blob.owner == (blob.module, blob.name):
                layer: Any = self.layers[blob.module]
                layer.blobs[blob.name].fill(getattr(layer, blob.name).data)
        return self

    def _materialize(self) -> None:
        for layer in self.layers.values():
            assert isinstance(layer, Layer)
            for name in layer.blobs:
                value = getattr(layer, name)
                if name in layer._parameters:
                    layer._parameters[name] = nn.Parameter(torch.empty(value.shape))
                else:
                    layer._buffers[name] = torch.empty(value.shape)
            if isinstance(layer, DummyData):
                layer._buffers["like"] = torch.empty(0)
        for blob in self.blobs:
            parameters = self.layers[blob.module]._parameters
            if blob.owner != (blob.module, blob.name):
                parameters[blob.name] = self.layers[blob.owner[0]]._parameters[blob.owner[1]]
            elif blob.lr_mult == 0 and (parameter := parameters.get(blob.name)) is not None:
                parameter.requires_grad_(False)

    def share_with(self, other: Net) -> Net:
        """Use the values of another net in all layers that have the same name there, as Caffe's test nets do."""
        theirs: dict[str, list[Blob]] = {}
        for blob in other.blobs:
            theirs.setdefault(blob.layer, []).append(blob)
        own: dict[str, list[Blob]] = {}
        for blob in self.blobs:
            own.setdefault(blob.layer, []).append(blob)
        for name, blobs in own.items():
            if name not in theirs:
                continue
            for mine, blob in zip(blobs, theirs[name], strict=False):
                if mine.shape != blob.shape:
                    raise UsageError(
                        f"layer {name!r} has a parameter of the shape {mine.shape} in the test net and {blob.shape} in "
                        "the training net: both must be the same"
                    )
                source, target = other.layers[blob.module], self.layers[mine.module]
                if mine.name in target._parameters:
                    target._parameters[mine.name] = source._parameters[blob.name]
                else:
                    target._buffers[mine.name] = source._buffers[blob.name]
        device = next((p.device for p in other.parameters()), torch.device("cpu"))
        for layer in self.layers.values():
            if isinstance(layer, DummyData):
                layer._buffers["like"] = torch.empty(0, device=device)
        return self

    def value(self, blob: Blob) -> Tensor:
        """The values of a parameter or statistic."""
        found: Tensor = getattr(self.layers[blob.module], blob.name).data
        return found

    def key(self, blob: Blob) -> str:
        """Its name in the state_dict."""
        return f"layers.{blob.module}.{blob.name}"

    @property
    def parameter_count(self) -> int:
        """How many values are learned; statistics are not, and shared ones count once."""
        return sum(
            torch.Size(blob.shape).numel()
            for blob in self.blobs
            if blob.owner == (blob.module, blob.name) and blob.name in self.layers[blob.module]._parameters
        )

    # ---- computing ----

    @property
    def inputs(self) -> tuple[str, ...]:
        """The names of the blobs that come from outside."""
        return tuple(top for source in self.sources for top in source.tops)

    def compute(self, inputs: Mapping[str, Tensor]) -> dict[str, Tensor]:
        """Every blob of the net."""
        return self._compute(inputs)[0]

    def _compute(self, inputs: Mapping[str, Tensor]) -> tuple[dict[str, Tensor], Tensor | None]:
        if missing := [name for name in self.inputs if name not in inputs]:
            raise UsageError(f"the net {self.title!r} lacks the inputs {', '.join(missing)}")
        blobs = dict(inputs)
        loss: Tensor | None = None
        for node in self.nodes:
            pairs = zip(node.bottoms, node.propagates, strict=True)
            tops = as_tuple(
                self.layers[node.module](*(blobs[name] if passes else blobs[name].detach() for name, passes in pairs))
            )
            for name, weight, top in zip(node.tops, node.loss_weights, tops, strict=True):
                blobs[name] = top
                if weight:
                    part = weight * top.sum()
                    loss = part if loss is None else loss + part
        return blobs, loss

    def loss(self, inputs: Mapping[str, Tensor]) -> Tensor:
        """The weighted sum of all losses."""
        loss = self._compute(inputs)[1]
        if loss is None:
            raise UsageError(f"the net {self.title!r} has no loss in phase {self.state.phase}: add a loss layer")
        return loss

    def forward(self, *inputs: Tensor, **named: Tensor) -> dict[str, Tensor]:
        """The outputs; inputs are in the order of `inputs`, or by name. Labels may be missing outside of training."""
        given = {**dict(zip(self.inputs, inputs, strict=False)), **named}
        blobs = dict(given)
        for node in self.nodes:
            if all(name in blobs for name in node.bottoms):
                tops = as_tuple(self.layers[node.module](*(blobs[name] for name in node.bottoms)))
                blobs.update(zip(node.tops, tops, strict=True))
        taken = {name for node in self.nodes if all(top in blobs for top in node.tops) for name in node.bottoms}
        in_place = {top for node in self.nodes for top in node.tops if top in node.bottoms}
        return {
            name: value
            for name, value in blobs.items()
            if name not in given and (name not in taken or (name in in_place and name in self.outputs))
        }


def _makers(source: NetFile, numbers: Sequence[int], state: State) -> dict[str, str]:
    """For errors: where each blob of the file is made, and why it may not be there."""
    found: dict[str, str] = {}
    for index in reversed(range(len(source.net.layer))):
        layer = source.net.layer[index]
        line = f" (line {source.lines[index]})" if source.lines[index] else ""
        if index in numbers:
            why = "makes it below: a layer takes only what layers above it make"
        else:
            stages = f" and stages {', '.join(sorted(state.stages))}" if state.stages else " without a stage"
            why = f"makes it, but its include and exclude rules leave it out in phase {state.phase}{stages}"
        for top in layer.top:
            if top not in layer.bottom or top not in found:
                found[top] = f"layer {layer.name!r}{line} {why}"
    return found


def _with_top(spec: Any, top: str) -> Any:
    copy = type(spec)()
    copy.CopyFrom(spec)
    copy.top.append(top)
    return copy


def _module_name(name: str, taken: nn.ModuleDict) -> str:
    """A name that torch accepts for a module: it has no dots and is not taken."""
    plain = name.replace(".", "_") or "layer"
    if hasattr(nn.ModuleDict(), plain):
        plain = f"{plain}_"
    candidate, number = plain, 2
    while candidate in taken:
        candidate, number = f"{plain}_{number}", number + 1
    return candidate
