"""Who trains on which mini-batch, so that every sample of an epoch counts exactly once.

The data of a run is one endless sequence of mini-batches, numbered from 0: a fresh permutation of the samples for every
epoch. The node that counts, the hub or grid's master, keeps a `Ledger`: which mini-batches count already, which worker
was dealt which of the others, and which were given back. A worker has a `Portion`: what it was dealt and has not begun.

- The first deal follows from the schedule alone, so workers begin without a message.
- Mini-batches are dealt in lanes: of a group of them, the first of k workers gets the 1st, the k+1st, and so on. So
  workers that keep step take, in each step, the same samples as one worker with k times the mini-batch.
- A worker asks for more (`More`) before it runs out. One that is behind finds its lane taken by a faster one, and takes
  the next.
- A worker's mini-batches count in the order in which they were dealt. Those of a dead worker that do not count yet are
  dealt to others, first of all.
- When nothing is left to deal, a worker that has much left is asked to give half of it back (`Recall`, `Returned`).

A resumed run deals what does not count yet, whoever had it. Where each worker has data of its own, nothing can be
handed on: each goes through its own part, and the goal is a number of mini-batches, whichever they are.

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

from tether.errors import InvariantBroken
from tether.machine import Compute, Effect, Message, Seat, Wanted

#: how many mini-batches a worker is dealt at a time, unless it asks for more: requests may wait behind whole models
AHEAD = 1024
#: but no more than one in so many of what is left for it, so that all finish together
SHARE = 2
#: the most mini-batches that a worker asks for
WANTED_MAX = 8192
#: how many mini-batches may be loaded ahead
UPCOMING = 2


class More(Message, frozen=True):
    """Worker to hub: it will soon have nothing to train on, or has nothing (`idle`)."""

    wanted: int
    idle: bool = False


class Lease(Message, frozen=True):
    """Hub to worker: mini-batches to train on, and how many of the run's count so far."""

    batches: tuple[int, ...]
    position: int


class Recall(Message, frozen=True):
    """Hub to worker: give back half of what you have not begun, for others have nothing left."""


class Returned(Message, frozen=True):
    """Worker to hub: these it will not train on."""

    batches: tuple[int, ...]


#: what every protocol's nodes may say to each other besides its own messages
DEALING: tuple[type[Message], ...] = (More, Lease, Recall, Returned)


class Spans:
    """A set of numbers, kept as its runs."""

    def __init__(self, pairs: Iterable[tuple[int, int]] = ()) -> None:
        """Each pair is the first of a run and the one after its last, in order."""
        self._starts = [start for start, _ in pairs]
        self._stops = [stop for _, stop in pairs]
        self.total = sum(self._stops) - sum(self._starts)

    def __contains__(self, number: int) -> bool:
        index = bisect_right(self._starts, number) - 1
        return index >= 0 and number < self._stops[index]

    def __iter__(self) -> Iterator[tuple[int, int]]:
        return iter(zip(self._starts, self._stops, strict=True))

    def add(self, number: int) -> bool:
        """Whether it is new."""
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
        """The numbers from 0 to the last run that are not in it."""
        edges = zip([0, *self._stops], self._starts, strict=False)
        return [number for stop, start in edges for number in range(stop, start)]

    @property
    def stop(self) -> int:
        """The number after the last one."""
        return self._stops[-1] if self._stops else 0

    @property
    def first_gap(self) -> int:
        """The least number that is not in it."""
        return self._stops[0] if self._starts and self._starts[0] == 0 else 0


