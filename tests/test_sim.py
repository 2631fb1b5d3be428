"""The simulated cluster: its network against times worked out by hand, its faults, timers and checks."""

from __future__ import annotations

import json
import random
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor

from tether import Averaging, Elastic, Faults, Grid, Mpca, Server, Single, StepTime
from tether.core.effects import CancelTimer, Compute, Effect, Finish, Send, SetTimer
from tether.core.events import Event, GradientReady, PeerJoined, PeerLost, Received, Started, TimerFired
from tether.core.machine import Machine, Node, NodeContext
from tether.core.message import Message, Timer
from tether.core.vector import digest
from tether.errors import InvariantBroken, NodesLost, RunError, Stalled, UsageError
from tether.execution.goals import Request
from tether.execution.plan import RunPlan
from tether.learner.synthetic import SyntheticTask
from tether.protocols import Options
from tether.runtimes.base import NullObserver, Outcome
from tether.runtimes.sim.network import HEADER_BYTES
from tether.task import Task
from tether.testing.conformance import Blobs
from tether.testing.conformance import CheckedSim as Sim

#: a parcel of so many values takes exactly one second at 1000 bytes a second
VALUES = (1000 - HEADER_BYTES) // 4
SLOW_LINK = Sim(workers=1, link=1000.0, latency=0.25)
FAST_LINK = Sim(workers=1, link=1e12, latency=0.0)

Script = Callable[[Event, float], list[Effect]]


class Parcel(Message, frozen=True):
    """One second of network."""

    number: int
    values: Tensor


def parcel(number: int = 0) -> Parcel:
    return Parcel(number, torch.zeros(VALUES))


@dataclass
class Scripted:
    """A machine that does what a function says and keeps what happened to it."""

    script: Script
    log: list[tuple[float, Event]]

    def handle(self, event: Event, now: float) -> list[Effect]:
        self.log.append((now, event))
        return self.script(event, now)

    def check(self) -> None: ...


@dataclass(frozen=True)
class Play(Options):
    """A protocol in which every node follows a script of its own; the node "end" stands idle and ends the run."""

    scripts: Mapping[str, Script]
    logs: dict[str, list[tuple[float, Event]]]
    hosts: Mapping[str, str]
    end: float

    name = "play"
    summary = "scripts"
    messages = (Parcel,)
    hub = "end"

    def nodes(self, workers: int) -> tuple[Node, ...]:
        others = (Node(name, "worker", computes=True, host=self.hosts.get(name, "")) for name in self.scripts)
        return Node("end", "end"), *others

    def machine(self, context: NodeContext) -> Machine:
        name = context.node.name
        log = self.logs.setdefault(name, [])
        return Scripted(self._end if name == "end" else self.scripts[name.partition("~")[0]], log)

    def _end(self, event: Event, now: float) -> list[Effect]:
        match event:
            case Started():
                return [SetTimer(Timer("end"), self.end)]
            case TimerFired():
                return [Finish("the play is over")]
        return []


class Notes(NullObserver):
    """An observer that keeps notes."""

    def __init__(self) -> None:
        self.notes: list[str] = []

    def note(self, text: str) -> None:
        self.notes.append(text)


def simulate(
    sim: Sim, protocol: Options, task: Task | None = None, steps: int = 10, seed: int = 0, observer: Any = None
) -> Outcome:
    """A run without a run directory."""
    plan = RunPlan.make(
        task or SyntheticTask(VALUES), protocol, sim, Request(steps=steps, seed=seed, trace=False), None
    )
    return sim.execute(plan, observer or NullObserver())


def perform(
    scripts: Mapping[str, Script], sim: Sim = SLOW_LINK, hosts: Mapping[str, str] | None = None, end: float = 100.0
) -> dict[str, list[tuple[float, Event]]]:
    """Everything that happened to every node, with its time."""
    play = Play(scripts, {}, hosts or {}, end)
    simulate(sim, play)
    return play.logs


def at_start(*effects: Effect) -> Script:
    return lambda event, now: list(effects) if isinstance(event, Started) else []


