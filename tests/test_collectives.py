"""Broadcast and reduction under every order of deliveries and deaths that a seed can think of.

A `Network` holds one `TreeCollectives` per node and queues between each two of them. A seed decides what happens next:
a message is delivered, a node contributes, a node dies, another hears of it, one joins. The root never dies.
"""

from __future__ import annotations

import random
from collections import deque
from collections.abc import Callable, Iterator
from functools import partial
from typing import Any

import pytest
import torch

from tether.core.effects import Broadcast, Reduce
from tether.core.events import Broadcasted, Event, Reduced
from tether.core.message import Message, Stream, Tag
from tether.protocols.averaging import ROUND
from tether.runtimes import tree as collectives
from tether.runtimes.collectives import CollectiveContext
from tether.runtimes.tree import Down, TreeCollectives, Up

SEEDS = range(600)
ROUNDS = 4
SIZE = 32


#: makes a tensor of SIZE travel in so many parts
PARTS = 4
LARGE = (PARTS - 0.5) * collectives.PART_BYTES / (4 * SIZE)


@pytest.fixture(params=["tree", "chains"], autouse=True)
def shape(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> None:
    """Every test in both shapes, whatever the number of members."""
    monkeypatch.setattr(collectives, "CHAINS_MAX", 0 if request.param == "tree" else 10**6)


class Note(Message, frozen=True):
    """What is broadcast: the round it opens, and a tensor to carry."""

    round: int
    values: torch.Tensor


def note(round: int) -> Note:
    return Note(round, torch.arange(float(SIZE)))


class Peer:
    """One node, which hears and speaks as the interpreter lets it: nothing of and to those it knows to be dead."""

    def __init__(self, name: str, network: Network) -> None:
        self.name = name
        self.network = network
        self.lost: set[str] = set()
        self.heard: list[int] = []
        self.open: Broadcasted | None = None
        self.part = TreeCollectives(CollectiveContext(name, self.send, network.scale))

    def send(self, to: str, message: Message) -> None:
        if to not in self.lost:
            self.network.queues.setdefault((self.name, to), deque()).append(message)

    def receive(self, sender: str, message: Up | Down[Any]) -> None:
        if sender not in self.lost:
            self.take(self.part.receive(message))

    def learn_of_death(self, peer: str) -> None:
        self.lost.add(peer)
        self.take(self.part.lost(peer))

    def contribute(self) -> None:
        assert self.open is not None and isinstance(self.open.message, Note)
        if self.network.scale == 1.0:
            values = torch.zeros(SIZE)
            values[self.network.position(self.name)] = 1.0
        else:
            values = torch.full((SIZE,), 3.0)
        effect = Reduce(Tag(ROUND, self.open.message.round), self.open.members, values, self.network.weight(self.name))
        self.open = None
        self.take(self.part.reduce(effect))

    def take(self, events: list[Event]) -> None:
        for event in events:
            match event:
                case Broadcasted(message=Note(round=round, values=values)):
                    assert torch.equal(values, note(round).values)
                    self.heard.append(round)
                    self.open = event
                case Reduced():
                    self.network.close(event)


class Network:
    """Rounds as in model averaging: the root broadcasts, all contribute, the root closes and opens the next."""

    def __init__(self, seed: int, workers: int, deaths: int, joins: int = 0, scale: float = 1.0) -> None:
        self.random = random.Random(seed)
        self.scale = scale
        self.queues: dict[tuple[str, str], deque[Any]] = {}
        self.notices: list[tuple[str, str]] = []
        self.deaths, self.joins = deaths, joins
        self.peers: dict[str, Peer] = {}
        self.names: list[str] = []
        self.dead: set[str] = set()
        self.newcomers: set[str] = set()
        for name in ["root", *(f"w{i}" for i in range(workers))]:
            self._add(name)
        self.members: tuple[str, ...] = ()
        self.round = -1
        self.closed: list[Reduced] = []
        self.open_next()

    def position(self, name: str) -> int:
        return self.names.index(name)

    def weight(self, name: str) -> float:
        """Small whole numbers, so that sums are exact; 1 is treated apart by the code."""
        return 1.0 + self.position(name) % 5

    @property
    def living(self) -> list[str]:
        return [name for name in self.names if name not in self.dead]

    def _add(self, name: str) -> None:
        self.names.append(name)
        self.peers[name] = Peer(name, self)

    def open_next(self) -> None:
        """The next round of all that the root believes alive; the last broadcast opens none."""
        root = self.peers["root"]
        self.round += 1
        self.members = ("root", *(name for name in self.names if name != "root" and name not in root.lost))
        root.part.broadcast(Broadcast(Stream("joint"), self.members, note(self.round)))
        if self.round < ROUNDS:
            root.take(root.part.reduce(Reduce(Tag(ROUND, self.round), self.members)))

    def close(self, event: Reduced) -> None:
        assert event.tag == Tag(ROUND, self.round), "a round closed that was not open"
        survivors = {name for name in self.members[1:] if name not in self.dead}
        assert survivors <= set(event.contributors), f"lacks the survivors {survivors - set(event.contributors)}"
        assert set(event.contributors) <= set(self.members[1:]), "somebody contributed who was not asked"
        if self.scale == 1.0:
            self._check_sum(event)
        elif event.total is not None:  # whoever is in a part, its mean is theirs
            assert torch.allclose(event.total / event.weight, torch.tensor(3.0))
        self.closed.append(event)
        self.open_next()

    def _check_sum(self, event: Reduced) -> None:
        expected = torch.zeros(SIZE)
        for name in event.contributors:
            expected[self.position(name)] = self.weight(name)
        total = torch.zeros(SIZE) if event.total is None else event.total
        assert torch.equal(total, expected), f"{total.tolist()} is not the sum over {event.contributors}"
        assert event.weight == expected.sum()

    # ---- what can happen ----

    def run(self) -> Network:
        """Until nothing is left to happen."""
        while actions := list(self._possible()):
            self.random.choice(actions)()
        return self

    def _possible(self) -> Iterator[Any]:
        for (sender, to), queue in self.queues.items():
            if queue and to not in self.dead:
                yield partial(self._deliver, sender, to)
        for notice in self.notices:
            if notice[0] not in self.dead:
                yield partial(self._tell, notice)
        for name in self.living:
            if self.peers[name].open is not None and self.round < ROUNDS:
                yield self.peers[name].contribute
        mortal = self.living[1:]
        if mortal and self.deaths and self.round < ROUNDS:
            yield partial(self._kill, self.random.choice(mortal))
        if self.joins and self.round < ROUNDS:
            yield self._join

    def _deliver(self, sender: str, to: str) -> None:
        self.peers[to].receive(sender, self.queues[sender, to].popleft())

    def _tell(self, notice: tuple[str, str]) -> None:
        self.notices.remove(notice)
        self.peers[notice[0]].learn_of_death(notice[1])

    def _kill(self, name: str) -> None:
        """What the dead node has sent arrives up to some point and not further."""
        self.deaths -= 1
        self.dead.add(name)
        for (sender, _), queue in self.queues.items():
            if sender == name:
                for _ in range(self.random.randint(0, len(queue))):
                    queue.pop()
        self.notices += [(other, name) for other in self.living]

    def _join(self) -> None:
        self.joins -= 1
        name = f"w{len(self.names)}"
        self._add(name)
        self.newcomers.add(name)
        self.notices += [(name, dead) for dead in self.dead]


def drawn(seed: int) -> Network:
    """The network that a seed stands for: from no worker's death to all of them."""
    rng = random.Random(f"network {seed}")
    workers = rng.randint(1, 12)
    joins, scale = rng.randint(0, 3), rng.choice([1.0, LARGE])
    return Network(seed, workers, deaths=rng.randint(0, workers), joins=joins, scale=scale)


def check(network: Network) -> None:
    """After everything has happened."""
    assert len(network.closed) == ROUNDS, f"round {network.round} never closed"
    for name in network.living[1:]:
        heard = network.peers[name].heard
        first = heard[0] if name in network.newcomers else 0
        assert heard == list(range(first, ROUNDS + 1)), f"{name} heard {heard}"


def wrong(seed: int) -> bool:
    try:
        check(drawn(seed).run())
    except AssertionError:
        return True
    return False


# ---- properties -----------------------------------------------------------------------------------------------------


def test_reductions_close_over_all_survivors_and_broadcasts_arrive_once_whoever_dies() -> None:
    """The sums are checked whenever a round closes, in `Network.close`."""
    for seed in SEEDS:
        try:
            check(drawn(seed).run())
        except AssertionError as error:
            raise AssertionError(f"seed {seed}: {error}") from error


def test_the_seeds_try_what_they_should() -> None:
    networks = [drawn(seed).run() for seed in SEEDS[:200]]
    assert any(len(network.dead) >= 5 for network in networks)
    assert any(len(network.names) > 13 for network in networks), "nobody joined"
    assert any(event.weight == 0 for network in networks for event in network.closed), "nobody was left"
    assert any(set(event.contributors) & network.dead for network in networks for event in network.closed)


def test_without_deaths_every_member_contributes() -> None:
    for seed in range(100):
        network = Network(seed, workers=1 + seed % 9, deaths=0).run()
        assert all(len(event.contributors) == len(network.names) - 1 for event in network.closed)


def test_nothing_is_kept_of_a_reduction_after_the_next_broadcast_whoever_dies() -> None:
    """Not even if a sum is sent again after the root has closed."""
    for seed in SEEDS:
        network = drawn(seed).run()
        keeping = [name for name in network.living if network.peers[name].part._reductions]
        assert not keeping, f"seed {seed}: {keeping} keep something"


def test_the_root_may_close_a_reduction_with_what_has_come() -> None:
    sent: list[tuple[str, Any]] = []
    members = ("root", "w0", "w1", "w2")  # w2 is below w0
    root = TreeCollectives(CollectiveContext("root", lambda to, message: sent.append((to, message))))
    assert root.reduce(Reduce(Tag(Stream("r"), 7), members)) == []
    assert root.receive(Up(Tag(Stream("r"), 7), members, torch.full((2,), 6.0), 3.0, {"w1": 5})) == []
    (closed,) = root.reduce(Reduce(Tag(Stream("r"), 7), ("root",)))
    assert isinstance(closed, Reduced) and closed.total is not None
    assert (closed.weight, closed.contributors, closed.steps) == (3.0, ("w1",), (5,))
    late = Up(Tag(Stream("r"), 7), members, torch.ones(2), 1.0, {"w0": 1, "w2": 1})
    assert root.receive(late) == [] and not root._reductions, "what comes too late leaves nothing behind"


def test_whoever_was_away_for_long_forgets_what_was_closed_meanwhile() -> None:
    members = ("root", "w0", "w1")
    member = TreeCollectives(CollectiveContext("w0", lambda to, message: None))
    for number in (1, 2):
        member.reduce(Reduce(Tag(Stream("r"), number), members, torch.ones(2), 1.0))
        member.reduce(Reduce(Tag(Stream("other"), number), members, torch.ones(2), 1.0))
    member.receive(
        Down(Stream("r"), 900, members, (Tag(Stream("r"), 900), Tag(Stream("other"), 1)), Note(900, torch.zeros(1)))
    )
    assert list(member._reductions) == [Tag(Stream("other"), 2)]
    member.receive(Up(Tag(Stream("r"), 3), members, torch.ones(2), 1.0, {"w2": 1}))
    assert list(member._reductions) == [Tag(Stream("other"), 2)]


def test_a_member_that_was_spared_a_broadcast_still_hears_what_was_closed() -> None:
    members = ("root", "a", "b", "c")  # c is a child of a
    sent: list[tuple[str, Any]] = []
    root, c = (
        TreeCollectives(CollectiveContext("root", lambda to, message: sent.append((to, message)))),
        TreeCollectives(CollectiveContext("c", lambda *_: None)),
    )
    c.reduce(Reduce(Tag(Stream("r"), 0), members, torch.ones(2), 1.0))
    for covers in ({"a": 0, "c": 0}, {"b": 0}):
        root.receive(Up(Tag(Stream("r"), 0), members, torch.ones(2), float(len(covers)), covers))
    assert root.reduce(Reduce(Tag(Stream("r"), 0), members))
    for number in (0, 1):  # both go to a, who dies before it passes any of them on
        root.broadcast(Broadcast(Stream("joint"), members, note(number)))
    sent.clear()
    root.lost("a"), c.lost("a")
    assert [(to, message.number) for to, message in sent] == [("c", 1)]
    c.receive(sent[0][1])
    assert not c._reductions


def test_a_message_travels_along_a_tree_and_not_from_the_root_to_all() -> None:
    network = Network(0, workers=12, deaths=0)
    assert [to for (sender, to), queue in network.queues.items() if queue] == ["w0", "w1"]


def test_a_later_broadcast_supersedes_an_earlier_one_but_never_the_other_way_round() -> None:
    told: list[tuple[str, Any]] = []
    member = TreeCollectives(CollectiveContext("b", lambda to, message: told.append((to, message))))
    members = ("a", "b", "c", "d")

    def down(number: int) -> Down[Note]:
        return Down(Stream("joint"), number, members, (), note(number))

    (event,) = member.receive(down(1))
    assert isinstance(event, Broadcasted) and event.message.round == 1  # type: ignore[attr-defined]
    assert [to for to, _ in told] == ["d"]
    assert member.receive(down(0)) == [] and member.receive(down(1)) == []
    assert len(told) == 1


def test_a_sum_goes_up_once_to_each_parent() -> None:
    told: list[tuple[str, Any]] = []
    member = TreeCollectives(CollectiveContext("d", lambda to, message: told.append((to, message))))
    member.reduce(Reduce(Tag(Stream("r"), 0), ("a", "b", "c", "d", "e"), torch.ones(2), weight=3.0))
    assert [to for to, _ in told] == ["b"]
    member.lost("c"), member.lost("e")
    assert len(told) == 1
    member.lost("b")
    (_, first), (to, again) = told
    assert to == "a" and again is first
    assert first.values.tolist() == [3.0, 3.0] and first.weight == 3.0 and first.covers == {"d": 0}


def test_a_vector_s_buffers_are_a_part_of_their_own_however_many_there_are() -> None:
    node = TreeCollectives(CollectiveContext("a", lambda *_: None, LARGE, parameter_count=SIZE, length=2 * SIZE + 1))
    whole = torch.arange(2 * SIZE + 1.0)
    assert [len(part) for part in node._cut(whole)] == [*[SIZE // PARTS] * PARTS, SIZE + 1]
    assert [len(part) for part in node._cut(whole[SIZE:])] == [SIZE + 1]
    assert torch.equal(torch.cat(node._cut(whole)), whole)


def test_streams_are_independent_of_each_other() -> None:
    member = TreeCollectives(CollectiveContext("b", lambda to, message: None))
    for stream in (Stream("one"), Stream("two")):
        assert len(member.receive(Down(stream, 0, ("a", "b"), (), note(0)))) == 1


def test_nobody_left_gives_a_sum_of_weight_zero() -> None:
    root = TreeCollectives(CollectiveContext("root", lambda to, message: None))
    assert root.reduce(Reduce(Tag(Stream("r"), 0), ("root", "w0"))) == []
    assert root.lost("w0") == [Reduced(Tag(Stream("r"), 0), None, 0.0, ())]
    assert root.reduce(Reduce(Tag(Stream("alone"), 0), ("root",))) == [Reduced(Tag(Stream("alone"), 0), None, 0.0, ())]


# ---- would these tests notice? --------------------------------------------------------------------------------------


def never_resend_broadcasts(monkeypatch: pytest.MonkeyPatch) -> None:
    def lost(self: TreeCollectives, peer: str) -> list[Event]:
        self._dead.add(peer)
        return [event for tag in list(self._reductions) for event in self._advance(tag)]

    monkeypatch.setattr(TreeCollectives, "lost", lost)


def never_resend_sums(monkeypatch: pytest.MonkeyPatch) -> None:
    advance = TreeCollectives._advance

    def once(self: TreeCollectives, tag: str) -> list[Event]:
        sums = self._reductions[tag].sums
        return [] if any(part.sent is not None for part in sums) else advance(self, tag)

    monkeypatch.setattr(TreeCollectives, "_advance", once)


def add_overlapping_sums(monkeypatch: pytest.MonkeyPatch) -> None:
    def add(self: Any, values: torch.Tensor, weight: float, covers: dict[str, int]) -> None:
        self.total = values if self.total is None else self.total + values
        self.weight += weight
        self.covered |= covers

    monkeypatch.setattr(collectives._Sum, "add", add)


def wait_for_nobody_below(monkeypatch: pytest.MonkeyPatch) -> None:
    change_below(monkeypatch, lambda node, members: set())


def wait_for_the_dead(monkeypatch: pytest.MonkeyPatch) -> None:
    change_below(monkeypatch, lambda node, members: collectives._Place(node, members, set()).below)


def change_below(monkeypatch: pytest.MonkeyPatch, below: Callable[[str, tuple[str, ...]], set[str]]) -> None:
    place = TreeCollectives._place

    def changed(self: TreeCollectives, members: tuple[str, ...]) -> Any:
        found = place(self, members)
        found.below = below(self.node, members)
        return found

    monkeypatch.setattr(TreeCollectives, "_place", changed)


MUTATIONS = [
    never_resend_broadcasts,
    never_resend_sums,
    add_overlapping_sums,
    wait_for_nobody_below,
    wait_for_the_dead,
]


@pytest.mark.parametrize("mutate", MUTATIONS, ids=lambda mutate: mutate.__name__)
def test_a_planted_bug_is_found(mutate: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    mutate(monkeypatch)
    assert any(wrong(seed) for seed in SEEDS)


def test_an_older_broadcast_of_another_stream_does_not_make_closed_reductions_forgotten() -> None:
    members = ("root", "b", "c", "d")
    b = TreeCollectives(CollectiveContext("b", lambda *_: None))
    b.receive(Down(Stream("two"), 5, members, (Tag(Stream("r"), 0),), note(5)))
    b.receive(Down(Stream("one"), 2, members, (), note(2)))
    b.receive(Up(Tag(Stream("r"), 0), members, torch.ones(2), 1.0, {"d": 0}))
    assert not b._reductions
