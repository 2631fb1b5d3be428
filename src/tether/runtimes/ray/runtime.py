"""Workers on a Ray cluster: one actor each, spread over its machines, and the hub on the driver's machine.

Ray places the actors in a placement group and replaces those that die. All else is as in every run across machines: see
`process/agent` and `process/agents`.
"""

from __future__ import annotations

import time
from concurrent.futures import Future
from dataclasses import dataclass, replace
from typing import Any

import cloudpickle

from tether.errors import RunError, UsageError
from tether.runtimes.base import Observer, Outcome, Plan, check_source
from tether.runtimes.process.agent import Answer, Assignment, Refusal
from tether.runtimes.process.agents import AgentLauncher, check_apart, launchers
from tether.runtimes.process.driver import Driver, check_processes
from tether.runtimes.process.spec import NodeSpec
from tether.runtimes.ray.agent import Greeting, RayAgent
from tether.runtimes.ray.session import connected

#: workers that Ray has not placed after this time are mentioned
PATIENCE_SECONDS = 5.0


@dataclass(frozen=True)
class Ray:
    """Where to run: actors on the machines of a Ray cluster, and the hub on the driver's machine."""

    workers: int = 2
    #: the cluster, such as HOST:6379. The default is the one that this program is connected to, that RAY_ADDRESS names
    #: or that runs on this machine; if there is none, one is started here for the run
    address: str | None = None
    #: how many CPUs Ray reserves for each worker
    cpus: float = 1
    #: whether Ray reserves a GPU for each worker; by default, if the cluster has enough of them
    gpu: bool | None = None
    #: intra-operation threads of torch in each worker
    threads: int = 1
    #: how often a run that has lost its hub or all its workers resumes by itself from its last checkpoint
    restarts: int = 3
    #: a worker that has not responded or made progress for this long is given up
    hung_seconds: float = 60.0
    #: how long to wait until Ray has room for the workers: more if an autoscaler has to start machines first
    wait_seconds: float = 300.0

    name = "ray"
    virtual = False
    processors = None

    def __post_init__(self) -> None:
        check_processes(self.workers, self.threads, self.restarts, self.hung_seconds)
        for name in ("cpus", "wait_seconds"):
            value = getattr(self, name)
            if isinstance(value, bool) or not isinstance(value, int | float) or not value > 0:
                raise UsageError(f"{name} must be a number above 0, not {value!r}")

    def execute(self, plan: Plan, observer: Observer) -> Outcome:
        check_apart(plan, "Ray")
        check_source(plan, self.name)
        with connected(self.address, self.workers * self.cpus) as ray:
            driver = RayDriver(self, ray, plan, observer)
            try:
                return driver.execute()
            finally:
                driver.close()

    def describe(self) -> dict[str, Any]:
        return {
            "name": self.name,
            "address": self.address,
            "cpus": self.cpus,
            "gpu": self.gpu,
            "threads": self.threads,
            "restarts": self.restarts,
            "hung_seconds": self.hung_seconds,
            "wait_seconds": self.wait_seconds,
        }


class RayDriver(Driver):
    """One run: its hub is a child of this process, its workers are actors."""

    def __init__(self, settings: Ray, ray: Any, plan: Plan, observer: Observer) -> None:
        host = ray.util.get_node_ip_address()
        super().__init__(plan, observer, settings.hung_seconds, host=host)
        self._settings = settings
        self._spec = NodeSpec(plan, self.directory, settings.threads, keys=self.keys, host=host)
        self._agents = RayAgents(settings, ray, replace(self._spec, driver=self.address))
        self._mentioned = False

    def execute(self) -> Outcome:
        return self.run(launchers(self._agents, self._spec))

    def close(self) -> None:
        if not self._launchers:
            self._agents.close(0)
        super().close()

    def _poll(self, seconds: float) -> None:
        super()._poll(seconds)
        waited = self._agents.seconds_unplaced()
        if waited is None:
            return
        self._extend_start()
        if waited > self._settings.wait_seconds:
            raise RunError(f"after {waited:.0f} s, {self._agents.describe_room()}; use fewer workers, or add machines")
        if waited > PATIENCE_SECONDS and not self._mentioned:
            self._mentioned = True
            self._observer.note(f"{self._agents.describe_room()}; waiting for more")


