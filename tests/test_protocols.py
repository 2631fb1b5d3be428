"""Each protocol as its paper tells it: a list of events in, the effects out, without any runtime."""

from __future__ import annotations

import dataclasses
import math
import re
import statistics
from collections.abc import Iterable
from typing import Any

import msgspec
import pytest
import torch
from torch import Tensor

from tether import Averaging, Single
from tether.core.effects import (
    Broadcast,
    Checkpoint,
    Compute,
    Effect,
    Evaluate,
    Finish,
    Install,
    Record,
    Reduce,
    Send,
    Step,
)
from tether.core.events import (
    Broadcasted,
    Event,
    GradientReady,
    PeerJoined,
    PeerLost,
    Received,
    Reduced,
    Started,
    StopRequested,
    TimerFired,
)
from tether.core.machine import Machine, NodeContext, Schedule
from tether.core.message import Message, Tag, Timer
from tether.core.snapshot import snapshot
from tether.errors import InvariantBroken, UsageError
from tether.protocols import DEALING, Options, known
from tether.protocols.averaging import ROUND, Effort, Joint
from tether.protocols.base import RunProgress
from tether.protocols.server.messages import Halt, Part, Tally

VARIANTS = [options for cls in known().values() for options in cls.variants()]
FAR = 1_000_000


def schedule(steps: int = FAR, evaluate_every: int = FAR, **more: Any) -> Schedule:
    return Schedule(steps=steps, evaluate_every=evaluate_every, **more)


def machine(
    options: Options,
    node: str = "hub",
    *,
    workers: int = 2,
    vector: Iterable[float] = (0.0, 0.0),
    buffers: int = 0,
    restored: dict[str, Any] | None = None,
    **goal: Any,
) -> Any:
    """A fresh machine; the last `buffers` values of its vector are not parameters."""
    nodes = options.nodes(workers)
    place = next(candidate for candidate in nodes if candidate.name == node)
    weights = torch.tensor(list(vector))
    return options.machine(NodeContext(place, nodes, weights, len(weights) - buffers, schedule(**goal), restored))


def started(workers: int = 2) -> Started:
    return Started(("hub", *(f"worker-{i}" for i in range(workers))))


def play(machine: Machine, *events: Event, now: float = 0.0) -> list[Effect]:
    """The effects of the last event, but for who trains on what; the invariants hold after each."""
    effects: list[Effect] = []
    for event in events:
        effects = machine.handle(event, now)
        machine.check()
    return [effect for effect in effects if not (isinstance(effect, Send) and isinstance(effect.message, DEALING))]


#: who trains on what, and how far the run is: `test_ledger` looks at that
DATA = {"batch", "batches", "upcoming", "position", "counted", "step_batches"}


def plain(value: Any) -> Any:
    """Effects as plain values, which can be compared, but for who trains on what."""

    def without(value: Any) -> Any:
        match value:
            case dict():
                return {key: without(item) for key, item in value.items() if key not in DATA}
            case list():
                return [without(item) for item in value]
        return value

    return without(msgspec.to_builtins(value, enc_hook=lambda tensor: [str(tensor.dtype), tensor.tolist()]))


def gives(effects: list[Effect], *expected: Effect) -> bool:
    assert plain(effects) == plain(list(expected))
    return True


def gradient(values: Iterable[float] = (1.0, 1.0), samples: int = 1, seconds: float = 0.1) -> GradientReady:
    return GradientReady(torch.tensor(list(values)), loss=1.0, samples=samples, seconds=seconds)


def of_kind(effects: list[Effect], kind: type) -> list[Any]:
    return [effect for effect in effects if isinstance(effect, kind)]


# ---- what all protocols have in common ------------------------------------------------------------------------------


@pytest.mark.parametrize("options", VARIANTS, ids=str)
def test_events_that_do_not_concern_a_node_are_let_pass(options: Options) -> None:
    for node in options.nodes(1):
        built = machine(options, node.name, workers=1)
        play(built, Started(tuple(node.name for node in options.nodes(1))))
        assert play(built, TimerFired(Timer("of somebody else"))) == []