def idle(event: Event, now: float) -> list[Effect]:
    return []


def every_second(*to: str, until: int) -> Script:
    """A parcel to each, without weight, at 1, 2, 3 and so on."""

    def script(event: Event, now: float) -> list[Effect]:
        tick = SetTimer(Timer("tick"), 1.0)
        match event:
            case Started():
                return [tick]
            case TimerFired() if now < until + 0.5:
                return [*(Send(peer, Parcel(round(now), torch.zeros(0))) for peer in to), tick]
        return []

    return script


def arrivals(log: list[tuple[float, Event]]) -> list[tuple[float, int]]:
    return [(now, event.message.number) for now, event in log if isinstance(event, Received)]


def times(log: list[tuple[float, Event]], kind: type) -> list[float]:
    return [now for now, event in log if isinstance(event, kind)]


# ---- the network, by hand -------------------------------------------------------------------------------------------


def test_a_message_takes_the_latency_and_its_bytes_over_the_bandwidth() -> None:
    logs = perform({"a": at_start(Send("b", parcel())), "b": idle})
    assert arrivals(logs["b"]) == [(1.25, 0)]


def test_a_message_without_tensors_weighs_a_header() -> None:
    empty = Parcel(0, torch.zeros(0))
    logs = perform({"a": at_start(Send("b", empty)), "b": idle})
    assert arrivals(logs["b"]) == [(0.25 + HEADER_BYTES / 1000, 0)]


def test_two_messages_of_one_sender_go_one_after_the_other() -> None:
    logs = perform({"a": at_start(Send("b", parcel(0)), Send("c", parcel(1))), "b": idle, "c": idle})
    assert arrivals(logs["b"]) == [(1.25, 0)]
    assert arrivals(logs["c"]) == [(2.25, 1)]


def test_two_messages_to_one_receiver_go_one_after_the_other() -> None:
    logs = perform({"a": at_start(Send("c", parcel(0))), "b": at_start(Send("c", parcel(1))), "c": idle})
    assert arrivals(logs["c"]) == [(1.25, 0), (2.25, 1)]


def test_both_directions_go_at_once() -> None:
    logs = perform({"a": at_start(Send("b", parcel(0))), "b": at_start(Send("a", parcel(1)))})
    assert arrivals(logs["a"]) == [(1.25, 1)] and arrivals(logs["b"]) == [(1.25, 0)]


def test_separate_pairs_do_not_disturb_each_other() -> None:
    logs = perform({"a": at_start(Send("b", parcel(0))), "b": idle, "c": at_start(Send("d", parcel(1))), "d": idle})
    assert arrivals(logs["b"]) == [(1.25, 0)] and arrivals(logs["d"]) == [(1.25, 1)]


def test_nodes_on_one_host_talk_for_nothing_and_share_its_interface() -> None:
    scripts = {
        "a": at_start(Send("b", parcel(0)), Send("c", parcel(1))),
        "b": at_start(Send("c", parcel(2))),
        "c": idle,
    }
    logs = perform(scripts, hosts={"a": "box", "b": "box"})
    assert arrivals(logs["b"]) == [(0.0, 0)]
    assert arrivals(logs["c"]) == [(1.25, 1), (2.25, 2)]


def test_a_broadcast_and_a_reduction_may_cost_more_than_the_link() -> None:
    """Five rounds of one broadcast and one reduction of 1000 bytes, each for 1 s and at 500 bytes a second."""

    def seconds(**price: Any) -> float:
        sim = Sim(workers=3, link="1gbit", step_seconds=0.1, **price)
        plan = RunPlan.make(
            SyntheticTask(parameters=250), Averaging(tau=1), sim, Request(steps=5, seed=0, trace=False), None
        )
        return sim.execute(plan, NullObserver()).seconds

    bare = seconds()
    assert seconds(exchange_seconds=1.0) == pytest.approx(bare + 5 * 2)
    assert seconds(exchange_rate=500.0) == pytest.approx(bare + 5 * 2 * 2)
    assert seconds(exchange_seconds=1.0, exchange_rate=500.0, model_bytes=2000) == pytest.approx(
        bare + 5 * 2 * 5, rel=1e-4
    )


