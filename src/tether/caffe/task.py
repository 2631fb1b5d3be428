"""A Caffe solver as a task."""

from __future__ import annotations

from collections.abc import Mapping
from functools import cached_property
from pathlib import Path
from typing import Any, ClassVar

import torch
from torch import Tensor, nn
from torch.optim.lr_scheduler import LambdaLR, LRScheduler

from tether.caffe.data import Feed, Together, collate, open_feed
from tether.caffe.layers import SOURCES
from tether.caffe.net import Net
from tether.caffe.reading import NetFile, SolverFile, State, included, read_solver
from tether.caffe.schema import message
from tether.caffe.solver import Policy, make_solver
from tether.caffe.weights import Loaded, load_weights
from tether.errors import UsageError
from tether.task import Length, Task


class CaffeTask(Task):
    """What a solver file of Caffe describes: its net, data, solver, policy of the rate, and test nets."""

    options: ClassVar[dict[str, str]] = {
        "solver": "the solver file",
        "sources": "where data is, as NAME=PATH with commas between; NAME is a layer, a top or a source",
    }

    def __init__(self, solver: Path, *, sources: str = "") -> None:
        self.path = Path(solver).expanduser().absolute()
        self._elsewhere = parse_sources(sources)
        self._file = read_solver(self.path)
        settings = self._file.solver
        self.policy = Policy.of(settings)
        if settings.max_iter < 1:
            raise UsageError(f"{self.path} has max_iter {settings.max_iter}; it must be at least 1")
        self.accumulate = max(1, settings.iter_size)
        if settings.clip_gradients >= 0:
            # Caffe clips the sum over iter_size batches, and Tether their mean
            self.clip_norm = settings.clip_gradients / self.accumulate or 1e-30
        feeds = self._feeds
        sizes = {feed.batch_size for feed in feeds}
        if len(sizes) > 1:
            raise UsageError(f"{self.path}: data layers for training have the batch sizes {sizes}: give them one")
        if not feeds:
            raise UsageError(
                f"{self.path}: the net has no data layer for training; supported are {', '.join(SOURCES[:-1])}"
            )
        self.batch_size = sizes.pop()
        self._net(0)

    @property
    def name(self) -> str:
        return "".join(c if c.isalnum() or c in "_-" else "-" for c in self._file.train[0].net.name).lower() or "caffe"

    def run_defaults(self, workers: int) -> dict[str, Any]:
        """What the solver says about a run: the iterations of each worker, the time between tests, the seed."""
        settings = self._file.solver
        found: dict[str, Any] = {"steps": settings.max_iter}
        if settings.test_interval > 0 and self._file.tests:
            samples = workers * self.batch_size * self.accumulate * settings.test_interval
            found["evaluate_every"] = samples / len(Together(self._feeds))
        if settings.random_seed >= 0:
            found["seed"] = settings.random_seed
        return found

    @property
    def snapshot_name(self) -> str | None:
        """How Caffe would begin the name of the trained weights; None if the solver wants none."""
        settings = self._file.solver
        return Path(settings.snapshot_prefix or self.name).name if settings.snapshot_after_train else None

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

    def with_weights(self, path: Path, seed: int) -> tuple[dict[str, Tensor], Loaded]:
        """A state_dict that begins with the layers of a .caffemodel; other layers are drawn with this seed."""
        with torch.random.fork_rng(devices=()):
            torch.manual_seed(seed)
            net = self._net(0).fill()
        loaded = load_weights(net, path)
        if not loaded.loaded:
            raise UsageError(f"{path} has no layer of this net; it has {', '.join(loaded.unused)}")
        return net.state_dict(), loaded

    def optimizer(self, model: nn.Module) -> torch.optim.Optimizer:
        assert isinstance(model, Net)
        return make_solver(self._file.solver, model)

    def scheduler(self, optimizer: torch.optim.Optimizer, length: Length) -> LRScheduler | None:
        return None if self.policy.name == "fixed" else LambdaLR(optimizer, self.policy.factor)

    def train_data(self) -> Any:
        return Together(self._feeds)

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
        return f"{settings.type} with rate {settings.base_lr:g}, policy {self.policy.name}" if settings.type else ""

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
    """Where data is, from NAME=PATH with commas between."""
    found = {}
    for item in filter(None, text.split(",")):
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

    The batches are the first ones of the data, in its order; after its end it begins again.
    """
    device = next((p.device for p in net.parameters()), torch.device("cpu"))
    sums: dict[str, float] = {}
    net.eval()
    with torch.no_grad():
        for number in range(batches):
            batch = []
            for feed in feeds:
                first = number * feed.batch_size
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