@pytest.mark.parametrize("options", VARIANTS, ids=str)
def test_a_stop_request_ends_the_run_in_good_order_and_once(options: Options) -> None:
    joint = machine(options, options.hub or "worker-0", workers=1, first_step=7, counted=((0, 70),))
    play(joint, Started(tuple(node.name for node in options.nodes(1))))
    effects = play(joint, StopRequested("error<0.1 reached"))
    if getattr(options, "apply", "") == "inline":
        assert gives(effects[:1], Send("worker-0", Halt())), "whoever steps on the model halts first"
        effects = play(joint, Received("worker-0", Tally(0, last=True)))[1:]
    for hub in [send.to for send in of_kind(effects, Send)]:  # other hubs, which have parts of the model
        effects = play(joint, Received(hub, Part(torch.zeros(0), None)))
    evaluate, checkpoint, finish = [effect for effect in effects if not isinstance(effect, Install)]
    assert gives([evaluate, finish], Evaluate(7, 70, final=True), Finish("error<0.1 reached"))
    assert isinstance(checkpoint, Checkpoint) and (checkpoint.step, checkpoint.samples, checkpoint.final) == (7, 70, 1)
    assert play(joint, StopRequested("again")) == []


@pytest.mark.parametrize("options", VARIANTS, ids=str)
def test_every_option_is_documented_and_every_protocol_says_what_it_is(options: Options) -> None:
    assert options.summary and options.name in known()
    assert all(field.metadata["doc"] for field in dataclasses.fields(options))
    assert options.hub in {"", *(node.name for node in options.nodes(1))}


# ---- progress --------------------------------------------------------------------------------------------------------


def pace_of(state: Any = dict, **goal: Any) -> RunProgress:
    nodes = Single().nodes(1)
    return RunProgress(NodeContext(nodes[0], nodes, torch.zeros(1), 1, schedule(**goal)), state)


def made(progress: RunProgress, gradients: int, now: float = 0.0) -> list[Effect]:
    """The only worker has made so many."""
    if len(progress.ledger.held["worker-0"]) < gradients:
        progress.ledger.deal("worker-0", gradients)
    progress.ledger.count("worker-0", gradients)
    return progress.advance(gradients, 1, now)


def test_the_joint_model_is_evaluated_whenever_a_multiple_is_passed() -> None:
    progress = pace_of(steps=20, evaluate_every=4)
    seen = [[e.step for e in of_kind(made(progress, 3), Evaluate)] for _ in range(6)]
    assert seen == [[], [6], [9], [12], [], [18]]
    effects = made(progress, 3)
    assert gives(effects, Evaluate(20, 21, final=True), Checkpoint(20, 21, {}, final=True), Finish("all steps made"))
    assert progress.over


def test_one_evaluation_is_enough_for_several_multiples() -> None:
    progress = pace_of(steps=100, evaluate_every=4)
    assert gives(made(progress, 13), Evaluate(13, 13))


def test_checkpoints_are_so_many_seconds_apart() -> None:
    progress = pace_of(lambda: {"tau": 3}, checkpoint_seconds=10.0)
    times = [0.0, 4.0, 9.9, 10.0, 12.0, 19.9, 25.0, 34.0, 35.0]
    saved = [now for now in times if of_kind(made(progress, 1, now), Checkpoint)]
    assert saved == [10.0, 25.0, 35.0]


def test_a_checkpoint_keeps_what_the_protocol_wants_kept() -> None:
    state = {"tau": 2}
    progress = pace_of(state.copy, checkpoint_seconds=1.0, first_step=5, counted=((0, 5),), batch_size=10)
    made(progress, 1, 0.0)
    state["tau"] = 3
    assert gives(made(progress, 1, 1.0), Checkpoint(7, 70, {"tau": 3}))


def test_a_continued_run_makes_only_the_steps_that_are_left() -> None:
    progress = pace_of(steps=7, first_step=5, counted=((0, 5),), batch_size=10)
    assert progress.steps_left == 2
    assert not made(progress, 1)
    assert of_kind(made(progress, 1), Evaluate)[0].samples == 70 and progress.over


def test_a_goal_in_samples_ends_the_run_when_all_of_them_count() -> None:
    progress = pace_of(steps=4, goal=7, step_batches=2)
    for step in (0, 1, 1, 2, 2, 3):
        assert not made(progress, 1)
        assert progress.step == step
    assert of_kind(made(progress, 1), Finish) and progress.step == 4


def test_a_goal_of_steps_says_who_missed_it() -> None:
    options = Averaging(tau=2)
    hub = machine(options, steps=4)
    play(hub, started(), reduced(0, steps=2), PeerLost("worker-1"))
    (finish,) = of_kind(play(hub, reduced(1, workers=1, steps=2)), Finish)
    assert finish.reason == "all steps made, except that worker-1 made 2 of its 4"


# ---- one learner ----------------------------------------------------------------------------------------------------


