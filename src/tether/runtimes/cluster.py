"""Workers on plain machines: the driver listens, and a worker joins by `tether worker HOST:PORT --key FILE`.

People start these workers, or `hosts` does so by ssh.
The driver and the hub are on one machine. A worker greets on its lifeline, proves that it holds the key, and is told
its node; the plan follows on an encrypted socket. All else is as in every run across machines: see `process/agent` and
`process/agents`. By default the plan comes as plain values and names a task that the worker's machine has. Only a
worker that was started with `--accept-code` unpickles a task, from a driver that holds the key.
"""

from __future__ import annotations

import math
import os
import secrets
import selectors
import shutil
import signal
import socket
import sys
import tempfile
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, suppress
from dataclasses import dataclass, replace
from pathlib import Path
from types import FrameType
from typing import IO, Any

import cloudpickle
import msgspec
import torch
import zmq
from torch import Tensor

from tether.core.machine import Node
from tether.core.message import Message
from tether.errors import RunError, UsageError, WireError
from tether.runtimes.base import Observer, Outcome, Plan, check_count, check_source
from tether.runtimes.hosts import HostStarter, own_address
from tether.runtimes.process.agent import (
    GREETING_SECONDS,
    LIFELINE,
    Answer,
    Assignment,
    Lifeline,
    Refusal,
    close_after_silence,
    decode,
    greet,
    host_nodes,
)
from tether.runtimes.process.agents import Agent, AgentLauncher, check_apart, launchers
from tether.runtimes.process.driver import Driver, check_processes
from tether.runtimes.process.handshake import AuthenticatedConnection, Keys, authenticate
from tether.runtimes.process.link import Inbox, Outbox, is_power_of_ten
from tether.runtimes.process.liveness import Watchdog
from tether.runtimes.process.spec import NodeSpec

#: changes with everything that driver and workers send each other
WIRE_VERSION = 2
#: a key file holds this many bytes in hexadecimal digits
KEY_BYTES = 32
#: the longest reason that a worker can give for leaving
REASON_BYTES_MAX = 1000
#: how a worker begins its reason if it finds that its code or model is another
REFUSED = "is refused: "
#: how often who watches the run is sent new rows
SHOW_SECONDS = 0.5
#: how long a worker waits before it tries to reach the driver again
RETRY_SECONDS = 0.5


# ---- keys -----------------------------------------------------------------------------------------------------------


def make_key(path: Path) -> None:
    """Write a new key to a file that only its owner can read."""
    try:
        descriptor = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600)
    except FileExistsError:
        raise UsageError(f"{path} exists already: remove it first, or name another file") from None
    with os.fdopen(descriptor, "w") as file:
        file.write(secrets.token_hex(KEY_BYTES) + "\n")


def read_key(path: Path) -> Keys:
    """The key in a file that `make_key` has written."""
    try:
        keys = parse_key(path.read_text(errors="replace"), str(path))
    except FileNotFoundError:
        raise UsageError(f"there is no key {path}: make one with 'tether keys {path}', or copy the driver's") from None
    except OSError as error:
        raise UsageError(f"the key {path} cannot be read: {error.strerror}") from None
    if path.stat().st_mode & 0o077:
        raise UsageError(f"others can read the key {path}: run chmod 600 {path}")
    return keys


def parse_key(text: str, source: str) -> Keys:
    """The key in a text; `source` is where it came from."""
    try:
        secret = bytes.fromhex(text.strip())
    except ValueError:
        secret = b""
    if len(secret) != KEY_BYTES:
        raise UsageError(
            f"{source} is not a key: it must hold {2 * KEY_BYTES} hexadecimal digits, as 'tether keys' writes"
        )
    return Keys(secret)


def parse_address(text: str) -> tuple[str, int]:
    """The host and port in HOST:PORT."""
    host, colon, port = text.rpartition(":")
    if not (colon and host and port.isdecimal() and int(port) < 1 << 16):
        raise UsageError(f"{text!r} is not an address: write HOST:PORT, such as 10.0.0.1:7000")
    return host, int(port)


