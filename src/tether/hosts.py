"""Hosts on this machine: network namespaces, each with its own address and one link to a switch, as fast as asked for.

What runs on one can reach the others and nothing else. Root's rights and iproute2 are needed.
"""

from __future__ import annotations

import os
import shutil
import subprocess
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass

from tether.errors import UsageError
from tether.units import bytes_per_second

#: a link may send so much at once, of what it was idle for
BURST_BYTES = 256 * 1024
#: what a link may keep waiting, in seconds of its speed
QUEUE_SECONDS = 0.1


@dataclass(frozen=True)
class Host:
    """Where processes run."""

    address: str = "127.0.0.1"
    #: the words before a command that has to run there
    words: tuple[str, ...] = ()


@contextmanager
def hosts(count: int, link: str) -> Iterator[list[Host]]:
    """So many hosts, for a while; each sends and receives at most at the speed of its link, such as 1gbit."""
    if os.geteuid() != 0 or shutil.which("ip") is None or shutil.which("tc") is None:
        raise UsageError("hosts are made by ip and tc, as root: apt-get install iproute2")
    rate = round(bytes_per_second(link, "a link") * 8)
    switch, *names = (f"tether-{os.getpid()}-{which}" for which in ("switch", *range(count)))
    with ExitStack() as at_the_end:
        for name in (switch, *names):
            _ip(f"netns add {name}")
            at_the_end.callback(_ip, f"netns del {name}")
        _ip(f"-n {switch} link add switch up type bridge")
        for number, name in enumerate(names, 1):
            _ip(f"link add eth0 netns {name} type veth peer name port{number} netns {switch}")
            _ip(f"-n {name} address add 10.0.0.{number}/24 dev eth0")
            for place, end, more in ((name, "lo", ""), (name, "eth0", ""), (switch, f"port{number}", "master switch")):
                _ip(f"-n {place} link set {end} up {more}")
                if end != "lo":
                    shaped = f"rate {rate}bit burst {BURST_BYTES} latency {QUEUE_SECONDS}s"
                    _run(f"tc -n {place} qdisc add dev {end} root tbf {shaped}")
        yield [Host(f"10.0.0.{number}", ("ip", "netns", "exec", name)) for number, name in enumerate(names, 1)]


def _ip(words: str) -> None:
    _run(f"ip {words}")


def _run(command: str) -> None:
    done = subprocess.run(command.split(), capture_output=True, text=True, check=False)
    if done.returncode:
        raise UsageError(f"no hosts on this machine: {command}: {done.stderr.strip()}")
