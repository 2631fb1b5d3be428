"""The plan of a run whose workers run a script: what is known of the model only when the first worker has joined."""

from __future__ import annotations

import math
import os
import sys
from collections.abc import Callable
from dataclasses import dataclass, field
from importlib.machinery import PathFinder
from pathlib import Path
from types import CodeType
from typing import Any

import msgspec
import torch
from torch import Tensor, nn

from tether.core.device import Device
from tether.core.machine import Machine, Node, Replica, Schedule
from tether.core.vector import Empty, Layout, Shared, is_finite, raw_bytes
from tether.errors import RunError, UsageError
from tether.execution.checkpoint import Restored
from tether.execution.directory import not_finite
from tether.execution.evaluation import JointModel
from tether.execution.execute import described
from tether.execution.plan import RunPlan
from tether.learner.loop import HeldWeights, LoopReplica
from tether.loops.sampler import Part, next_parts
from tether.protocols import Options, known
from tether.protocols import make as make_protocol
from tether.runtimes.base import Runtime
from tether.task import Task, describe_error

#: how long a run is as far as protocols know: the script decides
STEPS_UNKNOWN = 10**9
#: the files in which the first worker describes its model to the driver and to the other workers
DESCRIPTION, WEIGHTS = "model.json", "model.weights"


class Script(Task):
    """Stands for the user's script where a run has a task."""

    def __init__(self, path: Path, arguments: tuple[str, ...], module: str | None = None) -> None:
        """`module`: the name under which `python -m` would run the file, if it is not to run as a file."""
        self.path = path
        self.arguments = arguments
        self.module = module

    @property
    def name(self) -> str:
        return self.path.stem if self.path.stem != "__main__" else self.path.parent.name

    @staticmethod
    def of_file(path: Path, arguments: tuple[str, ...]) -> Script:
        """The script in a file; UsageError if it is not there or is not Python."""
        if not path.is_file():
            raise UsageError(f"there is no script {path}: name a Python file, after all options of 'tether launch'")
        script = Script(path.absolute(), arguments)
        script.compile()
        return script

    @staticmethod
    def of_module(name: str, arguments: tuple[str, ...]) -> Script:
        """The module that `python -m name` would run; its packages are not imported for that."""
        found, parts = None, name.split(".")
        folders: list[str] | None = [os.getcwd(), *sys.path]
        while parts and folders is not None:
            found = PathFinder.find_spec(parts.pop(0), folders)
            folders = list(found.submodule_search_locations or ()) or None if found is not None else None
            if found is not None and folders is not None and not parts and name.rpartition(".")[2] != "__main__":
                parts, name = ["__main__"], f"{name}.__main__"
        if found is None or parts or not (found.origin or "").endswith(".py"):
            raise UsageError(
                f"there is no module {name} in {os.getcwd()} or among the installed ones: name a module as 'python -m' "
                "takes it, after all options of 'tether launch'"
            )
        script = Script(Path(str(found.origin)), arguments, name)
        script.compile()
        return script

    def compile(self) -> CodeType:
        """The program; UsageError if the file is not Python."""
        try:
            code: CodeType = compile(self.path.read_bytes(), str(self.path), "exec")
        except (SyntaxError, ValueError, OSError) as error:
            raise UsageError(f"{describe_error(self, error)}: correct the script") from error
        return code


class ModelDescription(msgspec.Struct, frozen=True):
    """What is exchanged of a model, and how."""

    #: the names and shapes of the parameters and, behind them, of the buffers
    shapes: dict[str, tuple[int, ...]]
    #: second names of tied weights, with the first ones
    aliases: dict[str, str]
    parameter_count: int
    dtype: str
    protocol: dict[str, Any]

    @staticmethod
    def of(replica: LoopReplica, protocol: Options) -> ModelDescription:
        layout, dtype = replica.vector.layout, str(replica.weights.dtype).removeprefix("torch.")
        return ModelDescription(layout.shapes, layout.aliases, replica.parameter_count, dtype, described(protocol))

    @property
    def layout(self) -> Layout:
        """Without the tensors that are not exchanged, which only the script knows."""
        return Layout(self.shapes, self.aliases)