# ---- the runtime ----------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Cluster:
    """Where to run: workers on other machines that join by `tether worker`, and the hub on this one."""

    #: HOST:PORT at which workers reach this machine. With `hosts`, the default is a free port at the address that they
    #: see of it
    listen: str | None = None
    #: the file that holds the key. With `hosts`, the default is a key that only this run has
    key: str | None = None
    #: the run begins when this many workers have joined. 0: as many as there are `hosts`, or else 2
    workers: int = 0
    #: at most this many workers take part at a time; `workers` unless given
    workers_max: int | None = None
    #: encrypt what is sent. Without it, who can read the network can also join the run: only for trusted networks
    encrypt: bool = True
    #: intra-operation threads of torch in each worker
    threads: int = 1
    #: how often a run that has lost its hub or all its workers resumes by itself from its last checkpoint
    restarts: int = 3
    #: a worker that has not responded or made progress for this long is given up
    hung_seconds: float = 15.0
    #: hosts on which workers are started by ssh, a worker for each; "localhost" needs no ssh. Others may still join
    hosts: Sequence[str] = ()
    #: the command that runs another command on a host, such as "ssh -p 2222 -l me"
    ssh: str = "ssh -T -o BatchMode=yes -o ConnectTimeout=10 -o ServerAliveInterval=5 -o ServerAliveCountMax=3"

    name = "cluster"
    virtual = False
    processors = None

    def __post_init__(self) -> None:
        object.__setattr__(self, "hosts", tuple(self.hosts))
        if not all(isinstance(host, str) and host and not host.startswith("-") for host in self.hosts):
            raise UsageError(f"hosts must be names such as 'a' or 'me@b', not {list(self.hosts)!r}")
        if not self.hosts and (self.listen is None or self.key is None):
            raise UsageError(
                "a cluster needs an address and a key, for workers that join: add --listen HOST:PORT --key FILE; or "
                "hosts on which they are started: --hosts a,b,c (tether.Cluster(...))"
            )
        if self.workers == 0:
            object.__setattr__(self, "workers", len(self.hosts) or 2)
        check_processes(self.workers, self.threads, self.restarts, self.hung_seconds)
        host, _ = parse_address(self.listen) if self.listen is not None else ("", 0)
        if host in ("0.0.0.0", "::", "*"):
            raise UsageError(f"listen at an address of this machine that workers can reach, not at {host}")
        if self.hosts and self.workers_max is None and len(self.hosts) > self.workers:
            object.__setattr__(self, "workers_max", len(self.hosts))
        if self.workers_max is not None:
            check_count("workers_max", self.workers_max, self.workers)

    def execute(self, plan: Plan, observer: Observer) -> Outcome:
        check_apart(plan, "a cluster")
        check_source(plan, "cluster")
        driver = ClusterDriver(self, plan, observer)
        try:
            return driver.execute()
        finally:
            driver.close()

    def describe(self) -> dict[str, Any]:
        return {
            "name": self.name,
            "listen": self.listen,
            "key": self.key,
            "workers_max": self.workers_max,
            "encrypt": self.encrypt,
            "threads": self.threads,
            "restarts": self.restarts,
            "hung_seconds": self.hung_seconds,
            "hosts": list(self.hosts),
            "ssh": self.ssh,
        }


class ClusterDriver(Driver):
    """One run: its hub is a child of this process, its workers are agents on other machines."""

    def __init__(self, settings: Cluster, plan: Plan, observer: Observer) -> None:
        listen = settings.listen or f"{own_address(settings.hosts)}:0"
        name, port = parse_address(listen)
        shared = read_key(Path(settings.key)) if settings.key is not None else Keys.make()
        run = secrets.token_hex(8)
        try:
            host = socket.gethostbyname(name)
            self._agents = ClusterAgents(shared, run, host, port, settings)
        except OSError as error:
            raise UsageError(
                f"this machine cannot listen at {listen}: {error}; name an address of this machine and a port that no "
                "other program uses"
            ) from error
        super().__init__(plan, observer, settings.hung_seconds, host=host, keys=run_keys(shared, run, settings.encrypt))
        self._watchdog = Watchdog(settings.hung_seconds, start_seconds=math.inf)  # people start workers when they like
        self._settings = settings
        self._agents.note = observer.note
        self._agents.recent_rows = observer.recent_rows
        self._spec = NodeSpec(plan, self.directory, settings.threads, keys=self.keys, host=host)

    def execute(self) -> Outcome:
        started = launchers(self._agents, self._spec)
        self._agents.prepare(self._plan, self.address, started[0][1])
        return self.run(started)

    def close(self) -> None:
        if not self._launchers:
            self._agents.close(0)
        super().close()

    def _wait_until_ready(self) -> None:
        host, port = self._agents.address
        self._observer.note(f"waiting for {self._settings.workers} workers at {host}:{port}")
        while not self._is_complete():
            if reason := self._observer.stop_requested():
                raise RunError(f"the run ended before {self._settings.workers} workers had joined: {reason}")
            self._poll(0.1)

    def _is_complete(self) -> bool:
        return super()._is_complete() and len(self._workers()) >= self._settings.workers


