"""A plan as plain values and tensors, so that it travels without being pickled.

The receiver has the code of the task. Before any of it is imported, its file is compared with the sender's.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING, Any

import msgspec
from torch import Tensor

from tether.core.machine import Node, Schedule
from tether.core.wire import can_be_packed, pack_tree, unpack_tree
from tether.errors import UsageError
from tether.execution.checkpoint import Restored
from tether.learner.learner import InitialWeights
from tether.learner.synthetic import SyntheticTask
from tether.protocols import make as make_protocol
from tether.task import Task, code_hash

if TYPE_CHECKING:
    from tether.execution.plan import RunPlan

#: plain fields of a plan
_PLAIN = ("seed", "samples", "vector_bytes", "traced", "until", "seconds", "patience")


def pack(plan: RunPlan) -> tuple[Any, list[Tensor]] | None:
    """The plan for a machine that has its task; None if the task was not named on a command line."""
    spec = plan.task_spec
    if spec is None or spec.get("spec") is None:
        return None
    values = {
        "task": {"spec": spec["spec"], "data": str(spec["data"]) if spec["data"] else "", "settings": spec["settings"]},
        "code": code_hash(Path(inspect.getfile(type(plan.task)))),
        "shapes": _shapes(plan),
        "protocol": {"name": plan.protocol.name, **asdict(plan.protocol)},
        "nodes": msgspec.to_builtins(plan.nodes),
        "schedule": msgspec.to_builtins(plan.schedule),
        **{name: getattr(plan, name) for name in _PLAIN},
    }
    if (restored := plan.restored) is not None:
        kept = (restored.step, restored.samples, restored.weights, restored.state, restored.protocol, restored.others)
        values["restored"] = kept
    if plan.initial is not None:
        values["initial"] = dict(plan.initial.tensors), plan.initial.whole
    tensors: list[Tensor] = []
    return (pack_tree(values, tensors), tensors) if can_be_packed(values) else None


def unpack(
    packed: Any, tensors: list[Tensor], find: Callable[[str], Path], load: Callable[[str, str, dict[str, str]], Task]
) -> RunPlan:
    """The plan on a machine that has the task; UsageError if its code or model is another.

    `find` is given the task's spec and returns the file that has it; `load` makes the task from spec, data and
    settings.
    """
    from tether.execution.plan import RunPlan

    values = unpack_tree(packed, tensors)
    spec = values["task"]
    file = find(spec["spec"])
    if code_hash(file) != values["code"]:
        raise UsageError(f"the code of task {spec['spec']} differs: {file} is not the file that the driver has")
    restored, initial = values.get("restored"), values.get("initial")
    plan = RunPlan(
        task=load(spec["spec"], spec["data"], spec["settings"]),
        protocol=make_protocol(values["protocol"]),
        nodes=tuple(msgspec.convert(values["nodes"], tuple[Node, ...])),
        schedule=msgspec.convert(values["schedule"], Schedule),
        record=False,
        virtual=False,
        restored=_restored(*restored) if restored is not None else None,
        initial=InitialWeights(*initial) if initial is not None else None,
        task_spec=spec,
        **{name: values[name] for name in _PLAIN},
    )
    if difference := _difference(_shapes(plan), values["shapes"]):
        raise UsageError(f"the model of task {spec['spec']} differs from the driver's: {difference}")
    return plan


def _restored(
    step: int, samples: int, weights: Tensor, state: dict[str, Any], protocol: str, others: dict[str, Tensor]
) -> Restored:
    return Restored(step, samples, weights, state, {}, protocol, others=others)


def _shapes(plan: RunPlan) -> dict[str, list[int]]:
    """The names and shapes of the model's tensors."""
    if isinstance(plan.task, SyntheticTask):
        return {}
    return {name: list(value.shape) for name, value in plan.new_model().state_dict().items()}


def _difference(own: dict[str, list[int]], expected: dict[str, list[int]]) -> str:
    """The first tensor in which two models differ, or ""."""
    for name in {**expected, **own}:
        if own.get(name) != expected.get(name):
            return f"{name} has shape {own.get(name)} instead of {expected.get(name)}"
    return ""