@dataclass
class LoopPlan(RunPlan):
    """The plan of a run whose workers run a script."""

    #: how many workers the run has
    world: int = 1
    #: the protocol was chosen on the command line, so the script's own choice does not count
    chosen: bool = False
    processors: int | None = None
    #: runs the script in the process of a worker
    run_script: Callable[[Any, Node], bool] | None = None
    model: ModelDescription | None = None
    #: in the process of a worker: the user's model and optimizer
    replica: LoopReplica | None = field(default=None, repr=False)
    #: what earlier parts of the run have drawn, for each of the script's samplers
    drawn: tuple[tuple[Part, ...], ...] = ()
    #: how long a loop may go without a step
    hung_seconds: float = math.inf

    @staticmethod
    def of_script(
        script: Script,
        protocol: Options | None,
        on: Runtime,
        seed: int,
        checkpoint_seconds: float,
        restored: Restored | None,
    ) -> LoopPlan:
        """The plan as far as it is known before the script has joined."""
        kept = restored.state if restored is not None else {}
        counted = tuple((start, stop) for start, stop in kept.get("counted", []))
        options = protocol if protocol is not None else default_protocol(on.workers)
        check_protocol(options, on.workers)
        return LoopPlan(
            task=script,
            protocol=options,
            nodes=tuple(Node(f"worker-{i}", "worker", computes=True, index=i) for i in range(on.workers)),
            schedule=Schedule(
                steps=STEPS_UNKNOWN,
                evaluate_every=STEPS_UNKNOWN,
                checkpoint_seconds=checkpoint_seconds,
                step_batches=on.workers,
                first_step=restored.step if restored is not None else 0,
                counted=counted,
                data_bound=True,
            ),
            seed=seed,
            samples=STEPS_UNKNOWN,
            vector_bytes=0,
            record=False,
            traced=True,
            virtual=False,
            until=None,
            seconds=None,
            patience=None,
            restored=restored,
            initial=None,
            notes=restored.notes if restored is not None else (),
            world=on.workers,
            chosen=protocol is not None,
            processors=on.processors,
            drawn=_drawn(restored),
        )

    @property
    def scripted(self) -> bool:
        return True

    @property
    def loop_seconds(self) -> float:
        return self.hung_seconds

    @property
    def steps(self) -> int:
        return STEPS_UNKNOWN

    def program(self, node: Node) -> Callable[[Any, Node], bool] | None:
        return self.run_script if node.computes else None

    def is_shown(self, node: Node) -> bool:
        return node.computes and node.index == 0

    # ---- the model ----

    def describe(self, directory: Path, replica: LoopReplica, protocol: Options | None) -> None:
        """At the first worker: say what the model is, so that the hub can start and other workers begin with it."""
        if protocol is not None and not self.chosen:
            check_protocol(protocol, self.world)
        options = self.protocol if self.chosen or protocol is None else protocol
        description = ModelDescription.of(replica, options)
        (directory / WEIGHTS).write_bytes(raw_bytes(replica.weights))
        partial = directory / f"{DESCRIPTION}.partial"
        partial.write_bytes(msgspec.json.encode(description))
        os.replace(partial, directory / DESCRIPTION)

    def complete(self, directory: Path) -> tuple[Node, ...] | None:
        try:
            text = (directory / DESCRIPTION).read_bytes()
        except FileNotFoundError:
            return None
        self.model = msgspec.json.decode(text, type=ModelDescription)
        self.protocol = make_protocol(self.model.protocol).resolved_for(self.world, self.processors)
        workers = {node.name for node in self.nodes}
        self.nodes = self.protocol.nodes(self.world)
        self._initial = directory / WEIGHTS
        return tuple(node for node in self.nodes if node.name not in workers)

    def take_model(self, directory: Path, replica: LoopReplica) -> None:
        """At a worker: begin with the weights of the first one, whose model must be the same."""
        assert self.model is not None
        own = ModelDescription.of(replica, self.protocol)
        if (list(own.shapes.items()), own.dtype) != (list(self.model.shapes.items()), self.model.dtype):
            raise UsageError(
                f"this process joined another model than the one of rank 0 ({_difference(own, self.model)}): all "
                "processes must build the same model, whatever their rank"
            )
        replica.weights.copy_(self._initial_weights())
        self.replica = replica

    def _initial_weights(self) -> Tensor:
        assert self.model is not None
        if self.restored is not None:
            count = sum(map(math.prod, self.model.shapes.values()))
            if self.restored.weights.numel() != count:
                raise UsageError(
                    f"the checkpoint holds {self.restored.weights.numel()} values and the script's model {count}: "
                    "resume with the script and arguments of then, or start a new run"
                )
            return self.restored.weights.clone()
        dtype = getattr(torch, self.model.dtype)
        return torch.frombuffer(bytearray(self._initial.read_bytes()), dtype=dtype)

    def device(self, node: Node, number: int | None) -> Device | None:
        """Where the script has its model."""
        where = self.replica.weights.device if node.computes and self.replica is not None else None
        return Device(where) if where is not None and where.type != "cpu" else None

    def build(
        self,
        node: Node,
        empty: Empty = torch.empty,
        shared: Shared | None = None,
        device: Device | None = None,
    ) -> tuple[Machine, Replica]:
        assert self.model is not None
        replica: LoopReplica | HeldWeights
        if node.computes:
            assert self.replica is not None
            replica = self.replica
            replica.begin(node.name, self.protocol.guard, empty)
        else:
            replica = HeldWeights(self._initial_weights(), self.model.parameter_count)
        return self._machine(node, replica, empty), replica

    # ---- resuming ----

    def state_of(self, node: Node) -> dict[str, Any]:
        state = {name: value for name, value in super().state_of(node).items() if name != "loop"}
        own = self.restored.workers.get(node.index, {}).get("loop") if self.restored is not None else None
        if own is not None:
            state["loop"] = {"schedule_calls": own["schedule_calls"]}
        return state

    def drawn_by(self, sampler: int) -> tuple[Part, ...]:
        """What earlier parts of the run have drawn from one of the script's samplers."""
        return self.drawn[sampler] if sampler < len(self.drawn) else ()