def test_a_single_learner_computes_and_steps_until_all_steps_are_made() -> None:
    alone = machine(Single(), "worker-0", steps=2, batch_size=5)
    assert gives(play(alone, Started(("worker-0",))), Compute())
    assert gives(play(alone, gradient(samples=5)), Step(), Compute())
    assert gives(
        play(alone, gradient(samples=5)),
        Step(),
        Evaluate(2, 10, final=True),
        Checkpoint(2, 10, {}, final=True),
        Finish("all steps made"),
    )
    assert play(alone, gradient()) == []


def test_a_single_learner_is_evaluated_before_it_computes_on() -> None:
    alone = machine(Single(), "worker-0", steps=5, evaluate_every=1)
    assert gives(play(alone, Started(("worker-0",)), gradient()), Step(), Evaluate(1, 1), Compute())


# ---- SparkNet: averaging --------------------------------------------------------------------------------------------


def joint(tau: int, round: int = 0, values: tuple[float, ...] = (0.0, 0.0)) -> Broadcasted:
    batches = {f"worker-{i}": tuple(range(i, 2 * tau, 2)) for i in range(2)}
    return Broadcasted(ROUND, ("hub", "worker-0", "worker-1"), Joint(round, torch.tensor(values), batches, 0))


def reduced(round: int, total: Iterable[float] | None = (2.0, 4.0), workers: int = 2, steps: int = 1) -> Reduced:
    values = None if total is None else torch.tensor(list(total))
    names = tuple(f"worker-{i}" for i in range(workers)) if total is not None else ()
    return Reduced(Tag(ROUND, round), values, float(len(names)), names, (steps,) * len(names))


def tau_of(effects: list[Effect]) -> int:
    (broadcast,) = of_kind(effects, Broadcast)
    return max(map(len, broadcast.message.batches.values()))


def test_sparknet_a_round_begins_with_a_broadcast_and_an_open_reduction() -> None:
    hub = machine(Averaging(tau=3))
    members = ("hub", "worker-0", "worker-1")
    opened = Broadcast(ROUND, members, Joint(0, snapshot(), {}, 0)), Reduce(Tag(ROUND, 0), members)
    assert gives(play(hub, started()), *opened)


def test_sparknet_a_worker_makes_tau_steps_from_the_joint_model_and_contributes() -> None:
    worker = machine(Averaging(tau=3), "worker-0")
    assert gives(play(worker, started(), joint(3, values=(1.0, 2.0))), Install(torch.tensor([1.0, 2.0])), Compute())
    for _ in range(2):
        assert gives(play(worker, gradient()), Step(), Compute())
    members = ("hub", "worker-0", "worker-1")
    assert gives(play(worker, gradient()), Step(), Reduce(Tag(ROUND, 0), members, snapshot(), weight=1.0, steps=3))


def test_sparknet_the_mean_is_installed_and_the_next_round_opened() -> None:
    hub = machine(Averaging(tau=3), batch_size=10)
    members = ("hub", "worker-0", "worker-1")
    assert gives(
        play(hub, started(), reduced(0, (2.0, 4.0), steps=3)),
        Install(torch.tensor([1.0, 2.0])),
        Record({"round": 0, "tau": 3, "workers": 2}),
        Broadcast(ROUND, members, Joint(1, snapshot(), {}, 0)),
        Reduce(Tag(ROUND, 1), members),
    )
    assert (hub.progress.step, hub.progress.samples) == (3, 60)


def test_the_last_round_has_only_the_steps_that_are_left() -> None:
    hub = machine(Averaging(tau=4), steps=10)
    assert tau_of(play(hub, started())) == 4
    assert tau_of(play(hub, reduced(0, steps=4))) == 4
    assert tau_of(play(hub, reduced(1, steps=4))) == 2
    effects = play(hub, reduced(2, steps=2))
    assert of_kind(effects, Evaluate)[0].step == 10
    assert of_kind(effects, Finish) and not of_kind(effects, Broadcast)


def test_the_dead_are_left_out_of_the_next_round_and_newcomers_are_in_it() -> None:
    hub = machine(Averaging(tau=1), workers=3)
    assert play(hub, started(3), PeerLost("worker-1"), PeerJoined("worker-1~2", "worker")) == []
    effects = play(hub, reduced(0))
    assert of_kind(effects, Broadcast)[0].members == ("hub", "worker-0", "worker-2", "worker-1~2")
    assert of_kind(effects, Reduce)[0].members == ("hub", "worker-0", "worker-2", "worker-1~2")