def test_model_bytes_price_the_vector_as_a_larger_one() -> None:
    vector_bytes = 4 * VALUES
    sim = replace(SLOW_LINK, model_bytes=10 * vector_bytes)
    logs = perform({"a": at_start(Send("b", parcel())), "b": idle}, sim)
    assert arrivals(logs["b"]) == [(0.25 + (10 * vector_bytes + HEADER_BYTES) / 1000, 0)]


def test_meters_count_priced_bytes() -> None:
    sim = Sim(workers=2, model_bytes="1MB")
    meters = simulate(sim, Server(), steps=3).meters
    assert meters["hub"].bytes_sent == 6_000_000 == meters["hub"].bytes_received
    assert meters["worker-0"].bytes_received == 3_000_000


@pytest.mark.parametrize("workers", [1, 2, 5, 16])
def test_a_hardsync_round_takes_the_time_that_theory_says(workers: int) -> None:
    """After the first pull the hub sends to one learner after the other; the last one's push ends the round."""
    latency, compute, transfer, rounds = 0.25, 3.0, 1.0, 4
    sim = replace(SLOW_LINK, workers=workers, step_seconds=compute)
    outcome = simulate(sim, Server(), steps=rounds)
    pull, round_ = latency + HEADER_BYTES / 1000, 2 * latency + (workers + 1) * transfer + compute
    assert outcome.seconds == pytest.approx(pull + rounds * round_)
    assert outcome.meters["worker-0"].compute_seconds == pytest.approx(rounds * compute)


def test_waiting_is_counted_where_a_node_could_have_computed() -> None:
    outcome = simulate(replace(SLOW_LINK, step_seconds=3.0), Server(), steps=4)
    round_trip = 2 * 0.25 + 2 * 1.0
    assert outcome.meters["worker-0"].wait_seconds == pytest.approx(3 * round_trip)
    assert outcome.meters["worker-0"].overlap == pytest.approx(12 / (12 + 3 * round_trip))


# ---- computing ------------------------------------------------------------------------------------------------------


def drawn(time: StepTime, count: int = 4000, node: str = "worker-0") -> np.ndarray[Any, Any]:
    rng = np.random.default_rng(0)
    return np.array([time.draw(Node(node, "worker"), rng) for _ in range(count)])


def test_a_fixed_step_always_takes_the_same_time() -> None:
    assert set(drawn(StepTime(0.3), 50)) == {0.3}
    assert simulate(Sim(workers=1, step_seconds="50ms"), Single(), steps=20).seconds == pytest.approx(1.0)


@pytest.mark.parametrize("spread", [0.1, 0.5, 1.0])
def test_a_spread_keeps_the_mean_and_has_the_deviation_it_says(spread: float) -> None:
    seconds = drawn(StepTime(2.0, spread=spread), 40_000)
    assert seconds.min() > 0
    assert seconds.mean() == pytest.approx(2.0, rel=0.03)
    assert seconds.std() / seconds.mean() == pytest.approx(spread, rel=0.1)


def test_factors_slow_down_the_workers_they_name() -> None:
    time = StepTime(0.5, factors={"worker-1": 4.0})
    assert drawn(time, 1, "worker-1")[0] == 2.0 and drawn(time, 1, "worker-0")[0] == 0.5


def test_stragglers_come_as_often_and_take_as_long_as_said() -> None:
    seconds = drawn(StepTime(1.0, straggle_chance=0.2, straggle_factor=7.0))
    assert set(seconds) == {1.0, 7.0}
    assert (seconds == 7.0).mean() == pytest.approx(0.2, abs=0.02)


@pytest.mark.parametrize("bad", [{"seconds": 0.0}, {"spread": -0.1}, {"straggle_chance": 1.5}])
def test_impossible_step_times_are_refused(bad: dict[str, float]) -> None:
    with pytest.raises(UsageError):
        StepTime(**bad)


