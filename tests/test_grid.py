"""The elastic grid as its paper describes it: places, rounds, quorums, nodes that come and go, masters that die."""

from __future__ import annotations

import itertools
import json
import random
from collections import Counter, defaultdict, deque
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from tether import Faults, Grid, Local, StepTime
from tether.api import replay_recorded, run
from tether.core.effects import Add, Blend, CancelTimer, Compute, Effect, Fail, Install, Send, SetTimer, Step
from tether.core.events import Event, GradientReady, PeerJoined, PeerLost, Received, Started, StopRequested, TimerFired
from tether.core.machine import Node, NodeContext, Replica, Schedule
from tether.core.message import Timer
from tether.core.snapshot import Snapshot
from tether.errors import InvariantBroken, UsageError
from tether.execution.goals import Request
from tether.execution.plan import RunPlan
from tether.learner.synthetic import SyntheticTask
from tether.protocols.grid.geometry import lines, lines_of, places, rearranged, sides
from tether.protocols.grid.messages import Config, Mean, Open, Ready, RequestVote, Slice, Vote, Welcome
from tether.protocols.grid.node import GridNode
from tether.protocols.grid.rounds import STAND_IN_ROUNDS, LatestValues
from tether.runtimes.base import NullObserver, Outcome
from tether.runtimes.interpreter import Recorder
from tether.testing.conformance import Assassin, Blobs, train_quietly
from tether.testing.conformance import CheckedSim as Sim
from tether.testing.swarm import swarm

# ---- places (sections 2.1, 2.2, 6.1.1) ------------------------------------------------------------------------------


def populations(count: int, dimensions: int) -> list[list[int]]:
    """The populations of the lines of each dimension, counting places only."""
    box, taken = sides(count, dimensions), set(places(count, dimensions))
    found = []
    for k in range(dimensions):
        rest = itertools.product(*(range(side) for j, side in enumerate(box) if j != k))
        found.append([sum((*r[:k], i, *r[k:]) in taken for i in range(box[k])) for r in rest])
    return found


def names(count: int) -> tuple[str, ...]:
    return tuple(f"worker-{i}" for i in range(count))


def steps_to_everybody(members: tuple[str, ...], dimensions: int, start: str) -> int:
    """How many rounds it takes until a change at one node has reached every other."""
    of, all_lines = lines_of(members, dimensions), lines(members, dimensions)
    reached, rounds = {start}, 0
    while len(reached) < len(members):
        reached |= {peer for name in reached for number in of[name] for peer in all_lines[number].peers}
        rounds += 1
        assert rounds <= len(members), "the grid falls apart"
    return rounds


@pytest.mark.parametrize("dimensions", [1, 2, 3, 4])
def test_populations_of_lines_differ_by_at_most_one(dimensions: int) -> None:
    for count in [*range(1, 150), 255, 256, 257, 1000, 4096]:
        assert len(set(places(count, dimensions))) == count
        for found in populations(count, dimensions):
            assert max(found) - min(found) <= 1, (count, found)
        taking_part = [len(line.peers) for line in lines(names(count), dimensions) if line.dimension == 0 or count > 9]
        assert count < 4 or max(taking_part) - min(taking_part) <= 1, (count, taking_part)


@pytest.mark.parametrize("dimensions", [1, 2, 3, 4])
def test_a_change_reaches_every_node_in_at_most_as_many_rounds_as_there_are_dimensions(dimensions: int) -> None:
    for count in range(2, 120):
        members = names(count)
        assert max(steps_to_everybody(members, dimensions, name) for name in members) <= dimensions, count


def test_four_nodes_are_two_rows_and_two_columns() -> None:
    rows = [line.peers for line in lines(("a", "b", "c", "d"), 2) if line.dimension == 1]
    columns = [line.peers for line in lines(("a", "b", "c", "d"), 2) if line.dimension == 0]
    assert len(rows) == len(columns) == 2
    assert all(len(set(row) & set(column)) == 1 for row in rows for column in columns)


def test_the_neighbour_of_an_empty_place_takes_part_in_its_lines() -> None:
    """Of three nodes, the one that is alone in its row also takes part in the row of the empty place."""
    at = dict(zip(places(3, 2), "abc", strict=True))
    assert at == {(0, 0): "a", (1, 1): "b", (0, 1): "c"}, "(1, 0) is empty"
    columns = [line.peers for line in lines(("a", "b", "c"), 2) if line.dimension == 0]
    rows = [line.peers for line in lines(("a", "b", "c"), 2) if line.dimension == 1]
    assert columns == [("c", "b")] and rows == [("a", "c"), ("a", "b")]