def test_a_round_that_nobody_survived_is_made_again_from_the_same_model() -> None:
    hub = machine(Averaging(tau=4), steps=8)
    play(hub, started(), PeerLost("worker-0"), PeerLost("worker-1"))
    assert play(hub, reduced(0, None)) == []
    effects = play(hub, PeerJoined("worker-0~2", "worker"))
    assert tau_of(effects) == 4 and not of_kind(effects, Install)
    assert hub.progress.step == 0


def test_a_newcomer_of_another_role_is_in_no_round() -> None:
    hub = machine(Averaging(tau=1))
    play(hub, started(), PeerJoined("watcher", "observer"))
    assert of_kind(play(hub, reduced(0)), Broadcast)[0].members == ("hub", "worker-0", "worker-1")


@pytest.mark.parametrize(
    ("waits", "steps"),
    [((0.3, 0.5), (0.1, 0.1)), ((2.0, 1.0), (0.3, 0.5)), ((0.001, 0.2), (1.0, 3.0)), ((7.0, 9.0), (0.25, 0.25))],
)
def test_sparknet_tau_makes_computing_five_times_as_long_as_communicating(
    waits: tuple[float, ...], steps: tuple[float, ...]
) -> None:
    hub = machine(Averaging())
    assert tau_of(play(hub, started())) == 1
    efforts = [Received(f"worker-{i}", Effort(*pair)) for i, pair in enumerate(zip(waits, steps, strict=True))]
    expected = max(1, math.ceil(5 * min(waits) / statistics.median(steps)))
    assert tau_of(play(hub, *efforts, reduced(0))) == expected


def test_tau_stays_where_it_is_until_something_was_measured() -> None:
    hub = machine(Averaging())
    unmeasured = [Received(f"worker-{i}", Effort(None, 0.1)) for i in range(2)]
    assert tau_of(play(hub, started(), *unmeasured, reduced(0))) == 1
    assert tau_of(play(hub, Received("worker-0", Effort(0.2, 0.1)), reduced(1))) == 10
    assert tau_of(play(hub, reduced(2, steps=10))) == 10


def test_a_fixed_tau_is_not_changed_by_measurements() -> None:
    hub = machine(Averaging(tau=2))
    assert tau_of(play(hub, started(), Received("worker-0", Effort(9.0, 0.1)), reduced(0, steps=2))) == 2


def test_a_worker_reports_how_long_it_waited_and_how_long_a_step_took() -> None:
    worker = machine(Averaging(), "worker-0")
    play(worker, started(), joint(2), gradient(seconds=0.25), now=1.0)
    first = play(worker, gradient(seconds=0.5), now=2.0)
    assert gives(of_kind(first, Send), Send("hub", Effort(None, 0.375)))
    play(worker, joint(1, round=1), now=2.75)
    second = play(worker, gradient(seconds=0.5), now=3.0)
    assert gives(of_kind(second, Send), Send("hub", Effort(0.75, 0.5)))


def test_a_continued_hub_goes_on_with_the_tau_it_had_measured() -> None:
    hub = machine(Averaging(), restored={"tau": 6})
    assert tau_of(play(hub, started())) == 6
    (checkpoint,) = of_kind(play(hub, StopRequested("enough")), Checkpoint)
    assert checkpoint.state["tau"] == 6


def test_a_continued_run_has_the_tau_it_was_given_and_not_that_of_its_short_last_round() -> None:
    first = machine(Averaging(tau=4), steps=5)
    assert tau_of(play(first, started(), reduced(0, steps=4))) == 1
    (checkpoint,) = of_kind(play(first, reduced(1)), Checkpoint)
    further = machine(Averaging(tau=4), steps=50, first_step=5, restored=checkpoint.state)
    assert tau_of(play(further, started())) == 4


def test_a_reduction_that_closes_outside_of_its_round_breaks_an_invariant() -> None:
    hub = machine(Averaging(tau=1))
    with pytest.raises(InvariantBroken, match="round 7 closed outside of round 1"):
        play(hub, started(), reduced(0), reduced(7))


def test_a_round_that_begins_too_early_breaks_an_invariant() -> None:
    worker = machine(Averaging(tau=2), "worker-0")
    with pytest.raises(InvariantBroken, match="round 1 began while round 0 lacked steps"):
        play(worker, joint(2), gradient(), joint(2, round=1))


def test_a_worker_makes_no_step_beyond_what_it_was_dealt() -> None:
    worker = machine(Averaging(tau=1), "worker-0")
    assert not of_kind(play(worker, joint(1), gradient()), Compute)


def test_a_worker_that_is_present_twice_breaks_an_invariant() -> None:
    hub = machine(Averaging(tau=1))
    with pytest.raises(InvariantBroken, match="present twice"):
        play(hub, started(), PeerJoined("worker-0", "worker"))