@pytest.mark.parametrize(
    "bad",
    [
        {"workers": 0},
        {"link": 0},
        {"link": "fast"},
        {"latency": "-1ms"},
        {"step_seconds": 0},
        {"model_bytes": 0},
        {"exchange_seconds": "-1s"},
        {"exchange_rate": 0},
    ],
)
def test_impossible_clusters_are_refused(bad: dict[str, Any]) -> None:
    with pytest.raises(UsageError):
        Sim(**bad)


# ---- faults ---------------------------------------------------------------------------------------------------------


def test_a_crash_at_a_step_strikes_after_that_gradient() -> None:
    notes = Notes()
    sim = Sim(workers=3, step_seconds=1.0, faults=Faults().crash("worker-1", step=4))
    outcome = simulate(sim, Averaging(tau=2), steps=10, observer=notes)
    assert outcome.meters["worker-1"].steps == 4
    assert outcome.meters["worker-0"].steps == 10
    assert len(notes.notes) == 1 and notes.notes[0].startswith("worker-1 died at 4.0")


def test_a_crash_at_a_time_strikes_then_and_is_known_soon_after() -> None:
    sim = replace(SLOW_LINK, faults=Faults().crash("a", at=3.0), detect_seconds=2.0)
    logs = perform({"a": idle, "b": idle, "c": idle}, sim)
    heard = [times(logs[name], PeerLost) for name in ("b", "c", "end")]
    assert all(len(moments) == 1 and 5.0 <= moments[0] < 7.0 for moments in heard)
    assert heard[0] != heard[1]


def test_what_a_dead_node_had_sent_completely_arrives_and_the_rest_does_not() -> None:
    scripts = {"a": at_start(Send("b", parcel(0)), Send("b", parcel(1))), "b": idle}
    logs = perform(scripts, replace(SLOW_LINK, faults=Faults().crash("a", at=1.1), detect_seconds=50.0))
    assert arrivals(logs["b"]) == [(1.25, 0)]


def test_nothing_reaches_a_node_after_it_was_told_of_the_senders_death() -> None:
    sim = replace(SLOW_LINK, latency=50.0, detect_seconds=0.5, faults=Faults().crash("a", at=2.0))
    logs = perform({"a": at_start(Send("b", parcel())), "b": idle}, sim)
    assert times(logs["b"], PeerLost) and not arrivals(logs["b"])


def test_a_restarted_node_comes_back_under_another_name_after_its_death_is_known() -> None:
    faults = Faults().restart("a", at=1.0, seconds=5.0)
    logs = perform({"a": idle, "b": idle}, replace(SLOW_LINK, faults=faults, detect_seconds=0.5))
    assert times(logs["b"], PeerJoined) == [7.0] and times(logs["b"], PeerLost)[0] < 7.0
    (joined,) = [event for _, event in logs["b"] if isinstance(event, PeerJoined)]
    assert joined == PeerJoined("a~2", "worker")
    assert logs["a~2"][:2] == [(7.0, Started(("end", "b", "a~2"))), (7.0, PeerLost("a"))]


def test_a_paused_node_gets_everything_later_and_in_order() -> None:
    clock = [SetTimer(Timer(str(i)), float(i)) for i in range(1, 6)]
    logs = perform({"a": at_start(*clock)}, replace(SLOW_LINK, faults=Faults().pause("a", at=1.5, seconds=2.0)))
    assert [(now, event.timer.name) for now, event in logs["a"] if isinstance(event, TimerFired)] == [
        (1.0, "1"),
        (3.5, "2"),
        (3.5, "3"),
        (4.0, "4"),
        (5.0, "5"),
    ]


@pytest.mark.parametrize(
    ("faults", "seconds"),
    [
        (Faults().pause("worker-0", at=0.2, seconds=0.5), 3.5),
        (Faults().pause("worker-0", at=0.5, seconds=1.0), 4.0),
        (Faults().pause("worker-0", at=0.2, seconds=1.0).pause("worker-0", at=0.7, seconds=1.0), 4.5),
        (Faults().pause("worker-0", at=0.2, seconds=1.0).pause("worker-0", at=0.7, seconds=0.1), 4.0),
    ],
    ids=["inside a step", "across its end", "longer than known", "no longer than known"],
)
def test_a_pause_costs_as_long_as_it_lasts(faults: Faults, seconds: float) -> None:
    sim = Sim(workers=1, step_seconds=1.0, faults=faults)
    assert simulate(sim, Single(), steps=3).seconds == pytest.approx(seconds)


