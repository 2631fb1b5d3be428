"""A Caffe solver as a task."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from functools import cached_property
from pathlib import Path
from typing import Any, ClassVar, Literal

import torch
from torch import Tensor, nn
from torch.optim.lr_scheduler import LambdaLR, LRScheduler

from tether.caffe.data import Feed, Together, collate, open_feed
from tether.caffe.layers import SOURCES
from tether.caffe.net import Net
from tether.caffe.reading import NetFile, SolverFile, State, find_file, included, read_solver
from tether.caffe.schema import message
from tether.caffe.solver import CaffeSolver, Policy, make_solver
from tether.caffe.weights import Loaded, load_weights, read_state, weights_content
from tether.errors import UsageError, unknown
from tether.task import Length, Task


class CaffeTask(Task):
    """What a solver file of Caffe describes: its net, data, solver, policy of the rate, and test nets."""

    options: ClassVar[dict[str, str]] = {
        "solver": "the solver file",
        "sources": "where data is, as NAME=PATH with commas or line breaks between; NAME is a layer, a top or a source",
        "iterations": "whose iterations the solver counts: those of each worker, or of all workers together",
        "rate": "factor of base_lr, such as the number of workers where these share the iterations of one",
        "snapshot": "continue from this .solverstate file",
    }

    def __init__(
        self,
        solver: Path,
        *,
        sources: str = "",
        iterations: Literal["each", "all"] = "each",
        rate: float = 1.0,
        snapshot: Path | None = None,
    ) -> None:
        self.path = Path(solver).expanduser().absolute()
        self._elsewhere = parse_sources(sources)
        self._file = read_solver(self.path)
        settings = self._file.solver
        self.policy = Policy.of(settings)
        if iterations not in ("each", "all"):
            raise unknown("value of iterations", iterations, ("each", "all"))
        if not 0 < rate < math.inf:
            raise UsageError(f"rate is {rate:g}; it must be more than 0")
        self.iterations, self.rate = iterations, rate
        self.state_path = Path(snapshot).expanduser().absolute() if snapshot is not None else None
        self._state = read_state(self.state_path) if self.state_path is not None else None
        #: the iteration that a run begins at
        self.first_iteration = self._state.iteration if self._state is not None else 0
        if settings.max_iter <= self.first_iteration:
            least = (
                f"more than {self.first_iteration}, which are made already" if self.first_iteration else "at least 1"
            )
            raise UsageError(f"{self.path} has max_iter {settings.max_iter}; it must be {least}")
        #: the number of the last snapshot that was written
        self._snapshots = 0
        self._weights_note = ""
        self.accumulate = max(1, settings.iter_size)
        if settings.clip_gradients >= 0:
            # Caffe clips the sum over iter_size batches, and Tether their mean
            self.clip_norm = settings.clip_gradients / self.accumulate or 1e-30
        feeds = self._feeds
        sizes = {feed.batch_size for feed in feeds}
        if len(sizes) > 1:
            raise UsageError(f"{self.path}: data layers for training have the batch sizes {sizes}: give them one")
        net = self._net(0)
        dummies = [node.shapes[0] for node in net.nodes if node.type == "DummyData" and node.shapes[0]]
        if not feeds and not dummies:
            known = ", ".join([*SOURCES[:-1], "DummyData"])
            raise UsageError(f"{self.path}: the net has no data layer for training; supported are {known}")
        self.batch_size = sizes.pop() if sizes else max(1, dummies[0][0])
        if self._state is not None:
            self._solver(net.fill())  # whether the histories fit is known at once

    @property
    def name(self) -> str:
        return "".join(c if c.isalnum() or c in "_-" else "-" for c in self._file.train[0].net.name).lower() or "caffe"

    @property
    def seed(self) -> int:
        """The solver's seed, or 0."""
        return max(0, int(self._file.solver.random_seed))

    def run_defaults(self, workers: int, seed: int | None) -> dict[str, Any]:
        """What the solver says about a run: its length, the time between tests, the seed, the weights to begin with."""
        settings = self._file.solver
        share = workers if self.iterations == "all" else 1
        found: dict[str, Any] = {"steps": math.ceil((settings.max_iter - self.first_iteration) / share)}
        interval = settings.test_interval if self._file.tests else 0
        interval = interval if interval > 0 else settings.snapshot
        if interval > 0:
            samples = workers * self.batch_size * self.accumulate * max(1, interval // share)
            found["evaluate_every"] = samples / len(self.train_data())
        found["seed"] = self.seed
        if paths := self._first_weights():
            found["weights"], loaded = self.with_weights(paths, self.seed if seed is None else seed)
            self._weights_note = f"weights of {', '.join(path.name for path in paths)}: {loaded}"
        return found

    def _first_weights(self) -> list[Path]:
        """The .caffemodel files that the solver or its snapshot names."""
        if self._state is not None and self.state_path is not None:
            named, near = [self._state.learned_net], self.state_path
        else:
            near = self.path
            named = [name for text in self._file.solver.weights for name in text.split(",") if name]
        found = []
        for name in named:
            if (path := find_file(name, near)) is None:
                raise UsageError(f"{near} names the weights {name!r}, which do not exist: correct the name")
            found.append(path)
        return found

    def iteration(self, step: int, workers: int) -> int:
        """The solver's iteration at a step of a run."""
        return self.first_iteration + step * (workers if self.iterations == "all" else 1)

    @property
    def snapshot_name(self) -> str:
        """How the names of snapshots begin."""
        return Path(self._file.solver.snapshot_prefix or self.name).name

    def step_files(self, model: nn.Module, step: int) -> dict[str, str | bytes]:
        """A snapshot at the first evaluation after every `snapshot` iterations."""
        every, iteration = self._file.solver.snapshot, self.iteration(step, self.world_size)
        if every < 1 or iteration // every <= self._snapshots:
            return {}
        assert isinstance(model, Net)
        self._snapshots = iteration // every
        return {f"{self.snapshot_name}_iter_{iteration}.caffemodel": weights_content(model)}

    def final_files(self, model: nn.Module) -> dict[str, str | bytes]:
        assert isinstance(model, Net)
        wanted = self._file.solver.snapshot_after_train
        return {f"{self.snapshot_name}.caffemodel": weights_content(model)} if wanted else {}

    def _net(self, number: int) -> Net:
        """The training net, 0, or a test net, from 1; with shapes and without values."""
        source, state = self._nets[number]
        feeds = self._feeds if number == 0 else self._test_feeds[number - 1]
        return Net(source, state, {feed.name: feed.shapes for feed in feeds})

    @property
    def _nets(self) -> list[tuple[NetFile, State]]:
        return [self._file.train, *self._file.tests]

    @cached_property
    def _feeds(self) -> list[Feed]:
        return open_feeds(*self._file.train, self._elsewhere)

    @cached_property
    def _test_feeds(self) -> list[list[Feed]]:
        return [open_feeds(*test, self._elsewhere) for test in self._file.tests]

    @cached_property
    def _test_nets(self) -> list[Net]:
        return [self._net(number) for number in range(1, 1 + len(self._file.tests))]

    def model(self) -> nn.Module:
        return self._net(0).fill()

    def with_weights(self, paths: Sequence[Path], seed: int) -> tuple[dict[str, Tensor], Loaded]:
        """A state_dict that begins with the layers of .caffemodel files; other layers are drawn with this seed."""
        with torch.random.fork_rng(devices=()):
            torch.manual_seed(seed)
            net = self._net(0).fill()
        parts = []
        for path in paths:
            parts.append(load_weights(net, path))
            if not parts[-1].loaded:
                raise UsageError(f"{path} has no layer of this net; it has {', '.join(parts[-1].unused)}")
        return net.state_dict(), Loaded.together(parts)

    def optimizer(self, model: nn.Module) -> torch.optim.Optimizer:
        assert isinstance(model, Net)
        return self._solver(model)

    def _solver(self, net: Net) -> CaffeSolver:
        solver = make_solver(self._file.solver, net, self.rate)
        if self._state is not None:
            solver.begin_with(net, self._state)
        return solver

    def scheduler(self, optimizer: torch.optim.Optimizer, length: Length) -> LRScheduler | None:
        if self.policy.name == "fixed":
            return None
        return LambdaLR(optimizer, lambda step: self.policy.factor(self.iteration(step, length.workers)))

    def train_data(self) -> Any:
        # a small data set fills its mini-batches several times, as in Caffe; layers that draw their own data have as
        # many samples as one likes: an epoch is a thousand mini-batches
        return Together(self._feeds, self.batch_size * self.accumulate * (1 if self._feeds else 1000))

    def collate(self, samples: list[Any]) -> Any:
        return collate(samples)

    def loss(self, model: nn.Module, batch: Any) -> Tensor:
        assert isinstance(model, Net)
        return model.loss(_inputs(self._feeds, batch))

    def evaluate(self, model: nn.Module) -> dict[str, float]:
        metrics: dict[str, float] = {}
        for number, (net, feeds) in enumerate(zip(self._test_nets, self._test_feeds, strict=True)):
            assert isinstance(model, Net)
            found = measure(net.share_with(model), feeds, self._file.solver.test_iter[number])
            suffix = "" if number == 0 else f"#{number}"
            metrics.update({f"{name}{suffix}": value for name, value in found.items()})
        return metrics

    def note(self) -> str:
        settings = self._file.solver
        rate = f"{settings.type} with rate {self.rate * settings.base_lr:g}, policy {self.policy.name}"
        first = f"from iteration {self.first_iteration}" if self.first_iteration else ""
        return "; ".join(filter(None, (rate, first, self._weights_note)))

    def __getstate__(self) -> dict[str, Any]:
        """The definitions as bytes, so that other machines need no copy of the files; data is opened again there."""
        nets = [(net.net.SerializeToString(), net.path, net.lines, state) for net, state in self._nets]
        kept = {k: v for k, v in vars(self).items() if k not in ("_file", "_feeds", "_test_feeds", "_test_nets")}
        return {"kept": kept, "solver": self._file.solver.SerializeToString(), "nets": nets}

    def __setstate__(self, state: dict[str, Any]) -> None:
        vars(self).update(state["kept"])
        solver = message("SolverParameter")
        solver.ParseFromString(state["solver"])
        nets = []
        for content, path, lines, of in state["nets"]:
            net = message("NetParameter")
            net.ParseFromString(content)
            nets.append((NetFile(net, path, lines), of))
        self._file = SolverFile(solver, self.path, nets[0], tuple(nets[1:]))


def parse_sources(text: str) -> dict[str, str]:
    """Where data is, from NAME=PATH with line breaks between or, if there are none, commas."""
    found = {}
    for item in filter(None, text.split("\n" if "\n" in text else ",")):
        name, equals, path = item.partition("=")
        if not equals or not name or not path:
            raise UsageError(f"{item!r} does not say where data is; write it like --data mnist=PATH")
        found[name] = str(Path(path).expanduser().absolute())
    return found


def open_feeds(source: NetFile, state: State, elsewhere: Mapping[str, str]) -> list[Feed]:
    """The data layers of a net in a state, with their samples."""
    feeds = []
    for index in included(source, state):
        spec = source.net.layer[index]
        if spec.type in SOURCES and spec.type != "Input":
            try:
                feeds.append(open_feed(spec, state.phase, source.path, elsewhere))
            except UsageError as error:
                raise UsageError(f"{source.where(index)}: {error}") from None
    return feeds


def _inputs(feeds: list[Feed], batch: Any) -> dict[str, Tensor]:
    found: dict[str, Tensor] = {}
    for feed, part in zip(feeds, batch, strict=True):
        found.update(feed.inputs(part))
    return found


def measure(net: Net, feeds: list[Feed], batches: int) -> dict[str, float]:
    """The mean of every output of a net over this many batches, and the error of its last top-1 accuracy, if any.

    The batches are the first ones of the data, in its order, unless rand_skip leaves some out; after its end it begins
    again.
    """
    device = next((p.device for p in net.parameters()), torch.device("cpu"))
    sums: dict[str, float] = {}
    net.eval()
    with torch.no_grad():
        for number in range(batches):
            batch = []
            for feed in feeds:
                first = feed.skip + number * feed.batch_size
                rows = [feed.data[i % len(feed.data)] for i in range(first, first + feed.batch_size)]
                batch += collate([[row] for row in rows])
            inputs = {name: value.to(device) for name, value in _inputs(feeds, batch).items()}
            blobs = net.compute(inputs)
            for name in net.outputs:
                values = blobs[name].flatten().tolist() if blobs[name].numel() <= 1000 else []
                for place, value in enumerate(values):
                    key = name if len(values) == 1 else f"{name}.{place}"
                    sums[key] = sums.get(key, 0.0) + value
    means = {name: total / max(1, batches) for name, total in sums.items()}
    tops = [node.tops[0] for node in net.nodes if node.type == "Accuracy" and net.layers[node.module].top_k == 1]
    error = {"error": 1 - means[tops[-1]]} if tops and tops[-1] in means else {}
    return {**error, **means}
