"""A user's own loop: alone it changes nothing, launched its processes stay tied, and it ends in good order."""

from __future__ import annotations

import json
import signal
import subprocess
import sys
import textwrap
import time
from collections import Counter
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

import tether
from tether import Averaging, Elastic, Grid, Mpca, Single, Streaming, Tide
from tether.core.effects import Compute, Contributed, Effect, Install, Reduce, Send, Step
from tether.core.events import Broadcasted, DataEnded, GradientReady, Received, Started
from tether.core.machine import NodeContext, Schedule
from tether.errors import UsageError
from tether.learner.loop import LoopReplica
from tether.loops import loop as loops
from tether.loops import process
from tether.loops.launch import launch as launch_script
from tether.loops.sampler import SharedSampler, next_parts
from tether.protocols import Options
from tether.protocols.averaging import ROUND, Joint
from tether.protocols.circulation import tag_of
from tether.protocols.elastic import Ask, Centre, Difference

EXAMPLES = Path(__file__).parent.parent / "examples" / "loops"

#: a script whose data, model and loop the tests vary
SCRIPT = """
import sys
import torch
from torch import nn
from torch.utils.data import DataLoader, TensorDataset
import tether

torch.manual_seed(0)
inputs = torch.randn(256, 8)
labels = (inputs[:, 0] * inputs[:, 1] > 0).long()
data = TensorDataset(inputs, labels)
model = nn.Sequential(nn.Linear(8, 16), nn.Tanh(), nn.Linear(16, 2))
optimizer = torch.optim.SGD(model.parameters(), lr=0.2, momentum=0.9)


def steps(loader, epochs=1):
    for epoch in range(epochs):
        for x, y in loader:
            optimizer.zero_grad()
            nn.functional.cross_entropy(model(x), y).backward()
            optimizer.step()


def digest():
    return " ".join(f"{p.double().sum().item():.15g}" for p in model.state_dict().values())

"""


def run(
    command: list[str], folder: Path, *, ends_well: bool = True, seconds: float = 300
) -> subprocess.CompletedProcess[str]:
    ended = subprocess.run(command, cwd=folder, capture_output=True, text=True, timeout=seconds)
    assert (ended.returncode == 0) == ends_well, ended.stdout + ended.stderr
    return ended


def launch(folder: Path, script: str, *options: str, ends_well: bool = True) -> subprocess.CompletedProcess[str]:
    """Launch a script with these options of `tether launch`, and `--run run`."""
    (folder / "script.py").write_text(SCRIPT + textwrap.dedent(script))
    command = [sys.executable, "-m", "tether", "launch", "--run", "run", *options, "script.py"]
    return run(command, folder, ends_well=ends_well)


def log(folder: Path, rank: int) -> str:
    return (folder / "run" / "logs" / f"worker-{rank}.log").read_text()


def digests(folder: Path, ended: subprocess.CompletedProcess[str], world: int) -> list[str]:
    """What each process printed last, after the word "end"."""
    texts = [ended.stdout, *(log(folder, rank) for rank in range(1, world))]
    return [text.rpartition("end ")[2].strip() for text in texts]


@pytest.fixture
def alone() -> Iterator[None]:
    """No loop of another test."""
    loops._loop = None
    yield
    loops._loop = None


# ---- three programs of others ---------------------------------------------------------------------------------------


def original(name: str) -> str:
    """The program before Tether: without the lines that name it; what a with statement held is indented less."""
    lines: list[str] = []
    left_out, indented = 0, False
    for line in (EXAMPLES / f"{name}.py").read_text().split("\n"):
        if "tether" in line.lower():
            left_out, indented = left_out + 1, line.lstrip().startswith("with")
            continue
        lines.append(line.removeprefix("    ") if indented else line)
        indented = False
    assert left_out == 2, "a program needs two lines"
    return "\n".join(lines)


def weights(folder: Path, name: str) -> dict[str, torch.Tensor]:
    found: dict[str, torch.Tensor] = torch.load(folder / f"{name}.pt")
    return found


@pytest.mark.parametrize("name", ["plain_loop", "huggingface_trainer", "lightning_module"])
def test_a_program_of_others_changes_by_two_lines_and_alone_not_by_a_bit(name: str, tmp_path: Path) -> None:
    before, after = tmp_path / "before", tmp_path / "after"
    for folder, text in ((before, original(name)), (after, (EXAMPLES / f"{name}.py").read_text())):
        folder.mkdir()
        (folder / f"{name}.py").write_text(text)
        run([sys.executable, f"{name}.py", "--epochs", "1"], folder)
    assert "tether" not in (before / f"{name}.py").read_text().lower()
    expected, found = weights(before, name), weights(after, name)
    assert expected.keys() == found.keys() and all(expected[key].equal(found[key]) for key in expected)


