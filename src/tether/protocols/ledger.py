"""Who trains on which mini-batch, so that every sample of an epoch counts exactly once.

The data of a run is one endless sequence of mini-batches, numbered from 0, with a new permutation of the samples for
every epoch. The node that counts, which is the hub or grid's master, keeps a `Ledger`: which mini-batches already
count, which worker was dealt which of the others, and which were given back. A worker has a `Portion`: the mini-batches
that it was dealt and has not begun.

- The first deal follows from the schedule alone, so workers begin without a message.
- Mini-batches are dealt in lanes: of a group, the first of k workers gets the 1st, the k+1st, and so on. Workers that
  keep the same pace therefore use, in each step, the same samples as one worker with k times the mini-batch.
- A worker asks for more (`More`) before it runs out. If a faster worker took a slow one's lane, the slow one gets the
  next lane.
- A worker's mini-batches count in the order in which they were dealt. Mini-batches of a dead worker that do not count
  yet are dealt to others before any new ones.
- When nothing is left to deal, a worker with many mini-batches left is asked to give half of them back (`Recall`,
  `Returned`).

A resumed run deals the mini-batches that do not count yet, no matter which worker had them. Where each worker has data
of its own, mini-batches cannot move between workers: each worker goes through its own part, and the goal is only a
number of mini-batches.

Invariant: below the frontier every mini-batch counts, or is held by one worker, or waits to be dealt.
"""

from __future__ import annotations

import math
from bisect import bisect_left, bisect_right
from collections import Counter, deque
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from itertools import islice
from typing import Any

import msgspec

from tether.core.effects import Compute, Effect, GradientForm
from tether.core.machine import NodeContext
from tether.core.message import Message
from tether.errors import InvariantBroken

#: how many mini-batches a worker is dealt at a time, unless it asks for more: a request may queue behind whole models
AHEAD = 1024
#: a worker gets at most 1/SHARE of its fair share of what is left, so that all workers finish together
SHARE = 2
#: the most mini-batches that a worker asks for
WANTED_MAX = 8192


class More(Message, frozen=True):
    """Worker to hub: it will soon run out of mini-batches, or has none left (`idle`)."""

    wanted: int
    idle: bool = False


class Lease(Message, frozen=True):
    """Hub to worker: mini-batches to train on, and how many mini-batches of the run count."""

    batches: tuple[int, ...]
    position: int


class Recall(Message, frozen=True):
    """Hub to worker: give back half of what you have not begun; others have nothing left."""


class Returned(Message, frozen=True):
    """Worker to hub: it will not train on these mini-batches."""

    batches: tuple[int, ...]


#: messages that the nodes of every protocol may send besides the protocol's own
DEALING: tuple[type[Message], ...] = (More, Lease, Recall, Returned)


class Spans:
    """A set of integers, stored as ranges."""

    def __init__(self, pairs: Iterable[tuple[int, int]] = ()) -> None:
        """Each pair is a range (first, last + 1); pairs are in order."""
        self._starts = [start for start, _ in pairs]
        self._stops = [stop for _, stop in pairs]
        self.total = sum(self._stops) - sum(self._starts)

    def __contains__(self, number: int) -> bool:
        index = bisect_right(self._starts, number) - 1
        return index >= 0 and number < self._stops[index]

    def __iter__(self) -> Iterator[tuple[int, int]]:
        return iter(zip(self._starts, self._stops, strict=True))

    def add(self, number: int) -> bool:
        """Add a number; True if it is new."""
        if number in self:
            return False
        self.total += 1
        index = bisect_left(self._starts, number)
        extends = index > 0 and self._stops[index - 1] == number
        meets = index < len(self._starts) and self._starts[index] == number + 1
        if extends and meets:
            del self._starts[index]
            del self._stops[index - 1]
        elif extends:
            self._stops[index - 1] = number + 1
        elif meets:
            self._starts[index] = number
        else:
            self._starts.insert(index, number)
            self._stops.insert(index, number + 1)
        return True

    def gaps(self) -> list[int]:
        """The numbers between 0 and the last range that are not in the set."""
        edges = zip([0, *self._stops], self._starts, strict=False)
        return [number for stop, start in edges for number in range(stop, start)]

    @property
    def stop(self) -> int:
        """The largest number in the set, plus 1."""
        return self._stops[-1] if self._stops else 0

    @property
    def first_gap(self) -> int:
        """The smallest number that is not in the set."""
        return self._stops[0] if self._starts and self._starts[0] == 0 else 0


