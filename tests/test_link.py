"""Links between real sockets: queues have bounds, and threads end before their sockets."""

from __future__ import annotations

import shutil
import tempfile
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any, ClassVar

import pytest
import zmq
from torch import Tensor, nn

from tether import Averaging, Local, RunError, Single
from tether.execution.goals import Request
from tether.execution.plan import RunPlan
from tether.runtimes.process import control, link
from tether.runtimes.process import node as process
from tether.runtimes.process.control import DRIVER
from tether.runtimes.process.link import Inbox, Outbox
from tether.runtimes.process.spec import NodeSpec
from tether.testing.conformance import Blobs


@pytest.fixture
def directory() -> Iterator[Path]:
    """Of a short name, since the paths of sockets cannot be long."""
    path = Path(tempfile.mkdtemp(prefix="tether-"))
    yield path
    shutil.rmtree(path)


@pytest.fixture
def context() -> Iterator[zmq.Context[Any]]:
    context: zmq.Context[Any] = zmq.Context()
    yield context
    context.destroy(linger=0)


def test_a_queue_that_nobody_takes_from_is_an_error_when_it_is_full(
    context: zmq.Context[Any], directory: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(link, "QUEUE_MAX", 10)
    outbox = Outbox(context, directory, "worker-0")
    for number in range(10):
        outbox.send("hub", control.Note(str(number)))
    with pytest.raises(RunError, match="10 messages of worker-0 wait for hub, which does not receive them"):
        outbox.send("hub", control.Note("one more"))
    inbox = Inbox(context, directory, "hub", control.FROM_NODE)
    received = [inbox.receive() for _ in range(10)]
    assert received == [("worker-0", control.Note(str(number))) for number in range(10)]
    inbox.close()
    outbox.close()


def make_node(directory: Path, context: zmq.Context[Any]) -> process.NodeProcess:
    plan = RunPlan.make(Blobs(), Averaging(tau=2), Local(2), Request(steps=10), None)
    node = next(node for node in plan.nodes if node.name == "worker-0")
    return process.NodeProcess(NodeSpec(plan, directory, threads=1), node, context)


def test_what_comes_before_a_node_has_begun_is_kept_up_to_a_bound(
    context: zmq.Context[Any], directory: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(process, "EARLY_PER_NODE_MAX", 2)
    node = make_node(directory, context)
    for _ in range(6):
        node.handle("hub", control.Note("a message"))
    with pytest.raises(RunError, match="worker-0 received 7 messages before the driver let it begin"):
        node.handle("hub", control.Note("a message"))
    node.close()


class Failing(Blobs):
    """Its first gradient is an error, in the thread that trains."""

    def loss(self, model: nn.Module, batch: Any) -> Tensor:
        raise ValueError("no such thing")


class Watched(zmq.Context[Any]):
    """Knows which threads of a node there were when it was destroyed."""

    threads: ClassVar[list[str]] = []

    def destroy(self, linger: int | None = None) -> None:
        names = [thread.name for thread in threading.enumerate()]
        type(self).threads = [name for name in names if name in ("link", "pulse") or name.startswith("pool")]
        super().destroy(linger)


@pytest.mark.parametrize("failing", [False, True], ids=["in good order", "failing"])
def test_when_a_node_is_over_its_threads_have_ended_before_its_context_does(
    failing: bool, context: zmq.Context[Any], directory: Path
) -> None:
    Watched.threads = ["not destroyed"]
    driver, outbox = Inbox(context, directory, DRIVER, control.FROM_NODE), Outbox(context, directory, DRIVER)
    plan = RunPlan.make(Failing(), Single(), Local(1), Request(steps=10), None)
    (node,), spec = plan.nodes, NodeSpec(plan, directory, threads=1)
    living = threading.Thread(target=process.run_node, args=(spec, node, Watched(), lambda made: None), daemon=True)
    living.start()
    while not isinstance(driver.receive()[1], control.Hello):
        pass
    outbox.send(node.name, control.Begin((node.name,), {}) if failing else control.End())
    last = control.Failed if failing else control.Bye
    while not isinstance(driver.receive()[1], last):
        pass
    living.join(30.0)
    assert not living.is_alive() and Watched.threads == []
    driver.close()
    outbox.close()
