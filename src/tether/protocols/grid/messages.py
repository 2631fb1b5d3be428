"""What the nodes of a grid say to each other."""

from __future__ import annotations

from torch import Tensor

from tether.core.message import Message
from tether.core.snapshot import Values

#: identifies a configuration: its term, the master of that term, and its version; a greater stamp is newer
Stamp = tuple[int, str, int]
#: the mini-batches that count, as runs: the first of a run and the one after its last
Counted = tuple[tuple[int, int], ...]


# ---- membership and elections ---------------------------------------------------------------------------------------


class Config(Message, frozen=True):
    """Master to all: the members in the order of their places, and the count. `final` says why the run ends."""

    term: int
    master: str
    version: int
    members: tuple[str, ...]
    step: int
    counted: Counted
    final: str = ""

    @property
    def stamp(self) -> Stamp:
        return self.term, self.master, self.version


class Welcome(Message, frozen=True):
    """Master to a node without a place: the configuration, and weights to begin with."""

    config: Config
    values: Values


class Ready(Message, frozen=True):
    """Node to master: it has this configuration. Sent by a newcomer that has weights now, and by all at the end."""

    stamp: Stamp


class NoWeights(Message, frozen=True):
    """Newcomer to all: it has no weights and will get none from these nodes, which are dead."""

    dead: tuple[str, ...]


class RequestVote(Message, frozen=True):
    """Candidate to all: the master is dead, vote for me. With the stamp of the candidate's configuration."""

    term: int
    stamp: Stamp


class Vote(Message, frozen=True):
    """Answer to a candidate, with the count as the voter knows it. A newcomer without weights abstains."""

    term: int
    granted: bool
    abstains: bool
    step: int
    counted: Counted


# ---- rounds ---------------------------------------------------------------------------------------------------------


class Open(Message, frozen=True):
    """Line master to its line: a round begins. With the count as the line master knows it."""

    stamp: Stamp
    line: int
    round: int
    step: int
    counted: Counted


class Slice(Message, frozen=True):
    """Peer to peer: the receiver's slice of the sender's vector."""

    stamp: Stamp
    line: int
    round: int
    start: int
    weight: float
    values: Tensor


class Mean(Message, frozen=True):
    """Peer to peer: the mean of the sender's slice, and the total weight of the vectors in it."""

    stamp: Stamp
    line: int
    round: int
    start: int
    weight: float
    values: Tensor


class Report(Message, frozen=True):
    """Peer to line master: the round has ended here, and the steps after it are made."""

    stamp: Stamp
    line: int
    round: int


RoundMessage = Open | Slice | Mean | Report


# ---- counting -------------------------------------------------------------------------------------------------------


class Tally(Message, frozen=True):
    """Node to master: the number of steps made since the last tally."""

    steps: int


class Holdings(Message, frozen=True):
    """Node to a new master: the mini-batches that it has made and that may not count yet, and those it still has."""

    term: int
    made: tuple[int, ...]
    held: tuple[int, ...]
