"""Plain machines: workers join a run by an address and a key, come and go, and are refused if something differs."""

from __future__ import annotations

import hashlib
import hmac
import json
import os
import random
import re
import shlex
import shutil
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import suppress
from pathlib import Path

import msgspec
import pytest
import zmq

import tether
from mutate import mutations
from tether.analysis.live import MetricsTail, RunView
from tether.cli import slurm
from tether.core.message import Message
from tether.core.wire import Codec
from tether.errors import RunError, UsageError, WireError
from tether.runtimes.cluster import make_key, parse_address, read_key, watch
from tether.runtimes.hosts import own_address
from tether.runtimes.process import control
from tether.runtimes.process.handshake import Keys
from tether.runtimes.process.link import Inbox, Outbox, enveloped
from tether.testing.hosts import Host, hosts

TASK = """
import torch
import tether

class Line(tether.Task):
    batch_size = 8
    epochs = {epochs}
    def model(self): return torch.nn.Linear(4, {outputs})
    def optimizer(self, model): return torch.optim.SGD(model.parameters(), lr=0.01)
    def train_data(self):
        x = torch.randn(256, 4, generator=torch.Generator().manual_seed(0))
        return torch.utils.data.TensorDataset(x, x.sum(1, keepdim=True))
    def loss(self, model, batch): return (model(batch[0]) - batch[1]).square().mean()
    def evaluate(self, model):
        x = torch.eye(4)
        return {{"error": float((model(x) - 1).square().mean())}}
"""

Start = Callable[..., "subprocess.Popen[str]"]


@pytest.fixture
def start(tmp_path: Path) -> Iterator[Start]:
    """Starts the program in a directory of its own; all are killed at the end."""
    started = []

    def run(*words: str, below: str = "", on: Host | None = None) -> subprocess.Popen[str]:
        directory = tmp_path / below
        command = [*(on.words if on else ()), sys.executable, "-m", "tether", *words]
        started.append(subprocess.Popen(command, cwd=directory, stderr=subprocess.PIPE, text=True))
        return started[-1]

    yield run
    for process in started:
        process.kill()
        process.communicate()


def free_address() -> str:
    with socket.create_server(("127.0.0.1", 0)) as server:
        return f"127.0.0.1:{server.getsockname()[1]}"


def wait_for(process: subprocess.Popen[str], text: str) -> None:
    assert process.stderr is not None
    lines = []
    for line in process.stderr:
        lines.append(line)
        if text in line:
            return
    raise AssertionError(f"no {text!r} in {''.join(lines)}")


def test_a_worker_leaves_another_is_killed_and_who_joins_later_trains_to_the_end(start: Start, tmp_path: Path) -> None:
    make_key(tmp_path / "key")
    (tmp_path / "line.py").write_text(TASK.format(epochs=100000, outputs=1))
    address = free_address()
    words = ("--on", "cluster", "--listen", address, "--key", "key", "--workers", "2:4")
    words += ("--epochs", "1000000", "--evaluate-every", "1000000")
    driver = start("train", "line.py:Line", "--protocol", "elastic", *words, "--run", "run")
    wait_for(driver, "waiting for 2 workers")
    leaving, killed, staying = (start("worker", address, "--key", "key") for _ in range(3))
    wait_for(driver, "training")
    leaving.terminate()
    wait_for(driver, "has left")
    killed.kill()
    wait_for(driver, "has died")
    late = start("worker", address, "--key", "key")
    wait_for(driver, "has joined")
    assert leaving.wait(30) == 0
    driver.send_signal(signal.SIGINT)
    driver.communicate(timeout=90)
    assert driver.returncode == 130
    assert late.wait(30) == staying.wait(30) == 0


def test_a_worker_with_another_key_or_other_code_is_refused_and_the_run_goes_on(start: Start, tmp_path: Path) -> None:
    for name, outputs in (("good", 1), ("bad", 2)):
        (tmp_path / name).mkdir()
        (tmp_path / name / "line.py").write_text(TASK.format(epochs=1, outputs=outputs))
    make_key(tmp_path / "key")
    make_key(tmp_path / "other")
    address, key = free_address(), str(tmp_path / "key")
    words = ("--on", "cluster", "--listen", address, "--key", key, "--workers", "1", "--protocol", "single")
    driver = start("train", "line.py:Line", *words, "--run", "run", below="good")
    wait_for(driver, "waiting for 1 workers")
    stranger = start("worker", address, "--key", str(tmp_path / "other"))
    assert "does not accept this worker's key" in stranger.communicate(timeout=90)[1]
    differing = start("worker", address, "--key", key, below="bad")
    assert "the code of task line.py:Line differs" in differing.communicate(timeout=90)[1]
    assert differing.returncode == 2
    fitting = start("worker", address, "--key", key, below="good")
    driver.communicate(timeout=90)
    assert driver.returncode == 0
    assert fitting.wait(30) == 0