def test_a_slow_phase_multiplies_the_steps_that_begin_in_it() -> None:
    """Steps of one second begin at 0, 1, 2 (four seconds, as the slow phase goes to 4.5) and 6."""
    faults = Faults().slow("worker-0", 4.0, at=1.5, seconds=3.0)
    assert simulate(Sim(workers=1, step_seconds=1.0, faults=faults), Single(), steps=4).seconds == 7.0


def test_a_slow_worker_slows_hardsync_down_as_much_as_itself() -> None:
    usual = Sim(workers=4, link=1e12, latency=0.0, step_seconds=1.0)
    slow = replace(usual, faults=Faults().slow("worker-2", 10.0))
    assert simulate(slow, Server(), steps=5).seconds == pytest.approx(10 * simulate(usual, Server(), steps=5).seconds)


def test_a_cut_link_holds_messages_in_their_order_and_leaves_others_alone() -> None:
    sim = replace(FAST_LINK, faults=Faults().cut("b", "a", at=1.5, seconds=2.0))
    logs = perform({"a": every_second("b", "c", until=4), "b": idle, "c": idle}, sim)
    assert [number for _, number in arrivals(logs["b"])] == [1, 2, 3, 4]
    assert [now for now, _ in arrivals(logs["b"])] == pytest.approx([1.0, 3.5, 3.5, 4.0], abs=1e-5)
    assert [now for now, _ in arrivals(logs["c"])] == pytest.approx([1.0, 2.0, 3.0, 4.0], abs=1e-5)


def test_a_one_way_cut_holds_messages_in_one_direction_only() -> None:
    sim = replace(FAST_LINK, faults=Faults().cut("a", "b", at=1.5, seconds=2.0, one_way=True))
    logs = perform({"a": every_second("b", until=4), "b": every_second("a", until=4)}, sim)
    assert [now for now, _ in arrivals(logs["b"])] == pytest.approx([1.0, 3.5, 3.5, 4.0], abs=1e-5)
    assert [now for now, _ in arrivals(logs["a"])] == pytest.approx([1.0, 2.0, 3.0, 4.0], abs=1e-5)


def test_a_delay_makes_messages_late_that_are_sent_while_it_lasts_and_keeps_their_order() -> None:
    sim = replace(FAST_LINK, faults=Faults().delay("b", 1.7, at=1.5, seconds=1.0))
    logs = perform({"a": every_second("b", "c", until=4), "b": idle, "c": idle}, sim)
    assert [now for now, _ in arrivals(logs["b"])] == pytest.approx([1.0, 3.7, 3.7, 4.0], abs=1e-5)
    assert [number for _, number in arrivals(logs["b"])] == [1, 2, 3, 4]
    assert [now for now, _ in arrivals(logs["c"])] == pytest.approx([1.0, 2.0, 3.0, 4.0], abs=1e-5)


@pytest.mark.parametrize(
    "protocol", [Server(), Server(topology="tree"), Averaging(tau=2), Elastic(), Mpca(), Grid()], ids=str
)
def test_a_worker_that_was_not_there_at_the_start_takes_part(protocol: Options) -> None:
    outcome = simulate(Sim(workers=2, faults=Faults().join("worker-2", at=0.5)), protocol, steps=40)
    assert outcome.meters["worker-2"].steps > 10


