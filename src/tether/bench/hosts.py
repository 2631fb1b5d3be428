"""A standalone Spark cluster on this machine or on emulated hosts."""

from __future__ import annotations

import os
import socket
import subprocess
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager
from pathlib import Path
from tempfile import TemporaryDirectory

from tether.runtimes.spark import jvm
from tether.testing.hosts import Host

#: the port of a standalone master that has a host to itself
MASTER_PORT = 7077


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
