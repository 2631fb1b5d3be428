"""Workers as actors of Ray: several raylets on this machine, of which some are killed."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

import tether
from tether.errors import UsageError
from tether.execution.progress import make_progress
from tether.testing.conformance import Assassin, Blobs, at_this_load, check_runtime, train_quietly

pytest.importorskip("ray", reason="ray is not installed")
pytestmark = [pytest.mark.ray, pytest.mark.filterwarnings("default")]  # Ray is not free of warnings

#: raylets are missed sooner than after Ray's own 15 seconds
SOON = {"health_check_initial_delay_ms": 0, "health_check_period_ms": 300, "health_check_failure_threshold": 4}


@pytest.fixture(scope="module")
def raylets() -> Iterator[Any]:
    """A head with one CPU, and two machines with two CPUs each."""
    from ray.cluster_utils import Cluster

    os.environ["RAY_USAGE_STATS_ENABLED"] = "0"
    memory = {"object_store_memory": 80 << 20}
    head = {"num_cpus": 1, "include_dashboard": False, "_system_config": SOON, **memory}
    cluster = Cluster(initialize_head=True, head_node_args=head)
    for _ in range(2):
        cluster.add_node(num_cpus=2, **memory)
    yield cluster
    cluster.shutdown()


def actors_of(raylet: Any) -> list[int]:
    """The processes of the actors that a raylet has started."""
    parent, found = raylet.all_processes["raylet"][0].process.pid, []
    for entry in Path("/proc").glob("[0-9]*"):
        try:
            of_parent = (entry / "stat").read_text().rpartition(")")[2].split()[1] == str(parent)
            if of_parent and b"RayAgent" in (entry / "cmdline").read_bytes():
                found.append(int(entry.name))
        except OSError:
            continue
    return found


class Killer(Assassin):
    """Kills an actor as soon as workers step, then a raylet as soon as the actor's replacement has joined."""

    def __init__(self, cluster: Any) -> None:
        super().__init__([], 5)
        self.cluster = cluster
        self.kills: list[float] = []

    @property
    def joined(self) -> list[str]:
        return [text for _, text in self.notes if text.endswith("has joined")]

    def meter(self, meter: Any, time_: float) -> None:
        raylet = next((node for node in self.cluster.worker_nodes if actors_of(node)), None)
        if meter.steps >= self.steps and len(self.kills) == len(self.joined) < 2 and raylet is not None:
            if not self.kills:
                os.kill(actors_of(raylet)[0], signal.SIGKILL)
            else:
                self.cluster.worker_nodes.remove(raylet)
                raylet.kill_raylet()
            self.kills.append(time.monotonic())


def test_a_killed_actor_and_the_actors_of_a_killed_raylet_are_noticed_and_replaced(
    raylets: Any, tmp_path: Path
) -> None:
    killer = Killer(raylets)
    result = tether.run(
        Blobs(),
        tether.Elastic(tau=5),
        tether.Ray(3, raylets.address),
        steps=10**7,
        seconds=at_this_load(120.0),
        run_dir=tmp_path / "run",
        progress=killer,
        stop=lambda: "both are replaced" if len(killer.joined) >= 2 else None,
    )
    assert result.figures["reason"] == "both are replaced", killer.notes
    assert result.metrics["error"] < 0.1
    noticed = [moment for moment, text in killer.notes if "has died with its actor; the others go on" in text]
    assert len(noticed) >= 2
    for killed, told in zip(killer.kills, noticed, strict=False):
        assert told - killed < at_this_load(2.0)
    steps = result.figures["steps"] + 100
    replaced = tether.resume(tmp_path / "run", Blobs(), workers=2, steps=steps, progress=make_progress(quiet=True))
    assert replaced.figures["workers"] == 2 and replaced.metrics["error"] < 0.1


def test_the_command_line_trains_on_a_cluster_and_prints_one_object(raylets: Any, tmp_path: Path) -> None:
    command = [sys.executable, "-m", "tether", "train", "digits", "--on", "ray", "--address", raylets.address]
    command += ["-n", "2", "--steps", "20", "--run", "run", "--json"]
    done = subprocess.run(command, cwd=tmp_path, capture_output=True, text=True, timeout=200)
    assert done.returncode == 0, done.stderr
    assert json.loads(done.stdout)["steps"] == 20
    described = json.loads((tmp_path / "run" / "run.json").read_text())["runtime"]
    assert (described["name"], described["address"]) == ("ray", raylets.address)


def test_a_cluster_without_room_is_told(raylets: Any, tmp_path: Path) -> None:
    where = tether.Ray(2, raylets.address, cpus=50, wait_seconds=0.1, restarts=0)
    with pytest.raises(tether.RunError, match=r"no room for 2 workers, which need 100 CPU: the cluster has \d CPU"):
        train_quietly(Blobs(), tether.Averaging(), where, tmp_path / "run", steps=1)


@pytest.mark.slow
def test_actors_keep_the_promises_of_a_runtime(raylets: Any, tmp_path: Path) -> None:
    check_runtime(lambda workers: tether.Ray(workers, raylets.address), tmp_path, workers_max=3, records=False)


def test_settings_that_ray_cannot_have_are_refused(tmp_path: Path) -> None:
    with pytest.raises(UsageError, match="cpus must be a number above 0, not 0"):
        tether.Ray(cpus=0)
    with pytest.raises(UsageError, match="ray job submit"):
        train_quietly(Blobs(), None, tether.Ray(2, "ray://somewhere:10001"), tmp_path / "run", steps=1)
    with pytest.raises(UsageError, match="address: only a Ray cluster has that"):
        tether.run(Blobs(), on="local", address="somewhere:6379")


def test_the_program_of_the_document_runs_on_the_cluster_that_the_environment_names(
    raylets: Any, tmp_path: Path
) -> None:
    text = (Path(__file__).parents[1] / "docs" / "ray.md").read_text()
    program = text.partition("```python\n")[2].partition("```")[0] + "print(result)"
    environment = {**os.environ, "RAY_ADDRESS": raylets.address}
    done = subprocess.run(
        [sys.executable, "-c", program], cwd=tmp_path, env=environment, capture_output=True, text=True, timeout=200
    )
    assert done.returncode == 0 and "error=" in done.stdout, done.stderr