@pytest.mark.parametrize(
    "faults",
    [
        Faults().cut("a", "b", at=0.5, seconds=4.0).cut("a", "b", at=2.5, seconds=6.0),
        Faults().cut("a", "b", at=0.5, seconds=6.0).cut("b", "a", at=2.5, seconds=1.0),
        Faults().pause("b", at=0.5, seconds=4.0).pause("b", at=2.5, seconds=6.0),
        Faults().pause("b", at=0.5, seconds=3.0).cut("a", "b", at=2.5, seconds=3.0),
    ],
    ids=["a longer cut", "a shorter cut", "a longer pause", "a pause and a cut"],
)
def test_overlapping_faults_keep_the_order_of_messages(faults: Faults) -> None:
    logs = perform({"a": every_second("b", until=9), "b": idle}, replace(FAST_LINK, faults=faults))
    assert [number for _, number in arrivals(logs["b"])] == list(range(1, 10))


def test_whatever_faults_overlap_messages_stay_in_order_and_none_is_lost() -> None:
    """Faults begin and end on half seconds and messages are sent on whole ones, so that many fall together."""
    for seed in range(100):
        rng = random.Random(seed)
        faults = Faults()
        for _ in range(rng.randint(2, 5)):
            at, seconds = rng.randint(0, 16) / 2, rng.randint(1, 10) / 2
            kind = rng.choice(["cut", "one way", "delay", "pause"])
            if kind in ("cut", "one way"):
                faults = faults.cut("a", "b", at=at, seconds=seconds, one_way=kind == "one way")
            elif kind == "delay":
                faults = faults.delay(rng.choice("ab"), rng.randint(1, 6) / 2, at=at, seconds=seconds)
            else:
                faults = faults.pause(rng.choice("ab"), at=at, seconds=seconds)
        logs = perform({"a": every_second("b", until=9), "b": idle}, replace(FAST_LINK, faults=faults))
        numbers = [number for _, number in arrivals(logs["b"])]
        assert numbers == sorted(numbers), f"seed {seed}: {numbers} under {faults}"
        sent = sum(isinstance(event, TimerFired) and now < 9.5 for now, event in logs["a"])
        assert len(numbers) == sent, f"seed {seed}: {len(numbers)} of {sent} arrived under {faults}"


def test_a_timer_that_an_earlier_event_cancels_does_not_fire_after_a_pause() -> None:
    """The message comes at 1 and the timer is due at 3; a pause holds both until 5."""

    def cancels(event: Event, now: float) -> list[Effect]:
        match event:
            case Started():
                return [SetTimer(Timer("x"), 3.0)]
            case Received():
                return [CancelTimer(Timer("x"))]
        return []

    sim = replace(FAST_LINK, faults=Faults().pause("b", at=0.5, seconds=4.5))
    log = perform({"a": every_second("b", until=1), "b": cancels}, sim)["b"]
    assert [(now, type(event)) for now, event in log] == [(0.0, Started), (5.0, Received)]


def test_a_fault_without_a_moment_or_of_a_stranger_is_refused() -> None:
    with pytest.raises(UsageError, match="a crash of worker-0 needs a time"):
        Faults().crash("worker-0")
    for faults in (Faults().crash("worker-9", at=1.0), Faults().cut("worker-0", "bub", at=0.0, seconds=1.0)):
        with pytest.raises(UsageError, match=r"a fault names the node '(worker-9|bub)'; this run has hub, worker-0"):
            simulate(Sim(workers=1, faults=faults), Server())
    with pytest.raises(UsageError, match="a disk-full needs a disk"):
        simulate(Sim(workers=1, faults=Faults().disk(at=1.0, seconds=1.0)), Server())


def test_the_death_of_the_joint_node_or_of_the_last_worker_ends_the_run_with_its_cause() -> None:
    with pytest.raises(NodesLost, match=r"hub, which holds the joint model, died at 0\.35 s"):
        simulate(Sim(workers=2, faults=Faults().crash("hub", at=0.35)), Server())
    everybody = Faults().crash("worker-0", at=0.2).crash("worker-1", at=0.3)
    with pytest.raises(NodesLost, match=r"no worker is left: worker-1 was the last and died at 0\.3 s"):
        simulate(Sim(workers=2, faults=everybody), Server())


# ---- timers ---------------------------------------------------------------------------------------------------------


