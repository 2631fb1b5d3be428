"""Which samples a process of a run draws: all processes share one permutation of the data for every epoch.

The permutation follows from the seed and the epoch. Process r of n draws the elements r, r + n, r + 2n and so on, so
each sample is drawn once in an epoch, and no sample is drawn twice to make all shares equal.

A resumed script begins its loop again. The sampler then returns nothing for the epochs that are over, and in the epoch
that was under way what no process had stepped with: what counts is what is in the joint model of the checkpoint. The
number of processes may be another one.

How far a process is follows from its optimizer steps. A DataLoader with workers draws ahead of the loop; the sampler
learns how many samples a step takes from the draws between the first two steps of an epoch.

States of processes are in fewer checkpoints than the joint model, so the model may be some steps further than the
sampler's state: those steps have drawn as many samples as the steps before.

A process that replaces one which has died continues the share of that one, after the steps of it that count. Where
each step left the sampler is in a file that outlives the process.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterator, Sequence, Sized
from pathlib import Path
from typing import Any, BinaryIO

import numpy as np
import torch
from torch.utils.data import Sampler

from tether.errors import UsageError

#: for how many steps a process remembers where it was: the joint model of a checkpoint is at most that far behind
MARKS_KEPT = 4096
#: the bytes of a mark in a file
MARK_BYTES = 24

Indices = np.ndarray[Any, np.dtype[np.int64]]
#: for one part of a run: how many processes it had, and for each the epoch and the samples of it that count
Part = tuple[int, tuple[tuple[int, int], ...]]


def left_in_epoch(length: int, seed: int, epoch: int, parts: Sequence[Part]) -> Indices:
    """What the earlier parts of a run have left of an epoch, in the order of its permutation."""
    left = np.arange(length)
    for world, places in parts:
        kept = np.ones(len(left), dtype=bool)
        for rank, (reached, count) in enumerate(places):
            share = np.arange(rank, len(left), world)
            kept[share if epoch < reached else share[:count] if epoch == reached else share[:0]] = False
        left = left[kept]
    order: Indices = np.random.default_rng((seed, epoch)).permutation(length)
    return order[left]


class SharedSampler(Sampler[int]):
    """This process's share of the one permutation of every epoch."""

    def __init__(self, dataset: Sized, *, seed: int, rank: int, world_size: int) -> None:
        if not hasattr(dataset, "__len__"):
            raise UsageError(
                f"tether.sampler() was given a {type(dataset).__name__}, which has no length: it shares out a "
                "map-style Dataset; an IterableDataset shards itself, by tether.rank() and tether.world_size()"
            )
        self._length = len(dataset)
        self._seed, self._rank, self._world_size = seed, rank, world_size
        self._parts: tuple[Part, ...] = ()
        self._epoch = -1
        #: of the epoch under way: its length here, how many were drawn, the draws by the last step, and the steps
        self._share = 0
        self._drawn = 0
        self._drawn_at_step = 0
        self._epoch_steps = 0
        #: the samples that a step takes, once that is known, and those that count as stepped with
        self._per_step = 0
        self._ahead = 0
        #: the loop leaves out the end of an epoch that is shorter than a mini-batch
        self._drops_last = False
        self._stepped = 0
        #: for the latest steps of this process: the step, the epoch, and the samples of it that were stepped with
        self._marks: deque[tuple[int, int, int]] = deque([(0, 0, 0)], maxlen=MARKS_KEPT)
        #: where a process that is replaced was: the epoch, and the samples of it that count
        self._begin = (0, 0)
        self._skipped = 0
        self._journal: BinaryIO | None = None
        self._journal_path: Path | None = None
        self._earlier: Callable[[], int] | None = None

    def __len__(self) -> int:
        """The length of this process's share of a whole epoch."""
        return len(range(self._rank, self._length, self._world_size))

    def __iter__(self) -> Iterator[int]:
        if self._earlier is not None:
            self._take_over(self._earlier())
        if self._stepped:
            self._drops_last = 0 < self._share - self._skipped - self._stepped < self._per_step
        self._epoch += 1
        share = left_in_epoch(self._length, self._seed, self._epoch, self._parts)[self._rank :: self._world_size]
        self._share, self._drawn, self._drawn_at_step, self._epoch_steps, self._stepped = len(share), 0, 0, 0, 0
        epoch, count = self._begin
        self._skipped = min(len(share), len(share) if self._epoch < epoch else count if self._epoch == epoch else 0)
        if self._marks[-1][1] < self._epoch:
            self._mark(self._marks[-1][0], self._epoch, 0)
        return self._draw(share[self._skipped :].tolist(), self._epoch)

    def _draw(self, share: list[int], epoch: int) -> Iterator[int]:
        for index in share:
            if epoch == self._epoch:
                self._drawn += 1
            yield index

    def step_made(self, step: int) -> None:
        """The optimizer makes this step: if it counts, what it used of the draws counts."""
        if self._epoch < 0:
            return
        self._epoch_steps += 1
        since, self._drawn_at_step = self._drawn - self._drawn_at_step, self._drawn
        if self._epoch_steps == 1:
            self._ahead = max(0, since - self._per_step) if self._per_step else 0
            self._stepped = since - self._ahead
        elif self._epoch_steps == 2 and since and not self._per_step:
            # the first step came after its own samples and those that were drawn ahead
            self._per_step = since
            self._ahead = max(0, self._stepped - since)
            first = self._stepped - self._ahead
            if self._marks[-1] == (step - 1, self._epoch, self._skipped + self._stepped):
                self._marks.pop()
                self._mark(step - 1, self._epoch, self._skipped + first)
            self._stepped = first + since
        else:
            self._stepped += since or self._per_step
        self._stepped = min(self._stepped, self._share - self._skipped)
        self._mark(step, self._epoch, self._skipped + self._stepped)

    def _mark(self, *mark: int) -> None:
        step, epoch, count = mark
        self._marks.append((step, epoch, count))
        if self._journal_path is None:
            return
        try:
            self._journal = self._journal or self._journal_path.open("ab", buffering=0)
            whole = self._journal.write(np.array(mark, np.int64).tobytes()) == MARK_BYTES
        except OSError:
            whole = False
        if not whole:  # the disk is full: a process that replaces this one begins at the last mark that was written
            self._journal_path = None
            if self._journal is not None:
                self._journal.close()

    def keep(self, journal: Path, earlier: Callable[[], int] | None) -> None:
        """Write every mark to a file. `earlier`: the steps that count of the process that this one replaces."""
        self._journal_path, self._earlier = journal, earlier

    def _take_over(self, steps: int) -> None:
        """Continue after these steps of the process that was replaced."""
        self._earlier = None
        assert self._journal_path is not None
        if not self._journal_path.exists():
            return
        written = np.frombuffer(
            self._journal_path.read_bytes()[: self._journal_path.stat().st_size // MARK_BYTES * MARK_BYTES], np.int64
        )
        for step, epoch, count in written.reshape(-1, 3).tolist():
            if step <= steps:
                self._marks.append((step, epoch, count))
        self._begin = self._marks[-1][1:]

    def state(self) -> dict[str, Any]:
        """What a checkpoint keeps."""
        return {
            "parts": self._parts,
            "marks": torch.tensor(list(self._marks)),
            "length": self._length,
            "seed": self._seed,
            "per_step": self._per_step,
            "drops_last": self._drops_last,
        }

    def resume(self, parts: tuple[Part, ...]) -> None:
        """Leave out what earlier parts of the run have done."""
        self._parts = parts


def next_parts(states: dict[int, dict[str, Any]], made: dict[int, int], world: int) -> tuple[Part, ...]:
    """The parts of a run so far, from the states of the samplers of a part, by rank, and the steps that count."""
    earlier: tuple[Part, ...] = ()
    places = []
    for rank in range(world):
        place = (0, 0)
        if rank in states:
            earlier = tuple((int(count), tuple(map(tuple, done))) for count, done in states[rank]["parts"])
            steps = made.get(rank, 0)
            for step, epoch, count in states[rank]["marks"].tolist():
                if step <= made.get(rank, 0):
                    place, steps = (epoch, count), made.get(rank, 0) - step
            place = _advanced(place, steps, states[rank], earlier, rank, world)
        places.append(place)
    return (*earlier, (world, tuple(places)))


def _advanced(
    place: tuple[int, int], steps: int, state: dict[str, Any], parts: tuple[Part, ...], rank: int, world: int
) -> tuple[int, int]:
    """The place of a process after further steps, if each draws the same number of samples as those before."""
    (epoch, count), per_step = place, state["per_step"]
    last = epoch + steps + max((reached for _, places in parts for reached, _ in places), default=0)
    while steps and per_step and epoch <= last:
        share = len(left_in_epoch(state["length"], state["seed"], epoch, parts)[rank::world])
        left = (share - count) // per_step if state["drops_last"] else -((count - share) // per_step)
        if steps <= left:
            return epoch, min(share, count + steps * per_step)
        steps, epoch, count = steps - left, epoch + 1, 0
    return epoch, count
