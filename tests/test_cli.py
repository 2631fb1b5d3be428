"""The command line as a person uses it: what is printed where, and how wrong input is refused."""

from __future__ import annotations

import inspect
import io
import json
import math
import re
import signal
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, NamedTuple

import pytest
from rich.console import Console

from tether.bench.spark import output_of
from tether.cli import app as cli
from tether.cli.bench import BENCHMARKS
from tether.cli.output import show_report
from tether.errors import RunError
from tether.protocols import known
from tether.runtimes.local import Local
from tether.runtimes.sim.runtime import Sim

KEYS = {
    "protocol",
    "runtime",
    "workers",
    "steps",
    "samples",
    "seconds",
    "metrics",
    "digest",
    "bytes_sent",
    "bytes_received",
    "overlap",
    "utilization",
    "staleness",
    "run",
}
TASKS = """
import tether, threading, torch
from torch import nn
from torch.utils.data import Dataset, TensorDataset

GUARD = threading.Lock()

class Forward(nn.Linear):
    def __init__(self): super().__init__(4, 2)
    def forward(self, points): return torch.ones(3) @ points  # forward fails

class Stepper(torch.optim.SGD):
    def step(self, closure=None): raise RuntimeError("no step")

class Broken(torch.autograd.Function):
    @staticmethod
    def forward(ctx, loss): return loss.clone()
    @staticmethod
    def backward(ctx, gradient): raise RuntimeError("no way back")

class Rows(Dataset):
    def __len__(self): return 64
    def __getitem__(self, i): return {}["row"]

class Good(tether.Task):
    batch_size = 8
    def model(self): return nn.Linear(4, 2)
    def train_data(self): return TensorDataset(torch.randn(64, 4), torch.randint(0, 2, (64,)))
    def loss(self, model, batch): return nn.functional.cross_entropy(model(batch[0]), batch[1])

class NoModel(Good):
    model = tether.Task.model

class NoLoss(Good):
    loss = tether.Task.loss

class VectorLoss(Good):
    def loss(self, model, batch): return model(batch[0])

class PlainLoss(Good):
    def loss(self, model, batch): return 3.0

class Frozen(Good):
    def model(self): return nn.Linear(4, 2).requires_grad_(False)

class Few(Good):
    def train_data(self): return TensorDataset(torch.randn(1, 4), torch.zeros(1).long())

class Stuck(Good):
    def optimizer(self, model): return torch.optim.SGD(model.parameters(), lr=0.0)
    def evaluate(self, model): return {"error": float(model.weight.square().sum())}

class Infinite(Good):
    def loss(self, model, batch): return super().loss(model, batch) * float("inf")

class BadMetrics(Good):
    def evaluate(self, model): return 3

class FailingMetrics(Good):
    def evaluate(self, model): return {"error": 1 / 0}

class NeedsClosure(Good):
    def optimizer(self, model): return torch.optim.LBFGS(model.parameters())

class NeedsShapes(Good):
    def optimizer(self, model): return torch.optim.Adafactor(model.parameters())

class Locked(Good):
    def __init__(self):
        self.rows = 64
        self.guard = threading.Lock()

class LockedByName(Good):
    def loss(self, model, batch):
        with GUARD: return super().loss(model, batch)

class OnCuda(Good):
    def model(self): return nn.Linear(4, 2).cuda()

class FailingModel(Good):
    def model(self): return nn.Linear("four", 2)

class FailingForward(Good):
    def model(self): return Forward()

class FailingOptimizer(Good):
    def optimizer(self, model): return torch.optim.SGD(model.parameters(), lr=-1)

class FailingSchedule(Good):
    def scheduler(self, optimizer, length): return length.weeks

class FailingStep(Good):
    def optimizer(self, model): return Stepper(model.parameters())

class FailingData(Good):
    def train_data(self): return open("absent.csv")

class FailingRow(Good):
    def train_data(self): return Rows()

class FailingCollate(Good):
    def collate(self, samples): return samples[99]

class FailingNote(Good):
    def note(self): return "chosen: " + 3

class FailingBackward(Good):
    def loss(self, model, batch): return Broken.apply(super().loss(model, batch))

class NoDataset(Good):
    def train_data(self): return 5

class ListOfModels(Good):
    def model(self): return [nn.Linear(4, 2)]

class WrongBatch(Good):
    batch_size = "eight"

class WrongSchedule(Good):
    def scheduler(self, optimizer, length): return 0.1

class TextMetric(Good):
    def evaluate(self, model): return {"error": "low"}

class Sized(Good):
    def __init__(self, size): self.size = size

class FailingConstructor(Good):
    def __init__(self): self.rows = [][1]
"""


