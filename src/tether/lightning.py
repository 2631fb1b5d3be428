"""Lightning's Trainer under `tether launch`: give it a `TetherCallback`."""

from __future__ import annotations

from typing import Any

from lightning.pytorch import Callback

from tether.errors import UsageError
from tether.loops import Loop, join
from tether.protocols import Options


class TetherCallback(Callback):  # type: ignore[misc]
    """Ties a LightningModule to those of the other processes, from the first step to the last.

    In a script that was started alone, nothing changes.
    """

    def __init__(self, protocol: Options | None = None) -> None:
        """`protocol`: how the processes agree, unless the command line says it."""
        self._protocol = protocol
        self._loop: Loop | None = None

    def on_train_start(self, trainer: Any, pl_module: Any) -> None:
        if len(trainer.optimizers) != 1:
            raise UsageError(
                f"the module has {len(trainer.optimizers)} optimizers, and a run ties one: configure one optimizer"
            )
        schedulers = [config.scheduler for config in trainer.lr_scheduler_configs]
        scheduler = schedulers[0] if len(schedulers) == 1 else None
        self._loop = join(pl_module, trainer.optimizers[0], scheduler, self._protocol)

    def on_train_end(self, trainer: Any, pl_module: Any) -> None:
        if self._loop is not None:
            self._loop.close()
