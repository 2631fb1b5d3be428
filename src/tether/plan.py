"""What a run shall do: how far it goes, who takes part, and how each node is built."""

from __future__ import annotations

import math
import operator
import re
import zlib
from dataclasses import dataclass, field, replace
from typing import IO, Any, ClassVar

import torch

from tether.checkpoint import Restored
from tether.errors import UsageError
from tether.learner import Learner, SyntheticLearner
from tether.machine import Machine, Message, Node, Replica, Schedule, Seat
from tether.protocols import DEALING, Options
from tether.record import EventLog
from tether.rundir import RunDirectory
from tether.runtimes.base import Runtime
from tether.runtimes.interpreter import Recorder
from tether.task import (
    Batches,
    Length,
    Prefetched,
    SyntheticTask,
    Task,
    check_batch,
    check_can_travel,
    check_is_task,
    check_task,
    metric_of,
    users_code,
)
from tether.vector import Empty, Shared

#: a run that only has a target or a time ends after so many epochs
EPOCHS_MAX = 100


@dataclass(frozen=True)
class Until:
    """A condition on a metric that ends a run, such as error<0.05."""

    metric: str
    relation: str
    value: float

    _RELATIONS: ClassVar[dict[str, Any]] = {"<": operator.lt, "<=": operator.le, ">": operator.gt, ">=": operator.ge}

    @staticmethod
    def parse(text: str) -> Until:
        match = re.fullmatch(r"\s*([\w.-]+)\s*(<=|>=|<|>)\s*([-+0-9.e]+)\s*", text)
        try:
            if match is None:
                raise ValueError
            return Until(match[1], match[2], float(match[3]))
        except ValueError:
            raise UsageError(f"the condition {text!r} is not understood; write it like error<0.05") from None

    def holds(self, metrics: dict[str, float]) -> bool:
        if self.metric not in metrics:
            known = ", ".join(sorted(metrics)) or "none: its evaluate() returns no metrics"
            raise UsageError(f"the condition names the metric {self.metric!r}; the task has {known}")
        return bool(self._RELATIONS[self.relation](metrics[self.metric], self.value))

    def __str__(self) -> str:
        return f"{self.metric}{self.relation}{self.value:g}"


#: what a metric's name says of its direction
FALLING, RISING = ("error", "loss"), ("accuracy",)


def worth(metrics: dict[str, float]) -> float:
    """How good a model with these metrics is; more is better."""
    metric = metric_of(metrics)
    falls, rises = (any(word in metric.lower() for word in words) for words in (FALLING, RISING))
    if not falls and not rises:
        raise UsageError(
            f"patience does not know what is better for the metric {metric or 'none'!r}: have evaluate() return "
            "one called error, or first one whose name has error, loss or accuracy in it"
        )
    return -metrics[metric] if falls else metrics[metric]


class Patience:
    """Ends a run whose metric has not got better for so many evaluations."""

    def __init__(self, evaluations: int) -> None:
        if evaluations < 1:
            raise UsageError(f"patience must be at least 1 evaluation, not {evaluations}")
        self.evaluations = evaluations
        self._best = -math.inf
        self._waited = 0

    def ends(self, metrics: dict[str, float], *, late: bool = False) -> bool:
        """Whether the metrics of the next evaluation end the run; `late`: it is of an older model than the last was."""
        value = worth(metrics)
        if not late:
            self._waited = 0 if value > self._best else self._waited + 1
        self._best = max(self._best, value)
        return not late and self._waited >= self.evaluations

    def __str__(self) -> str:
        return f"no better for {self.evaluations} evaluation{'s' if self.evaluations > 1 else ''}"


