"""Tide with a part of another protocol in place of its own, to measure the effect of that part."""

from __future__ import annotations

from tether.core.effects import Blend, Effect
from tether.core.events import GradientReady
from tether.core.machine import Machine, NodeContext
from tether.protocols.circulation import Circulated, is_buffers
from tether.protocols.mpca import PULL
from tether.protocols.tide import Joint, Tide, TideWorker


class PulledTide(Tide):
    """Tide whose workers are pulled towards the joint model at every step, as in MPCA SGD."""

    def machine(self, context: NodeContext) -> Machine:
        return super().machine(context) if context.node.role == "hub" else PulledWorker(context, self)


class PulledWorker(TideWorker):
    """Over the steps of a cycle, each step covers a part of the distance to the joint shard: equation 7 of MPCA SGD."""

    def _arrive(self, arrived: Circulated) -> list[Effect]:
        assert isinstance(arrived, Joint)
        if self.running and not is_buffers(self._cut[arrived.shard], self.context):
            self._tau = self._mean_new(arrived)
            self._base[arrived.shard], self._counted[arrived.shard] = arrived.values, arrived.steps
        return []

    def _mean_new(self, arrived: Joint) -> float:
        new = [count - self._counted[arrived.shard].get(name, 0) for name, count in arrived.steps.items()]
        return max(1.0, sum(new) / len(new)) if new else 1.0

    def __init__(self, context: NodeContext, options: Tide) -> None:
        super().__init__(context, options)
        self._tau = 1.0

    def _step(self, ready: GradientReady, now: float) -> list[Effect]:
        step, *rest = super()._step(ready, now)
        alpha = 1 - (1 - PULL) ** (1 / self._tau)
        pulls = [
            Blend(target, alpha, part.start)
            for target, part in zip(self._received, self._cut, strict=True)
            if target is not None and not is_buffers(part, self.context)
        ]
        # a contribution is taken in an event of its own, after all of these
        return [step, *pulls, *rest]
