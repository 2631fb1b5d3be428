"""The connection of this process to a Ray cluster."""

from __future__ import annotations

import logging
import math
import os
import signal
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

from tether.errors import UsageError, missing_extra


def import_ray() -> Any:
    """The module ray, or an error that says what to install."""
    try:
        import ray
    except ImportError:
        raise missing_extra("ray", "ray") from None
    return ray


@contextmanager
def connected(address: str | None, cpus: float) -> Iterator[Any]:
    """The module ray, connected to a cluster; what was not connected before is disconnected afterwards.

    Without an address, the cluster is the one that this program is connected to, that RAY_ADDRESS names, or that was
    started last on this machine. If there is none, one with at least `cpus` CPUs is started, and ends afterwards.
    """
    ray = import_ray()
    from ray.util.client import ray as client

    if client.is_connected() or (address or "").startswith("ray://"):
        raise UsageError(
            "workers must reach the driver, which a Ray Client outside of the cluster does not allow: run the program "
            "on a machine of the cluster, for example by 'ray job submit'"
        )
    if ray.is_initialized():
        present = ray.get_runtime_context().gcs_address
        if address not in (None, "auto", present):
            raise UsageError(
                f"this program is connected to the Ray cluster at {present}, not at {address}: leave address out"
            )
        yield ray
        return
    _init(ray, address, cpus)
    try:
        yield ray
    finally:
        ray.shutdown()


def _init(ray: Any, address: str | None, cpus: float) -> None:
    """Connect. What actors print stays in Ray's logs, and signals are handled as before."""
    handler = signal.getsignal(signal.SIGTERM)
    quiet = {"log_to_driver": False, "logging_level": logging.WARNING}
    try:
        if address is not None:
            ray.init(address, **quiet)
        else:
            try:
                ray.init("auto", **quiet)
            except ConnectionError:
                ray.init("local", num_cpus=max(os.cpu_count() or 1, math.ceil(cpus)), **quiet)
    except (ConnectionError, ValueError, RuntimeError) as error:
        raise UsageError(
            f"no Ray cluster can be reached at {address or 'this machine'}: {error}; start one with 'ray start --head'"
        ) from error
    finally:
        if threading.current_thread() is threading.main_thread():
            signal.signal(signal.SIGTERM, handler)