def fired(*plan: tuple[float, Effect]) -> list[tuple[float, str]]:
    """When which timer fired, if a node performs these effects at these times."""

    def script(event: Event, now: float) -> list[Effect]:
        match event:
            case Started():
                return [SetTimer(Timer("cue", (i,)), when) for i, (when, _) in enumerate(plan)]
            case TimerFired(timer=Timer(name="cue", numbers=(number,))):
                return [plan[number][1]]
        return []

    log = perform({"a": script})["a"]
    return [
        (now, event.timer.name) for now, event in log if isinstance(event, TimerFired) and event.timer.name != "cue"
    ]


def test_a_timer_fires_once_after_its_time() -> None:
    assert fired((1.0, SetTimer(Timer("x"), 2.5)), (2.0, SetTimer(Timer("y"), 0.0))) == [(2.0, "y"), (3.5, "x")]


def test_setting_a_timer_again_moves_it() -> None:
    assert fired((1.0, SetTimer(Timer("x"), 2.0)), (2.0, SetTimer(Timer("x"), 5.0))) == [(7.0, "x")]
    assert fired((1.0, SetTimer(Timer("x"), 9.0)), (2.0, SetTimer(Timer("x"), 1.0))) == [(3.0, "x")]


def test_a_cancelled_timer_does_not_fire_until_it_is_set_anew() -> None:
    assert fired((1.0, SetTimer(Timer("x"), 2.0)), (2.0, CancelTimer(Timer("x")))) == []
    assert fired((1.0, CancelTimer(Timer("x"))), (2.0, SetTimer(Timer("x"), 1.0))) == [(3.0, "x")]
    assert fired(
        (1.0, SetTimer(Timer("x"), 2.0)), (2.0, CancelTimer(Timer("x"))), (2.5, SetTimer(Timer("x"), 2.0))
    ) == [(4.5, "x")]


# ---- what the simulator catches -------------------------------------------------------------------------------------


def test_a_tensor_that_is_changed_after_it_was_sent_is_noticed() -> None:
    values = torch.zeros(VALUES)

    def meddler(event: Event, now: float) -> list[Effect]:
        match event:
            case Started():
                return [Send("b", Parcel(0, values)), SetTimer(Timer("meddle"), 0.5)]
            case TimerFired():
                values[3] = 1.0
        return []

    with pytest.raises(InvariantBroken, match="a changed a tensor of Parcel after sending it to b"):
        perform({"a": meddler, "b": idle})
    values.zero_()
    assert arrivals(perform({"a": meddler, "b": idle}, replace(SLOW_LINK, checked=False))["b"]) == [(1.25, 0)]


def test_a_gradient_that_was_sent_may_not_be_overwritten_by_the_next_one() -> None:
    def hasty(fresh: bool) -> Script:
        def script(event: Event, now: float) -> list[Effect]:
            match event:
                case Started():
                    return [Compute("dense")]
                case GradientReady(gradient=gradient) if now < 1:
                    return [Send("b", Parcel(0, gradient)), Compute("dense", fresh)]
            return []

        return script

    with pytest.raises(InvariantBroken, match="a changed a tensor of Parcel"):
        perform({"a": hasty(fresh=False), "b": idle})
    assert arrivals(perform({"a": hasty(fresh=True), "b": idle})["b"])


def test_an_invariant_is_checked_after_every_event() -> None:
    class Strict(Scripted):
        def check(self) -> None:
            if len(self.log) == 3:
                raise InvariantBroken("three events are too many")

    class StrictPlay(Play):
        def machine(self, context: NodeContext) -> Machine:
            return Strict(self.scripts["a"], []) if context.node.name == "a" else super().machine(context)

    timers = at_start(*(SetTimer(Timer(str(i)), float(i)) for i in range(9)))
    with pytest.raises(InvariantBroken, match="three events"):
        simulate(SLOW_LINK, StrictPlay({"a": timers}, {}, {}, 100.0))