@settings(max_examples=100, deadline=None)
@given(st.integers(1, 4), st.integers(1, 40), st.lists(st.integers(-40, 3), max_size=30))
def test_few_nodes_move_when_some_come_and_go(dimensions: int, count: int, changes: list[int]) -> None:
    """In the same box no node moves when one comes, and one when one goes; in another box, a slab of nodes moves."""
    members = rearranged((), names(count), dimensions)
    numbers = itertools.count(count)
    for change in changes:
        gone = {members[change % len(members)]} if change < 0 else set()
        came = [f"worker-{next(numbers)}" for _ in range(change)] if change > 0 else []
        now = [*(name for name in members if name not in gone), *came]
        if not now:
            continue
        before = dict(zip(members, places(len(members), dimensions), strict=True))
        after_members = rearranged(members, now, dimensions)
        after = dict(zip(after_members, places(len(now), dimensions), strict=True))
        assert set(after) == set(now) and len(after_members) == len(now)
        moved = [name for name in now if name in before and before[name] != after[name]]
        if sides(len(members), dimensions) == sides(len(now), dimensions):
            assert len(moved) <= len(gone)
        else:
            longest = sides(max(len(now), len(members)), dimensions)[0]
            assert len(moved) <= max(len(gone), 2 * -(-max(len(now), len(members)) // longest) + len(came))
        members = after_members


# ---- rounds (algorithm 1) -------------------------------------------------------------------------------------------


class World:
    """Machines and their vectors without a runtime: the test decides what happens next."""

    def __init__(
        self, options: Grid, workers: int, parameters: int = 7, buffers: int = 0, goal: int | None = None
    ) -> None:
        self.options = options
        self.schedule = Schedule(steps=10**6, evaluate_every=10**9, goal=goal)
        self.nodes = options.nodes(workers)
        self.parameters = parameters
        self.size = parameters + buffers
        self.noise = torch.Generator().manual_seed(1)
        self.vectors: dict[str, Tensor] = {}
        self.machines: dict[str, GridNode] = {}
        self.mail: dict[tuple[str, str], deque[Any]] = {}
        self.timers: dict[tuple[str, Timer], float] = {}
        self.computing: set[str] = set()
        self.effects: dict[str, list[Effect]] = defaultdict(list)
        self.now = 0.0
        for node in self.nodes:
            self.add(node)
        for node in self.nodes:
            self.feed(node.name, Started(tuple(self.vectors)))

    def add(self, node: Node) -> None:
        self.vectors[node.name] = torch.rand(self.size, generator=self.noise, dtype=torch.float64)
        context = NodeContext(node, self.nodes, self.vectors[node.name], self.parameters, self.schedule)
        machine = self.options.machine(context)
        assert isinstance(machine, GridNode)
        self.machines[node.name] = machine

    def feed(self, name: str, event: Event) -> list[Effect]:
        vector = self.vectors[name]
        effects = self.machines[name].handle(event, self.now)
        for effect in effects:
            self.effects[name].append(effect)
            match effect:
                case Compute():
                    self.computing.add(name)
                case Step():
                    vector[: self.parameters].add_(0.1 * len(self.effects[name]))
                case Install(values=values, start=start):
                    vector[start : start + len(values)] = values
                case Add(values=values, rate=rate, start=start):
                    vector[start : start + len(values)].add_(values, alpha=rate)
                case Blend(values=values, rate=rate, start=start):
                    vector[start : start + len(values)].lerp_(values, rate)
                case SetTimer(timer=timer, seconds=seconds):
                    self.timers[name, timer] = self.now + seconds
                case CancelTimer(timer=timer):
                    self.timers.pop((name, timer), None)
                case Send(to=to, message=message):
                    fields = {f: getattr(message, f) for f in message.__struct_fields__}
                    taken = {f: v.take(vector) if isinstance(v, Snapshot) else v for f, v in fields.items()}
                    self.mail.setdefault((name, to), deque()).append(type(message)(**taken))
        self.machines[name].check()
        return effects

    def deliver(self, *silent: str, until: type | None = None) -> None:
        """Deliver all mail, except that of the silent nodes and what waits behind a message of the kind `until`."""

        def moves(pair: tuple[str, str]) -> bool:
            there = self.mail[pair] and not {*pair} & {*silent} and pair[1] in self.machines
            return bool(there) and (until is None or not isinstance(self.mail[pair][0], until))

        while pairs := [pair for pair in sorted(self.mail) if moves(pair)]:
            for sender, to in pairs:
                self.feed(to, Received(sender, self.mail[sender, to].popleft()))

    def step(self, *workers: str) -> None:
        for name in workers or sorted(self.computing):
            self.computing.discard(name)
            self.feed(name, GradientReady(torch.zeros(self.parameters), 1.0, 1, 0.1))

    def fire(self, name: str, kind: str) -> None:
        for owner, timer in sorted(self.timers):
            if owner == name and timer.name == kind:
                self.now = max(self.now, self.timers.pop((owner, timer)))
                self.feed(name, TimerFired(timer))

    def die(self, victim: str, *knowing: str) -> None:
        self.mail = {pair: messages for pair, messages in self.mail.items() if victim not in pair}
        self.computing.discard(victim)
        for name in knowing or [name for name in self.machines if name != victim]:
            self.feed(name, PeerLost(victim))
        del self.machines[victim]

    def said(self, kind: type, name: str | None = None) -> list[Any]:
        """The messages of a kind that are under way."""
        return [m for pair, mail in self.mail.items() if name in (None, pair[0]) for m in mail if isinstance(m, kind)]


@pytest.mark.parametrize("pull", ["difference", "blend"])
@pytest.mark.parametrize("workers", [2, 3, 4, 5])
def test_a_round_moves_each_node_a_share_of_the_way_to_the_exact_mean(pull: Any, workers: int) -> None:
    """Algorithm 1, line 17, with all nodes in one line; each keeps its own buffers."""
    world = World(Grid(dimensions=1, alpha=0.25, pull=pull), workers, buffers=2)
    before = {name: vector.clone() for name, vector in world.vectors.items()}
    mean = torch.stack(list(before.values())).mean(0)
    world.deliver()
    for name, vector in world.vectors.items():
        torch.testing.assert_close(vector[:-2], (before[name] + 0.25 * (mean - before[name]))[:-2])
        assert torch.equal(vector[-2:], before[name][-2:])


def test_steps_made_during_a_round_are_not_pulled_back() -> None:
    """The sum over a line includes every step, however late the means come; with the rule of the paper it is less."""
    for pull, kept in (("difference", True), ("blend", False)):
        world = World(Grid(dimensions=1, alpha=0.5, pull=pull), 3)  # type: ignore[arg-type]
        before = sum(world.vectors.values())
        stepped = {name: vector.clone() for name, vector in world.vectors.items()}
        world.step()
        made = sum(world.vectors[name] - stepped[name] for name in stepped)
        world.deliver()
        assert torch.allclose(sum(world.vectors.values()), before + made) == kept  # type: ignore[arg-type]


@settings(max_examples=40, deadline=None)
@given(
    st.integers(2, 7), st.integers(1, 3), st.integers(1, 3), st.lists(st.integers(0, 1000), min_size=50, max_size=200)
)
def test_the_sum_over_all_nodes_is_conserved_whatever_the_order_of_events(
    workers: int, dimensions: int, flight: int, choices: list[int]
) -> None:
    """When every round has ended, what the pulls have added and subtracted sums to zero."""
    world = World(Grid(dimensions=dimensions, rounds_in_flight=flight), workers)
    before = sum(world.vectors.values())
    made = torch.zeros(world.size, dtype=torch.float64)
    for choice in choices:
        possible: list[Any] = sorted(world.computing) + [pair for pair in sorted(world.mail) if world.mail[pair]]
        what = possible[choice % len(possible)]
        if isinstance(what, str):
            kept = world.vectors[what].clone()
            effects_before = len(world.effects[what])
            world.step(what)
            pulls = [e for e in world.effects[what][effects_before:] if isinstance(e, Add | Blend)]
            assert not pulls, "a gradient ends no round"
            made += world.vectors[what] - kept
        else:
            world.feed(what[1], Received(what[0], world.mail[what].popleft()))
    world.deliver()
    assert torch.allclose(sum(world.vectors.values()), before + made)  # type: ignore[arg-type]


@pytest.mark.parametrize(("workers", "dimensions"), [(4, 2), (9, 2), (5, 2), (8, 3), (6, 3), (7, 2)])
def test_a_change_at_one_node_reaches_every_vector_in_at_most_d_rounds(workers: int, dimensions: int) -> None:
    """Section 2.1: parameters travel to every other node in at most two iterations; one along each dimension."""
    for changed in names(workers):
        worlds = [World(Grid(dimensions=dimensions), workers) for _ in range(2)]
        for world in worlds:
            world.deliver()
        worlds[1].vectors[changed].add_(1.0)
        for _ in range(dimensions):
            for world in worlds:
                world.step()
                world.deliver()
        for name in names(workers):
            assert not torch.allclose(*(world.vectors[name] for world in worlds)), (changed, name)


def test_a_line_starts_its_next_round_when_all_have_reported_and_made_their_steps() -> None:
    world = World(Grid(dimensions=1, steps_per_round=2), 3)
    world.deliver()
    assert world.machines["worker-0"].lines[0].opened == 1
    world.step()
    world.deliver()
    assert world.machines["worker-0"].lines[0].opened == 1
    world.step("worker-0", "worker-1")
    world.deliver()
    assert world.machines["worker-0"].lines[0].opened == 1, "worker-2 has made one step only"
    world.step("worker-2")
    world.deliver()
    assert world.machines["worker-0"].lines[0].opened == 2


def test_as_many_rounds_are_under_way_as_allowed() -> None:
    world = World(Grid(dimensions=1, rounds_in_flight=3), 2)
    assert [message.round for message in world.said(Open)] == [1, 2, 3]
    world.deliver()
    world.step()
    world.deliver()
    assert world.machines["worker-1"].lines[0].opened == 4, "a step makes room for one"


def test_any_number_of_rounds_may_be_under_way() -> None:
    sim = Sim(workers=4, step_seconds=0.1, link="1mbit")
    options = Grid(rounds_in_flight=40, scatter_quorum=1.0, gather_quorum=1.0, round_quorum=1.0)
    plan = RunPlan.make(SyntheticTask(parameters=8), options, sim, Request(steps=80, trace=False), None)
    observer = Rounds()
    sim.execute(plan, observer)
    assert min(observer.counts[line] for line in range(4)) > 60, "one for each step, except for the last ones"


def test_rows_and_columns_do_not_wait_for_each_other() -> None:
    world = World(Grid(dimensions=2), 4)
    # a column stands still; the other lines go on
    all_lines = lines(world.machines["worker-0"].membership.members, 2)
    quiet = next(i for i, line in enumerate(all_lines) if "worker-0" in line.peers)
    for _ in range(3):
        while pairs := [pair for pair in sorted(world.mail) if world.mail[pair]]:
            for pair in pairs:
                message = world.mail[pair].popleft()
                if getattr(message, "line", None) != quiet:
                    world.feed(pair[1], Received(pair[0], message))
        world.step()
    opened = {number: line.opened for name in world.machines for number, line in world.machines[name].lines.items()}
    assert opened[quiet] <= 1 and all(opened[number] > 2 for number in opened if number != quiet)


# ---- quorums and patience (sections 2.1, 6.1.4) ---------------------------------------------------------------------


def test_a_node_waits_for_all_peers_until_the_time_out_and_then_for_a_quorum() -> None:
    world = World(Grid(dimensions=1, alpha=0.5, scatter_quorum=0.5, gather_quorum=0.5, timeout_seconds=2.0), 4)
    start = {name: vector.clone() for name, vector in world.vectors.items()}
    world.deliver("worker-3")
    assert all(torch.equal(world.vectors[name], start[name]) for name in start), "no node goes on without worker-3 yet"
    for name in ("worker-0", "worker-1", "worker-2"):
        assert world.timers[name, Timer("slices", (0, 1, 1, 1))] == 2.0
        world.fire(name, "slices")
    world.deliver("worker-3")
    for name in ("worker-0", "worker-1", "worker-2"):
        world.fire(name, "means")
    mean = torch.stack([start[name] for name in names(3)]).mean(0)
    parts = world.machines["worker-0"].lines[0].parts
    for name in names(3):
        for peer in names(3):
            expected = start[name] + 0.5 * (mean - start[name])
            torch.testing.assert_close(world.vectors[name][parts[peer]], expected[parts[peer]])
        silent = parts["worker-3"]
        assert torch.equal(world.vectors[name][silent], start[name][silent]), "no node has the mean of that slice"


def test_the_previous_slice_and_mean_of_a_silent_peer_stand_in() -> None:
    world = World(Grid(dimensions=1, alpha=0.5, timeout_seconds=2.0), 4)
    world.deliver()
    first = {peer: world.machines[peer].lines[0] for peer in names(4)}
    previous_mean = first["worker-0"].means.of("worker-3", 1).clone()
    world.step()
    world.deliver("worker-3")
    world.fire("worker-0", "reports")  # a quorum has reported the first round
    sent = {name: world.vectors[name].clone() for name in names(3)}
    old = {name: world.machines[name].lines[0].slices.of("worker-3", 1).clone() for name in names(3)}
    world.deliver("worker-3")
    for kind in ("slices", "means"):
        for name in names(3):
            world.fire(name, kind)
        world.deliver("worker-3")
    parts = world.machines["worker-0"].lines[0].parts
    part = parts["worker-1"]
    mean = (sum(sent[name][part] for name in names(3)) + old["worker-1"]) / 4
    torch.testing.assert_close(world.vectors["worker-0"][part], sent["worker-0"][part] * 0.5 + 0.5 * mean)
    silent = parts["worker-3"]
    torch.testing.assert_close(world.vectors["worker-0"][silent], sent["worker-0"][silent] * 0.5 + 0.5 * previous_mean)


def test_old_values_stand_in_for_a_few_rounds_only() -> None:
    latest, values = LatestValues(), torch.ones(2)
    assert latest.of("worker-1", 0) is None
    latest.keep("worker-1", 7, values)
    assert latest.of("worker-1", 8) is latest.of("worker-1", 7 + STAND_IN_ROUNDS) is values
    assert latest.of("worker-1", 8 + STAND_IN_ROUNDS) is None and latest.of("worker-2", 8) is None


def test_below_the_quorum_a_node_waits_without_a_time_out() -> None:
    world = World(Grid(dimensions=1, scatter_quorum=1.0, gather_quorum=1.0, round_quorum=1.0), 3)
    world.deliver("worker-2")
    assert not world.timers
    world.deliver()
    assert world.machines["worker-0"].lines[0].unreported == deque([1])


def test_a_node_alone_is_not_a_quorum() -> None:
    options = Grid(scatter_quorum=0.1, gather_quorum=0.5, round_quorum=1.0)
    assert [options.round_rules.quorum("slices", living) for living in (1, 2, 3, 10, 30)] == [1, 2, 2, 2, 3]
    assert [options.round_rules.quorum("means", living) for living in (1, 2, 4, 5)] == [1, 2, 2, 3]
    assert [options.round_rules.quorum("reports", living) for living in (1, 2, 5)] == [1, 2, 5]


def test_the_time_out_doubles_until_the_usual_time_is_known() -> None:
    """Otherwise, on a slow link, every round would end before anything has come."""
    slow = Sim(workers=4, step_seconds=0.1, link="1mbit", model_bytes="10MB", checked=True)  # a round takes minutes
    plan = RunPlan.make(SyntheticTask(), Grid(rounds_in_flight=4), slow, Request(steps=6000, trace=False), None)
    observer = Rounds()
    outcome = slow.execute(plan, observer)
    sent = sum(meter.bytes_sent for meter in outcome.meters.values())
    assert sent > 0.7 * 4 * outcome.seconds * 1e6 / 8
    assert sum(observer.counts.values()) * 2 * 10e6 < 1.1 * sent, "each round has moved its bytes"


def test_a_node_does_not_wait_for_the_dead() -> None:
    world = World(Grid(dimensions=1, scatter_quorum=1.0, gather_quorum=1.0, alpha=0.5), 3)
    start = {name: vector.clone() for name, vector in world.vectors.items()}
    world.deliver("worker-2")
    world.die("worker-2", "worker-1")
    assert world.said(Mean, "worker-1"), "worker-1 knows of the death and goes on"
    world.feed("worker-0", PeerLost("worker-2"))  # the master issues a new configuration, and rounds begin again
    world.deliver()
    mean = (start["worker-0"] + start["worker-1"]) / 2
    torch.testing.assert_close(world.vectors["worker-0"], start["worker-0"] + 0.5 * (mean - start["worker-0"]))


def test_the_time_out_follows_what_half_of_the_peers_take() -> None:
    world = World(Grid(dimensions=1), 4)
    machine = world.machines["worker-0"]
    assert machine.patience.seconds("means") == 1.0
    for _ in range(60):
        world.deliver(until=Mean)
        world.now += 0.1
        world.deliver()
        world.step()
    assert machine.patience.seconds("means") == pytest.approx(0.3, rel=0.2)
    assert machine.patience.seconds("reports") == pytest.approx(0.3, rel=0.4)


def test_rounds_that_are_too_old_are_given_up() -> None:
    world = World(Grid(dimensions=1, timeout_seconds=0.5), 3)
    for _ in range(4):
        world.deliver("worker-2")
        for kind in ("slices", "means", "reports"):
            for name in ("worker-0", "worker-1"):
                world.fire(name, kind)
            world.deliver("worker-2")
        world.step("worker-0", "worker-1")
    assert world.machines["worker-0"].lines[0].opened > 2
    world.deliver()  # all at once: worker-2 never keeps more than one (check() is called after every event)
    assert world.machines["worker-2"].lines[0].opened == world.machines["worker-0"].lines[0].opened


# ---- configurations, newcomers, elections (sections 2.2, 5.2, 6.1.5) ------------------------------------------------


def newcomer(world: World, name: str = "worker-9") -> None:
    world.add(Node(name, "peer", computes=True, index=9, life=2))
    world.feed(name, Started(tuple(world.machines)))
    for other in list(world.machines):
        if other != name:
            world.feed(other, PeerJoined(name, "peer"))


def test_messages_of_an_older_configuration_are_ignored_and_those_of_a_newer_one_kept() -> None:
    world = World(Grid(dimensions=1), 3)
    late = Slice((1, "worker-0", 1), 0, 1, 3, 1.0, torch.zeros(4, dtype=torch.float64))
    early = replace_stamp(late, (1, "worker-0", 2))
    assert world.feed("worker-1", Received("worker-0", early)) == []
    assert world.machines["worker-1"].lines[0].opened == 0
    config = Config(1, "worker-0", 2, ("worker-0", "worker-1"), 0, ())
    world.feed("worker-1", Received("worker-0", config))
    assert world.machines["worker-1"].lines[0].opened == 1, "the message that was kept has opened the round"
    assert world.feed("worker-1", Received("worker-0", late)) == []
    assert world.feed("worker-1", Received("worker-0", Config(1, "worker-0", 1, names(3), 0, ()))) == []
    assert world.machines["worker-1"].membership.stamp == (1, "worker-0", 2)


def test_no_more_early_messages_are_kept_than_peers_can_have_under_way() -> None:
    world = World(Grid(), 2)
    late = Slice((1, "worker-0", 1), 0, 1, 3, 1.0, torch.zeros(4, dtype=torch.float64))
    for version in range(2, 50):
        world.feed("worker-1", Received("worker-0", replace_stamp(late, (1, "worker-0", version))))
        world.machines["worker-1"].check()
    with pytest.raises(InvariantBroken, match="worker-1 holds 17 early messages of worker-0; 16 may come"):
        for _ in range(50):
            world.feed("worker-1", Received("worker-0", replace_stamp(late, (1, "worker-0", 50))))


def replace_stamp(message: Slice, stamp: tuple[int, str, int]) -> Slice:
    return Slice(stamp, message.line, message.round, message.start, message.weight, message.values)


def test_a_newcomer_begins_with_the_masters_weights_and_then_gets_a_place() -> None:
    world = World(Grid(), 4)
    newcomer(world)
    assert "worker-9" not in world.computing
    masters = world.vectors["worker-0"].clone()
    (welcome,) = world.said(Welcome)
    world.mail["worker-0", "worker-9"].popleft()
    effects = world.feed("worker-9", Received("worker-0", welcome))
    assert torch.equal(world.vectors["worker-9"], masters)
    assert isinstance(effects[0], Install) and "worker-9" not in world.computing, "it has no mini-batches yet"
    assert world.said(Ready, "worker-9")
    assert "worker-9" not in world.machines["worker-0"].membership.members
    world.deliver()
    assert "worker-9" in world.computing
    assert all("worker-9" in machine.membership.members for machine in world.machines.values())
    assert {machine.membership.stamp for machine in world.machines.values()} == {(1, "worker-0", 2)}


def test_a_newcomer_without_weights_neither_votes_nor_stands_nor_goes_on_alone() -> None:
    world = World(Grid(), 2)
    newcomer(world)
    world.mail.clear()  # it is never welcomed
    world.die("worker-0")
    assert ("worker-9", Timer("stand")) not in world.timers
    effects = world.feed("worker-9", Received("worker-1", RequestVote(2, (1, "worker-0", 1))))
    assert [effect.message for effect in effects if isinstance(effect, Send)] == [Vote(2, False, True, 0, ())]
    world.fire("worker-1", "stand")
    world.deliver()
    assert world.machines["worker-1"].membership.stamp == (2, "worker-1", 2), (
        "it has won alone, and the newcomer has a place"
    )
    alone = World(Grid(), 1)
    newcomer(alone)
    alone.mail.clear()
    alone.die("worker-0")
    assert any(isinstance(effect, Fail) for effect in alone.effects["worker-9"])
    assert not alone.computing


def test_a_dead_master_is_replaced_by_the_first_that_gets_a_majority() -> None:
    world = World(Grid(), 5)
    world.deliver()
    world.die("worker-0", "worker-3")  # only worker-3 knows yet
    world.fire("worker-3", "stand")
    world.deliver()
    assert {machine.membership.stamp for machine in world.machines.values()} == {(2, "worker-3", 1)}
    assert "worker-0" not in world.machines["worker-1"].membership.members


def test_half_of_a_configuration_elects_nobody_unless_the_other_half_is_dead() -> None:
    """Otherwise worker-1 could win with half, two of these die, and the rest elect another master of the same term."""
    world = World(Grid(), 6)
    world.deliver()
    world.die("worker-0")
    silent = ("worker-3", "worker-4")
    world.fire("worker-1", "stand")
    world.deliver(*silent)
    assert len(world.machines["worker-1"].election.votes) == 3 and not world.machines["worker-1"].membership.is_master
    world.die("worker-3")
    world.die("worker-4")
    assert world.machines["worker-1"].membership.is_master, "all living members have voted for it"


@pytest.mark.parametrize("welcomed", [False, True])
def test_the_run_fails_when_only_newcomers_without_weights_are_left_and_not_before(welcomed: bool) -> None:
    world = World(Grid(), 1)
    for name in ("worker-8", "worker-9"):
        newcomer(world, name)
    late = world.mail.pop(("worker-0", "worker-9"))
    world.mail.clear()  # worker-8 is never welcomed

    def failed(name: str) -> bool:
        return any(isinstance(effect, Fail) for effect in world.effects[name])

    world.die("worker-0", "worker-8")
    world.deliver()
    assert not failed("worker-8"), "worker-9 does not know of the death yet, and may still get a message of the dead"
    if welcomed:
        world.feed("worker-9", Received("worker-0", late.popleft()))
    world.feed("worker-9", PeerLost("worker-0"))
    world.deliver()
    assert failed("worker-8") is failed("worker-9") is not welcomed
    if welcomed:
        world.fire("worker-9", "stand")
        world.deliver()
        assert world.machines["worker-9"].membership.is_master and world.computing == {"worker-8", "worker-9"}


def test_a_node_votes_once_in_a_term_and_never_for_an_older_configuration() -> None:
    world = World(Grid(), 4)
    world.deliver()
    voter = "worker-2"

    def ask(candidate: str, term: int, stamp: tuple[int, str, int] = (1, "worker-0", 1)) -> Any:
        effects = world.feed(voter, Received(candidate, RequestVote(term, stamp)))
        (message,) = [effect.message for effect in effects if isinstance(effect, Send)]
        return message.granted if isinstance(message, Vote) else message

    assert ask("worker-1", 2) is True
    assert ask("worker-3", 2) is False, "it has voted in this term"
    assert ask("worker-1", 2) is True, "the same candidate may get the same answer again"
    assert ask("worker-3", 3) is True
    assert ask("worker-1", 2) is False, "an older term"
    world.feed(voter, Received("worker-3", Config(3, "worker-3", 1, names(4)[1:], 0, ())))
    answer = ask("worker-1", 4)
    assert isinstance(answer, Config) and answer.stamp == (3, "worker-3", 1), "it answers with the newer configuration"


def test_a_candidate_that_learns_of_a_newer_master_gives_up() -> None:
    world = World(Grid(), 5)
    world.deliver()
    world.die("worker-0")
    world.fire("worker-1", "stand")
    world.deliver("worker-3")  # worker-3 gets no message yet
    assert world.machines["worker-1"].membership.is_master
    world.fire("worker-3", "stand")
    world.deliver()
    assert sum(machine.membership.is_master for machine in world.machines.values()) == 1
    assert len({machine.membership.stamp for machine in world.machines.values()}) == 1


# ---- whole runs -----------------------------------------------------------------------------------------------------


class Listening(RunPlan):
    """A plan that notes which nodes acted as master, and their configurations."""

    def recorder(self, node: Node, replica: Replica) -> Recorder:
        def listen(event: Event, now: float, effects: list[Effect]) -> None:
            self.times.append(now)
            for effect in effects:
                if isinstance(effect, Send) and isinstance(effect.message, Config):
                    config = effect.message
                    if config.master == node.name:
                        self.masters[config.term].add(config.master)
                        self.grids.append(config)

        return listen

    @property
    def masters(self) -> dict[int, set[str]]:
        found: dict[int, set[str]] = vars(self).setdefault("_masters", defaultdict(set))
        return found

    @property
    def grids(self) -> list[Config]:
        found: list[Config] = vars(self).setdefault("_grids", [])
        return found

    @property
    def times(self) -> list[float]:
        found: list[float] = vars(self).setdefault("_times", [])
        return found


def listen(
    options: Grid, sim: Sim, steps: int, task: SyntheticTask | None = None, **request: Any
) -> tuple[Listening, Outcome]:
    task = task or SyntheticTask(parameters=8)
    plan = RunPlan.make(task, options, sim, Request(steps=steps, trace=False, **request), None)
    listening = Listening(**vars(plan))
    return listening, sim.execute(listening, NullObserver())


@pytest.mark.parametrize(("workers", "every"), [(4, 1), (5, 9)])
def test_a_master_killed_at_any_event_has_exactly_one_successor(workers: int, every: int) -> None:
    sim = Sim(workers=workers, step_seconds=StepTime(0.1, spread=0.3), link="1mbit", detect_seconds=0.1)
    quiet, _ = listen(Grid(), sim, steps=4)
    moments = sorted(set(quiet.times))
    assert len(moments) > 100
    for moment in moments[:-1:every]:
        for at in (moment, np.nextafter(moment, np.inf)):  # just before that event, and just after
            plan, outcome = listen(Grid(), replace(sim, faults=Faults().crash("worker-0", at=float(at))), steps=4)
            assert outcome.reason.startswith("all steps made") and outcome.lost == {"worker-0"}
            assert all(len(masters) == 1 for masters in plan.masters.values()), plan.masters
            assert len([number for number in plan.masters if number > 1]) == 1, f"killed at {at}: {plan.masters}"


def test_masters_that_are_killed_one_after_the_other_are_each_replaced() -> None:
    faults = Faults()
    for i in range(7):
        faults = faults.crash(f"worker-{i}", at=0.35 * (i + 1))
    sim = Sim(workers=8, step_seconds=0.1, faults=faults, detect_seconds=0.1)
    plan, outcome = listen(Grid(), sim, steps=40)
    assert outcome.reason.startswith("all steps made") and len(outcome.lost) == 7
    assert all(len(masters) == 1 for masters in plan.masters.values())


def test_a_pause_makes_no_second_master() -> None:
    """The master stands still for a long time; no node replaces it, since it is not dead."""
    sim = Sim(workers=4, step_seconds=0.1, faults=Faults().pause("worker-0", at=0.5, seconds=5.0))
    plan, outcome = listen(Grid(), sim, steps=20)
    assert set(plan.masters) == {1} and outcome.reason.startswith("all steps made")


def test_while_nodes_come_and_go_the_grid_stays_balanced_and_each_term_has_one_master() -> None:
    for seed in range(4):
        rng = np.random.default_rng(seed)
        workers = int(rng.integers(4, 9))
        faults = Faults.churn(rng, names(workers), 4.0, 0.4)
        sim = Sim(workers=workers, step_seconds=0.1, faults=faults, detect_seconds=0.05)
        plan, outcome = listen(Grid(dimensions=int(rng.integers(1, 4))), sim, steps=40, seed=seed)
        assert outcome.reason.startswith("all steps made") and float(outcome.weights.square().mean()) < 0.2
        assert all(len(masters) == 1 for masters in plan.masters.values()), plan.masters
        for config in plan.grids:
            dimensions = plan.protocol.dimensions  # type: ignore[attr-defined]
            for found in populations(len(config.members), dimensions):
                assert max(found) - min(found) <= 1
        came = {name for config in plan.grids for name in config.members if "~" in name}
        assert came, "some newcomers got a place"


def test_no_seed_of_the_swarm_goes_wrong() -> None:
    assert swarm(range(5000, 5015), "grid") == []


@pytest.mark.parametrize("dimensions", [1, 2, 3])
@pytest.mark.parametrize("workers", [1, 2, 3, 5, 7, 9, 16, 23])
def test_the_final_model_is_the_exact_mean_over_all_nodes(workers: int, dimensions: int) -> None:
    """The mean of the vectors at the moment the end begins, also where places are empty."""
    world = World(Grid(dimensions=dimensions), workers)
    world.deliver()
    world.step()
    world.mail.clear()
    expected = torch.stack(list(world.vectors.values())).mean(0)
    master = world.machines["worker-0"]
    for name in world.machines:
        world.feed(name, StopRequested("enough"))
    assert master.membership.config is not None and master.membership.config.final == "enough"
    world.deliver()
    assert master.counting.progress.over and not any(
        m.counting.progress.over for name, m in world.machines.items() if name != "worker-0"
    )
    torch.testing.assert_close(world.vectors["worker-0"], expected)


def test_a_node_that_dies_in_the_finale_is_left_out_of_the_mean() -> None:
    world = World(Grid(), 5)
    world.deliver()
    world.feed("worker-0", StopRequested("enough"))
    world.deliver("worker-3")
    assert not world.machines["worker-0"].counting.progress.over
    world.die("worker-3")
    living = [world.vectors[name].clone() for name in names(5) if name != "worker-3"]
    world.deliver()
    torch.testing.assert_close(world.vectors["worker-0"], torch.stack(living).mean(0))


def test_a_node_that_stands_still_in_the_finale_is_left_out_after_a_while() -> None:
    world = World(Grid(), 5)
    world.deliver()
    world.feed("worker-0", StopRequested("enough"))
    world.deliver("worker-3")
    assert not world.machines["worker-0"].counting.progress.over
    others = [world.vectors[name].clone() for name in names(5) if name != "worker-3"]
    world.fire("worker-0", "final")
    assert world.now >= 10
    world.deliver("worker-3")
    assert world.machines["worker-0"].counting.progress.over
    torch.testing.assert_close(world.vectors["worker-0"], torch.stack(others).mean(0))


def test_a_finale_that_is_only_slow_begins_again_with_all_nodes() -> None:
    world = World(Grid(), 4)
    world.deliver()
    world.feed("worker-0", StopRequested("enough"))
    world.deliver(until=Slice)
    world.fire("worker-0", "final")
    assert world.machines["worker-0"].membership.members == names(4)
    assert world.timers["worker-0", Timer("final")] - world.now == 20, "and waits twice as long"
    world.deliver()
    assert world.machines["worker-0"].counting.progress.over


def test_a_master_that_dies_in_the_finale_is_replaced_by_one_that_ends_the_run() -> None:
    world = World(Grid(), 4)
    world.deliver()
    for name in names(4):
        world.feed(name, StopRequested("enough"))
    world.die("worker-0")
    world.fire("worker-1", "stand")
    world.deliver()
    assert world.machines["worker-1"].counting.progress.over


def test_a_new_master_that_finds_the_goal_reached_begins_the_finale_and_no_round() -> None:
    """Its final configuration replaces the first while it adopts that; a member that it has not met yet takes part."""
    world = World(Grid(dimensions=1), 2, goal=2)
    world.add(Node("worker-9", "peer", computes=True, index=9, life=2))
    world.feed("worker-9", Started(tuple(world.machines)))
    world.feed("worker-0", PeerJoined("worker-9", "peer"))  # worker-1 is not told yet
    world.deliver()
    assert world.machines["worker-1"].membership.members == (*names(2), "worker-9")
    world.step("worker-0", "worker-1")
    world.machines["worker-1"].counting.learn(0, ((0, 1),))  # the tally of its own mini-batch is lost
    world.die("worker-0", "worker-1", "worker-9")
    world.fire("worker-1", "stand")
    assert "worker-1" not in world.computing, "there is nothing left to train on"
    expected = (world.vectors["worker-1"] + world.vectors["worker-9"]) / 2
    world.deliver()
    assert world.machines["worker-1"].counting.progress.over
    torch.testing.assert_close(world.vectors["worker-1"], expected)


def test_a_straggler_does_not_hold_the_others_up() -> None:
    """With a quorum, rounds go on although one node is ten times slower; without, all wait for its reports."""
    slow = Sim(workers=16, step_seconds=StepTime(0.1, factors={"worker-5": 10.0}))
    rounds = {}
    for name, quorum in (("quorum", 0.5), ("all", 1.0)):
        options = Grid(scatter_quorum=quorum, gather_quorum=quorum, round_quorum=quorum)
        plan = RunPlan.make(SyntheticTask(), options, slow, Request(steps=60, trace=False), None)
        observer = Rounds()
        slow.execute(plan, observer)
        rounds[name] = min(observer.counts.values())
    assert rounds["quorum"] > 2 * rounds["all"]


class Rounds(NullObserver):
    """Counts the rounds of each line."""

    def __init__(self) -> None:
        self.counts: Counter[int] = Counter()

    def record(self, node: str, values: Any, now: float) -> None:
        if "round" in values:
            self.counts[values["line"]] += 1


def test_training_never_waits(tmp_path: Path) -> None:
    """16 nodes with AlexNet on a network as in chapter 4, where the paper reaches 86 % of the ideal."""
    sim = Sim(workers=16, step_seconds=0.66, link="1.24gbit", model_bytes="250MB")
    result = train_quietly(SyntheticTask(), Grid(), sim, tmp_path / "run", steps=400)
    ideal = 16 / 0.66
    assert result.figures["samples_per_second"] > 0.95 * ideal
    assert result.figures["overlap"] == 1.0


# ---- real processes -------------------------------------------------------------------------------------------------


def test_processes_run_replay_and_learn(tmp_path: Path) -> None:
    result = train_quietly(Blobs(), Grid(), Local(4), tmp_path / "run", steps=80, record=True)
    assert result.figures["steps"] == 80 and result.metrics["error"] < 0.1
    assert all(count > 0 for count in replay_recorded(tmp_path / "run", Blobs()).values())


class Leisurely(Blobs):
    def loss(self, model: Any, batch: Any) -> Tensor:
        sum(random.random() for _ in range(20_000))
        return super().loss(model, batch)


def test_a_killed_master_process_is_replaced(tmp_path: Path) -> None:
    result = run(
        Leisurely(),
        Grid(),
        Local(4),
        run_dir=tmp_path / "run",
        steps=600,
        trace=False,
        progress=Assassin(["worker-0"], 20),
    )
    assert result.figures["steps"] == 600 and result.metrics["error"] < 0.1
    rows = [json.loads(line) for line in (tmp_path / "run" / "metrics.jsonl").read_text().splitlines()]
    assert "worker-0 was killed by SIGKILL; the others go on" in [row.get("text") for row in rows]
    terms = [(row["term"], row["node"]) for row in rows if row["kind"] == "record" and "term" in row]
    assert len(terms) == 1 and terms[0][0] >= 2


@pytest.mark.parametrize(
    ("options", "reason"),
    [
        ({"dimensions": 0}, "dimensions must be at least 1, not 0"),
        ({"rounds_in_flight": 0}, "rounds_in_flight must be at least 1"),
        ({"alpha": 0.0}, "alpha must be above 0 and at most 1, not 0.0"),
        ({"alpha": 1.1}, "alpha must be above 0"),
        ({"alpha": float("nan")}, "alpha must be above 0"),
        ({"steps_per_round": 0}, "steps_per_round must be at least 1 or 'auto', not 0"),
        ({"scatter_quorum": 0.0}, "scatter_quorum must be above 0 and at most 1"),
        ({"gather_quorum": 1.5}, "gather_quorum must be above 0"),
        ({"round_quorum": -1.0}, "round_quorum must be above 0"),
        ({"timeout_seconds": -1.0}, "timeout_seconds must be a number of seconds or 'auto', not -1.0"),
        ({"timeout_seconds": float("inf")}, "timeout_seconds must be a number"),
        ({"pull": "hard"}, "pull"),
    ],
)
def test_bad_settings_are_refused_with_the_reason(options: dict[str, Any], reason: str) -> None:
    with pytest.raises(UsageError, match=reason):
        Grid(**options)
