"""Hosts made of network namespaces: they reach each other at the speed of their links, and nothing else."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys

import pytest

from tether.errors import UsageError
from tether.testing.hosts import Host, hosts

MEGABYTES = 4
SERVER = """
import socket
server = socket.create_server(("0.0.0.0", 9000))
print("listens", flush=True)
connection, _ = server.accept()
print(sum(len(part) for part in iter(lambda: connection.recv(1 << 20), b"")))
"""
CLIENT = f"""
import socket, time
begun = time.monotonic()
with socket.create_connection(("10.0.0.1", 9000)) as connection:
    connection.sendall(bytes({MEGABYTES} * 10**6))
    connection.shutdown(socket.SHUT_WR)
    connection.recv(1)
print(time.monotonic() - begun)
"""
OUTSIDE = """
import socket
try:
    socket.create_connection(("192.0.2.1", 9000), 1)
except OSError as error:
    print(error)
"""


def run(host: Host, code: str) -> str:
    return subprocess.run(
        [*host.words, sys.executable, "-c", code], check=True, capture_output=True, text=True, timeout=60
    ).stdout


@pytest.mark.skipif(
    os.geteuid() != 0 or not (shutil.which("ip") and shutil.which("tc")),
    reason="emulated hosts need root and the programs ip and tc: apt-get install iproute2",
)
def test_hosts_reach_each_other_at_the_speed_of_their_links_and_nothing_else() -> None:
    with hosts(2, "80mbit") as (one, other):
        with subprocess.Popen([*one.words, sys.executable, "-c", SERVER], stdout=subprocess.PIPE, text=True) as server:
            assert server.stdout is not None and server.stdout.readline() == "listens\n"
            seconds = float(run(other, CLIENT))
            assert int(server.stdout.read()) == MEGABYTES * 10**6
        assert seconds > 0.8 * MEGABYTES / 10, "no link is faster than it should be"
        assert "unreachable" in run(other, OUTSIDE)
        name = other.words[-1]
        assert name in subprocess.run(["ip", "netns"], check=True, capture_output=True, text=True).stdout
    assert name not in subprocess.run(["ip", "netns"], check=True, capture_output=True, text=True).stdout


def test_who_is_not_root_is_told(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(os, "geteuid", lambda: 1000)
    with pytest.raises(UsageError, match="as root, after apt-get install iproute2"), hosts(2, "1gbit"):
        pass