def test_a_run_in_which_nothing_can_happen_any_more_tells_what_every_node_knows() -> None:
    class Endless(Play):
        def machine(self, context: NodeContext) -> Machine:
            return Scripted(idle, [(0.0, Started(()))])

    with pytest.raises(Stalled, match=r"nothing can happen after 0 s and 3 events; end: Scripted\(.*a: .*b: "):
        simulate(SLOW_LINK, Endless({"a": idle, "b": idle}, {}, {}, 0.0))


def test_a_run_that_goes_round_in_circles_is_given_up() -> None:
    def restless(event: Event, now: float) -> list[Effect]:
        return [SetTimer(Timer("again"), 1e-6)]

    with pytest.raises(Stalled, match="not finished after 500 events; end: "):
        perform({"a": restless}, replace(SLOW_LINK, events_max=500))


@pytest.mark.parametrize("protocol", [Server(), Averaging(tau=2)], ids=str)
@pytest.mark.parametrize(("sender", "receiver"), [("hub", "worker-1"), ("worker-0", "hub")])
def test_a_lost_message_is_found_and_the_node_that_waits_for_it_named(
    protocol: Options, sender: str, receiver: str
) -> None:
    sim = Sim(workers=2, faults=Faults().drop(sender, receiver, nth=3))
    with pytest.raises(Stalled, match=r"nothing can happen after .*hub: .*worker-0: .*worker-1: "):
        simulate(sim, protocol)


# ---- repetition -----------------------------------------------------------------------------------------------------

UNEVEN = Sim(
    workers=3,
    step_seconds=StepTime(0.1, spread=0.7, straggle_chance=0.1),
    faults=Faults().restart("worker-2", at=0.5, seconds=0.2).pause("worker-0", at=0.4, seconds=0.3),
)


@pytest.mark.parametrize("task", [SyntheticTask(), Blobs()], ids=lambda task: task.name)
def test_a_seed_repeats_bit_for_bit_and_another_seed_does_not(task: Task) -> None:
    first, again, other = (simulate(UNEVEN, Averaging(), task, steps=15, seed=seed) for seed in (4, 4, 5))
    assert digest(first.weights) == digest(again.weights) != digest(other.weights)
    assert first.seconds == again.seconds != other.seconds
    assert first.meters["worker-0"] == again.meters["worker-0"] and first.events == again.events


class Gambler(Blobs):
    """A task that uses every global source of randomness there is."""

    def loss(self, model: Any, batch: Any) -> Tensor:
        return super().loss(model, batch) * (1 + random.random() + np.random.random() + torch.rand(()))


def test_a_task_that_draws_from_the_global_generators_repeats_too() -> None:
    random.seed(7)
    first = simulate(UNEVEN, Server(), Gambler(), steps=5)
    random.random(), np.random.random(), torch.rand(3)
    assert digest(simulate(UNEVEN, Server(), Gambler(), steps=5).weights) == digest(first.weights)


@pytest.mark.parametrize("faults", [Faults(), Faults().crash("hub", at=0.2)], ids=["finished", "failed"])
def test_the_callers_randomness_and_threads_are_left_as_they_were(faults: Faults) -> None:
    def rest() -> tuple[Any, ...]:
        return random.random(), np.random.random(), float(torch.rand(())), torch.get_num_threads()

    def seed() -> None:
        random.seed(1), np.random.seed(2), torch.manual_seed(3)

    seed()
    expected = rest()
    seed()
    try:
        simulate(Sim(workers=2, faults=faults, threads=2 if torch.get_num_threads() == 1 else 1), Server(), Gambler())
    except RunError:
        assert faults.schedule
    assert rest() == expected


def test_what_is_kept_of_a_simulated_cluster_makes_the_same_one_again() -> None:
    """As `resume` does it; before, the spread of step times and the slow workers were forgotten."""
    times = StepTime(0.2, spread=0.3, factors={"worker-1": 4.0}, straggle_chance=0.1)
    cluster = Sim(3, link="10mbit", step_seconds=times, detect_seconds=0.25, exchange_seconds="5ms")
    described = json.loads(json.dumps(cluster.describe()))
    again = Sim(workers=3, **{name: value for name, value in described.items() if name != "name"})
    assert again.step_time == times and again.describe() == cluster.describe()