def _drawn(restored: Restored | None) -> tuple[tuple[Part, ...], ...]:
    """For each sampler of the script: the parts of the run so far."""
    loops = {index: state["loop"] for index, state in restored.workers.items() if "loop" in state} if restored else {}
    if restored is None or not loops:
        return ()
    made = {int(place): int(steps) for place, steps in restored.state.get("made", {}).items()}
    world = int(restored.state["step_batches"])
    count = min(len(loop["samplers"]) for loop in loops.values())
    return tuple(
        next_parts({rank: loop["samplers"][number] for rank, loop in loops.items()}, made, world)
        for number in range(count)
    )


def _difference(own: ModelDescription, first: ModelDescription) -> str:
    """Where two models differ, in a few words."""
    if own.dtype != first.dtype:
        return f"{own.dtype} instead of {first.dtype}"
    ours, theirs = (list(model.shapes.items()) for model in (own, first))
    for mine, other in zip(ours, theirs, strict=False):
        if mine != other:
            return f"{mine[0]} of shape {list(mine[1])} instead of {other[0]} of shape {list(other[1])}"
    return f"{len(ours)} tensors instead of {len(theirs)}"


def default_protocol(workers: int) -> Options:
    """The protocol of a run that was given none."""
    return make_protocol({"name": "single"} if workers == 1 else dict(Task.protocol))


def check_protocol(options: Options, workers: int) -> None:
    """Refuse a protocol whose hub steps, and one with fewer workers."""
    if options.steps_at_hub:
        others = [name for name, other in sorted(known().items()) if not other().steps_at_hub]
        raise UsageError(
            f"under protocol {options.name!r} the hub steps with the optimizer, which a script has at its workers: "
            f"choose one of {', '.join(others)}, or write a tether.Task"
        )
    if options.workers_max is not None and workers > options.workers_max:
        raise UsageError(
            f"protocol {options.name!r} uses {options.workers_max} worker, not {workers}: give -n 1, or choose another"
        )


class ScriptModel(JointModel):
    """The joint model on the caller's side, which knows the names and shapes of the script's model and nothing else."""

    def __init__(self, plan: RunPlan, note: Callable[[str], None]) -> None:
        assert isinstance(plan, LoopPlan)
        self._plan = plan
        self.nbytes = 0

    @property
    def parameter_count(self) -> int:  # type: ignore[override]
        """How many of the weights are parameters."""
        return self._plan.model.parameter_count if self._plan.model is not None else 0

    @property
    def layout(self) -> Layout:  # type: ignore[override]
        """Which tensors the weights are."""
        return self._plan.model.layout if self._plan.model is not None else Layout({})

    def weights(self) -> Tensor:
        return torch.empty(0)

    def with_weights(self, weights: Tensor) -> nn.Module:
        """A module without a forward pass whose state_dict is that of the script's model, as far as it is exchanged."""
        model = self._plan.model
        if model is None:
            raise RunError("the run ended before a worker had joined")
        root = nn.Module()
        for name, values in model.layout.named(weights).items():
            folder, _, leaf = name.rpartition(".")
            part = root
            for step in filter(None, folder.split(".")):
                if step not in part._modules:
                    part.add_module(step, nn.Module())
                part = part.get_submodule(step)
            part.register_buffer(leaf, values.clone())
        return root.eval()

    def measure(self, weights: Tensor) -> dict[str, float]:
        return {}

    def require_finite(self, step: int, weights: Tensor) -> None:
        if not is_finite(weights[: self.parameter_count]):
            raise not_finite(step)