@pytest.mark.parametrize(
    ("name", "epochs", "error", "protocol"),
    [
        ("plain_loop", 12, 0.06, "averaging"),
        ("plain_loop", 12, 0.06, "mpca"),
        ("huggingface_trainer", 3, 0.08, "mpca"),
        ("lightning_module", 8, 0.06, "averaging"),
        pytest.param("huggingface_trainer", 3, 0.08, "averaging", marks=pytest.mark.slow),
        pytest.param("lightning_module", 8, 0.06, "mpca", marks=pytest.mark.slow),
    ],
)
def test_a_program_of_others_learns_on_two_workers(
    name: str, epochs: int, error: float, protocol: str, tmp_path: Path
) -> None:
    options = ["-n", "2", "--protocol", protocol, "--run", "run"]
    command = [sys.executable, "-m", "tether", "launch", *options, str(EXAMPLES / f"{name}.py")]
    ended = run([*command, "--epochs", str(epochs)], tmp_path)
    found = [float(text.rpartition("error ")[2].split()[0]) for text in (ended.stdout, log(tmp_path, 1))]
    assert found[0] == found[1], "both have the joint model in their modules"
    assert found[0] <= error


# ---- what a loop may do ---------------------------------------------------------------------------------------------

#: one script that does everything at once
EVERYTHING = """
    class Tied(nn.Module):
        def __init__(self):
            super().__init__()
            self.first = nn.Linear(8, 8)
            self.second = nn.Linear(8, 8)
            self.second.weight = self.first.weight
            self.norm = nn.BatchNorm1d(8)
            self.last = nn.Linear(8, 2)

        def forward(self, x):
            return self.last(self.norm(torch.tanh(self.second(torch.relu(self.first(x))))))

    def main():
        global model, optimizer
        model = Tied()
        optimizer = torch.optim.AdamW(
            [{"params": [*model.first.parameters(), model.second.bias, *model.norm.parameters()]},
             {"params": model.last.parameters(), "lr": 3e-3, "weight_decay": 0.0}], lr=1e-2)
        scheduler = torch.optim.lr_scheduler.OneCycleLR(optimizer, 1e-2, total_steps=10_000)
        compiled = torch.compile(model, backend="eager")
        scaler = torch.amp.GradScaler("cpu")
        model.last.bias.requires_grad_(False)
        made = 0
        context = sys.argv[1] if len(sys.argv) > 1 else "fork"
        with tether.join(model, optimizer, scheduler) as (_, _, scheduler):
            frozen = model.last.bias.clone()
            used, known = tether.sampler(data), []
            optimizer.register_step_post_hook(lambda *_: known.append(int(used.state()["marks"][-1][0])))
            loader = DataLoader(data, batch_size=16, sampler=used, num_workers=2, multiprocessing_context=context)
            for epoch in range(3):
                model.train()
                if epoch == 1:
                    assert torch.allclose(model.last.bias, frozen, atol=1e-6), "it was not trained"
                    model.last.bias.requires_grad_(True)
                    model.first.bias.requires_grad_(False)
                for number, (x, y) in enumerate(loader):
                    with torch.autocast("cpu", dtype=torch.bfloat16):
                        loss = nn.functional.cross_entropy(compiled(x), y) / 2
                    scaler.scale(loss).backward()
                    if number % 2:
                        scaler.unscale_(optimizer)
                        nn.utils.clip_grad_norm_(model.parameters(), 1.0)
                        scaler.step(optimizer)
                        scaler.update()
                        optimizer.zero_grad(set_to_none=bool(epoch % 2))
                        scheduler.step()
                        made += 1
                model.eval()
                with torch.no_grad():
                    own = (model(inputs).argmax(1) != labels).float().mean().item()
                joint = tether.evaluate(lambda m: {"error": (m(inputs).argmax(1) != labels).float().mean().item()})
                assert (joint is None) == (tether.rank() > 0), joint
            assert not torch.equal(model.last.bias, frozen), "it was trained"
            assert model.second.weight is model.first.weight
        assert known == [*range(1, made + 1)], "a checkpoint that is made during a step has its samples"
        assert scheduler.last_epoch == made, (scheduler.last_epoch, made)
        tether.save("joint.safetensors")
        print("made", made, "end", digest())

    if __name__ == "__main__":
        main()
"""


@pytest.mark.parametrize(("protocol", "context"), [("averaging", "fork"), ("tide", "spawn")])
def test_a_loop_may_do_what_loops_do(protocol: str, context: str, tmp_path: Path) -> None:
    (tmp_path / "script.py").write_text(SCRIPT + textwrap.dedent(EVERYTHING))
    command = [
        sys.executable,
        "-m",
        "tether",
        "launch",
        "-n",
        "2",
        "--run",
        "run",
        "-p",
        protocol,
        "script.py",
        context,
    ]
    ended = run(command, tmp_path)
    first, second = digests(tmp_path, ended, 2)
    assert first == second and first, "both end with the joint model"
    rows = [json.loads(line) for line in (tmp_path / "run" / "metrics.jsonl").read_text().splitlines()]
    assert [list(row["metrics"]) for row in rows if row["kind"] == "evaluation"] == [["error"]] * 3
    figures = json.loads((tmp_path / "run" / "run.json").read_text())["result"]
    assert figures["samples"] == 2 * 3 * 4, "256 samples in 2 shares, mini-batches of 16, every second one a step"
    from safetensors.torch import load_file

    saved = load_file(tmp_path / "joint.safetensors")
    assert f"{saved['last.weight'].double().sum().item():.15g}" in first