class Ledger:
    """At the node that counts: which mini-batches count, and which worker has the others."""

    def __init__(
        self,
        context: NodeContext,
        ahead: int = AHEAD,
        *,
        overshoots: bool = False,
        dealt: bool = True,
        only: str | None = None,
    ) -> None:
        """`overshoots`: deal beyond the goal too, so that no worker is ever idle; `dealt`: make the first deal.

        `only`: of the first deal, keep only what this worker gets.
        """
        schedule = context.schedule
        self.counted = Spans(schedule.counted)
        self._goal = schedule.goal
        self._bound = schedule.data_bound
        self._overshoots = overshoots
        self._indices = {node.name: node.index for node in context.nodes if node.computes}
        self.places = frozenset(self._indices.values())
        #: the workers that are present, with their lane numbers
        self.members = dict(self._indices)
        self._next = self.counted.stop
        self._returned = self.counted.gaps()
        #: mini-batches of dead workers whose gradients may still arrive: dealt when all others count
        self._late: list[int] = []
        self._groups: deque[dict[str, range]] = deque()
        self.held: dict[str, deque[int]] = {name: deque() for name in self.members}
        #: how many mini-batches of each lane count, including those of earlier workers in that lane
        self.made: Counter[int] = Counter()
        #: how far each lane is in its own data
        self._own: Counter[int] = Counter()
        if self._bound:
            rounds = math.ceil(self.counted.total / max(1, len(self._indices)))
            self._own.update(dict.fromkeys(self._indices.values(), rounds))
        #: workers that have asked for more and have not been answered
        self.waiting: dict[str, More] = {}
        #: workers that were asked to give back, and workers that had nothing to give
        self._recalled: set[str] = set()
        self._spent: set[str] = set()
        if dealt:
            for worker in self.members:
                batches = self._choose(worker, ahead)
                if only in (None, worker):
                    self.held[worker].extend(batches)

    # ---- counting ----

    @property
    def is_complete(self) -> bool:
        """The goal is reached."""
        if self._goal is None:
            return False
        reached = self.counted.total if self._bound else self.counted.first_gap
        return reached >= self._goal

    def count(self, worker: str, gradients: int) -> None:
        """The worker's next `gradients` mini-batches are in the joint model."""
        held = self.held[worker]
        if gradients > len(held):
            raise InvariantBroken(f"{worker} reports {gradients} gradients but has only {len(held)} mini-batches left")
        for _ in range(gradients):
            self._add(worker, held.popleft())

    def count_batches(self, worker: str, batches: Iterable[int]) -> None:
        """These mini-batches of a worker, which may be dead by now, are in the joint model."""
        for batch in batches:
            if batch in self.counted and not self._bound:
                continue  # it was dealt to another worker after the first one died, and both have trained on it
            for places in (self.held.get(worker, ()), self._late, self._returned, *self.held.values()):
                if batch in places:
                    places.remove(batch)  # type: ignore[union-attr]
                    break
            self._add(worker, batch)

    def _add(self, worker: str, batch: int) -> None:
        self.made[self._place(worker)] += 1
        if self._bound:
            self.counted = Spans([(0, self.counted.total + 1)])
        elif not self.counted.add(batch):
            raise InvariantBroken(f"mini-batch {batch} counts twice, now by {worker}")

    # ---- membership ----

    def _place(self, worker: str) -> int:
        """A worker's lane: a successor has the lane of the worker it replaces, any other gets a new one."""
        return self._indices.setdefault(worker.partition("~")[0], len(self._indices))

    def join(self, worker: str) -> None:
        """A worker has joined."""
        self.members[worker] = self._place(worker)
        self.held[worker] = deque()

    def lose(self, worker: str, late: bool = False) -> None:
        """A worker has died: others get its mini-batches; with `late`, last, since its gradients may still arrive."""
        if self.members.pop(worker, None) is None:
            return
        back = list(self.held.pop(worker))
        if self._bound:
            self._own[self._place(worker)] -= len(back)
        else:
            for group in self._groups:
                self._give_back(group.pop(worker, []))
            (self._late.extend if late else self._give_back)(back)
        self.waiting.pop(worker, None)
        self._recalled.discard(worker)

    def take_back(self, worker: str, batches: Iterable[int]) -> None:
        """A worker has given these mini-batches back."""
        if worker not in self.members:
            return
        self._recalled.discard(worker)
        given = set(batches) & set(self.held[worker])
        if not given:
            self._spent.add(worker)
        self.held[worker] = deque(batch for batch in self.held[worker] if batch not in given)
        self._give_back(given)

    def _give_back(self, batches: Iterable[int]) -> None:
        self._returned = sorted((*self._returned, *batches))

    def recall(self) -> str | None:
        """If a worker is idle, the worker to ask for mini-batches: the one with the most."""
        idle = {worker for worker, more in self.waiting.items() if more.idle}
        if self._bound or len(idle) <= len(self._recalled):
            return None
        refused = self._recalled | self._spent | idle
        able = {name: len(held) for name, held in self.held.items() if len(held) > 1 and name not in refused}
        if not able:
            return None
        richest = max(able, key=lambda name: able[name])
        self._recalled.add(richest)
        return richest

    def rebuild(
        self, counted: Iterable[tuple[int, int]], made: Mapping[str, Iterable[int]], held: Mapping[str, Iterable[int]]
    ) -> int:
        """Start over from what counts, what else was made, and what living workers hold; how many more count now."""
        self.counted = Spans(tuple(counted))
        before = self.counted.total
        self.members = {worker: self._place(worker) for worker in held}
        self.held = {
            worker: deque(batch for batch in batches if batch not in self.counted) for worker, batches in held.items()
        }
        for worker, batches in made.items():
            for batch in batches:
                if batch not in self.counted:
                    self._add(worker, batch)
        taken = {batch for batches in self.held.values() for batch in batches}
        self._next = max(self.counted.stop, 1 + max(taken, default=-1))
        missing = (*self.counted.gaps(), *range(self.counted.stop, self._next))
        self._returned = [batch for batch in missing if batch not in taken]
        self._late, self._groups = [], deque()
        self.waiting, self._recalled, self._spent = {}, set(), set()
        return self.counted.total - before

    # ---- dealing ----

    def deal(self, worker: str, wanted: int) -> tuple[int, ...]:
        """The next mini-batches for a worker; empty if none are left."""
        batches = self._choose(worker, wanted)
        self.held[worker].extend(batches)
        if batches:
            self._spent.discard(worker)
        return tuple(batches)

    def _choose(self, worker: str, wanted: int) -> Sequence[int]:
        if self._bound:
            return self._deal_own(worker, wanted)
        length = self._length(wanted)
        batches = self._take(self._returned, length) or (self._take(self._late, length) if self.late_is_due else [])
        return batches or self._take_lane(worker, length)

    @property
    def late_is_due(self) -> bool:
        """Only mini-batches of dead workers are left, and their gradients have not arrived."""
        if self._goal is None or not self._late:
            return False
        return (self._next if self._overshoots else self.counted.total + len(self._late)) >= self._goal

    def deal_round(self, steps: int) -> dict[str, tuple[int, ...]]:
        """`steps` mini-batches for every worker that is present, replacing what it had; fewer at the end of the run."""
        for worker in self.members:
            if self._bound:
                self._own[self._place(worker)] -= len(self.held[worker])
            else:
                self._give_back(self.held[worker])
            self.held[worker] = deque(self._deal_own(worker, steps) if self._bound else ())
        if not self._bound:
            wanted = steps * len(self.members)
            again, self._returned = self._returned[:wanted], self._returned[wanted:]
            first, stop = self._next, self._next + wanted - len(again)
            self._next = stop if self._goal is None else max(first, min(stop, self._goal))
            batches = [*again, *range(first, self._next)]
            for lane, worker in enumerate(sorted(self.members, key=lambda name: self.members[name])):
                self.held[worker].extend(batches[lane :: len(self.members)])
        return {worker: tuple(held) for worker, held in self.held.items()}

    def _deal_own(self, worker: str, wanted: int) -> list[int]:
        place, places = self._place(worker), len(self._indices)
        first = self._own[place]
        self._own[place] += wanted
        return [place + number * places for number in range(first, first + wanted)]

    def _length(self, wanted: int) -> int:
        if self._goal is None or self._overshoots:
            return max(1, wanted)
        left = self._goal - self._next + len(self._returned)
        return max(1, min(wanted, math.ceil(left / (SHARE * len(self.members)))))

    def _take(self, waiting: list[int], length: int) -> list[int]:
        """The first of these, up to a worker's fair share."""
        count = min(length, math.ceil(len(waiting) / max(1, len(self.members))))
        taken, waiting[:] = waiting[:count], waiting[count:]
        return taken

    def _take_lane(self, worker: str, length: int) -> Sequence[int]:
        while self._groups and not self._groups[0]:
            self._groups.popleft()
        for group in self._groups:
            if worker in group:
                return group.pop(worker)
        # in groups before the last one, a fast worker takes the lane of a slow one
        for group in islice(self._groups, max(0, len(self._groups) - 1)):
            if group:
                return group.pop(next(iter(group)))
        opened = self._open(length)
        if opened:
            self._groups.append(opened)
        last = self._groups[-1] if self._groups else {}
        return last.pop(worker if worker in last else next(iter(last))) if last else []

    def _open(self, length: int) -> dict[str, range]:
        """The lanes of the next group, one per present worker."""
        workers = sorted(self.members, key=lambda name: self.members[name])
        first, stop = self._next, self._next + length * len(workers)
        if self._goal is not None and not self._overshoots:
            stop = min(stop, self._goal)
        self._next = max(first, stop)
        lanes = {worker: range(first + lane, stop, len(workers)) for lane, worker in enumerate(workers)}
        return {worker: lane for worker, lane in lanes.items() if lane}

    def check(self) -> None:
        """Raise `InvariantBroken` unless every mini-batch below the frontier counts, is held or waits."""
        if self._bound:
            return
        dealt = sum(map(len, self.held.values())) + sum(len(lane) for group in self._groups for lane in group.values())
        waiting = len(self._returned) + len(self._late)
        if self.counted.total + dealt + waiting != self._next:
            raise InvariantBroken(
                f"of {self._next} mini-batches {self.counted.total} count, {dealt} are dealt and {waiting} wait"
            )


