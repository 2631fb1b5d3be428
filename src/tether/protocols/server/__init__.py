"""Parameter server: Rudra's three protocols and three architectures, and Downpour.

A hub holds the joint model and runs the optimizer on it. Workers compute gradients and push them to the hub. The Rudra
paper calls a worker a learner: its lambda is the number of workers, its mu the size of a mini-batch.

Clock and staleness (section 3.1). The hub's clock is the number of updates so far. A worker computes the gradient of
one mini-batch and pushes it with the clock of the weights it was computed at. Its staleness is the hub's clock minus
that clock. An update is one step of the optimizer, on the flat vector, with the mean of the gradients collected for it:

- hard (equation 3): one gradient from every worker present, all of the current clock. Staleness is always zero, and
  lambda workers with mini-batch mu equal one worker with mini-batch lambda*mu (equation 7) at the rate used here.
- soft (equation 5): any c = floor(lambda/n) gradients. The average staleness is then n.
- async (equation 4): every gradient by itself, at once. This is soft with n = lambda.

Learning rate. In hardsync it is the task's rate times sqrt(lambda*mu/B), where B is the batch size that the rate was
chosen for (section 3.2): mu, the task's own, unless given. To compare with one worker of mini-batch lambda*mu at the
same rate, use `rate="none"`. In soft and async it is the task's rate, and momentum, if the optimizer has it, is reduced
by the average staleness of the update (equation 2), and the rate with it: with momentum m and s = 1 + staleness,
momentum becomes m^s and the rate is divided by the square root of s. From s = 8 on, all rates fall as 1/s, as the
paper's do. docs/decisions/0115-async-rate.md has the measurements. The paper's 1/n (equation 6) is another choice, as
are one over the average staleness and one over the staleness of each gradient (footnote 3).

Architectures (section 3.3). In a star, workers talk to the hub. In a tree (Rudra-adv), they talk to an aggregator on
their own host. The aggregator passes the mean of what it has collected on to the node above, as one push. It answers
the nodes below when that push is answered, so all weights carry one clock. With overlap (Rudra-adv*), the hub
broadcasts its weights down a tree of workers. The next of these downcasts begins when all workers have the last one. A
worker computes while its push is under way. It has at most one push under way, and never merges two gradients.

Downpour: a worker pushes the sum of `push_every` gradients, pulls every `pull_every` steps, and steps by itself in
between.

Several hubs (`tether.protocols.server.parts`): each holds a part of the vector, and workers talk to all of them.

Shared weights (GaDei, section 4.1). In async on one machine, all nodes share one vector, unless `consistent`. Workers
compute gradients at the vector as it is, even while the hub steps on it, so no weights travel and a pull costs nothing.
The answer to a push carries the hub's clock. A gradient is marked with the newest clock that its worker knew when it
began, so its true staleness is at most what is recorded. A worker may have two pushes unanswered before it waits.

Inline (GaDei; `tether.protocols.server.inline`). On one machine each worker can step by itself on the shared vector.
Nothing is pushed then.

Rows: where every push is an update by itself, it carries only the touched rows of embeddings.

The conversation, besides that of `tether.protocols.ledger`, which deals out mini-batches:

    worker, aggregator -> node above   Pull              asks for weights newer than those it has
                                       Push              gradients, and perhaps the same question
    hub, aggregator -> node below      Weights           the answer, if there are newer weights
                                       Current           the answer, if there are not
                                       Refused           the answer, if its model is another one
    hub -> workers, by broadcast       Weights           with overlap: a downcast
    worker -> hub                      DowncastArrived   with overlap: the answer
    first hub -> other hubs            Round             hardsync: which gradients form an update
                                       GetPart           asks for the hub's part of the model
    other hub -> first hub             Part              the answer
    worker -> hub                      Tally             inline: how many steps it has made
    hub -> worker                      Halt              inline: make no more

Every Pull and Push is answered. In hardsync the answer to a push is the update that it is part of. The sender keeps a
push until it is answered. If the node above dies first, the sender pushes again to the next one above. Each worker
numbers its gradients, and a push with any number that was counted before is not counted again. So each gradient counts
once, or not at all if its worker died.

When a worker dies, no node waits for it any longer; what it had pushed counts. A worker that joins pulls, and counts
from then on. BatchNorm's buffers are pushed along with the gradients and averaged.

Invariants: no gradient is counted twice; none has a later clock than the hub's; in hardsync all have its clock, and
only workers present are awaited; a worker has at most one push under way, or two where weights are shared.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Literal

from tether.core.effects import Step
from tether.core.machine import Machine, Node, NodeContext
from tether.errors import UsageError
from tether.protocols.base import Options, option
from tether.protocols.server.aggregator import Aggregator
from tether.protocols.server.hub import ServerHub
from tether.protocols.server.inline import InlineHub, InlineWorker
from tether.protocols.server.messages import (
    Current,
    DowncastArrived,
    GetPart,
    Halt,
    Part,
    Pull,
    Push,
    Refused,
    Round,
    Tally,
    Weights,
)
from tether.protocols.server.parts import MultiHubWorker, PartHub
from tether.protocols.server.rates import RateRule
from tether.protocols.server.worker import ServerWorker, SharingWorker

__all__ = ["Server"]

#: what sharing the hub's weights needs of the other options
_SHARING_NEEDS = {"sync": "async", "topology": "star", "overlap": False, "push_every": 1, "pull_every": 1, "hubs": 1}
#: learning rates that do not depend on what only the hub knows
_INLINE_RATES = ("auto", "none", "1/n", "staleness")


@dataclass(frozen=True)
class Server(Options):
    """The optimizer runs at a hub; workers push gradients and pull weights."""

    sync: Literal["hard", "soft", "async"] = option(
        "hard", "which gradients form an update: one of every worker (hard), any lambda/n (soft), or each alone (async)"
    )
    n: int = option(1, "soft: the number of updates that one gradient from each of the lambda workers makes")
    topology: Literal["star", "tree"] = option("star", "workers talk to the hub (star) or to aggregators (tree)")
    fan_out: int = option(8, "tree: how many nodes are below each aggregator, and below the hub")
    overlap: bool = option(False, "broadcast weights down a tree of workers, and compute while a push is under way")
    rate: Literal["auto", "none", "sqrt", "1/n", "average", "gradient", "staleness"] = option(
        "auto",
        "how the task's learning rate is changed. none: not at all. sqrt: times sqrt(lambda*mu/B). 1/n: times 1/n, in "
        "async 1/lambda. average: divided by the average staleness of an update. gradient: divided by the staleness of "
        "each gradient. staleness: with s = 1 + the average staleness, inline s = lambda, momentum is raised to the "
        "power of s and the rate divided by sqrt(s) where there is momentum, and every rate is multiplied by 8/s where "
        "s is more than 8. auto: sqrt in hardsync, else staleness",
    )
    reference_batch: int | None = option(
        None,
        "sqrt: B, the batch size that the learning rate was chosen for; by default mu, the task's own, so that lambda "
        "workers have sqrt(lambda) times its rate",
    )
    push_every: int = option(1, "Downpour: steps between two pushes")
    pull_every: int = option(1, "Downpour: steps between two pulls; the worker steps by itself in between")
    apply: Literal["server", "inline", "auto"] = option(
        "server",
        "async, on one machine: the hub steps (server), or each worker does, on weights that all share (inline); "
        "auto: inline unless a processor is left for the hub",
    )
    hubs: int = option(
        1,
        "hard and async, star: how many hubs share the work, each with a part of the vector; raise it where the link "
        "of one hub is the limit. All but the first run on hosts of workers",
    )
    consistent: bool | None = option(
        None,
        "async: send copies of the weights, so that no node reads them while they are written. If false, all nodes, on "
        "one machine, share one vector. By default they share it where they can",
    )

    name = "server"
    summary = "parameter server: the hub steps with the workers' gradients (Rudra, Downpour)"
    suits = (
        "one server with small mini-batches or a large embedding (sync=async, apply=inline), or a result "
        "that equals one worker with a large mini-batch (sync=hard, rate=none)"
    )
    messages = (Pull, Weights, Current, Refused, Push, DowncastArrived, Tally, Halt, Round, GetPart, Part)

    def machine(self, context: NodeContext) -> Machine:
        rates = self._rates(context.schedule.batch_size)
        hard = self.sync == "hard"
        match context.node.role:
            case "hub" if self.apply == "inline":
                return InlineHub(context)
            case "hub" if context.node.index:
                return PartHub(context, hard, rates)
            case "hub":
                return ServerHub(
                    context,
                    sync=self.sync,
                    n=self.n,
                    rates=rates,
                    tree=self.topology == "tree",
                    overlap=self.overlap,
                    shares=self.shares,
                )
            case "aggregator":
                return Aggregator(context, hard=hard, overlap=self.overlap)
        if self.apply == "inline":
            # no node counts updates there: while one gradient is computed, every other worker makes about one step
            workers = len(context.workers)
            rate, momentum_staleness = rates.for_update(workers, workers - 1)
            return InlineWorker(context, Step(rate=rate, staleness=momentum_staleness))
        if self.hubs > 1:
            return MultiHubWorker(context, hard)
        if self.shares:
            return SharingWorker(context)
        alone = (self.sync, self.topology, self.push_every, self.compress) == ("async", "star", 1, "none")
        return ServerWorker(
            context,
            hard=hard,
            overlap=self.overlap,
            push_every=self.push_every,
            pull_every=self.pull_every,
            form="rows" if alone else "dense",
        )

    def nodes(self, workers: int) -> tuple[Node, ...]:
        if self.n > workers:
            raise UsageError(f"n must be from 1 to the number of workers, {workers}, not {self.n}")
        computing = [Node(f"worker-{i}", "worker", True, i, parent="hub") for i in range(workers)]
        if self.topology == "star":
            others = [Node(f"hub-{i}", "hub", index=i, host=f"worker-{i % workers}") for i in range(1, self.hubs)]
            return Node("hub", "hub"), *others, *computing
        return Node("hub", "hub"), *_tree(computing, self.fan_out)

    def _rates(self, batch_size: int) -> RateRule:
        rule = self.rate
        if rule == "auto":
            rule = "sqrt" if self.sync == "hard" else "staleness"
        n = None if self.sync == "async" else self.n
        return RateRule(rule, batch_size, self.reference_batch or batch_size, n)

    @property
    def steps_at_hub(self) -> bool:
        return self.apply != "inline"

    @property
    def steps_at_workers(self) -> bool:
        return not self.steps_at_hub or self.pull_every > 1

    @property
    def clips_mean(self) -> bool:
        return self.steps_at_hub and self.sync != "async"

    @property
    def shares(self) -> bool:
        return self.apply == "inline" or self.consistent is False

    @property
    def vital(self) -> frozenset[str]:
        return frozenset({"hub", *(f"hub-{i}" for i in range(1, self.hubs))})

    def part_of(self, node: Node) -> tuple[int, int] | None:
        return (node.index, self.hubs) if self.hubs > 1 and node.role == "hub" else None

    def resolved_for(self, workers: int, processors: int | None) -> Options:
        may_share = self.compress == "none" and all(
            getattr(self, name) == value for name, value in _SHARING_NEEDS.items()
        )
        chosen = self
        if self.apply == "auto":
            crowded = processors is not None and processors <= workers
            able = may_share and self.rate in _INLINE_RATES and not self.consistent
            chosen = replace(self, apply="inline" if crowded and able else "server")
        if chosen.apply == "server" and chosen.consistent is None and may_share and processors is not None:
            chosen = replace(chosen, consistent=False)
        return chosen

    @classmethod
    def variants(cls) -> tuple[Options, ...]:
        combinations = [
            cls(sync=sync, topology=topology, fan_out=2, overlap=overlap)
            for sync in ("hard", "soft", "async")
            for topology in ("star", "tree")
            for overlap in (False, True)
        ]
        sharing = cls(sync="async", apply="inline"), cls(sync="async", consistent=False)
        several = cls(sync="hard", hubs=3), cls(sync="async", hubs=2)
        return *combinations, cls(sync="async", push_every=2, pull_every=3), *sharing, *several

    def __post_init__(self) -> None:
        super().__post_init__()
        for name in ("n", "push_every", "pull_every", "hubs"):
            if getattr(self, name) < 1:
                raise UsageError(f"{name} must be at least 1, not {getattr(self, name)}")
        if self.fan_out < 2:
            raise UsageError(f"fan_out must be at least 2, not {self.fan_out}: with 1, a tree has no end")
        if self.reference_batch is not None and self.reference_batch < 1:
            raise UsageError(f"reference_batch must be at least 1, not {self.reference_batch}")
        if self.n != 1 and self.sync != "soft":
            raise UsageError(f"n={self.n} is for sync='soft', not for sync={self.sync!r}")
        if max(self.push_every, self.pull_every) > 1 and (self.sync == "hard" or self.overlap):
            raise UsageError(
                "push_every and pull_every let workers step by themselves: use them with sync='soft' or 'async' and "
                "without overlap, which sends each gradient on its own"
            )
        if self.hubs > 1:
            self._check_hubs()
        if self.apply != "server":
            self._check_sharing(f"apply={self.apply!r}")
        elif self.consistent is False:
            self._check_sharing("consistent=False")

    def _check_hubs(self) -> None:
        if self.sync == "soft":
            raise UsageError(
                f"hubs={self.hubs} is for sync='hard' or 'async': in softsync each hub would split the gradients "
                "differently"
            )
        if self.rate == "gradient":
            raise UsageError(
                f"hubs={self.hubs} has no rate='gradient': use rate='average', which is the same where an update has "
                "one gradient"
            )
        if self.consistent is False:
            raise UsageError(f"hubs={self.hubs} is for weights that travel; with consistent=False they do not")
        needed = {"topology": "star", "overlap": False, "push_every": 1, "pull_every": 1, "apply": "server"}
        for name, value in (needed | {"compress": "none"}).items():
            if getattr(self, name) != value:
                raise UsageError(f"hubs={self.hubs} needs {name}={value!r}, not {getattr(self, name)!r}")

    def _check_sharing(self, setting: str) -> None:
        """`setting` is the option that makes nodes share the weights, or may."""
        for name, value in _SHARING_NEEDS.items():
            if getattr(self, name) != value:
                raise UsageError(f"{setting} needs {name}={value!r}, not {getattr(self, name)!r}")
        if self.shares and self.compress != "none":
            raise UsageError(f"with {setting} nothing is sent that compress={self.compress!r} could make smaller")
        if self.apply == "inline" and self.rate not in _INLINE_RATES:
            raise UsageError(f"rate={self.rate!r} needs what the hub knows about each gradient: use apply='server'")
        if self.apply == "inline" and self.consistent:
            raise UsageError("workers that step on shared weights read what others write: use apply='server'")


def _tree(workers: list[Node], fan_out: int) -> list[Node]:
    """Aggregators above the workers, each on the host of a node below it, until the hub has at most `fan_out` below."""
    placed: list[Node] = []
    level, count = workers, 0
    while level is workers or len(level) > fan_out:
        above: list[Node] = []
        for start in range(0, len(level), fan_out):
            group = level[start : start + fan_out]
            host = group[0].host or f"host-{start // fan_out}"
            parent = Node(f"aggregator-{count}", "aggregator", host=host, parent="hub")
            count += 1
            above.append(parent)
            placed += [replace(node, host=node.host or host, parent=parent.name) for node in group]
        level = above
    return placed + level