@pytest.mark.parametrize("protocol", ["averaging", "elastic", "mpca", "tide", "grid"])
def test_a_rank_that_makes_more_steps_than_another_holds_nobody_up(protocol: str, tmp_path: Path) -> None:
    script = """
        with tether.join(model, optimizer):
            steps(DataLoader(data, batch_size=16), 1 + 4 * tether.rank())
        print("end", digest())
    """
    ended = launch(tmp_path, script, "-n", "2", "--protocol", protocol)
    first, second = digests(tmp_path, ended, 2)
    assert first == second
    config = json.loads((tmp_path / "run" / "run.json").read_text())
    assert config["result"]["reason"] == "all loops have ended"
    assert config["result"]["samples"] == 16 * 6, "every step counts, those after the last whole round too"


def test_the_script_may_choose_the_protocol_and_the_end_of_the_script_ends_the_run(tmp_path: Path) -> None:
    script = """
        tether.join(model, optimizer, protocol=tether.Elastic(tau=3))
        steps(DataLoader(data, batch_size=16, shuffle=True))
    """
    launch(tmp_path, script, "-n", "2")
    config = json.loads((tmp_path / "run" / "run.json").read_text())
    assert (config["protocol"]["name"], config["protocol"]["tau"]) == ("elastic", 3)
    assert config["status"] == "finished" and config["result"]["samples"] == 32


def test_one_process_makes_the_steps_that_the_script_makes_alone(tmp_path: Path) -> None:
    script = """
        with tether.join(model, optimizer):
            steps(DataLoader(data, batch_size=16, shuffle=True), 2)
        print("end", digest())
    """
    ended = launch(tmp_path, script, "-n", "1")
    by_itself = run([sys.executable, "script.py"], tmp_path)
    assert ended.stdout == by_itself.stdout


MODULE = """
    from .parts import SAM

    import threading, time

    optimizer = SAM(model.parameters(), lr=0.2)

    def closure():
        optimizer.zero_grad()
        loss = nn.functional.cross_entropy(model(inputs), labels)
        loss.backward()
        return loss

    with tether.join(model, optimizer):
        for _ in range(20):
            closure()
            optimizer.step(closure)
        tether.evaluate(lambda joint: {"loss": nn.functional.cross_entropy(joint(inputs), labels)})

    def last():
        time.sleep(0.5)
        print(__package__, *sys.argv[1:], "end", digest(), flush=True)

    threading.Thread(target=last).start()
"""
#: an optimizer that calls the closure in the middle of its step, and gives the parameters other memory
PARTS = """
import torch

class SAM(torch.optim.Optimizer):
    def __init__(self, params, lr):
        super().__init__(params, {"lr": lr})

    @torch.no_grad()
    def step(self, closure=None):
        parameters = self.param_groups[0]["params"]
        before = [p.data.clone() for p in parameters]
        for p in parameters:
            p.add_(p.grad, alpha=0.05)
        with torch.enable_grad():
            closure()
        for p, old in zip(parameters, before):
            p.data = old - self.param_groups[0]["lr"] * p.grad
"""


def test_a_module_of_a_package_with_an_optimizer_that_needs_its_closure(tmp_path: Path) -> None:
    (tmp_path / "package").mkdir()
    (tmp_path / "package" / "parts.py").write_text(PARTS)
    (tmp_path / "package" / "train.py").write_text(SCRIPT + textwrap.dedent(MODULE))
    command = [sys.executable, "-m", "tether", "launch", "--run", "run"]
    ended = run([*command, "-n", "1", "-m", "package.train", "--flag", "x"], tmp_path)
    by_itself = run([sys.executable, "-m", "package.train", "--flag", "x"], tmp_path)
    assert ended.stdout == by_itself.stdout and ended.stdout.startswith("package --flag x end ")
    rows = [json.loads(line) for line in (tmp_path / "run" / "metrics.jsonl").read_text().splitlines()]
    assert [list(row["metrics"]) for row in rows if row["kind"] == "evaluation"] == [["loss"]], "a tensor is a number"


