"""Emulated hosts on this machine, and a Spark cluster on them.

A host is a network namespace with its own address and one link to a switch, of a given speed. Processes on a host reach
the other hosts and nothing else.
"""

from __future__ import annotations

import os
import shutil
import socket
import subprocess
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from pathlib import Path
from tempfile import TemporaryDirectory

from tether.core.units import bytes_per_second
from tether.errors import UsageError
from tether.runtimes.spark import jvm

#: how much a link that was idle may send at once
BURST_BYTES = 256 * 1024
#: how much a link may queue, in seconds at its speed
QUEUE_SECONDS = 0.1
#: the port of a standalone master that has a host to itself
MASTER_PORT = 7077


@dataclass(frozen=True)
class Host:
    """Where processes run."""

    address: str = "127.0.0.1"
    #: what a command begins with so that it runs there
    words: tuple[str, ...] = ()


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


@contextmanager
def standalone(places: Sequence[Host], cores: int, megabytes: int) -> Iterator[str]:
    """A standalone Spark cluster: the URL of its master, on the first of these hosts; each of the others has a worker.

    It is stopped at the end. Drivers and executors bring their own interpreters and modules.
    """
    home = jvm.home()
    first, *others = places
    port = _free_port() if first == Host() else MASTER_PORT
    url = f"spark://{first.address}:{port}"
    with TemporaryDirectory(prefix="tether-standalone-") as directory, ExitStack() as cleanup:

        def start(host: Host, role: str, *words: str) -> None:
            command = [*host.words, str(home / "bin" / "spark-class"), f"org.apache.spark.deploy.{role}"]
            environment = {**os.environ, "SPARK_HOME": str(home), "SPARK_LOCAL_IP": host.address}
            process = subprocess.Popen(
                [*command, "--host", host.address, "--webui-port", "0", *words], env=environment, cwd=directory
            )
            cleanup.callback(process.wait)
            cleanup.callback(process.terminate)

        start(first, "master.Master", "--port", str(port))
        for number, host in enumerate(others):
            limits = (
                "--cores",
                str(cores),
                "--memory",
                f"{megabytes}M",
                "--work-dir",
                str(Path(directory, str(number))),
            )
            start(host, "worker.Worker", *limits, url)
        yield url


def _free_port() -> int:
    with socket.create_server(("127.0.0.1", 0)) as server:
        port: int = server.getsockname()[1]
        return port


def _ip(words: str) -> None:
    _run(f"ip {words}")


def _run(command: str) -> None:
    done = subprocess.run(command.split(), capture_output=True, text=True, check=False)
    if done.returncode:
        raise UsageError(f"hosts cannot be emulated on this machine: {command} failed: {done.stderr.strip()}")
