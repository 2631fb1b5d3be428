"""The HuggingFace Trainer under `tether launch`: give it a `TetherCallback`."""

from __future__ import annotations

from typing import Any

from transformers import TrainerCallback

from tether.loops import Loop, is_main, join, rank
from tether.protocols import Options


class TetherCallback(TrainerCallback):  # type: ignore[misc]
    """Ties the Trainer's model to those of the other processes, from the first step to the last.

    Every process draws the data in an order of its own, and only that of rank 0 saves checkpoints of the Trainer. In a
    script that was started alone, nothing changes.
    """

    def __init__(self, protocol: Options | None = None) -> None:
        """`protocol`: how the processes agree, unless the command line says it."""
        self._protocol = protocol
        self._loop: Loop | None = None

    def on_train_begin(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        if not is_main():
            args.save_strategy = "no"
            # the Trainer seeds its sampler by itself, in every process alike
            sampler: Any = getattr(kwargs["train_dataloader"].batch_sampler, "sampler", None)
            if hasattr(sampler, "initial_seed"):
                sampler.initial_seed += rank() * 7919
        self._loop = join(kwargs["model"], kwargs["optimizer"], kwargs["lr_scheduler"], self._protocol)

    def on_train_end(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        if self._loop is not None:
            self._loop.close()