def run_keys(shared: Keys, run: str, encrypt: bool) -> Keys:
    """The keys of one run, which reveal nothing about the cluster's key or other runs."""
    return Keys(shared.derive(f"run {run}"), encrypt)


class WorkerGreeting(msgspec.Struct, frozen=True, array_like=True, tag=True):
    """Worker to driver: what it is, and where it waits for the plan."""

    wire_version: int
    torch: str
    address: str
    accepts_code: bool


class ViewerGreeting(msgspec.Struct, frozen=True, array_like=True, tag=True):
    """Who watches the run to driver: where it waits for rows of metrics."""

    address: str


class Rows(Message, frozen=True):
    """Driver to who watches: rows of metrics, as they are in the run's directory."""

    rows: list[dict[str, Any]]


class Setup(Message, frozen=True):
    """Driver to worker: the plan, as plain values and tensors or, in `code`, pickled; and what the run is."""

    run: str
    encrypt: bool
    driver: str
    threads: int
    plan: Any
    tensors: list[Tensor]
    code: bytes = b""


class ClusterAgents(AgentLauncher[WorkerGreeting]):
    """A launcher of workers that come by themselves."""

    greeting_type = WorkerGreeting
    gone = "has died, or the network to it has"

    def __init__(self, keys: Keys, run: str, host: str, port: int, settings: Cluster) -> None:
        super().__init__(keys, host, port)
        self._run = run
        self._settings = settings
        self._setup: Setup | None = None
        self._newcomers: set[int] = set()
        self.note: Callable[[str], None] = lambda text: None
        self.recent_rows: Callable[[int], list[tuple[int, Any]]] = lambda after: []
        #: who watches the run: the connection, and the number of the last row that was sent
        self._viewers: dict[str, tuple[socket.socket, int]] = {}
        self._viewers_seen = 0
        self._shown_at = 0.0
        self._rejected = 0
        self._directory = Path(tempfile.mkdtemp(prefix="tether-"))
        self._context: zmq.Context[Any] = zmq.Context()
        self._outbox = Outbox(self._context, self._directory, "driver", keys=keys)
        #: how many workers have joined so far
        self._joined = 0
        self._starter: HostStarter | None = None

    def prepare(self, plan: Plan, driver: str, nodes: list[Node]) -> None:
        """What workers will be sent; `driver` is the address of the driver's inbox, `nodes` those of the plan."""
        portable = plan.portable()
        values, tensors = portable if portable is not None else (None, [])
        code = b"" if portable is not None else cloudpickle.dumps(plan)
        settings = self._settings
        self._setup = Setup(self._run, settings.encrypt, driver, settings.threads, values, tensors, code)
        like = next(node for node in nodes if node.computes)
        for index in range(settings.workers, settings.workers_max or settings.workers):
            above = plan.hub if like.parent else ""
            self._places[index] = replace(like, name=f"worker-{index}", index=index, host="", parent=above)
            self._newcomers.add(index)
        if settings.hosts:

            def open_log(number: int) -> IO[bytes]:
                name = f"host-{number}"
                return plan.log(name) or (self._directory / name).open("wb")

            self._starter = HostStarter(
                settings.hosts,
                settings.ssh,
                self.address,
                self.keys,
                bool(code),
                open_log,
                lambda text: self.note(text),
            )

    def _start_agents(self) -> None:
        if self._starter is not None:
            self._starter.start()

    def _is_new(self, node: Node) -> bool:
        return node.life > 1 or node.index in self._newcomers

    def _admit(self, accepted: AuthenticatedConnection) -> None:
        try:
            greeting = decode(accepted.text, ViewerGreeting)
        except WireError:
            super()._admit(accepted)
            return
        try:
            accepted.answer(b"")
        except OSError:
            accepted.connection.close()
            return
        close_after_silence(accepted.connection)
        self._viewers_seen += 1
        name = f"viewer-{self._viewers_seen}"
        self._viewers[name] = accepted.connection, 0
        self._outbox.addresses[name] = greeting.address
        self._selector.register(accepted.connection, selectors.EVENT_READ, name)

    def _check(self) -> None:
        """Called with every poll: send new rows to who watches, and report connections without the key."""
        if self._listener.rejected > self._rejected and is_power_of_ten(self._listener.rejected):
            self.note(f"{self._listener.rejected} connections that did not prove that they have the key were refused")
        self._rejected = self._listener.rejected
        if self._starter is not None:
            self._starter.check(self._joined, self._settings.workers)
        if self._viewers and time.monotonic() - self._shown_at >= SHOW_SECONDS:
            self._shown_at = time.monotonic()
            for name, (connection, last) in self._viewers.items():
                if rows := self.recent_rows(last):
                    self._outbox.send(name, Rows([row for _, row in rows]))
                    self._viewers[name] = connection, rows[-1][0]

    def _answer(self, greeting: WorkerGreeting) -> Answer:
        assert self._setup is not None
        free = [node for index, node in sorted(self._places.items()) if node.name not in self.living]
        if greeting.wire_version != WIRE_VERSION:
            return self._refuse(f"it speaks version {greeting.wire_version} and this driver version {WIRE_VERSION}")
        if greeting.torch != torch.__version__:
            return self._refuse(f"it has torch {greeting.torch} and this driver torch {torch.__version__}")
        if self._setup.code and not greeting.accepts_code:
            return self._refuse("the task was not named on a command line: start the worker with --accept-code")
        if not free:
            return self._refuse(f"the run has {len(self.living)} workers already")
        return Assignment(free[0], self._colocated.get(free[0].index, ()))

    def _refuse(self, reason: str) -> Refusal:
        self.note(f"a worker was refused: {reason}")
        return Refusal(reason)

    def _admitted(self, agent: Agent[WorkerGreeting]) -> None:
        assert self._setup is not None
        self._outbox.addresses[agent.node.name] = agent.greeting.address
        self._outbox.send(agent.node.name, self._setup)
        self._joined += 1
        if self._starter is not None:
            self._starter.has_joined()

    def _read(self, agent: Agent[WorkerGreeting] | str) -> None:
        """The lifeline has closed, or the worker says why it leaves. A text is the name of who watches."""
        if isinstance(agent, str):
            connection, _ = self._viewers.pop(agent)
            self._selector.unregister(connection)
            connection.close()
            self._outbox.forget(agent)
            return
        try:
            said = agent.lifeline.recv(REASON_BYTES_MAX)
        except OSError:
            said = b""
        reason = "".join(filter(str.isprintable, said.decode(errors="replace")))
        self._outbox.forget(agent.node.name)
        if reason.startswith(REFUSED) and not self._is_new(agent.node):
            # its node was never built: the next worker in this place becomes the same node, which may be the hub
            self.note(f"{agent.node.name} {reason}")
            self._selector.unregister(agent.lifeline)
            agent.lifeline.close()
            del self.living[agent.node.name]
            return
        self._remove(agent, reason or self.gone)

    def _end_agents(self, seconds: float) -> None:
        for connection, _ in self._viewers.values():
            connection.close()
        self._outbox.close()
        self._context.destroy(linger=0)
        if self._starter is not None:
            self._starter.close(seconds)
        shutil.rmtree(self._directory, ignore_errors=True)


