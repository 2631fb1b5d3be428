"""The plan of a run: which nodes take part and how each one is built."""

from __future__ import annotations

import inspect
import math
import zlib
from collections.abc import Callable, Mapping
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path
from typing import IO, Any

import msgspec
import torch
from torch import Tensor, nn

from tether.core.device import AUTO, Device, choose_device
from tether.core.machine import Machine, Node, NodeContext, Recorder, Replica, Schedule
from tether.core.message import Message
from tether.core.vector import Empty, Shared
from tether.core.wire import can_be_packed, pack_tree
from tether.errors import UsageError
from tether.execution.checkpoint import Restored
from tether.execution.directory import RunDirectory
from tether.execution.goals import Request
from tether.learner.data import open_batches
from tether.learner.learner import InitialWeights, Learner, build_model
from tether.learner.synthetic import SyntheticLearner, SyntheticTask
from tether.protocols import DEALING, Options, known
from tether.runtimes.base import Runtime
from tether.runtimes.interpreter import AVERAGE
from tether.runtimes.record import EventLog
from tether.task import (
    Callback,
    Length,
    Task,
    check_batch,
    check_can_travel,
    check_is_task,
    check_task,
    code_hash,
    users_code,
)

#: fields of a plan that have plain values
PLAIN_FIELDS = ("seed", "samples", "vector_bytes", "traced", "until", "seconds", "patience")