class Ledger:
    """At the node that counts: which mini-batches count, and who has the others."""

    def __init__(
        self, seat: Seat, ahead: int = AHEAD, *, overshoots: bool = False, dealt: bool = True, only: str | None = None
    ) -> None:
        """`overshoots`: deal beyond the goal too, so that nobody ever stands idle; `dealt`: make the first deal.

        `only`: keep what that gives to one worker and forget the rest.
        """
        schedule = seat.schedule
        self.counted = Spans(schedule.counted)
        self._goal = schedule.goal
        self._bound = schedule.data_bound
        self._overshoots = overshoots
        self._indices = {node.name: node.index for node in seat.nodes if node.computes}
        self.places = frozenset(self._indices.values())
        #: the workers that are present, with their places among the lanes
        self.members = dict(self._indices)
        self._next = self.counted.stop
        self._returned = self.counted.gaps()
        #: of workers that died with something still on its way to the hub: dealt when all else counts
        self._late: list[int] = []
        self._groups: deque[dict[str, range]] = deque()
        self.held: dict[str, deque[int]] = {name: deque() for name in self.members}
        #: how many of each place's mini-batches count, whoever made them
        self.made: Counter[int] = Counter()
        #: where each place is in its own data
        self._own: Counter[int] = Counter()
        if self._bound:
            rounds = math.ceil(self.counted.total / max(1, len(self._indices)))
            self._own.update(dict.fromkeys(self._indices.values(), rounds))
        #: who has asked for more and got nothing yet
        self.waiting: dict[str, More] = {}
        #: who has been asked to give back, and who had nothing to give
        self._recalled: set[str] = set()
        self._spent: set[str] = set()
        if dealt:
            for worker in self.members:
                batches = self._choose(worker, ahead)
                if only in (None, worker):
                    self.held[worker].extend(batches)

    # ---- what counts ----

    @property
    def is_complete(self) -> bool:
        """The goal is reached."""
        if self._goal is None:
            return False
        reached = self.counted.total if self._bound else self.counted.first_gap
        return reached >= self._goal

    def count(self, worker: str, gradients: int) -> None:
        """The next of a worker's mini-batches are in the joint model."""
        held = self.held[worker]
        if gradients > len(held):
            raise InvariantBroken(f"{worker} tells of {gradients} gradients and was dealt {len(held)} more")
        for _ in range(gradients):
            self._add(worker, held.popleft())

    def settle(self, worker: str, batches: Iterable[int]) -> None:
        """These mini-batches of a worker, which may have died since, are in the joint model."""
        for batch in batches:
            if batch in self.counted and not self._bound:
                continue  # somebody else was dealt it after its worker had died, and both have made it
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

    # ---- who has what ----

    def _place(self, worker: str) -> int:
        """A successor has the place of whoever it succeeds, anybody else one of its own."""
        return self._indices.setdefault(worker.partition("~")[0], len(self._indices))

    def join(self, worker: str) -> None:
        """Somebody has come."""
        self.members[worker] = self._place(worker)
        self.held[worker] = deque()

    def lose(self, worker: str, late: bool = False) -> None:
        """Somebody has died: what it had is dealt to others; `late`: last of all, since some may still arrive."""
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
        """A worker has given these back."""
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
        """Whom to ask to give something back, if somebody has nothing to do: the worker with the most mini-batches."""
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
        """Begin anew with what counts, what more was made, and what the living have; how many count now besides."""
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
        """The next mini-batches for a worker; none if there are none left."""
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
        """Nothing is left but what dead workers had, and no longer comes from whoever had it of them."""
        if self._goal is None or not self._late:
            return False
        return (self._next if self._overshoots else self.counted.total + len(self._late)) >= self._goal

    def deal_round(self, steps: int) -> dict[str, tuple[int, ...]]:
        """So many mini-batches for every worker that is present, in place of what it had; fewer where the goal ends."""
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
        """The first of these, and no more than a fair share of them."""
        count = min(length, math.ceil(len(waiting) / max(1, len(self.members))))
        taken, waiting[:] = waiting[:count], waiting[count:]
        return taken

    def _take_lane(self, worker: str, length: int) -> Sequence[int]:
        while self._groups and not self._groups[0]:
            self._groups.popleft()
        for group in self._groups:
            if worker in group:
                return group.pop(worker)
        # of the groups before the last, whoever is so far behind is helped out
        for group in islice(self._groups, max(0, len(self._groups) - 1)):
            if group:
                return group.pop(next(iter(group)))
        opened = self._open(length)
        if opened:
            self._groups.append(opened)
        last = self._groups[-1] if self._groups else {}
        return last.pop(worker if worker in last else next(iter(last))) if last else []

    def _open(self, length: int) -> dict[str, range]:
        """The lanes of the next group, one for each worker that is present."""
        workers = sorted(self.members, key=lambda name: self.members[name])
        first, stop = self._next, self._next + length * len(workers)
        if self._goal is not None and not self._overshoots:
            stop = min(stop, self._goal)
        self._next = max(first, stop)
        lanes = {worker: range(first + lane, stop, len(workers)) for lane, worker in enumerate(workers)}
        return {worker: lane for worker, lane in lanes.items() if lane}

    def check(self) -> None:
        """Raise `InvariantBroken` unless as many mini-batches are in some place as were ever dealt."""
        if self._bound:
            return
        dealt = sum(map(len, self.held.values())) + sum(len(lane) for group in self._groups for lane in group.values())
        waiting = len(self._returned) + len(self._late)
        if self.counted.total + dealt + waiting != self._next:
            raise InvariantBroken(
                f"of {self._next} mini-batches {self.counted.total} count, {dealt} are dealt and {waiting} wait"
            )