def test_keys_are_private_and_never_overwritten(tmp_path: Path) -> None:
    path = tmp_path / "key"
    make_key(path)
    assert path.stat().st_mode & 0o777 == 0o600
    assert len(read_key(path).secret) == 32
    with pytest.raises(UsageError, match="exists already"):
        make_key(path)
    path.chmod(0o644)
    with pytest.raises(UsageError, match="chmod 600"):
        read_key(path)
    path.chmod(0o600)
    path.write_text("abc")
    with pytest.raises(UsageError, match="64 hexadecimal digits"):
        read_key(path)
    with pytest.raises(UsageError, match="tether keys"):
        read_key(tmp_path / "none")


@pytest.mark.parametrize("text", ["10.0.0.1", ":7000", "10.0.0.1:", "10.0.0.1:70000", "10.0.0.1:x"])
def test_what_is_not_an_address_is_refused(text: str) -> None:
    with pytest.raises(UsageError, match="HOST:PORT"):
        parse_address(text)


def test_a_cluster_listens_at_an_address_that_workers_can_reach() -> None:
    with pytest.raises(UsageError, match=r"not at 0\.0\.0\.0"):
        tether.Cluster("0.0.0.0:7000", "key")


# ---- hosts of their own ---------------------------------------------------------------------------------------------


@pytest.mark.skipif(
    os.geteuid() != 0 or not (shutil.which("ip") and shutil.which("tc")),
    reason="emulated hosts need root and the programs ip and tc: apt-get install iproute2",
)
def test_a_new_user_types_the_document_into_three_hosts_and_has_a_trained_model(start: Start, tmp_path: Path) -> None:
    """The addresses of emulated hosts are those of the document. They share a disk, so each has a folder of its own."""
    document = (Path(__file__).parents[1] / "docs" / "cluster.md").read_text()
    make, copy, train, work = re.findall(r"^ {3}((?:tether|scp) .*)$", document, re.MULTILINE)[:4]
    with hosts(3, "100mbit") as places:
        for host in places:
            (tmp_path / host.address).mkdir()

        def type_in(host: Host, line: str) -> subprocess.Popen[str]:
            return start(*shlex.split(line)[1:], below=host.address, on=host)

        assert type_in(places[0], make).wait(60) == 0
        _, _, key, _ = shlex.split(copy)
        for host in places[1:]:
            shutil.copy2(tmp_path / places[0].address / key, tmp_path / host.address)
        driver = type_in(places[0], train)
        workers = [type_in(host, work) for host in places]
        assert [worker.wait(120) for worker in workers] == [0, 0, 0]
        driver.communicate(timeout=60)
        assert driver.returncode == 0
        (run,) = (tmp_path / places[0].address / "runs").iterdir()
        result = json.loads((run / "run.json").read_text())["result"]
        assert result["metrics"]["error"] < 0.06
        assert places[1].bytes_sent_and_received()[0] > 100_000, "the model's changes go over its link"


# ---- workers that the driver starts ----------------------------------------------------------------------------------


def test_lists_of_nodes_are_read_as_slurm_writes_them() -> None:
    assert slurm.expand("node7") == ["node7"]
    assert slurm.expand("node[1-3,7],login") == ["node1", "node2", "node3", "node7", "login"]
    assert slurm.expand("n[08-11]") == ["n08", "n09", "n10", "n11"]
    assert slurm.expand("rack[0-1]n[1-2].local") == ["rack0n1.local", "rack0n2.local", "rack1n1.local", "rack1n2.local"]


@pytest.mark.parametrize(
    "text", ["n[1-", "n[1-3", "n1-3]", "n[3-1]", "n[a-c]", "n[]", "a,,b", "a b", "n[[1]]", "n[0-9999999]"]
)
def test_what_is_not_a_list_of_nodes_is_refused(text: str) -> None:
    with pytest.raises(UsageError, match="as Slurm writes it"):
        slurm.expand(text)