@dataclass
class RunPlan:
    """Which nodes take part and how each is built. It is sent to every process of a run."""

    task: Task
    protocol: Options
    nodes: tuple[Node, ...]
    schedule: Schedule
    seed: int
    #: in an epoch
    samples: int
    vector_bytes: int
    record: bool
    traced: bool
    #: time is virtual and stands still while data is fetched, so nothing is prefetched
    virtual: bool
    #: the condition that ends the run early
    until: str | None
    #: end after this many seconds at the latest
    seconds: float | None
    #: end after this many evaluations without improvement
    patience: int | None
    restored: Restored | None
    #: what the model begins with, instead of what the task draws
    initial: InitialWeights | None
    #: where workers compute: a device, or "auto"
    device_name: str = AUTO
    #: what to tell the user when the run begins
    notes: tuple[str, ...] = ()
    directory: RunDirectory | None = None
    #: those that workers tell of every mini-batch
    callbacks: tuple[Callback, ...] = ()
    #: how the command line finds the task again: its spec, data and settings
    task_spec: dict[str, Any] | None = None
    _data: Any = field(default=None, repr=False)
    #: the part of the data that was brought to this node
    _part: Any = field(default=None, repr=False)

    @staticmethod
    def make(
        task: Task,
        protocol: Options,
        on: Runtime,
        request: Request,
        restored: Restored | None,
        weights: Mapping[str, Tensor] | None = None,
    ) -> RunPlan:
        """Make the plan, and check the task as far as that is possible without training it.

        `weights` is a state_dict that the model begins with, if there is no checkpoint.
        """
        check_is_task(task)
        asked, protocol = protocol, protocol.resolved_for(on.workers, on.processors)
        if protocol.workers_max is not None and on.workers > protocol.workers_max:
            raise UsageError(
                f"protocol {protocol.name!r} uses {protocol.workers_max} worker, not {on.workers}: "
                "leave the number of workers out, or choose another protocol"
            )
        if not on.virtual:
            check_can_travel(task)
        task.rank, task.world_size = 0, on.workers
        with users_code(task, "train_data()"):
            data = task.train_data()
        samples = check_task(task, data, on.workers)
        plan = RunPlan(
            task=task,
            protocol=protocol,
            nodes=protocol.nodes(on.workers),
            schedule=request.schedule(task, samples, on.workers, restored),
            seed=request.seed,
            samples=samples,
            vector_bytes=0,
            record=request.record,
            traced=request.trace,
            virtual=on.virtual,
            until=request.until,
            seconds=request.seconds,
            patience=request.patience if request.has_goal else task.patience,
            restored=restored,
            initial=_initial(restored, weights),
            notes=(
                *(restored.notes if restored is not None else ()),
                *((f"chosen: {protocol}",) if protocol != asked else ()),
            ),
            device_name=getattr(on, "device", None) or task.device,
            _data=data,
        )
        if plan.shares and plan.record:
            raise UsageError(
                "nodes that share one vector cannot be recorded, because each sees the others' changes: use "
                "consistent=True and apply='server'"
            )
        example = next(node for node in plan.nodes if plan.hub in ("", node.name))
        _, replica = plan.build(example)
        plan._check_combination(replica)
        plan.vector_bytes = replica.weights.numel() * replica.weights.element_size()
        return plan

    def _check_combination(self, replica: Replica) -> None:
        """Refuse what the task asks for and the protocol cannot do."""
        task, protocol = self.task, self.protocol
        if protocol.needs_elementwise and isinstance(replica, Learner) and not replica.flat:
            others = [name for name, options in sorted(known().items()) if not options().needs_elementwise]
            raise UsageError(
                f"{type(replica.optimizer).__name__} cannot step with a flat gradient, which {protocol} hands it: use "
                "an optimizer such as torch.optim.SGD or Adam, or a protocol in which workers step with their own "
                f"gradients, by default {', '.join(others)}"
            )
        if protocol.clips_mean and task.clip_norm is not None and any(map(protocol.part_of, self.nodes)):
            raise UsageError(
                f"clip_norm of task {type(task).__name__} limits the norm of the whole gradient, of which each hub of "
                f"{protocol} has only a part: use hubs=1, sync='async' or clip_value"
            )
        if task.ema is not None and (not protocol.hub or any(map(protocol.part_of, self.nodes))):
            raise UsageError(
                f"ema of task {type(task).__name__} averages the joint model, which no single node of {protocol} has: "
                "use another protocol, hubs=1, or leave ema out"
            )
        if self.record and isinstance(replica, Learner) and replica.plateau is not None:
            raise UsageError(
                "a run with ReduceLROnPlateau cannot be recorded, because a record does not hold evaluations: "
                "record it with another schedule, or with none"
            )

    def device(self, node: Node, number: int | None) -> Device | None:
        if not node.computes or isinstance(self.task, SyntheticTask):
            return None
        where = choose_device(self.device_name, node.index if number is None else number)
        return Device(where) if where is not None else None

    @property
    def shares(self) -> bool:
        return self.protocol.shares

    @property
    def collective(self) -> bool:
        return self.protocol.collective

    @property
    def hub(self) -> str:
        return self.protocol.hub

    @property
    def vital(self) -> frozenset[str]:
        return self.protocol.vital

    @property
    def messages(self) -> tuple[type[Message], ...]:
        return (*self.protocol.messages, *DEALING)

    @property
    def pool_threads(self) -> int:
        return self.protocol.pool_threads

    @property
    def compress(self) -> str:
        return self.protocol.compress

    @property
    def steps(self) -> int:
        return self.schedule.steps - self.schedule.first_step

    @property
    def length(self) -> Length:
        """The length of the run, for the task's learning-rate schedule."""
        workers = self.schedule.step_batches or self.workers
        return Length(self.schedule.steps, self.samples / (workers * self.schedule.batch_size), workers)

    @property
    def workers(self) -> int:
        return sum(node.computes for node in self.nodes)

    def build(
        self,
        node: Node,
        empty: Empty = torch.empty,
        shared: Shared | None = None,
        device: Device | None = None,
    ) -> tuple[Machine, Replica]:
        replica: Learner | SyntheticLearner
        part = self.protocol.part_of(node)
        if isinstance(self.task, SyntheticTask):
            if self.initial is not None and self.initial.whole:
                raise UsageError("weights: a synthetic task has no model that could begin with them; leave them out")
            replica = SyntheticLearner(
                self.task,
                index=node.index,
                seed=self.random_seed,
                empty=empty,
                shared=shared,
                part=part,
                guard=self.protocol.guard,
            )
        else:
            batches = self._batches(node)
            replica = Learner(
                self.task,
                batches,
                node=node.name,
                seed=self.seed,
                length=self.length,
                empty=empty,
                shared=shared,
                device=device,
                part=part,
                guard=self.protocol.guard,
                clips_mean=self.protocol.clips_mean,
                initial=self.initial,
                place=(node.index, self.workers),
                callbacks=self.callbacks if node.computes else (),
            )
        restored = self.restored
        if restored is not None and (shared is None or shared.first):
            if replica.weights.shape != restored.weights.shape:
                raise UsageError(
                    f"the checkpoint holds {restored.weights.numel()} values and the model {replica.weights.numel()}: "
                    "the task's model has changed since it was saved; resume with the model of then, or start a new run"
                )
            replica.weights.copy_(restored.weights)
        if restored is not None and AVERAGE in restored.state and self.task.ema is not None:
            replica.restore_average(restored.state[AVERAGE])
        return self._machine(node, replica, empty), replica

    def _machine(self, node: Node, replica: Replica, empty: Empty) -> Machine:
        """The machine of a node that has this replica."""
        restored = self.restored
        context = NodeContext(
            node,
            self.nodes,
            replica.weights,
            replica.parameter_count,
            self.schedule,
            restored.state if restored and restored.protocol == self.protocol.name else None,
            empty,
        )
        return self.protocol.machine(context)

    def new_model(self) -> nn.Module:
        """The task's model as every replica begins with it, before a checkpoint's weights are loaded."""
        return build_model(self.task, self.seed, self.initial)

    @property
    def random_seed(self) -> int:
        first = self.schedule.first_samples
        return zlib.crc32(f"{self.seed} from {first}".encode()) if first else self.seed

    def state_of(self, node: Node) -> dict[str, Any]:
        """What the checkpoint holds for this node.

        A node that steps resumes with its own optimizer state, or else with that of another worker, or else with that
        of the nodes that stepped before. Random generators are restored only from the node's own state.
        """
        if self.restored is None:
            return {}
        workers, hub = self.restored.workers, self.restored.replica_state
        own = workers.get(node.index, {}) if node.computes else {}
        with_optimizer = [state for _, state in sorted(workers.items()) if "optimizer" in state]
        if node.computes and self.protocol.steps_at_workers:
            others = with_optimizer[node.index % len(with_optimizer)] if with_optimizer else hub
            state = own if "optimizer" in own else others
        elif node.name in self.vital and self.protocol.steps_at_hub:
            state = hub or next(iter(with_optimizer), {})
        else:
            state = {}
        random = {"random": own["random"]} if "random" in own else {}
        return {**{name: value for name, value in state.items() if name != "random"}, **random}

    @property
    def source(self) -> Any:
        return self.task.source

    @property
    def first_round(self) -> int:
        return math.ceil(sum(stop - start for start, stop in self.schedule.counted) / self.workers)

    @property
    def scripted(self) -> bool:
        return False

    @property
    def loop_seconds(self) -> float:
        return math.inf

    def program(self, node: Node) -> Callable[[Any, Node], bool] | None:
        return None

    def is_shown(self, node: Node) -> bool:
        return False

    def complete(self, directory: Path) -> tuple[Node, ...] | None:
        return ()

    def portable(self) -> tuple[Any, list[Tensor]] | None:
        spec = self.task_spec
        if spec is None or spec.get("spec") is None or self.scripted or self.callbacks:
            return None
        data = str(spec["data"]) if spec["data"] else ""
        values = {
            "task": {"spec": spec["spec"], "data": data, "settings": spec["settings"]},
            "code": code_hash(Path(inspect.getfile(type(self.task)))),
            "shapes": self.shapes(),
            "protocol": {"name": self.protocol.name, **asdict(self.protocol)},
            "nodes": msgspec.to_builtins(self.nodes),
            "schedule": msgspec.to_builtins(self.schedule),
            **{name: getattr(self, name) for name in PLAIN_FIELDS},
        }
        if (old := self.restored) is not None:
            values["restored"] = (old.step, old.samples, old.weights, old.state, old.protocol, old.others)
        if self.initial is not None:
            values["initial"] = dict(self.initial.tensors), self.initial.whole
        tensors: list[Tensor] = []
        return (pack_tree(values, tensors), tensors) if can_be_packed(values) else None

    def shapes(self) -> dict[str, list[int]]:
        """The names and shapes of the model's tensors."""
        if isinstance(self.task, SyntheticTask):
            return {}
        return {name: list(value.shape) for name, value in self.new_model().state_dict().items()}

    def bring(self, data: Any) -> None:
        self._part = data

    def _batches(self, node: Node) -> Any:
        if not node.computes:
            return iter(())
        self.task.rank, self.task.world_size = node.index, self.workers
        if self._part is not None:
            check_batch(self.task, len(self._part))
            seed = self.seed * 1_000_003 + node.index
            return open_batches(self.task, self._part, seed=seed, shared_by=self.workers, ahead=not self.virtual)
        if self._data is None:
            with users_code(self.task, "train_data()"):
                self._data = self.task.train_data()
        return open_batches(self.task, self._data, seed=self.seed, ahead=not self.virtual)

    def log(self, name: str) -> IO[bytes] | None:
        if self.directory is None:
            return None
        try:
            return self.directory.below("logs", f"{name}.log").open("wb")
        except OSError:  # a node without a log is better than no node
            return None

    def recorder(self, node: Node, replica: Replica) -> Recorder | None:
        if not self.record or self.directory is None:
            return None
        return EventLog(self.directory.below("record", f"{node.name}.events"), replica)

    def __getstate__(self) -> dict[str, Any]:
        """Without the states that each node is sent by itself: otherwise every process would receive all of them."""
        restored = replace(self.restored, replica_state={}, workers={}) if self.restored is not None else None
        return {**self.__dict__, "_data": None, "restored": restored}


def _initial(restored: Restored | None, weights: Mapping[str, Tensor] | None) -> InitialWeights | None:
    """A checkpoint holds the weights, which are loaded later, and what no vector holds, such as frozen parameters."""
    if restored is not None:
        return InitialWeights(restored.others, whole=False)
    return InitialWeights(weights, whole=True) if weights is not None else None