@dataclass(frozen=True)
class Request:
    """Everything that decides what a run does; kept in the run directory so that it can be continued."""

    epochs: float | None = None
    steps: int | None = None
    until: str | None = None
    seed: int = 0
    evaluate_every: float = 1.0
    checkpoint_seconds: float = 30.0
    record: bool = False
    trace: bool = True
    #: begin with so many epochs of this protocol, given by its name and options
    warmup: dict[str, Any] | None = None
    warmup_epochs: float = 1.0
    #: end after so long at the latest
    seconds: float | None = None
    #: end after so many evaluations without a better metric
    patience: int | None = None

    def __post_init__(self) -> None:
        for name in ("epochs", "steps", "evaluate_every", "warmup_epochs", "seconds"):
            value = getattr(self, name)
            if value is not None and not (isinstance(value, int | float) and value > 0):
                raise UsageError(f"{name} must be more than 0, not {value!r}")
        if self.epochs is not None and self.steps is not None:
            raise UsageError("give either epochs or steps, not both")
        if self.until is not None:
            Until.parse(self.until)
        if self.record and self.warmup is not None:
            raise UsageError("a run with a warm-up cannot be recorded: record the two parts as runs of their own")
        if self.patience is not None:
            Patience(self.patience)
        if self.seed < 0:
            raise UsageError(f"seed cannot be negative: {self.seed}")

    @property
    def has_goal(self) -> bool:
        """Whether anything is said of how long the run goes."""
        return any(goal is not None for goal in (self.epochs, self.steps, self.until, self.seconds, self.patience))

    def schedule(self, task: Task, samples: int, workers: int, restored: Restored | None) -> Schedule:
        batch_size = task.batch_size
        kept = restored.state if restored is not None else {}
        # a step of the run stays what it was when it began, also with another number of workers
        step_batches = kept.get("step_batches", workers)
        steps_per_epoch = samples / (step_batches * batch_size)
        usual = task.epochs if self.until is None and self.seconds is None and self.patience is None else EPOCHS_MAX
        goal, steps = None, self.steps
        if steps is None:
            goal = max(1, math.ceil((self.epochs if self.epochs is not None else usual) * samples / batch_size))
            steps = math.ceil(goal / step_batches)
        counted: tuple[tuple[int, int], ...] = ()
        first_step = 0
        if restored is not None:
            counted = tuple((start, stop) for start, stop in kept.get("counted", [[0, restored.samples // batch_size]]))
            done = sum(stop - start for start, stop in counted)
            if done * batch_size != restored.samples:  # the task has another mini-batch now
                done = restored.samples // batch_size
                counted = ((0, done),)
            first_step = restored.step if goal is None else done // step_batches
            if (first_step >= steps) if goal is None else any(start == 0 and stop >= goal for start, stop in counted):
                raise UsageError(f"the run has made its {steps} steps: give more epochs or steps to go further")
        return Schedule(
            steps=max(1, steps),
            evaluate_every=max(1, round(self.evaluate_every * steps_per_epoch)),
            batch_size=batch_size,
            checkpoint_seconds=self.checkpoint_seconds,
            goal=goal,
            step_batches=step_batches,
            first_step=first_step,
            counted=counted,
            data_bound=task.source is not None,
        )


@dataclass
class RunPlan:
    """Who takes part and how each is built; travels to the processes of a run."""

    task: Task
    protocol: Options
    nodes: tuple[Node, ...]
    schedule: Schedule
    seed: int
    #: of training, in an epoch
    samples: int
    vector_bytes: int
    record: bool
    traced: bool
    #: time stands still while data is fetched, so nothing is fetched ahead
    virtual: bool
    #: the condition that ends the run early
    until: str | None
    #: end after so long at the latest
    seconds: float | None
    #: end after so many evaluations without a better metric
    patience: int | None
    restored: Restored | None
    #: what to tell when it begins
    notes: tuple[str, ...] = ()
    directory: RunDirectory | None = None
    _data: Any = field(default=None, repr=False)
    #: what was brought to this node
    _part: Any = field(default=None, repr=False)

    @staticmethod
    def make(task: Task, protocol: Options, on: Runtime, request: Request, restored: Restored | None) -> RunPlan:
        """Check the task as far as that is possible without training it."""
        check_is_task(task)
        asked, protocol = protocol, protocol.settled(on.workers, on.processors)
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
                "nodes that share one vector cannot be recorded, since each would see the others' changes: use "
                "consistent=True and apply='server'"
            )
        joint = next(node for node in plan.nodes if plan.joint in ("", node.name))
        _, replica = plan.build(joint)
        if protocol.steps_at_hub and isinstance(replica, Learner) and not replica.flat:
            raise UsageError(
                f"{type(replica.optimizer).__name__} cannot run on a flat vector, which protocol {protocol.name!r} "
                "needs at its hub: use protocol 'averaging' or 'single', or an optimizer such as torch.optim.SGD"
            )
        if plan.record and isinstance(replica, Learner) and replica.plateau is not None:
            raise UsageError(
                "a run with ReduceLROnPlateau cannot be recorded, since a record does not hold evaluations: record it "
                "with another schedule, or with none"
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
    def joint(self) -> str:
        return self.protocol.joint

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
        """For the task's learning-rate schedule."""
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
                    "the task's model has changed since"
                )
            replica.weights.copy_(restored.weights)
        seat = Seat(
            node,
            self.nodes,
            replica.weights,
            replica.parameter_count,
            self.schedule,
            restored.state if restored and restored.protocol == self.protocol.name else None,
            empty,
        )
        return self.protocol.machine(seat), replica

    @property
    def random_seed(self) -> int:
        first = self.schedule.first_samples
        return zlib.crc32(f"{self.seed} from {first}".encode()) if first else self.seed

    def state_of(self, node: Node) -> dict[str, Any]:
        """Its own, or else a peer's, or, where others stepped before, theirs; random generators are its own or anew."""
        if self.restored is None:
            return {}
        workers, hub = self.restored.workers, self.restored.replica_state
        own = workers.get(node.index, {}) if node.computes else {}
        told = [state for _, state in sorted(workers.items()) if "optimizer" in state]
        if node.computes and self.protocol.steps_at_workers:
            others = told[node.index % len(told)] if told else hub
            taken = own if "optimizer" in own else others
        elif node.name in self.vital and self.protocol.steps_at_hub:
            taken = hub or next(iter(told), {})
        else:
            taken = {}
        random = {"random": own["random"]} if "random" in own else {}
        return {**{name: value for name, value in taken.items() if name != "random"}, **random}

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
        except OSError:  # a node without a log is better than none
            return None

    def recorder(self, node: Node, replica: Replica) -> Recorder | None:
        if not self.record or self.directory is None:
            return None
        return EventLog(self.directory.below("record", f"{node.name}.events"), replica)

    def __getstate__(self) -> dict[str, Any]:
        """Without what each node is given by itself, since all states would go to all processes."""
        restored = replace(self.restored, replica_state={}, workers={}) if self.restored is not None else None
        return {**self.__dict__, "_data": None, "restored": restored}