class Portion:
    """A worker's mini-batches: those that it was dealt and has not begun, in order."""

    def __init__(self, seat: Seat, ask: Callable[[More], list[Effect]], ahead: int = AHEAD, **first: Any) -> None:
        """`ask` gives the effects by which the hub is asked; `first` is what the ledger there was made with."""
        self._ask = ask
        ledger = Ledger(seat, ahead, only=seat.node.name, **first)
        self._held = ledger.held.get(seat.node.name, deque())
        #: how far the run is, as far as is known here
        self.position = ledger.counted.total
        self._wish: Compute | None = None
        #: of which mini-batch the gradient under way is
        self.batch = -1
        #: the last request, as long as it is not answered
        self._asked: More | None = None
        self._begun = 0
        #: ask when so many are left
        self._least = ahead // 2

    @property
    def idle(self) -> bool:
        """A gradient is wanted, and there is nothing to take it of."""
        return self._wish is not None

    @property
    def held(self) -> tuple[int, ...]:
        """What has not been begun."""
        return tuple(self._held)

    def compute(self, wanted: Wanted = "step", fresh: bool = False) -> list[Effect]:
        """Take the gradient of the next mini-batch, as soon as there is one."""
        self._wish = Compute(wanted, fresh)
        return self._go_on()

    def take(self, lease: Lease) -> list[Effect]:
        """What the hub deals."""
        late = 2 * self._least if self.idle else 2 * self._begun
        self._least = min(WANTED_MAX // 2, max(self._least, late))
        self._asked = None
        self._held.extend(lease.batches)
        self.position = max(self.position, lease.position)
        return self._go_on()

    def give(self) -> Returned:
        """Half of what has not been begun, the last ones."""
        given = [self._held.pop() for _ in range((len(self._held) + 1) // 2)]
        return Returned(tuple(reversed(given)))

    def ask_again(self) -> list[Effect]:
        """Whoever was asked is gone."""
        self._asked = None
        return self._go_on()

    def _go_on(self) -> list[Effect]:
        effects: list[Effect] = []
        if self._wish is not None and self._held:
            self.batch = batch = self._held.popleft()
            self._begun += 1
            self.position = max(self.position, batch)
            upcoming = tuple(islice(self._held, UPCOMING))
            effects = [msgspec.structs.replace(self._wish, batch=batch, upcoming=upcoming, position=self.position)]
            self._wish = None
        idle = self.idle and (self._asked is None or not self._asked.idle)
        if idle or (self._asked is None and len(self._held) <= self._least):
            if self._asked is None:
                self._begun = 0
            self._asked = More(2 * self._least, self.idle)
            effects += self._ask(self._asked)
        return effects