# ---- options --------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("tau", [0, -3])
def test_a_tau_below_one_is_refused(tau: int) -> None:
    with pytest.raises(UsageError, match=f"tau must be at least 1 or 'auto', not {tau}"):
        Averaging(tau=tau)


@pytest.mark.parametrize("tau", ["fast", "5", 2.5, None, True])
def test_a_tau_that_is_no_number_of_steps_is_refused(tau: Any) -> None:
    with pytest.raises(UsageError, match=re.escape(f"option tau of protocol averaging is {tau!r}; expected")):
        Averaging(tau=tau)


@pytest.mark.parametrize("options", VARIANTS, ids=str)
def test_messages_are_frozen(options: Options) -> None:
    """A message that could be changed could be changed after it was sent."""
    for cls in options.messages:
        assert issubclass(cls, Message) and cls.__struct_config__.frozen


def test_a_snapshot_is_no_tensor_until_it_is_sent() -> None:
    assert not isinstance(snapshot(), Tensor)


# ---- averaging with an outer optimizer (DiLoCo) ---------------------------------------------------------------------


def outer_rounds(options: Averaging, means: list[list[float]], restored: dict[str, Any] | None = None) -> list[Tensor]:
    """The joint models that a hub goes through when its two workers come to these means."""
    hub = machine(options, vector=(1.0, -2.0, 0.5), buffers=1, restored=restored)
    play(hub, started())
    models = []
    for round, mean in enumerate(means):
        (install,) = of_kind(play(hub, reduced(round, [2 * value for value in mean])), Install)
        hub.context.weights.copy_(install.values)
        models.append(hub.context.weights.clone())
    return models


@pytest.mark.parametrize(("outer", "nesterov"), [("nesterov", True), ("momentum", False)])
def test_the_outer_optimizer_is_torchs_sgd_on_the_averaged_difference(outer: Any, nesterov: bool) -> None:
    means = [[0.5, -1.0, 0.1], [0.7, -1.5, 0.2], [0.2, 0.3, 0.3]]
    models = outer_rounds(Averaging(tau=1, outer=outer, outer_rate=0.6, outer_momentum=0.8), means)
    parameter = torch.nn.Parameter(torch.tensor([1.0, -2.0]))
    optimizer = torch.optim.SGD([parameter], lr=0.6, momentum=0.8, nesterov=nesterov)
    for mean, model in zip(means, models, strict=True):
        parameter.grad = parameter.detach() - torch.tensor(mean[:2])
        optimizer.step()
        assert torch.allclose(model[:2], parameter.detach(), atol=1e-6)
        assert float(model[2]) == pytest.approx(mean[2]), "buffers are averaged and not stepped"


def test_an_outer_step_of_the_whole_difference_is_the_average() -> None:
    means = [[0.5, -1.0, 0.1], [0.7, -1.5, 0.2]]
    stepped = outer_rounds(Averaging(tau=1, outer="nesterov", outer_rate=1.0, outer_momentum=0.0), means)
    for one, other in zip(stepped, outer_rounds(Averaging(tau=1), means), strict=True):
        assert torch.allclose(one, other, atol=1e-6)


def test_a_continued_hub_keeps_the_momentum_of_its_outer_optimizer() -> None:
    options = Averaging(tau=1, outer="nesterov")
    hub = machine(options, vector=(1.0, -2.0, 0.5), buffers=1)
    play(hub, started(), reduced(0, [1.0, 2.0, 3.0]))
    (checkpoint,) = of_kind(play(hub, StopRequested("enough")), Checkpoint)
    assert torch.equal(checkpoint.state["velocity"], torch.tensor([0.5, -3.0]))
    fresh, further = (outer_rounds(options, [[0.0, 0.0, 0.0]], state)[0] for state in (None, checkpoint.state))
    assert not torch.allclose(fresh, further)


@pytest.mark.parametrize(
    ("settings", "reason"),
    [
        ({"outer": "adam"}, "outer"),
        ({"outer": "nesterov", "outer_rate": 0.0}, "outer_rate must be more than 0"),
        ({"outer": "nesterov", "outer_momentum": 1.0}, "outer_momentum must be at least 0 and below 1"),
        ({"outer_rate": 0.5}, "give outer='nesterov' too"),
    ],
)
def test_a_bad_outer_optimizer_is_refused(settings: dict[str, Any], reason: str) -> None:
    with pytest.raises(UsageError, match=reason):
        Averaging(**settings)