def test_accelerate_accumulates_gradients_and_a_step_is_one_of_the_optimizer(tmp_path: Path) -> None:
    script = """
        from accelerate import Accelerator
        accelerator = Accelerator(cpu=True, gradient_accumulation_steps=4)
        scheduler = torch.optim.lr_scheduler.StepLR(optimizer, 3, 0.5)
        model, optimizer, loader, scheduler = accelerator.prepare(
            model, optimizer, DataLoader(data, batch_size=16), scheduler)
        with tether.join(model, optimizer, scheduler):
            for x, y in loader:
                with accelerator.accumulate(model):
                    accelerator.backward(nn.functional.cross_entropy(model(x), y))
                    accelerator.clip_grad_norm_(model.parameters(), 1.0)
                    optimizer.step()
                    scheduler.step()
                    optimizer.zero_grad()
        print("end", scheduler.get_last_lr(), digest())
    """
    ended = launch(tmp_path, script, "-n", "1")
    by_itself = run([sys.executable, "script.py"], tmp_path)
    assert ended.stdout == by_itself.stdout and "end [0.1]" in ended.stdout
    assert json.loads((tmp_path / "run" / "run.json").read_text())["result"]["samples"] == 16 // 4


# ---- ends that nobody wants -----------------------------------------------------------------------------------------


def test_an_exception_in_the_loop_ends_the_run_and_names_the_line(tmp_path: Path) -> None:
    script = """
        with tether.join(model, optimizer):
            for number in range(1000):
                steps([(inputs[:16], labels[:16])])
                if tether.rank() == 1 and number == 5:
                    raise ValueError("no more of this")
    """
    ended = launch(tmp_path, script, "-n", "2", "--protocol", "mpca", ends_well=False)
    assert "worker-1: ValueError: no more of this" in ended.stderr and "script.py:" in ended.stderr
    assert json.loads((tmp_path / "run" / "run.json").read_text())["status"] == "failed"


@pytest.mark.parametrize(
    ("wrong", "guard", "counted"),
    [("nan", "0", "gradients_skipped"), ("1e6", "100", "gradients_refused")],
    ids=["not finite", "far too long"],
)
def test_a_wrong_gradient_of_one_rank_reaches_nobody(wrong: str, guard: str, counted: str, tmp_path: Path) -> None:
    script = """
        model.append(nn.BatchNorm1d(2))
        with tether.join(model, optimizer):
            for number in range(40):
                wrong = tether.rank() == 1 and number == 30
                x = inputs[:64] * (float("WRONG") if wrong else 1.0)
                optimizer.zero_grad()
                nn.functional.cross_entropy(model(x), labels[:64]).backward()
                if wrong:
                    model[0].weight.grad.fill_(float("WRONG"))
                optimizer.step()
        largest = max(float(values.abs().max()) for values in model.state_dict().values())
        print("small" if largest < 100 else f"the largest value is {largest}")
    """
    options = ["-n", "2", "--protocol", "averaging", "--set", "tau=1", "--set", f"guard={guard}"]
    ended = launch(tmp_path, script.replace("WRONG", wrong), *options)
    assert "small" in ended.stdout and "small" in log(tmp_path, 1), ended.stdout
    figures = json.loads((tmp_path / "run" / "run.json").read_text())["result"]
    assert figures[counted] in (1, {"worker-1": 1})


def test_a_rank_whose_gradients_are_never_finite_ends_the_run_by_name(tmp_path: Path) -> None:
    script = """
        with tether.join(model, optimizer):
            for number in range(1000):
                optimizer.zero_grad()
                (model(inputs[:16]).sum() * (float("nan") if tether.rank() == 1 else 1e-6)).backward()
                optimizer.step()
    """
    ended = launch(tmp_path, script, "-n", "2", ends_well=False)
    assert "worker-1, step 11: 11 of its gradients were not finite" in " ".join(ended.stderr.split())


def test_a_loop_that_stands_still_is_killed_and_its_script_starts_again(tmp_path: Path) -> None:
    script = """
        import pathlib, threading
        first = not pathlib.Path("stands").exists()
        with tether.join(model, optimizer):
            for number in range(40):
                steps([(inputs[:16], labels[:16])])
                if tether.rank() == 1 and number == 20 and first:
                    pathlib.Path("stands").touch()
                    threading.Event().wait()
        print("end", digest())
    """
    options = ["-n", "2", "--protocol", "averaging", "--set", "tau=1", "--hung-seconds", "4"]
    ended = launch(tmp_path, script, *options)
    assert "worker-1 has been at one step of its loop for" in ended.stderr and "is killed" in ended.stderr
    assert "worker-1 is replaced" in ended.stderr
    assert json.loads((tmp_path / "run" / "run.json").read_text())["status"] == "finished"


def test_a_worker_that_is_killed_again_and_again_is_left_out(tmp_path: Path) -> None:
    script = """
        import os, signal
        with tether.join(model, optimizer):
            for number in range(60):
                steps([(inputs[:16], labels[:16])])
                if tether.rank() == 1 and number == 20:
                    os.kill(os.getpid(), signal.SIGKILL)
        print("end", digest())
    """
    ended = launch(tmp_path, script, "-n", "2")
    assert "worker-1 was killed by SIGKILL; the others go on" in ended.stderr
    assert "worker-1~4 is left out: its script was started 4 times" in ended.stderr
    assert json.loads((tmp_path / "run" / "run.json").read_text())["status"] == "finished"