class Said(NamedTuple):
    status: int
    out: str
    err: str


@pytest.fixture
def tether(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> Iterator[Callable[[str], Said]]:
    """Runs a command line in a directory that has only a file of tasks."""
    (tmp_path / "bad.py").write_text(TASKS)
    monkeypatch.chdir(tmp_path)
    before = signal.getsignal(signal.SIGTERM)

    def run(line: str) -> Said:
        monkeypatch.setattr("sys.argv", ["tether", *line.split()])
        capsys.readouterr()
        with pytest.raises(SystemExit) as ended:
            cli.main()
        out, err = capsys.readouterr()
        code = ended.value.code
        return Said(code if isinstance(code, int) else 0, out, err)

    yield run
    signal.signal(signal.SIGTERM, before)


def train(tether: Callable[[str], Said], line: str) -> dict[str, Any]:
    said = tether(f"train {line} --json")
    assert said.status == 0, said.err
    figures: dict[str, Any] = json.loads(said.out)
    return figures


def test_json_is_exactly_one_object_with_every_figure(tether: Callable[[str], Said]) -> None:
    figures = train(tether, "digits --on sim --workers 3 --steps 12")
    assert set(figures) >= KEYS
    assert figures["workers"] == 3 and figures["steps"] == 12 and figures["samples"] == 3 * 12 * 32
    assert set(figures["utilization"]["workers"]) == {"worker-0", "worker-1", "worker-2"}
    assert Path(figures["run"]).is_dir()


def test_a_seed_repeats_bit_for_bit_and_another_seed_differs(tether: Callable[[str], Said]) -> None:
    line = "digits --on sim --workers 8 --protocol averaging --epochs 1 --seed"
    first, again, other = (train(tether, f"{line} {seed}")["digest"] for seed in (7, 7, 8))
    assert first == again
    assert first != other


def test_settings_reach_the_protocol_and_the_task(tether: Callable[[str], Said]) -> None:
    figures = train(tether, "digits -p averaging --on sim --workers 2 --steps 6 --set tau=3 --set batch_size=10")
    assert figures["samples"] == 2 * 6 * 10
    config = json.loads((Path(figures["run"]) / "run.json").read_text())
    assert config["protocol"].items() >= {"name": "averaging", "tau": 3, "compress": "none"}.items()


def test_without_a_protocol_the_one_that_suits_the_task_is_used(tether: Callable[[str], Said]) -> None:
    Path("texts.csv").write_text("text,label\n" + "good day now,a\nbad night then,b\n" * 20)
    figures = train(tether, "text --data texts.csv --on sim --workers 2 --steps 2 --set embedding=4 --set filters=2")
    config = json.loads((Path(figures["run"]) / "run.json").read_text())
    assert config["protocol"].items() >= {"name": "server", "sync": "async", "apply": "auto"}.items()
    assert train(tether, "digits --on sim --workers 2 --steps 2")["protocol"] == "tide"


def test_settings_change_the_protocol_that_suits_the_task_and_another_may_be_named(
    tether: Callable[[str], Said],
) -> None:
    Path("texts.csv").write_text("text,label\n" + "good day now,a\nbad night then,b\n" * 20)
    line = "text --data texts.csv --on sim --workers 2 --steps 2 --set embedding=4 --set filters=2"
    figures = train(tether, f"{line} --set rate=1/n")
    config = json.loads((Path(figures["run"]) / "run.json").read_text())
    assert config["protocol"].items() >= {"name": "server", "sync": "async", "rate": "1/n"}.items()
    assert train(tether, f"{line} --protocol averaging")["protocol"] == "averaging"


def test_what_is_sent_can_be_compressed_by_any_protocol(tether: Callable[[str], Said]) -> None:
    for protocol in sorted(known().keys() - {"single"}):
        line = f"digits --on sim --workers 2 --steps 4 --protocol {protocol} --set compress=int8"
        assert train(tether, line)["compression"]["share"] < 0.27
    assert "of what it was" not in tether("train digits --on sim --workers 2 --steps 4").out
    assert "MB, 25.1% of what it was" in tether("train digits --on sim --workers 2 --steps 4 --set compress=int8").out


def test_until_ends_the_run_when_the_metric_is_reached(tether: Callable[[str], Said]) -> None:
    figures = train(tether, "digits --on sim --workers 4 --until error<0.2")
    assert figures["reason"] == "error<0.2 reached"
    assert figures["metrics"]["error"] < 0.2


def test_a_slower_link_takes_longer_and_a_priced_model_more_bytes(tether: Callable[[str], Said]) -> None:
    line = "digits -p averaging --on sim --workers 4 --steps 10 --set tau=2"
    fast, slow = (train(tether, f"{line} --link {link}") for link in ("1gbit", "1mbit"))
    assert slow["seconds"] > 2 * fast["seconds"]
    assert slow["digest"] == fast["digest"]
    priced = train(tether, f"{line} --model-bytes 7MiB --step-seconds 0.095 --latency 1ms")
    assert priced["bytes_sent"] > 20 * fast["bytes_sent"]


def test_faults_come_from_a_file(tether: Callable[[str], Said], tmp_path: Path) -> None:
    (tmp_path / "faults.json").write_text('[{"kind": "crash", "node": "worker-1", "step": 3}]')
    figures = train(tether, "digits -p averaging --on sim --workers 3 --steps 10 --set tau=2 --faults faults.json")
    assert "worker-1 died" in (Path(figures["run"]) / "metrics.jsonl").read_text()


def test_runs_are_reported_side_by_side(tether: Callable[[str], Said], tmp_path: Path) -> None:
    train(tether, "digits --on sim --protocol single --steps 10 --run one")
    train(tether, "digits --on sim --protocol server --workers 2 --steps 10 --run two")
    said = tether("report one two --to page")
    assert said.status == 0
    assert "single" in said.out and "server" in said.out
    assert (tmp_path / "page" / "report.html").stat().st_size > 10_000
    assert (tmp_path / "page" / "report.png").read_bytes().startswith(b"\x89PNG")


def test_a_finished_run_is_resumed_with_more_steps_and_other_workers(tether: Callable[[str], Said]) -> None:
    train(tether, "digits --on sim --workers 4 --steps 10 --run one")
    refused = tether("resume one")
    assert refused.status == 2 and "give more epochs or steps" in refused.err
    said = tether("resume one --steps 30 --workers 2 --json")
    figures = json.loads(said.out)
    assert figures["steps"] == 30 and figures["workers"] == 2
    times = [json.loads(line)["time"] for line in Path("one/metrics.jsonl").read_text().splitlines()]
    assert times == sorted(times)


def test_the_table_of_a_resumed_run_says_what_belongs_to_its_last_part(tether: Callable[[str], Said]) -> None:
    train(tether, "digits --on sim --workers 2 --steps 10 --run one")
    lines = {line.split()[0]: " ".join(line.split()[1:]) for line in tether("resume one --steps 30").out.splitlines()}
    figures = json.loads(Path("one/run.json").read_text())["result"]
    part = figures["last_part"]
    assert part["samples"] == 2 * 20 * 32 and figures["samples"] == 2 * 30 * 32
    assert figures["samples_per_second"] == part["samples"] / part["seconds"]
    assert lines["seconds"] == (
        f"{figures['seconds']:.4g} (virtual), the last part {part['seconds']:.4g} with "
        f"{figures['samples_per_second']:,.0f} samples/s"
    )
    assert all(lines[name].endswith("in the last part") for name in ("utilization", "sent"))
    said = " ".join(tether("report one").out.split())
    assert "one: samples/s, utilization, overlap and MB sent are those of its last part" in said
    assert "last part" not in tether("train digits --on sim --steps 4").out


def test_a_recorded_run_is_replayed(tether: Callable[[str], Said]) -> None:
    train(tether, "digits --on sim --workers 2 --steps 4 --record --run one")
    said = tether("replay one")
    assert said.status == 0
    assert said.out.count("the same effects") == 3
    assert tether("train digits --on sim --steps 2 --run two").status == 0
    assert "was not recorded" in tether("replay two").err


def test_the_swarm_is_clean_and_finds_a_planted_bug_that_its_seed_repeats(tether: Callable[[str], Said]) -> None:
    fine = tether("swarm --seeds 10")
    assert fine.status == 0 and "failures" in fine.out and "server" in fine.out
    said = tether("swarm --first 7 --seeds 3 --protocol averaging --plant drop")
    assert said.status == 1 and "Stalled" in said.out
    scenario = said.out[said.out.index("{") : said.out.index("\n}\n") + 3]
    Path("failing.json").write_text(scenario)
    once, twice = tether("swarm --scenario failing.json"), tether("swarm --scenario failing.json")
    assert once.status == 1 and "Stalled" in once.out
    assert once.out == twice.out


def test_lists_name_every_protocol_and_task_with_defaults(tether: Callable[[str], Said]) -> None:
    listed = tether("protocols").out
    assert "tau = auto" in listed
    assert all(f"  for {options.suits[:40]}" in listed for options in known().values())
    alone = tether("protocols tide").out
    assert "  drift = auto" in alone and "mpca" not in alone
    listed = tether("tasks").out
    for name in ("digits", "fashion", "cifar", "chars", "synthetic"):
        assert f"{name}  " in listed


def test_in_a_terminal_a_list_is_wrapped_at_words(
    tether: Callable[[str], Said], monkeypatch: pytest.MonkeyPatch
) -> None:
    written = io.StringIO()
    monkeypatch.setattr(
        "tether.cli.lists.out", Console(file=written, force_terminal=True, color_system=None, width=60, soft_wrap=True)
    )
    assert tether("protocols tide").status == 0
    lines = [line.rstrip() for line in written.getvalue().splitlines()]
    assert max(map(len, lines)) <= 60
    assert "      how many shards are under way at a time: broadcast," in lines


WRONG = [
    ("train digitz", "unknown task 'digitz'; known: chars, cifar, digits"),
    (
        "train digits --protocol averagin",
        "unknown protocol 'averagin'; known: averaging, elastic, grid, mpca, server, single",
    ),
    (
        "train digits --set tau=3",
        "protocol tide has no option 'tau'; these have it: averaging, streaming, elastic. Choose",
    ),
    ("protocols tyde", "unknown protocol 'tyde'; known: averaging, elastic"),
    ("train digits -p averaging --set tau=x", "option tau of protocol averaging is 'x'; expected"),
    ("train digits -p averaging --set tau=0", "tau must be at least 1"),
    ("train digits -p averaging --set tao=3", "tau. Did you mean 'tau'?"),
    ("train digits --set compress=zip", "compress of protocol tide is 'zip'; expected none | fp16 | bf16 | int8"),
    ("train digits --protocol single --set compress=int8", "single sends nothing"),
    ("train digits --set tau", "write it like --set tau=10"),
    ("train digits --on mars", "unknown runtime 'mars'; known: cluster, local, ray, sim"),
    ("train digits --link 1gbit", "add --on sim"),
    ("train digits --on sim --hosts a,b", "only a cluster has them; add --on cluster"),
    ("train digits --hosts ,", "--hosts names no host: write --hosts a,b,c"),
    ("train digits --on cluster", "add --listen HOST:PORT --key FILE; or hosts on which they are started"),
    ("launch --hosts a bad.py", "an own loop runs on one machine; for several, write a tether.Task"),
    ("launch --hosts a", "an own loop runs on one machine"),
    ("train digits --on sim --link 1foo", "such as 1gbit"),
    ("train digits --on sim --latency fast", "such as 0.2ms"),
    ("train digits --on sim --step-seconds 0", "a step takes some time"),
    ("train digits --on sim --step-seconds -1", "step_seconds cannot be negative: '-1'"),
    ("train digits --on sim --model-bytes 0", "such as 7MiB"),
    ("train digits --on sim --faults none.json", "cannot read the faults in none.json"),
    ("train digits --epochs 0", "epochs must be more than 0"),
    ("train digits --epochs 1 --steps 2", "either epochs or steps"),
    ("train digits --until soon", "write it like error<0.05"),
    ("train digits --on sim --until loss2<1", "the task has error, loss"),
    ("train digits --on sim --until eror<0.1", "the task has error, loss. Did you mean 'error'?"),
    ("train digits --workers 0", "must be at least 1"),
    ("train digits --protocol single --workers 3", "uses 1 worker"),
    ("train digits --on sim --set batch_size=2000", "mini-batches of 2000 samples"),
    ("train digits --on sim --workers 5000", "1442 training samples for 5000 workers"),
    ("train digits --seed -3", "seed cannot be negative"),
    ("train fashion", "pass --data"),
    ("train digits --data .", "task digits takes no data: leave out --data"),
    ("train bad.py:Sized", "the constructor of task bad.py:Sized needs size: pass --set size=VALUE"),
    ("train nofile.py:Task", "there is no file"),
    ("train bad.py:Other", "has no class Other"),
    ("train bad.py:NoModel --on sim", "lacks the method model()"),
    ("train bad.py:NoLoss --on sim", "lacks the method loss()"),
    ("train bad.py:VectorLoss --on sim", "worker-0, step 1: loss() returned a tensor of shape (8, 2)"),
    ("train bad.py:PlainLoss --on sim", "worker-0, step 1: loss() returned float"),
    ("train bad.py:Frozen --on sim", "no trainable parameter"),
    ("train bad.py:Few --on sim", "1 training samples for 2 workers"),
    ("train bad.py:Infinite --on sim", "worker-0, step 1: the loss became inf"),
    ("train bad.py:BadMetrics --on sim", "return a dict of numbers"),
    ("train bad.py:FailingMetrics --on sim", "evaluate() failed: ZeroDivisionError"),
    ("train bad.py:NeedsClosure --on sim", "LBFGS calls the loss itself"),
    ("train bad.py:NeedsShapes --on sim --protocol server", "averaging, elastic, grid, mpca, single, streaming, tide"),
    ("resume nowhere", "there is no folder nowhere: name a run directory, such as one below runs/"),
    ("report nowhere", "there is no folder nowhere"),
    ("resume .", "is not a run directory: it has no run.json"),
    (
        "bench nothing",
        "unknown benchmark 'nothing'; known: accuracy, allreduce, checkpoint, cycles, fidelity, frontier, grid, loops",
    ),
    ("bench scaelup", "Did you mean 'scaleup'?"),
    ("trian digits", "unknown command 'trian'; known: bench, caffe, chaos, classify, data, demo"),
    ("bench accuracy", "needs a folder with mr_polarity.csv, trec_train.csv, banking77_train.csv: --data DIR"),
    ("swarm --plant thing", "unknown bug to plant"),
    ("swarm --protocol thing", "unknown protocol"),
]


@pytest.mark.parametrize(
    "line",
    [
        "report one --to bad.py/out",
        "tune digits --alpha 0.1,0.2 --share 0.5 --to bad.py/out",
        "study digits --mu 32 --lambda 1 --protocol hard --to bad.py/out",
        "demo --to bad.py/out",
    ],
)
def test_a_folder_that_cannot_be_written_is_refused_before_anything_is_computed(
    tether: Callable[[str], Said], monkeypatch: pytest.MonkeyPatch, line: str
) -> None:
    def computed(*_: Any) -> None:
        raise AssertionError("a run was computed for nothing")

    train(tether, "digits --on sim --protocol single --steps 2 --run one")
    for runtime in (Sim, Local):
        monkeypatch.setattr(runtime, "execute", computed)
    said = tether(line)
    assert (said.status, said.out) == (2, "")
    assert said.err.strip() == "tether: cannot write to bad.py/out: Not a directory; choose another folder with --to"


@pytest.mark.parametrize(("line", "message"), WRONG, ids=[line for line, _ in WRONG])
def test_wrong_input_is_explained_with_status_2(tether: Callable[[str], Said], line: str, message: str) -> None:
    said = tether(line)
    assert said.status == 2
    assert message in said.err.replace("\n", " ")
    assert "Traceback" not in said.err
    assert said.out == ""


def test_a_task_with_shapes_in_its_optimizer_trains_where_steps_are_local(tether: Callable[[str], Said]) -> None:
    assert train(tether, "bad.py:NeedsShapes --on sim --steps 4")["steps"] == 4


def test_a_model_that_has_not_learned_has_a_warning_in_the_table_and_in_json(tether: Callable[[str], Said]) -> None:
    line = "train bad.py:Stuck --on sim --steps 4"
    assert "no better than before training" in " ".join(tether(line).out.split())
    assert "no better than before training" in json.loads(tether(f"{line} --json").out)["warning"]
    assert "warning" not in tether("train digits --on sim --epochs 2").out


def where(text: str) -> str:
    """How an error names the line of the file of tasks that has this text."""
    number = next(i for i, line in enumerate(TASKS.splitlines(), 1) if text in line)
    return f"bad.py:{number}"


BLAMED = {
    "FailingModel": ("model() failed: TypeError: ", 'nn.Linear("four", 2)'),
    "FailingForward": ("worker-0, step 1: RuntimeError: ", "# forward fails"),
    "FailingOptimizer": ("optimizer() failed: ValueError: Invalid learning rate: -1", "lr=-1"),
    "FailingSchedule": ("scheduler() failed: AttributeError: 'Length' object has no attribute 'weeks'", "length.weeks"),
    "FailingStep": ("the optimizer's step() failed: RuntimeError: no step", "no step"),
    "FailingData": ("train_data() failed: FileNotFoundError: ", "absent.csv"),
    "FailingRow": ("worker-0, step 1: KeyError: 'row'", 'return {}["row"]'),
    "FailingCollate": ("worker-0, step 1: IndexError: ", "samples[99]"),
    "FailingNote": ("note() failed: TypeError: ", '"chosen: " + 3'),
    "FailingBackward": ("worker-0, step 1: RuntimeError: no way back", "no way back"),
    "OnCuda": ("model() failed: AssertionError: Torch not compiled with CUDA enabled", ".cuda()"),
    "FailingMetrics": ("evaluate() failed: ZeroDivisionError", "1 / 0"),
}


@pytest.mark.parametrize("name", BLAMED)
def test_what_the_users_code_raises_is_shown_once_with_its_line_and_no_traceback(
    tether: Callable[[str], Said], name: str
) -> None:
    message, line = BLAMED[name]
    said = tether(f"train bad.py:{name} --on sim --steps 4")
    assert said.status == 2 and said.out == ""
    assert said.err.count(message) == 1, said.err
    assert where(line) in said.err
    assert "Traceback" not in said.err and "internal" not in said.err


REFUSED = {
    "NoDataset": "train_data() of task NoDataset returned int",
    "ListOfModels": "model() of task ListOfModels returned list",
    "WrongBatch": "batch_size of task WrongBatch is 'eight'",
    "WrongSchedule": "scheduler() of task WrongSchedule returned float",
    "TextMetric": "evaluate() of task TextMetric returned {'error': 'low'}: values must be numbers",
    "FailingConstructor": "the constructor of task bad.py:FailingConstructor failed: IndexError",
}


@pytest.mark.parametrize("name", REFUSED)
def test_a_task_of_wrong_types_is_refused_once_with_the_reason(tether: Callable[[str], Said], name: str) -> None:
    said = tether(f"train bad.py:{name} --on sim --steps 4")
    assert said.status == 2 and said.err.count(REFUSED[name]) == 1, said.err
    assert "Traceback" not in said.err


def test_cuda_without_cuda_is_refused_with_what_to_do(tether: Callable[[str], Said]) -> None:
    assert "leave the model on the CPU" in tether("train bad.py:OnCuda --on sim --steps 4").err


@pytest.mark.parametrize(
    ("name", "what", "line"),
    [
        ("Locked", "attribute 'guard' of task Locked", "self.guard = threading.Lock()"),
        ("LockedByName", "'GUARD', which task LockedByName uses", "GUARD = threading.Lock()"),
    ],
)
def test_what_cannot_travel_to_other_processes_is_named_with_its_line_before_anything_is_started(
    tether: Callable[[str], Said], tmp_path: Path, name: str, what: str, line: str
) -> None:
    said = tether(f"train bad.py:{name} --steps 4")
    assert said.status == 2 and said.out == ""
    assert what in said.err and "cannot pickle '_thread.lock' object" in said.err and where(line) in said.err
    assert "Traceback" not in said.err and not (tmp_path / "runs").exists()
    assert train(tether, f"bad.py:{name} --on sim --steps 4")["steps"] == 4, "the simulator copies nothing"


README = Path(__file__).parents[1] / "README.md"


def test_the_readmes_first_program_trains_under_its_second_command(
    tether: Callable[[str], Said], tmp_path: Path
) -> None:
    program = re.findall(r"```python\n(.*?)```", README.read_text(), re.DOTALL)[0]
    (tmp_path / "my_task.py").write_text(program)
    assert train(tether, "my_task.py:Digits --protocol server -n 4 --on sim --steps 4")["workers"] == 4
    assert len(list((tmp_path / "runs").iterdir())) == 1, "and nothing else has run"


def test_a_task_below_a_call_of_run_at_the_top_of_its_file_is_refused_with_line_and_remedy(
    tether: Callable[[str], Said], tmp_path: Path
) -> None:
    program = f"{TASKS}\ntether.run(Good(), epochs=1)\n\ndef helper(): ...\n\nclass Below(Good): ...\n"
    (tmp_path / "late.py").write_text(program)
    line = program.splitlines().index("tether.run(Good(), epochs=1)") + 1
    for name in ("Good", "Below"):
        said = tether(f"train late.py:{name} --on sim")
        assert said.status == 2 and f"late.py:{line}" in said.err and 'if __name__ == "__main__":' in said.err
        assert "Traceback" not in said.err and not (tmp_path / "runs").exists()


def test_a_file_of_tasks_is_run_once_however_often_its_task_is_looked_up(
    tether: Callable[[str], Said], tmp_path: Path
) -> None:
    (tmp_path / "loud.py").write_text(TASKS + "\nprint('read')\n")
    said = tether("train loud.py:Good -p averaging --on sim --steps 2 --set tau=2")
    assert said.status == 0 and said.out.count("read\n") == 1
    (tmp_path / "loud.py").write_text(TASKS + "\nprint('read again')\n")
    assert "read again" in tether("train loud.py:Good --on sim --steps 2").out, "but a changed file is another"


def test_a_syntax_error_is_shown_with_its_line_and_no_traceback(tether: Callable[[str], Said], tmp_path: Path) -> None:
    (tmp_path / "broken.py").write_text("import tether\nclass T(tether.Task:\n")
    said = tether("train broken.py:T --on sim")
    assert said.status == 2 and "SyntaxError" in said.err and "(line 2)" in said.err and "Traceback" not in said.err


# ---- help, benchmarks and the demo ----------------------------------------------------------------------------------


def options_in(text: str) -> set[str]:
    """The long options that a help names at the beginning of a line."""
    return set(re.findall(r"^\W*(--[a-z][a-z-]*)", text, re.MULTILINE))


@pytest.mark.parametrize("name", BENCHMARKS)
def test_the_help_of_a_benchmark_names_its_own_options_and_no_others(tether: Callable[[str], Said], name: str) -> None:
    module = __import__(f"tether.bench.{name}", fromlist=[name])
    own = {"--" + parameter.replace("_", "-") for parameter in inspect.signature(getattr(module, name)).parameters}
    said = tether(f"bench {name} --help")
    assert said.status == 0
    assert options_in(said.out) == own | {"--json", "--help"}
    first_line = str(getattr(module, name).__doc__).splitlines()[0]
    assert first_line in " ".join(said.out.split())


def test_the_help_of_the_group_lists_every_benchmark(tether: Callable[[str], Said]) -> None:
    said = tether("bench --help")
    assert said.status == 0
    shown = " ".join(said.out.replace("│", " ").split())
    for name, line in BENCHMARKS.items():
        assert f" {name} {line}" in shown


@pytest.mark.parametrize(
    ("line", "message"),
    [
        ("bench sim --rounds 3", "No such option: --rounds"),
        ("bench scaleup --target 0.1", "No such option: --target"),
        ("bench scaling --workers 4,x", "Invalid value for '--workers': '4,x' is not understood"),
        ("bench cycles --steps 0", "Invalid value for '--steps': '0' is not understood"),
        ("bench accuracy --texts few.csv", "write it like a.csv:2,b.csv:7.5"),
    ],
)
def test_a_benchmark_refuses_options_that_it_does_not_have_and_values_that_it_cannot_read(
    tether: Callable[[str], Said], line: str, message: str
) -> None:
    said = tether(line)
    assert said.status == 2 and said.out == ""
    assert message in " ".join(said.err.replace("│", " ").split())


def test_a_benchmark_takes_its_options_and_prints_one_json_object(tether: Callable[[str], Said]) -> None:
    report = json.loads(tether("bench sim --workers 9 --steps 2 --json").out)
    assert report["bench"] == "sim" and {row["workers"] for row in report["rows"]} == {8, 9}
    assert "server 9 over 8 workers" in tether("bench sim --workers 9 --steps 2").out.replace("_", " ")


def test_a_target_that_is_not_reached_is_null_in_json(capsys: pytest.CaptureFixture[str]) -> None:
    show_report({"rows": [{"seconds": math.inf}], "ratios": {"over mpca": math.nan}}, as_json=True)
    assert json.loads(capsys.readouterr().out) == {"rows": [{"seconds": None}], "ratios": {"over mpca": None}}


def test_a_command_that_fails_on_emulated_hosts_shows_what_it_printed(capfd: pytest.CaptureFixture[str]) -> None:
    program = "import sys; print('on out'); print('on err', file=sys.stderr); sys.exit({})"
    command = [sys.executable, "-c"]
    assert output_of([*command, program.format(0)], {}) == "on out\n"
    assert capfd.readouterr().err == "on err\n"
    with pytest.raises(RunError, match=r"status 3. It printed:\non out\non err"):
        output_of([*command, program.format(3)], {})


@pytest.mark.parametrize("line", ["--help", "bench --help"])
def test_help_needs_neither_torch_nor_a_command_of_its_list(line: str) -> None:
    program = f"""
import sys
from tether.cli import main
sys.argv = ["tether", *{line.split()}]
try:
    main()
except SystemExit as ended:
    assert not ended.code
heavy = {{"torch", "numpy", "matplotlib", "tether.api", "tether.cli.train", "tether.bench.common"}}
assert not heavy & set(sys.modules), heavy & set(sys.modules)
"""
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr


def test_the_demo_compares_protocols_on_a_slow_network_and_writes_two_reports(
    tether: Callable[[str], Said], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("tether.cli.demo.TARGET", 0.2)  # sooner reached
    said = tether("demo --to out --epochs 1")
    assert said.status == 0, said.err
    for label in ("one worker", "server", "averaging", "DiLoCo", "mpca", "tide"):
        _, _, seconds, speedup, computing = row(said, label)
        assert int(seconds) > 0 and float(speedup) > 0 and computing.endswith("%"), label
    assert "times as fast as one worker" in said.out
    pages = {place: (tmp_path / "out" / place / "report.html").read_text() for place in ("report", "report-processes")}
    for page, runs in zip(pages.values(), (6, 2), strict=True):
        assert f"digits: {runs} runs" in page
    assert "8 simulated workers, links of 100mbit, a model of 1MiB" in pages["report"]
    assert "times as fast as one worker" in pages["report"]
    assert "in processes of this machine" in pages["report-processes"]
    assert said.out.index("open first") < said.out.index("report/report.html") < said.out.index("report-processes")


def row(said: Said, label: str) -> list[str]:
    """The cells of the last row of a table that begins with this label."""
    lines = [[cell.strip() for cell in line.strip("│").split("│")] for line in said.out.splitlines()]
    return next((cells for cells in reversed(lines) if cells[0] == label), [])