class RayAgents(AgentLauncher[Greeting]):
    """A launcher of agents, each an actor in its own bundle of one placement group."""

    greeting_type = Greeting
    gone = "has died with its actor"

    def __init__(self, settings: Ray, ray: Any, spec: NodeSpec) -> None:
        assert spec.keys is not None, "a run across machines has keys"
        super().__init__(spec.keys, spec.host)
        self._settings = settings
        self._ray = ray
        self._spec = spec
        self._group: Any = None
        self._asked_at = time.monotonic()
        self._placed = False
        #: by index
        self._actors: dict[int, Any] = {}
        #: by index, what `RayAgent.run` returns
        self._results: dict[int, Any] = {}
        self._failure = ""
        self._closing = False

    # ---- placing ----

    def _start_agents(self) -> None:
        from ray.util.placement_group import placement_group
        from ray.util.scheduling_strategies import PlacementGroupSchedulingStrategy

        bundle = self._bundle()
        self._asked_at = time.monotonic()
        self._group = placement_group([bundle] * len(self._places), strategy="SPREAD")
        self._group.ready().future().add_done_callback(self._group_placed)
        arguments = self._ray.put(cloudpickle.dumps((self._spec, self.address)))
        for number, index in enumerate(sorted(self._places)):
            actor = self._ray.remote(RayAgent).options(
                num_cpus=bundle["CPU"],
                num_gpus=bundle.get("GPU", 0),
                max_restarts=-1,
                max_task_retries=-1,
                scheduling_strategy=PlacementGroupSchedulingStrategy(self._group, number),
            )
            self._actors[index] = actor.remote()
            self._results[index] = self._actors[index].run.remote(index, arguments)
            self._results[index].future().add_done_callback(self._ended)

    def _bundle(self) -> dict[str, float]:
        """What Ray reserves for each worker."""
        gpu = self._settings.gpu
        if gpu is None:
            gpu = self._ray.cluster_resources().get("GPU", 0) >= len(self._places)
        return {"CPU": self._settings.cpus, **({"GPU": 1} if gpu else {})}

    def _group_placed(self, future: Future[Any]) -> None:
        self._placed = future.exception() is None
        self.wake()

    def seconds_unplaced(self) -> float | None:
        """How long the workers have waited for room in the cluster; None if they have it."""
        return None if self._placed or self._group is None else time.monotonic() - self._asked_at

    def describe_room(self) -> str:
        """How much of the cluster the workers need, and how much there is."""
        free, all_ = self._ray.available_resources(), self._ray.cluster_resources()
        bundle, count = self._bundle(), len(self._places)
        has = " and ".join(f"{all_.get(name, 0):g} {name}, {free.get(name, 0):g} free" for name in bundle)
        needs = " and ".join(f"{amount * count:g} {name}" for name, amount in bundle.items())
        return f"Ray has no room for {count} workers, which need {needs}: the cluster has {has}"

    # ---- the launcher ----

    def _ended(self, future: Future[Any]) -> None:
        """Called by a thread of Ray's: an agent has ended for good."""
        error = future.exception()
        if error is not None and not self._closing:
            self._failure = str(getattr(error, "cause", None) or error)
            self.wake()

    def _answer(self, greeting: Greeting) -> Answer:
        node = self._places.get(greeting.index)
        if node is None or self._closing:
            return Refusal("its place is not there")
        if (former := self.living.get(node.name)) is not None:
            # Ray starts an actor again only when it has given up the one before, perhaps before its lifeline closes
            self._remove(former, "has been replaced by Ray")
            node = self._places[greeting.index]
        return Assignment(node, self._colocated.get(greeting.index, ()))

    def kill(self, name: str) -> None:
        """A process that has stopped does not see that its lifeline is closed, so Ray ends it, and starts another."""
        indices = [agent.node.index for agent in self.living.values() if name in agent.names]
        super().kill(name)
        for index in indices:
            self._ray.kill(self._actors[index], no_restart=False)

    def _check(self) -> None:
        if self._failure:
            raise RunError(f"Ray has given up a worker: {self._failure}")

    def close(self, seconds: float) -> None:
        self._closing = True
        super().close(seconds)

    def _end_agents(self, seconds: float) -> None:
        ending = [self._results[agent.node.index] for agent in self.living.values()]
        if ending:
            self._ray.wait(ending, num_returns=len(ending), timeout=seconds)
        for actor in self._actors.values():
            self._ray.kill(actor)
        if self._group is not None:
            self._ray.util.remove_placement_group(self._group)