def test_a_job_of_slurm_knows_its_nodes_and_its_place() -> None:
    batch = {"SLURM_JOB_ID": "4711", "SLURM_JOB_NODELIST": "n[1-2]", "SLURM_NTASKS": "2", "SLURM_PROCID": "0"}
    found = slurm.allocation(batch)
    assert (found.hosts, found.rank, found.tasks) == (("n1", "n2"), 0, 1), "the script of a batch job is alone"
    step = batch | {"SLURM_STEP_ID": "3", "SLURM_STEP_NODELIST": "n2", "SLURM_PROCID": "1", "SLURM_STEP_NUM_TASKS": "2"}
    other = slurm.allocation(step)
    assert (other.hosts, other.rank, other.tasks) == (("n2",), 1, 2)
    assert other.port != found.port, "steps of a job may run side by side"
    with pytest.raises(UsageError, match="not a job of Slurm"):
        slurm.allocation({})
    with pytest.raises(UsageError, match="SLURM_PROCID is 'x'"):
        slurm.allocation(batch | {"SLURM_PROCID": "x"})


def test_processes_that_srun_has_started_train_together(
    start: Start, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    make_key(tmp_path / "key")
    (tmp_path / "line.py").write_text(TASK.format(epochs=2, outputs=1))
    job = {"SLURM_JOB_ID": str(os.getpid()), "SLURM_STEP_NODELIST": "localhost", "SLURM_STEP_NUM_TASKS": "2"}
    processes = []
    for rank in ("1", "0"):
        for name, value in (job | {"SLURM_PROCID": rank}).items():
            monkeypatch.setenv(name, value)
        words = ("--hosts", "slurm", "--key", "key", "--protocol", "elastic", "--run", "run")
        processes.append(start("train", "line.py:Line", *words))
    for process in processes:
        said = process.communicate(timeout=120)[1]
        assert process.returncode == 0, said
    assert json.loads((tmp_path / "run" / "run.json").read_text())["result"]["workers"] == 2


def test_a_host_on_which_nothing_starts_ends_the_run_with_what_it_printed(start: Start) -> None:
    launched = start("launch", "--hosts", "nowhere", "digits", "--listen", "127.0.0.1:0", "--ssh", "echo no way to")
    said = launched.communicate(timeout=120)[1]
    assert launched.returncode == 1
    assert "no worker could be started on nowhere: no way to nowhere" in said


def test_a_host_whose_name_is_not_known_is_refused() -> None:
    with pytest.raises(UsageError, match=r"no way to host no\.such\.host\.invalid is known"):
        own_address(["localhost", "me@no.such.host.invalid"])
    assert own_address(["localhost"]) == "127.0.0.1"


@pytest.fixture
def ssh(tmp_path: Path) -> Iterator[Callable[[Host], str]]:
    """Starts sshd on a host; the command that reaches it."""
    (tmp_path / "ssh").mkdir()
    for name in ("server", "client"):
        subprocess.run(["ssh-keygen", "-q", "-t", "ed25519", "-N", "", "-f", tmp_path / "ssh" / name], check=True)
    Path("/run/sshd").mkdir(exist_ok=True)
    configuration = tmp_path / "ssh" / "config"
    folder = tmp_path / "ssh"
    configuration.write_text(
        f"HostKey {folder}/server\nAuthorizedKeysFile {folder}/client.pub\nPidFile none\nStrictModes no\n"
        f"PasswordAuthentication no\nSetEnv PYTHONPATH={os.pathsep.join(filter(None, sys.path))}\n"
    )
    servers = []

    def serve(host: Host) -> str:
        servers.append(subprocess.Popen([*host.words, shutil.which("sshd") or "", "-D", "-e", "-f", configuration]))
        return (
            f"ssh -F none -i {folder}/client -o UserKnownHostsFile={folder}/known -o StrictHostKeyChecking=no -o "
            "BatchMode=yes -o ConnectionAttempts=20"
        )

    yield serve
    for server in servers:
        server.terminate()
        server.wait()


@pytest.mark.skipif(
    os.geteuid() != 0 or not (shutil.which("ip") and shutil.which("tc") and shutil.which("sshd")),
    reason="hosts with sshd need root and the programs ip, tc and sshd: apt-get install iproute2 openssh-server",
)
def test_workers_are_started_by_ssh_and_again_when_they_are_killed(
    start: Start, ssh: Callable[[Host], str], tmp_path: Path
) -> None:
    with hosts(3, "100mbit") as (first, *others):
        command = [ssh(host) for host in others].pop()
        names = ",".join(f"root@{host.address}" for host in others)
        goal = ("--epochs", "1000000", "--evaluate-every", "1000000", "--protocol", "elastic")
        driver = start("launch", "--hosts", names, "digits", *goal, "--ssh", command, "--run", "run", on=first)
        wait_for(driver, "training")
        trained = subprocess.run(
            ["ip", "netns", "pids", others[0].words[-1]], check=True, capture_output=True, text=True
        ).stdout.split()
        (worker,) = [
            pid
            for pid in map(int, trained)
            if b"\0worker\0" in (line := Path(f"/proc/{pid}/cmdline").read_bytes()) and b"--key\0-" in line
        ]
        os.kill(worker, signal.SIGKILL)
        wait_for(driver, "has joined")
        assert others[1].bytes_sent_and_received()[0] > 50_000
        driver.send_signal(signal.SIGINT)
        driver.communicate(timeout=90)
        assert driver.returncode == 130
        assert "the run is over" in (tmp_path / "run" / "logs" / "host-1.log").read_text()


# ---- who watches, and who must not get in ---------------------------------------------------------------------------


def listening_ports(pid: int) -> list[tuple[str, int]]:
    """The addresses at which a process listens by TCP."""
    inodes = {link.readlink().name for link in Path(f"/proc/{pid}/fd").iterdir() if link.is_symlink()}
    found = []
    for line in Path("/proc/net/tcp").read_text().splitlines()[1:]:
        fields = line.split()
        if fields[3] == "0A" and f"socket:[{fields[9]}]" in inodes:
            host, port = fields[1].split(":")
            found.append((socket.inet_ntoa(bytes.fromhex(host)[::-1]), int(port, 16)))
    return found


def memory_bytes(pid: int) -> int:
    return int(Path(f"/proc/{pid}/statm").read_text().split()[1]) * os.sysconf("SC_PAGE_SIZE")


def descendants(pid: int) -> list[int]:
    children = [int(child) for child in Path(f"/proc/{pid}/task/{pid}/children").read_text().split()]
    return [pid, *(found for child in children for found in descendants(child))]


def attack(address: tuple[str, int], text: bytes) -> None:
    """Send something to a port and wait until the other end has closed the connection or nothing more comes."""
    with suppress(OSError), socket.create_connection(address, 5) as connection:
        connection.settimeout(0.02)
        with suppress(TimeoutError):
            connection.recv(100)
        connection.sendall(text)
        with suppress(TimeoutError):
            connection.recv(100)


def malformed(rng: random.Random, stranger: Keys) -> bytes:
    """What may come from who does not hold the key: noise, a proof with another key, and false sizes."""
    nonce = rng.randbytes(32)
    signed = hmac.digest(stranger.derive("lifeline"), b"message" + nonce + nonce + b"hello", hashlib.sha256)
    proof = nonce + signed + (5).to_bytes(4, "big") + b"hello"
    greeting = b"\xff" + bytes(8) + b"\x7f\x03\x01CURVE" + bytes(15) + b"\x00" + bytes(31)
    return rng.choice(
        [
            rng.randbytes(rng.randint(1, 3000)),
            proof,
            proof[: rng.randrange(len(proof))],
            nonce + signed + b"\xff\xff\xff\xff" + rng.randbytes(2000),
            greeting,
            greeting + b"\x06" + (1 << 40).to_bytes(8, "big") + rng.randbytes(500),
            greeting + b"\x04\x19\x05READY" + rng.randbytes(19),
            greeting + b"\x04\xc8\x05HELLO" + rng.randbytes(194),
        ]
    )


def test_nothing_without_the_key_gets_in_and_who_has_it_may_watch(
    start: Start, tmp_path: Path, request: pytest.FixtureRequest, capfd: pytest.CaptureFixture[str]
) -> None:
    """`--mutations 10000` sends as many."""
    count = int(request.config.getoption("--mutations"))
    make_key(tmp_path / "key")
    make_key(tmp_path / "other")
    address = free_address()
    words = ("--on", "cluster", "--listen", address, "--key", "key", "--workers", "1", "--protocol", "elastic")
    driver = start("train", "digits", *words, "--run", "run", "--epochs", "1000000", "--evaluate-every", "1000000")
    wait_for(driver, "waiting for 1 workers")
    worker = start("worker", address, "--key", "key")
    wait_for(driver, "training")
    processes = [*descendants(driver.pid), worker.pid]
    ports = [port for pid in processes for port in listening_ports(pid)]
    assert len(ports) == 4, "the driver's two, the hub's and the worker's"
    rng = random.Random(5)
    stranger = read_key(tmp_path / "other")
    for number in range(20):  # caches fill
        attack(ports[number % 4], malformed(rng, stranger))
    before = sum(map(memory_bytes, processes))
    for number in range(count):
        attack(ports[number % 4], malformed(rng, stranger))
    grown = sum(map(memory_bytes, processes)) - before
    print(f"{count} malformed messages, memory grew by {grown / 1e6:.1f} MB")
    assert grown < 64 << 20
    assert driver.poll() is None and worker.poll() is None
    view = RunView("run")
    rows = MetricsTail(tmp_path / "run").new()
    refused = [row["text"] for row in rows if "did not prove" in row.get("text", "")]
    assert refused, "they are counted"
    seen = next(found for found in watch(parse_address(address), read_key(tmp_path / "key")) if found)
    view.take(seen)
    assert {row["node"] for row in seen if row["kind"] == "progress"} >= {"worker-0"}
    with pytest.raises(RunError, match="does not accept this key"):
        next(watch(parse_address(address), stranger))
    assert view.rate("worker-0") > 0
    steps = max(row["steps"] for row in rows if row["kind"] == "progress")
    tail = MetricsTail(tmp_path / "run")
    while max(row.get("steps", 0) for row in tail.new() or [{}]) <= steps:
        assert driver.poll() is None
        time.sleep(0.05)
    driver.send_signal(signal.SIGINT)
    driver.communicate(timeout=90)
    assert worker.wait(30) == 0


def test_malformed_messages_of_who_has_the_key_are_refused_and_others_arrive_in_order(
    tmp_path: Path, request: pytest.FixtureRequest
) -> None:
    """`--mutations 10000` sends as many."""
    count = int(request.config.getoption("--mutations"))
    keys, context, rng = Keys.make(), zmq.Context(), random.Random(7)
    authenticator = keys.start_authenticator(context)
    inbox = Inbox(context, tmp_path, "hub", [control.Note], keys=keys, host="127.0.0.1", frame_bytes_max=1 << 20)
    sender = Outbox(context, tmp_path / "elsewhere", "worker-0", keys=keys)
    sender.addresses["hub"] = inbox.address
    raw = context.socket(zmq.PUSH)
    keys.secure(raw, server=False)
    raw.connect(inbox.address)
    raw.setsockopt(zmq.RECONNECT_IVL, 1)
    whole, oversized = (
        [bytes(frame) for frame in enveloped(Codec([Message]), "worker-0", control.Note(text), lambda frame: None)]
        for text in ("aaaaaaaa", "oversized")
    )
    refused, arrived = 0, []
    try:
        for number in range(count):
            match number % 20:
                case 19:
                    frames = [*oversized, bytes(2 << 20)]  # too large: the connection is closed
                case even if even % 2:
                    frames = [rng.randbytes(rng.randint(0, 200)) for _ in range(rng.randint(1, 4))]
                case four if four % 4:
                    frames = [mutations(frame, rng) for frame in whole]
                case _:
                    frames = [whole[0], msgspec.msgpack.encode({"type": "Begin", "members": 3, "addresses": []})]
            raw.send_multipart(frames)
            sender.send("hub", control.Note(str(number)))
        while inbox.socket.poll(3000):
            try:
                _, message = inbox.receive()
                arrived.append(message.text)
            except WireError:
                refused += 1
        assert [text for text in arrived if text.isdigit()] == [str(number) for number in range(count)]
        assert "oversized" not in arrived, "what is too large is not delivered in part"
        print(f"{count} malformed messages, {refused} refused, {len(arrived) - count} well-formed nevertheless")
        assert refused > count / 2
    finally:
        sender.close()
        raw.close(linger=0)
        inbox.close()
        authenticator.stop()
        context.destroy(linger=0)
