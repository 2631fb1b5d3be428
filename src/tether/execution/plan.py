"""The plan of a run: which nodes take part and how each one is built."""

from __future__ import annotations

import zlib
from dataclasses import dataclass, field, replace
from typing import IO, Any

import torch

from tether.core.machine import Machine, Node, NodeContext, Recorder, Replica, Schedule
from tether.core.message import Message
from tether.core.vector import Empty, Shared
from tether.errors import UsageError
from tether.execution.checkpoint import Restored
from tether.execution.directory import RunDirectory
from tether.execution.goals import Request
from tether.learner.data import Batches, Prefetched
from tether.learner.learner import Learner
from tether.learner.synthetic import SyntheticLearner, SyntheticTask
from tether.protocols import DEALING, Options, known
from tether.runtimes.base import Runtime
from tether.runtimes.record import EventLog
from tether.task import (
    Length,
    Task,
    check_batch,
    check_can_travel,
    check_is_task,
    check_task,
    users_code,
)


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
    #: what to tell the user when the run begins
    notes: tuple[str, ...] = ()
    directory: RunDirectory | None = None
    _data: Any = field(default=None, repr=False)
    #: the part of the data that was brought to this node
    _part: Any = field(default=None, repr=False)

    @staticmethod
    def make(task: Task, protocol: Options, on: Runtime, request: Request, restored: Restored | None) -> RunPlan:
        """Make the plan, and check the task as far as that is possible without training it."""
        check_is_task(task)
        asked, protocol = protocol, protocol.resolved_for(on.workers, on.processors)
        if protocol.workers_max is not None and on.workers > protocol.workers_max:
            raise UsageError(
                f"protocol {protocol.name!r} uses {protocol.workers_max} worker, not {on.workers}: "
                "leave the number of workers out, or choose another protocol"
            )
        if not on.virtual:
            check_can_travel(task)
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
            notes=(
                *(restored.notes if restored is not None else ()),
                *((f"chosen: {protocol}",) if protocol != asked else ()),
            ),
            _data=data,
        )
        if plan.shares and plan.record:
            raise UsageError(
                "nodes that share one vector cannot be recorded, because each sees the others' changes: use "
                "consistent=True and apply='server'"
            )
        example = next(node for node in plan.nodes if plan.hub in ("", node.name))
        _, replica = plan.build(example)
        if protocol.needs_elementwise and isinstance(replica, Learner) and not replica.flat:
            others = [name for name, options in sorted(known().items()) if not options().needs_elementwise]
            raise UsageError(
                f"{type(replica.optimizer).__name__} cannot step with a flat gradient, which {protocol} hands it: use "
                "an optimizer such as torch.optim.SGD or Adam, or a protocol in which workers step with their own "
                f"gradients, by default {', '.join(others)}"
            )
        if plan.record and isinstance(replica, Learner) and replica.plateau is not None:
            raise UsageError(
                "a run with ReduceLROnPlateau cannot be recorded, because a record does not hold evaluations: "
                "record it with another schedule, or with none"
            )
        plan.vector_bytes = replica.weights.numel() * replica.weights.element_size()
        return plan

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
        device: torch.device | None = None,
    ) -> tuple[Machine, Replica]:
        replica: Replica
        part = self.protocol.part_of(node)
        if isinstance(self.task, SyntheticTask):
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
            )
        restored = self.restored
        if restored is not None and (shared is None or shared.first):
            if replica.weights.shape != restored.weights.shape:
                raise UsageError(
                    f"the checkpoint holds {restored.weights.numel()} values and the model {replica.weights.numel()}: "
                    "the task's model has changed since it was saved; resume with the model of then, or start a new run"
                )
            replica.weights.copy_(restored.weights)
        context = NodeContext(
            node,
            self.nodes,
            replica.weights,
            replica.parameter_count,
            self.schedule,
            restored.state if restored and restored.protocol == self.protocol.name else None,
            empty,
        )
        return self.protocol.machine(context), replica

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

    def bring(self, data: Any) -> None:
        self._part = data

    def _batches(self, node: Node) -> Any:
        if not node.computes:
            return iter(())
        if self._part is not None:
            check_batch(self.task, len(self._part))
            seed = self.seed * 1_000_003 + node.index
            batches = Batches(self.task, self._part, seed=seed, shared_by=self.workers)
        else:
            if self._data is None:
                with users_code(self.task, "train_data()"):
                    self._data = self.task.train_data()
            batches = Batches(self.task, self._data, seed=self.seed)
        return batches if batches.in_memory or self.virtual else Prefetched(batches)

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