# ---- the worker -----------------------------------------------------------------------------------------------------

#: makes a plan of its plain values and tensors
MakePlan = Callable[[Any, list[Tensor]], Plan]


def run_worker(
    address: tuple[str, int], keys: Keys, make_plan: MakePlan, *, accept_code: bool, wait_seconds: float
) -> str:
    """Join the run whose driver listens there, and train until it is over; the name of the node.

    SIGTERM and Ctrl-C leave the run in good order. `wait_seconds`: how long to wait for the driver to listen.
    """
    with ExitStack() as at_the_end:
        directory = Path(tempfile.mkdtemp(prefix="tether-"))
        at_the_end.callback(shutil.rmtree, directory, ignore_errors=True)
        connection = at_the_end.enter_context(_connect(address, wait_seconds))
        host = connection.getsockname()[0]
        context: zmq.Context[Any] = zmq.Context()
        authenticator = keys.start_authenticator(context)
        inbox = Inbox(context, directory, "setup", [Setup], keys=keys, host=host)
        try:
            greeting = WorkerGreeting(WIRE_VERSION, str(torch.__version__), inbox.address, accept_code)
            answer = _greet(connection, keys, greeting)
            watched = at_the_end.enter_context(Lifeline(connection, directory))
            leaving = _Leaving(connection, directory, watched)
            if not inbox.socket.poll(round(GREETING_SECONDS * 1000)):
                raise RunError(f"the driver has not sent its plan within {GREETING_SECONDS:g} s")
            _, setup = inbox.receive()
        finally:
            inbox.close()
            authenticator.stop()
            context.destroy(linger=0)
        assert isinstance(setup, Setup)
        try:
            if setup.code and not accept_code:
                raise UsageError("the driver sends code, which this worker was not told to accept")
            plan = cloudpickle.loads(setup.code) if setup.code else make_plan(setup.plan, setup.tensors)
        except Exception as error:
            leaving.say(f"{REFUSED}{error}")
            raise
        spec = NodeSpec(plan, directory, setup.threads, driver=setup.driver, host=host)
        spec.keys = run_keys(keys, setup.run, setup.encrypt)
        if not host_nodes(spec, answer, watched):
            raise RunError(f"{answer.node.name} ended with the error above")
        return answer.node.name


