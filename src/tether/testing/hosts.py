"""Emulated hosts on this machine, to run and to disturb what runs on several.

A host is a network namespace with its own address and one link to a switch, of a given speed. Processes on a host reach
the other hosts and nothing else.
"""

from __future__ import annotations

import json
import os
import shutil
import subprocess
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass

from tether.core.units import bytes_per_second
from tether.errors import UsageError

#: how much a link that was idle may send at once
BURST_BYTES = 256 * 1024
#: how much a link may queue, in seconds at its speed
QUEUE_SECONDS = 0.1


@dataclass(frozen=True)
class Host:
    """Where processes run."""

    address: str = "127.0.0.1"
    #: what a command begins with so that it runs there
    words: tuple[str, ...] = ()

    def set_link(self, *, up: bool) -> None:
        """Plug in or pull out the cable of an emulated host."""
        _ip(f"-n {self.words[-1]} link set eth0 {'up' if up else 'down'}")

    def bytes_sent_and_received(self) -> tuple[int, int]:
        """What the interface of an emulated host has counted, headers of packets included."""
        (found,) = json.loads(_ip(f"-n {self.words[-1]} -s -j link show eth0"))
        return found["stats64"]["tx"]["bytes"], found["stats64"]["rx"]["bytes"]


@contextmanager
def hosts(count: int, link: str) -> Iterator[list[Host]]:
    """Emulated hosts, removed at the end; each sends and receives at most at the speed of its link, such as 1gbit."""
    if os.geteuid() != 0 or shutil.which("ip") is None or shutil.which("tc") is None:
        raise UsageError(
            "emulated hosts need root and the programs ip and tc: run this as root, after apt-get install iproute2"
        )
    rate = round(bytes_per_second(link, "a link") * 8)
    shaped = f"rate {rate}bit burst {BURST_BYTES} latency {QUEUE_SECONDS}s"
    switch, *names = (f"tether-{os.getpid()}-{which}" for which in ("switch", *range(count)))
    with ExitStack() as cleanup:
        for name in (switch, *names):
            _ip(f"netns add {name}")
            cleanup.callback(_ip, f"netns del {name}")
        _ip(f"-n {switch} link add switch up type bridge")
        for number, name in enumerate(names, 1):
            _ip(f"link add eth0 netns {name} type veth peer name port{number} netns {switch}")
            _ip(f"-n {name} address add 10.0.0.{number}/24 dev eth0")
            _ip(f"-n {name} link set lo up")
            _ip(f"-n {name} link set eth0 up")
            _ip(f"-n {switch} link set port{number} up master switch")
            for place, end in ((name, "eth0"), (switch, f"port{number}")):
                _run(f"tc -n {place} qdisc add dev {end} root tbf {shaped}")
        yield [Host(f"10.0.0.{number}", ("ip", "netns", "exec", name)) for number, name in enumerate(names, 1)]


def _ip(words: str) -> str:
    return _run(f"ip {words}")


def _run(command: str) -> str:
    done = subprocess.run(command.split(), capture_output=True, text=True, check=False)
    if done.returncode:
        raise UsageError(f"hosts cannot be emulated on this machine: {command} failed: {done.stderr.strip()}")
    return done.stdout