def test_the_script_of_a_killed_worker_starts_again_and_goes_on_with_its_samples(tmp_path: Path) -> None:
    """Under tau 1 a step that has returned is in the joint model, so what is written down after it counts."""
    script = """
        import os, pathlib, signal
        numbered = TensorDataset(torch.arange(256), inputs, labels)
        loader = DataLoader(numbered, batch_size=8, sampler=tether.sampler(data))
        first = not pathlib.Path(f"drawn-{tether.rank()}").exists()
        with tether.join(model, optimizer), open(f"drawn-{tether.rank()}", "a") as drawn:
            for epoch in range(3):
                for number, x, y in loader:
                    optimizer.zero_grad()
                    nn.functional.cross_entropy(model(x), y).backward()
                    optimizer.step()
                    print(epoch, *number.tolist(), file=drawn, flush=True)
                    if tether.rank() == KILLED and first and epoch == 1 and number.numel() and drawn.tell() > 800:
                        os.kill(os.getpid(), signal.SIGKILL)
        print("end", digest())
    """
    for killed in (1, 0):
        folder = tmp_path / str(killed)
        folder.mkdir()
        chosen = script.replace("KILLED", str(killed))
        ended = launch(folder, chosen, "-n", "2", "--protocol", "averaging", "--set", "tau=1")
        assert f"worker-{killed} is replaced: its script starts again as worker-{killed}~2" in ended.stderr
        assert "worker-" + f"{killed}~2 has joined" in ended.stderr
        rows = [row.split() for rank in range(2) for row in (folder / f"drawn-{rank}").read_text().splitlines()]
        seen = Counter((int(epoch), int(index)) for epoch, *indices in rows for index in indices)
        assert seen == Counter((epoch, index) for epoch in range(3) for index in range(256))
        figures = json.loads((folder / "run" / "run.json").read_text())["result"]
        assert figures["samples"] == 3 * 256 // 8
        own = (folder / "run" / "logs" / "worker-1~2.log").read_text() if killed else log(folder, 1)
        assert ended.stdout.rpartition("end ")[2].strip() == own.rpartition("end ")[2].strip() != ""


