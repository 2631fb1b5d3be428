"""The random generators that a task's own code may draw from: the global ones of Python, numpy and torch."""

from __future__ import annotations

import random
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import numpy as np
import torch


def seed_all(seed: int) -> None:
    """Seed all of them."""
    torch.manual_seed(seed)
    np.random.seed(seed % 2**32)
    random.seed(seed)


def random_state() -> dict[str, Any]:
    """Their states, as tensors and plain values."""
    version, numbers, gauss = random.getstate()
    numpy: dict[str, Any] = dict(np.random.get_state(legacy=False))
    key = torch.from_numpy(numpy["state"]["key"].astype(np.int64))
    return {
        "python": (version, torch.tensor(numbers), gauss),
        "numpy": {**numpy, "state": {"key": key, "pos": int(numpy["state"]["pos"])}},
        "torch": torch.get_rng_state(),
    }


def restore_random(state: dict[str, Any]) -> None:
    """Restore their states, if `state` has them: most workers of a simulated run have no generators of their own."""
    if "python" not in state:
        return
    version, numbers, gauss = state["python"]
    random.setstate((version, tuple(numbers.tolist()), gauss))
    numpy = state["numpy"]
    key = numpy["state"]["key"].numpy().astype(np.uint32)
    np.random.set_state({**numpy, "state": {**numpy["state"], "key": key}})
    torch.set_rng_state(state["torch"].clone())


@contextmanager
def randomness_kept() -> Iterator[None]:
    """Restore all of them at the end."""
    python, numpy = random.getstate(), np.random.get_state()
    try:
        with torch.random.fork_rng(devices=()):
            yield
    finally:
        random.setstate(python)
        np.random.set_state(numpy)
