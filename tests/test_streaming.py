"""Streaming DiLoCo: outer steps of fragments, and what a worker makes of them."""

from __future__ import annotations

import pytest
import torch

from test_tide import context_of
from tether import Streaming, UsageError
from tether.core.effects import Blend, Effect, Reduce
from tether.core.events import Broadcasted, GradientReady, Reduced, Started
from tether.protocols.circulation import tag_of
from tether.protocols.streaming import Fragment, StreamingHub, StreamingWorker

MEMBERS = ("hub", "worker-0", "worker-1")


def test_the_hub_makes_a_step_with_nesterovs_momentum() -> None:
    options = Streaming(phases=1, shards=1, outer_rate=0.5, outer_momentum=0.8)
    start = torch.zeros(4, dtype=torch.float64)
    hub = StreamingHub(context_of(options, "hub", start, 2), options)
    hub.handle(Started(MEMBERS), 0.0)
    joint = torch.nn.Parameter(start.clone())
    outer = torch.optim.SGD([joint], lr=0.5, momentum=0.8, nesterov=True)
    generator = torch.Generator().manual_seed(0)
    for cycle in range(3):
        mean = joint.detach() + torch.randn(4, generator=generator, dtype=torch.float64)
        hub.handle(Reduced(tag_of(0, cycle), 2 * mean, 2.0, MEMBERS[1:], (0, 0)), float(cycle))
        hub.context.weights.copy_(hub._outgoing[0])
        joint.grad = joint.detach() - mean
        outer.step()
        torch.testing.assert_close(hub.context.weights, joint.detach())


def worker_of(options: Streaming) -> StreamingWorker:
    worker = StreamingWorker(context_of(options, "worker-0", torch.zeros(8, dtype=torch.float64), 2), options)
    worker.handle(Started(MEMBERS), 0.0)
    return worker


def arrive(worker: StreamingWorker, shard: int, cycle: int) -> list[Effect]:
    values = torch.ones(4, dtype=torch.float64)
    fragment = Fragment(shard, cycle, 1.0, values)
    return worker.handle(Broadcasted(tag_of(shard, cycle).stream, MEMBERS, fragment), float(worker.steps))


def test_a_worker_mixes_in_what_arrives_but_not_what_it_began_with() -> None:
    worker = worker_of(Streaming(phases=1, shards=2, tau=4, mix=0.25))
    assert not any(isinstance(effect, Blend) for effect in arrive(worker, 1, 0))
    (blend,) = [effect for effect in arrive(worker, 1, 1) if isinstance(effect, Blend)]
    assert (blend.rate, blend.start) == (0.75, 4)


def test_fragments_take_turns() -> None:
    worker = worker_of(Streaming(phases=2, shards=2, tau=4))
    given: list[tuple[int, int]] = []
    cycles = [0, 0]
    for step in range(13):
        for shard in range(2):
            if shard not in worker._awaited:  # the next fragment arrives at once
                effects = arrive(worker, shard, cycles[shard])
                cycles[shard] += 1
                given += [(step, shard) for effect in effects if isinstance(effect, Reduce)]
        effects = worker.handle(GradientReady(torch.zeros(0), 1.0, 1, 1.0), float(step))
        given += [(step + 1, effect.tag.stream.shard) for effect in effects if isinstance(effect, Reduce)]
    assert [shard for _, shard in given[-4:]] == [0, 1, 0, 1]
    gaps = [later - earlier for (earlier, _), (later, _) in zip(given[-4:], given[-3:], strict=False)]
    assert gaps == [2, 2, 2]


@pytest.mark.parametrize("wrong", [{"tau": 0}, {"mix": 1.0}, {"outer_rate": 0.0}, {"outer_momentum": 1.0}])
def test_settings_that_make_no_sense_are_refused(wrong: dict[str, float]) -> None:
    with pytest.raises(UsageError, match=next(iter(wrong))):
        Streaming(**wrong)  # type: ignore[arg-type]