def test_an_interrupted_run_resumes_and_draws_every_sample_of_the_epochs_once(tmp_path: Path) -> None:
    """Both parts write down what they have drawn and stepped with; what counts in the first is in its checkpoint."""
    script = """
        import pathlib, time
        used = tether.sampler(data)
        loader = DataLoader(TensorDataset(torch.arange(256), inputs, labels), batch_size=8, sampler=used)
        part = "second" if pathlib.Path("resuming").exists() else "first"
        scheduler = torch.optim.lr_scheduler.StepLR(optimizer, 1, 0.5)
        loop = tether.join(model, optimizer, scheduler)
        print("begins with", optimizer.param_groups[0]["lr"], digest())
        with open(f"{part}-{tether.rank()}", "w") as drawn:
            for epoch in range(3):
                for number, x, y in loader:
                    optimizer.zero_grad()
                    nn.functional.cross_entropy(model(x), y).backward()
                    print(epoch, *number.tolist(), file=drawn, flush=True)
                    optimizer.step()
                    time.sleep(0.05 if part == "first" else 0.0)
                scheduler.step()
        loop.close()
        print("end", optimizer.param_groups[0]["lr"])
    """
    (tmp_path / "script.py").write_text(SCRIPT + textwrap.dedent(script))
    command = [sys.executable, "-m", "tether", "launch"]
    options = ["-n", "2", "--protocol", "averaging", "--set", "tau=1", "--run", "run", "script.py"]
    started = subprocess.Popen(
        [*command, *options], cwd=tmp_path, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True
    )

    def drawn_in(part: str) -> list[list[tuple[int, list[int]]]]:
        files = [tmp_path / f"{part}-{rank}" for rank in range(2)]
        rows = [[list(map(int, line.split())) for line in file.read_text().splitlines()] for file in files]
        return [[(row[0], row[1:]) for row in of_rank] for of_rank in rows]

    deadline = time.monotonic() + 200
    while not all((tmp_path / f"first-{rank}").exists() for rank in range(2)) or len(drawn_in("first")[0]) < 22:
        assert time.monotonic() < deadline and started.poll() is None, started.communicate()
        time.sleep(0.1)
    started.send_signal(signal.SIGINT)
    _, printed = started.communicate(timeout=100)
    assert started.returncode == 130 and "continue with" in printed, printed
    (tmp_path / "resuming").touch()
    ended = run([*command[:-1], "resume", "run"], tmp_path)
    assert "begins with 0.1 " in ended.stdout, "the schedule of the second epoch"
    assert "\nend 0.025\n" in ended.stdout, "three steps of the schedule in all"
    state = json.loads((tmp_path / "run" / "run.json").read_text())
    assert state["result"]["samples"] == 3 * 256 // 8
    counted = state["result"]["samples"] - state["result"]["last_part"]["samples"]
    first, second = drawn_in("first"), drawn_in("second")
    # under tau 1, both have the same number of steps in the joint model
    before = [row for rows in first for row in rows[: counted // 2]]
    seen = Counter((epoch, index) for epoch, indices in [*before, *second[0], *second[1]] for index in indices)
    assert seen == Counter((epoch, index) for epoch in range(3) for index in range(256))


# ---- bad input ------------------------------------------------------------------------------------------------------


def test_a_model_and_an_optimizer_of_different_modules_cannot_be_joined(alone: None) -> None:
    optimizer = torch.optim.SGD(nn.Linear(2, 2).parameters(), lr=0.1)
    with pytest.raises(UsageError, match="2 of the 2 parameters of the optimizer are not parameters of the model"):
        tether.join(nn.Linear(2, 2), optimizer)


def test_joining_twice_is_an_error(alone: None) -> None:
    model = nn.Linear(2, 2)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    tether.join(model, optimizer)
    with pytest.raises(UsageError, match="called twice"):
        tether.join(model, optimizer)


def test_lbfgs_cannot_be_joined_with_other_processes(alone: None, monkeypatch: pytest.MonkeyPatch) -> None:
    model = nn.Linear(2, 2)
    optimizer = torch.optim.LBFGS(model.parameters())
    with tether.join(model, optimizer):
        """Alone, everything is allowed."""
    monkeypatch.setenv(process.WORLD_SIZE, "2")
    with pytest.raises(UsageError, match=r"LBFGS .* other processes change the weights"):
        tether.join(model, optimizer)


def test_data_of_a_parameter_that_is_replaced_outside_a_step_is_an_error() -> None:
    model = nn.Linear(2, 2)
    replica = LoopReplica(model, torch.optim.SGD(model.parameters(), lr=0.1))
    model.weight.data = model.weight.data.clamp(-1, 1)
    with pytest.raises(UsageError, match=r"parameter\.data\.copy_"):
        replica.check()


def test_a_gradient_of_rows_is_replaced_by_that_of_the_machine() -> None:
    model = nn.Embedding(4, 2, sparse=True)
    replica = LoopReplica(model, torch.optim.SGD(model.parameters(), lr=1.0))
    model(torch.tensor([1])).sum().backward()
    before = model.weight.detach().clone()
    replica.pending_step = replica.optimizer.step
    replica.step(torch.arange(8.0), 1.0)
    assert torch.allclose(before - model.weight, torch.arange(8.0).view(4, 2), atol=1e-5)


@pytest.mark.parametrize(
    ("text", "options", "expected"),
    [
        (None, {}, "there is no script train.py"),
        ("def f(:", {}, r"SyntaxError: invalid syntax \(.*train.py:1\): correct the script"),
        ("", {"is_module": True}, "there is no module train.py in "),
        ("", {"workers": 0}, "workers must be at least 1"),
        ("", {"threads": 0}, "threads must be at least 1"),
        ("", {"checkpoint_seconds": -1}, "checkpoint_seconds cannot be negative"),
    ],
    ids=["missing", "syntax", "module", "workers", "threads", "checkpoint_seconds"],
)
def test_what_cannot_be_launched_is_refused_before_any_process_starts(
    text: str | None, options: dict[str, Any], expected: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    if text is not None:
        Path("train.py").write_text(text)
    with pytest.raises(UsageError, match=expected):
        launch_script("train.py", **options)
    assert not Path("runs").exists()


@pytest.mark.parametrize("what", ["evaluate", "save"])
def test_what_needs_the_joint_model_needs_a_join(what: str, alone: None) -> None:
    with pytest.raises(UsageError, match=r"before tether\.join"):
        getattr(tether, what)("model.pt")


@pytest.mark.parametrize(
    ("script", "expected"),
    [
        ("steps(DataLoader(data, batch_size=16))", "script.py ended without calling tether.join(model, optimizer)"),
        (
            """
            import os, signal
            if tether.rank() == 1:
                os.kill(os.getpid(), signal.SIGKILL)
            tether.join(model, optimizer)
            """,
            "worker-1 was killed by SIGKILL before it had joined",
        ),
        (
            """
            with tether.join(model, optimizer):
                nn.functional.cross_entropy(model(inputs), labels).backward()
            """,
            "optimizer.step() was never called",
        ),
        (
            """
            loader = DataLoader(data, batch_size=200, drop_last=True, sampler=tether.sampler(data))
            with tether.join(model, optimizer):
                steps(loader)
            """,
            "This process's share of the data is 128 samples",
        ),
        (
            """
            model = nn.Linear(8, 2 + tether.rank())
            tether.join(model, torch.optim.SGD(model.parameters(), lr=0.1))
            """,
            "weight of shape [3, 8] instead of weight of shape [2, 8]",
        ),
    ],
    ids=["never joins", "dies before joining", "never steps", "large batches", "other model"],
)
def test_a_launched_script_that_goes_wrong_says_so_in_plain_words(script: str, expected: str, tmp_path: Path) -> None:
    ended = launch(tmp_path, script, "-n", "2", ends_well=False)
    assert expected in " ".join(ended.stderr.split()) and "internal error" not in ended.stderr


def test_a_protocol_whose_hub_steps_is_refused(tmp_path: Path) -> None:
    ended = launch(tmp_path, "", "--protocol", "server", ends_well=False)
    assert "the hub steps with the optimizer" in " ".join(ended.stderr.split())


# ---- alone ----------------------------------------------------------------------------------------------------------


def test_alone_nothing_of_model_and_optimizer_changes(alone: None, tmp_path: Path) -> None:
    model = nn.Linear(2, 2)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    before = vars(optimizer).copy(), model.weight.data_ptr(), torch.get_rng_state()
    with tether.join(model, optimizer) as (same_model, same_optimizer):
        assert same_model is model and same_optimizer is optimizer
    assert vars(optimizer) == before[0] and model.weight.data_ptr() == before[1]
    assert torch.equal(torch.get_rng_state(), before[2])
    assert (tether.rank(), tether.world_size(), tether.is_main()) == (0, 1, True)
    assert tether.evaluate(lambda joint: joint is model and not joint.training) is True
    assert model.training
    tether.save(tmp_path / "model.pt")
    assert torch.load(tmp_path / "model.pt")["weight"].equal(model.weight)


def test_alone_the_sampler_draws_what_shuffle_draws(alone: None) -> None:
    data = TensorDataset(torch.arange(50))
    drawn = []
    for loader in (DataLoader(data, shuffle=True), DataLoader(data, sampler=tether.sampler(data))):
        torch.manual_seed(3)
        drawn.append([x.item() for _ in range(2) for (x,) in loader])
    assert drawn[0] == drawn[1]


# ---- the sampler ----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("world", [1, 2, 4])
@pytest.mark.parametrize("workers", [0, 2])
def test_every_sample_of_an_epoch_is_drawn_once(world: int, workers: int) -> None:
    data = TensorDataset(torch.arange(103))
    for epoch in range(2):
        drawn: Counter[int] = Counter()
        for rank in range(world):
            sampler = SharedSampler(data, seed=5, rank=rank, world_size=world)
            loader = DataLoader(data, batch_size=8, sampler=sampler, num_workers=workers)
            for _ in range(epoch):
                list(sampler)
            drawn.update(x for (batch,) in loader for x in batch.tolist())
        assert drawn == Counter(range(103))


@pytest.mark.parametrize("workers", [0, 2])
@pytest.mark.parametrize(("before", "after"), [(2, 2), (2, 3), (3, 1)])
@pytest.mark.parametrize("ahead", [2, -3], ids=["newer state", "older state"])
def test_a_resumed_epoch_draws_what_no_step_that_counts_has_used(
    before: int, after: int, workers: int, ahead: int
) -> None:
    """The state of a sampler may be some steps ahead of the joint model of its checkpoint, or behind."""
    data, size = TensorDataset(torch.arange(120)), 5
    used: Counter[tuple[int, int]] = Counter()
    states, made = {}, {}
    for rank in range(before):
        sampler = SharedSampler(data, seed=1, rank=rank, world_size=before)
        loader = DataLoader(data, batch_size=size, sampler=sampler, num_workers=workers)
        made[rank] = 7 + rank  # of these the joint model has the steps of, though more were made
        step = 0
        for epoch in range(2):
            for (batch,) in loader:
                step += 1
                sampler.step_made(step)
                if step <= made[rank]:
                    used.update((epoch, x) for x in batch.tolist())
                if step == made[rank] + ahead:
                    states[rank] = sampler.state()
                if step == made[rank] + 2:
                    break
            if step == made[rank] + 2:
                break
    parts = next_parts(states, made, before)
    for rank in range(after):
        sampler = SharedSampler(data, seed=1, rank=rank, world_size=after)
        sampler.resume(parts)
        used.update((epoch, x) for epoch in range(2) for x in list(sampler))
    assert used == Counter((epoch, x) for epoch in range(2) for x in range(120))


# ---- machines whose data ends ---------------------------------------------------------------------------------------


def machine(options: Options, name: str = "worker-0") -> Any:
    nodes = options.nodes(2 if options.workers_max is None else 1)
    node = next(node for node in nodes if node.name == name)
    schedule = Schedule(steps=10**9, evaluate_every=10**9, step_batches=2, data_bound=True)
    return options.machine(NodeContext(node, nodes, torch.zeros(6), 6, schedule))


def gradient() -> GradientReady:
    return GradientReady(torch.zeros(0), 1.0, 1, 0.1)


def kinds(effects: list[Effect]) -> list[type]:
    return [type(effect) for effect in effects]


def joint_model(round_: int) -> Broadcasted:
    batches = {"worker-0": (0, 2, 4), "worker-1": (1, 3, 5)}
    return Broadcasted(ROUND, ("hub", "worker-0", "worker-1"), Joint(round_, torch.ones(6), batches, 0))


def test_averaging_a_worker_whose_data_ends_contributes_its_steps_and_then_nothing() -> None:
    worker = machine(Averaging(tau=3))
    for event in (Started(("hub", "worker-0", "worker-1")), joint_model(0), gradient()):
        worker.handle(event, 0.0)
    (contribution,) = worker.handle(DataEnded(), 1.0)
    assert isinstance(contribution, Reduce) and (contribution.weight, contribution.steps) == (1.0, 1)
    install, empty, contributed = worker.handle(joint_model(1), 2.0)
    assert kinds([install, empty, contributed]) == [Install, Reduce, Contributed]
    assert (empty.weight, empty.steps) == (0.0, 0)
    assert kinds(worker.handle(joint_model(2), 3.0)) == [Install, Reduce]


def shard(options: Options, cycle: int, steps: int) -> Broadcasted:
    """The only shard of the joint model, which has so many steps of worker-0."""
    kind: Any = options.messages[0]
    message = kind(0, cycle, 0.0, torch.ones(6), steps={"worker-0": steps})
    return Broadcasted(tag_of(0, 0).stream, ("hub", "worker-0", "worker-1"), message)


CIRCULATING = [Mpca(phases=1), Tide(phases=1), Streaming(phases=1, shards=1, tau=1)]


@pytest.mark.parametrize("options", CIRCULATING, ids=str)
def test_a_circulating_worker_whose_data_ends_has_contributed_when_every_shard_has_come_back(options: Options) -> None:
    worker = machine(options)
    worker.handle(Started(("hub", "worker-0", "worker-1")), 0.0)
    assert Step in kinds(worker.handle(gradient(), 0.1))
    assert kinds(worker.handle(DataEnded(), 0.2)) == [], "the step is not in the joint model"
    effects = worker.handle(shard(options, 0, 0), 0.3)
    assert [effect.steps for effect in effects if isinstance(effect, Reduce)] == [1]
    assert Contributed not in kinds(effects)
    assert Contributed in kinds(worker.handle(shard(options, 1, 1), 0.4))
    assert Contributed not in kinds(worker.handle(shard(options, 2, 1), 0.5))


@pytest.mark.parametrize("ends_late", [False, True])
@pytest.mark.parametrize("options", CIRCULATING, ids=str)
def test_last_steps_that_came_too_late_for_their_reduction_are_given_again(options: Options, ends_late: bool) -> None:
    """The hub closes a reduction that is overdue without the contribution of a worker that makes a long step."""
    worker = machine(options)
    worker.handle(Started(("hub", "worker-0", "worker-1")), 0.0)
    worker.handle(shard(options, 0, 0), 0.1)
    worker.handle(gradient(), 1.0)
    assert [effect.steps for effect in worker.handle(shard(options, 1, 0), 9.0) if isinstance(effect, Reduce)] == [1]
    events = [DataEnded(), shard(options, 5, 0)]
    effects = [effect for event in (events[::-1] if ends_late else events) for effect in worker.handle(event, 9.1)]
    given = [(effect.weight, effect.steps) for effect in effects if isinstance(effect, Reduce)]
    assert given == [(1.0, 1)], "as it would have been in time"
    assert Contributed not in kinds(effects)
    assert Contributed in kinds(worker.handle(shard(options, 6, 1), 9.2))


def test_elastic_a_worker_whose_data_ends_exchanges_and_waits_until_the_hub_has_it() -> None:
    worker = machine(Elastic(tau=5))
    worker.handle(Started(("hub", "worker-0", "worker-1")), 0.0)
    worker.handle(gradient(), 0.1)
    assert worker.handle(DataEnded(), 0.2) == [Send("hub", Ask())]
    effects = worker.handle(Received("hub", Centre(torch.ones(6), 0.5, 5)), 0.3)
    sent = [effect.message for effect in effects if isinstance(effect, Send)]
    assert isinstance(sent[0], Difference) and sent[0].steps == 1
    assert sent[1] == Ask(first=True) and Compute not in kinds(effects)
    assert kinds(worker.handle(Received("hub", Centre(torch.ones(6), 1.0, 5)), 0.4)) == [Install, Contributed]


def test_single_and_grid_have_nothing_to_wait_for() -> None:
    alone = machine(Single())
    alone.handle(Started(("worker-0",)), 0.0)
    assert alone.handle(DataEnded(), 0.1) == [Contributed()]
    node = machine(Grid(), "worker-1")
    node.handle(Started(("worker-0", "worker-1")), 0.0)
    assert Contributed in kinds(node.handle(DataEnded(), 0.1))