def _connect(address: tuple[str, int], wait_seconds: float) -> socket.socket:
    deadline = time.monotonic() + wait_seconds
    while True:
        try:
            return socket.create_connection(address, GREETING_SECONDS)
        except OSError as error:
            if time.monotonic() > deadline:
                raise RunError(f"no run listens at {address[0]}:{address[1]}: {error}") from error
            time.sleep(RETRY_SECONDS)


def _greet(connection: socket.socket, keys: Keys, greeting: WorkerGreeting) -> Assignment:
    try:
        answer = greet(connection, keys, greeting)
    except (OSError, WireError) as error:
        raise RunError(f"the driver does not accept this worker's key, or is gone ({error})") from error
    if isinstance(answer, Refusal):
        raise UsageError(f"the driver refuses this worker: {answer.reason}")
    return answer


# ---- who watches ----------------------------------------------------------------------------------------------------


def watch(address: tuple[str, int], keys: Keys) -> Iterator[list[dict[str, Any]]]:
    """The rows of metrics of the run whose driver listens there, as they are written; until the run is over.

    An empty list at least twice a second, also while there is nothing new.
    """
    with ExitStack() as at_the_end:
        directory = Path(at_the_end.enter_context(tempfile.TemporaryDirectory(prefix="tether-")))
        connection = at_the_end.enter_context(_connect(address, 0.0))
        context: zmq.Context[Any] = zmq.Context()
        at_the_end.callback(context.destroy, linger=0)
        authenticator = keys.start_authenticator(context)
        at_the_end.callback(authenticator.stop)
        inbox = Inbox(context, directory, "viewer", [Rows], keys=keys, host=connection.getsockname()[0])
        at_the_end.callback(inbox.close)
        try:
            authenticate(connection, keys, LIFELINE, msgspec.msgpack.encode(ViewerGreeting(inbox.address)))
        except (OSError, WireError) as error:
            raise RunError(f"the driver does not accept this key, or is gone ({error})") from error
        close_after_silence(connection)
        connection.setblocking(False)
        while True:
            if inbox.socket.poll(round(SHOW_SECONDS * 1000)):
                _, message = inbox.receive()
                assert isinstance(message, Rows)
                yield message.rows
            else:
                yield []
            try:
                if not connection.recv(1):
                    return
            except BlockingIOError:
                continue
            except OSError:
                return


class _Leaving:
    """Tells the driver why this worker leaves; SIGTERM and Ctrl-C make it leave."""

    def __init__(self, connection: socket.socket, directory: Path, lifeline: Lifeline) -> None:
        self._connection = connection
        self._directory = directory
        self._lifeline = lifeline
        if threading.current_thread() is threading.main_thread():
            for number in (signal.SIGTERM, signal.SIGINT):
                signal.signal(number, self._leave)

    def say(self, reason: str) -> None:
        self._lifeline.release()  # the driver closes it when it reads this
        with suppress(OSError):
            self._connection.sendall(reason.encode()[:REASON_BYTES_MAX])

    def _leave(self, number: int, frame: FrameType | None) -> None:
        self.say("has left")
        shutil.rmtree(self._directory, ignore_errors=True)
        print("tether: this worker has left the run", file=sys.stderr, flush=True)
        os._exit(0)