class Portion:
    """The mini-batches that a worker was dealt and has not begun, in order."""

    def __init__(
        self, context: NodeContext, ask: Callable[[More], list[Effect]], ahead: int = AHEAD, **first: Any
    ) -> None:
        """`ask` returns the effects that ask the hub; `first` holds the arguments of the ledger there."""
        self._ask = ask
        self._upcoming = context.schedule.upcoming
        ledger = Ledger(context, ahead, only=context.node.name, **first)
        self._held = ledger.held.get(context.node.name, deque())
        #: how far the run is, as far as this worker knows
        self.position = ledger.counted.total
        self._wish: Compute | None = None
        #: the mini-batch whose gradient is being computed
        self.batch = -1
        self._ended = False
        #: the last request, until it is answered
        self._asked: More | None = None
        self._begun = 0
        #: ask for more when this many are left
        self._least = ahead // 2

    @property
    def idle(self) -> bool:
        """A gradient is wanted, but there is no mini-batch."""
        return self._wish is not None

    @property
    def held(self) -> tuple[int, ...]:
        """The mini-batches that have not been begun."""
        return tuple(self._held)

    def compute(self, form: GradientForm = "none", fresh: bool = False) -> list[Effect]:
        """Compute the gradient of the next mini-batch as soon as there is one."""
        self._wish = Compute(form, fresh)
        return self._go_on()

    def take(self, lease: Lease) -> list[Effect]:
        """Add the mini-batches that the hub deals."""
        late = 2 * self._least if self.idle else 2 * self._begun
        self._least = min(WANTED_MAX // 2, max(self._least, late))
        self._asked = None
        self._held.extend(lease.batches)
        self.position = max(self.position, lease.position)
        return self._go_on()

    def give(self) -> Returned:
        """Give back the last half of what has not been begun."""
        given = [self._held.pop() for _ in range((len(self._held) + 1) // 2)]
        return Returned(tuple(reversed(given)))

    def end(self) -> None:
        """The worker makes no further gradient: it is idle from now on, whatever it is dealt."""
        self._ended = True
        self._held.clear()
        self._wish = self._wish or Compute()

    def ask_again(self) -> list[Effect]:
        """Ask again, because the node that was asked has died."""
        self._asked = None
        return self._go_on()

    def _go_on(self) -> list[Effect]:
        effects: list[Effect] = []
        if self._ended:
            return effects
        if self._wish is not None and self._held:
            self.batch = batch = self._held.popleft()
            self._begun += 1
            self.position = max(self.position, batch)
            upcoming = tuple(islice(self._held, self._upcoming))
            effects = [msgspec.structs.replace(self._wish, batch=batch, upcoming=upcoming, position=self.position)]
            self._wish = None
        idle = self.idle and (self._asked is None or not self._asked.idle)
        if idle or (self._asked is None and len(self._held) <= self._least):
            if self._asked is None:
                self._begun = 0
            self._asked = More(2 * self._least, self.idle)
            effects += self._ask(self._asked)
        return effects
