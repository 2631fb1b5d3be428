"""What a run has trained, as people keep it: named tensors that open without Tether."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import Tensor, nn
from typer.testing import CliRunner

from tether import Averaging, Result, Sim, Single, TaskError, UsageError, resume
from tether.api import trained_model
from tether.cli.app import app
from tether.execution.progress import make_progress
from tether.tasks.text.classifier import CLASSIFIER, Classifier
from tether.testing.conformance import Blobs, train_quietly

QUIET = make_progress(quiet=True)


class Tangled(Blobs):
    """A model with tied weights, a frozen layer in another precision, BatchNorm with its counter, and a mask."""

    def model(self) -> nn.Module:
        model = nn.Module()
        model.first = nn.Linear(2, 8)
        model.norm = nn.BatchNorm1d(8)
        model.frozen = nn.Linear(8, 8).double().requires_grad_(False)
        model.inner = nn.Linear(8, 8, bias=False)
        model.tied = nn.Linear(8, 8, bias=False)
        model.tied.weight = model.inner.weight
        model.last = nn.Linear(8, 2)
        model.register_buffer("mask", torch.tensor([True] * 7 + [False]))
        model.register_buffer("scratch", torch.ones(3), persistent=False)
        return model

    @staticmethod
    def scores(model: Any, points: Tensor) -> Tensor:
        hidden = model.norm(model.first(points)).relu()
        hidden = hidden + model.frozen(hidden.double()).float().tanh()
        hidden = model.tied(model.inner(hidden).relu()) * model.mask
        found: Tensor = model.last(hidden)
        return found

    def loss(self, model: nn.Module, batch: Any) -> Tensor:
        points, labels = batch
        return nn.functional.cross_entropy(self.scores(model, points), labels)

    def evaluate(self, model: nn.Module) -> dict[str, float]:
        points, labels = self.train_data().tensors
        return {"error": float((self.scores(model, points).argmax(1) != labels).float().mean())}


@pytest.fixture(scope="module")
def result(tmp_path_factory: pytest.TempPathFactory) -> Result:
    path = tmp_path_factory.mktemp("runs") / "run"
    return train_quietly(Tangled(), Averaging(tau=4), Sim(workers=2), path, steps=20)


def equal(one: dict[str, Tensor], other: dict[str, Tensor]) -> bool:
    return one.keys() == other.keys() and all(torch.equal(one[name], other[name]) for name in one)


def test_a_checkpoint_has_the_whole_state_dict_by_its_names(result: Result) -> None:
    (newest,) = sorted((result.directory / "checkpoints").glob("at-*"))[-1:]
    tensors = load_file(newest / "model.safetensors")
    assert equal(tensors, dict(result.model.state_dict()))
    assert {"first.weight", "norm.running_mean", "norm.num_batches_tracked", "tied.weight", "mask"} <= tensors.keys()
    fresh = Tangled().model()
    fresh.load_state_dict(tensors)
    assert Tangled().evaluate(fresh.eval()) == result.metrics


@pytest.mark.parametrize("name", ["model.safetensors", "model.pt", "model.pth"])
def test_a_saved_result_and_an_exported_run_are_the_same_and_need_no_tether(
    result: Result, name: str, tmp_path: Path
) -> None:
    result.save(tmp_path / name)
    exported = tmp_path / f"exported-{name}"
    done = CliRunner().invoke(app, ["export", str(result.directory), str(exported)])
    assert done.exit_code == 0 and f"{exported}: " in done.output.replace("\n", "")
    reading = "from safetensors.torch import load_file" if name.endswith("safetensors") else "from torch import load"
    call = "load_file" if name.endswith("safetensors") else "load"
    program = f"""
import sys
{reading}
one, other = {call}({str(tmp_path / name)!r}), {call}({str(exported)!r})
assert one.keys() == other.keys() and all((one[key] == other[key]).all() for key in one)
assert "tether" not in sys.modules
print(sorted(one))
"""
    printed = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=True).stdout
    assert printed.strip() == str(sorted(result.model.state_dict()))


def test_another_kind_of_file_and_a_place_that_cannot_be_written_are_refused(result: Result, tmp_path: Path) -> None:
    with pytest.raises(UsageError, match=r"\.safetensors, \.pt or \.pth"):
        result.save(tmp_path / "model.onnx")
    with pytest.raises(UsageError, match="cannot be written: there is no folder"):
        result.save(tmp_path / "nowhere" / "model.pt")
    with pytest.raises(UsageError, match="is not a run directory"):
        trained_model(tmp_path)


# ---- initial weights ------------------------------------------------------------------------------------------------


def changed(result: Result) -> dict[str, Tensor]:
    """The state_dict of a model in which even the frozen layer differs from what the task draws."""
    state = {name: value.clone() for name, value in result.model.state_dict().items()}
    state["frozen.weight"].add_(1.0)
    return state


def test_a_run_begins_with_the_weights_that_it_is_given_and_keeps_the_frozen_ones_when_it_is_resumed(
    result: Result, tmp_path: Path
) -> None:
    state = changed(result)
    torch.save(state, tmp_path / "model.pt")
    save_file({name: value.clone() for name, value in state.items()}, tmp_path / "model.safetensors")
    found = []
    for number, weights in enumerate([state, tmp_path / "model.pt", str(tmp_path / "model.safetensors")]):
        path = tmp_path / f"run-{number}"
        begun = train_quietly(Tangled(), Averaging(), Sim(workers=2), path, steps=5, weights=weights)
        assert begun.figures["untrained_metrics"] != result.figures["untrained_metrics"]
        found.append(begun.figures["digest"])
        resumed = resume(path, Tangled(), steps=10, progress=QUIET)
        for ended in (begun, resumed):
            assert torch.equal(ended.model.state_dict()["frozen.weight"], state["frozen.weight"])
            assert not torch.equal(ended.model.state_dict()["first.weight"], state["first.weight"])
    assert len(set(found)) == 1


def test_weights_that_do_not_fit_are_refused_by_name(result: Result, tmp_path: Path) -> None:
    def refusal(weights: Any) -> str:
        with pytest.raises(UsageError) as raised:
            train_quietly(Tangled(), Single(), Sim(workers=1), tmp_path / "run", steps=1, weights=weights)
        return str(raised.value)

    state = changed(result)
    assert "mask is missing" in refusal({name: value for name, value in state.items() if name != "mask"})
    assert "the model has no more" in refusal({**state, "more": torch.ones(1)})
    assert "first.bias has the shape (3,) and not (8,)" in refusal({**state, "first.bias": torch.ones(3)})
    assert "must be a state_dict or the path" in refusal([1])
    assert "No such file" in refusal(tmp_path / "none.pt")
    assert ".safetensors, .pt or .pth" in refusal("model.onnx")
    torch.save([1, 2], tmp_path / "list.pt")
    (tmp_path / "text.safetensors").write_text("not a model")
    for name in ("list.pt", "text.safetensors"):
        assert "does not hold a state_dict" in refusal(tmp_path / name)


def test_a_run_with_patience_exports_the_model_that_it_returned(tmp_path: Path) -> None:
    class Worse(Blobs):
        """The error grows with every evaluation."""

        evaluated = 0

        def evaluate(self, model: nn.Module) -> dict[str, float]:
            self.evaluated += 1
            return {"error": float(self.evaluated)}

    result = train_quietly(Worse(), Single(), Sim(workers=1), tmp_path, epochs=5, patience=2)
    assert result.figures["model_step"] < result.figures["steps"]
    assert equal(trained_model(tmp_path)[0], dict(result.model.state_dict()))
    assert load_file(tmp_path / "best.safetensors").keys() == result.model.state_dict().keys()


def test_a_run_that_has_no_checkpoint_has_no_model(tmp_path: Path) -> None:
    train_quietly(Blobs(), Single(), Sim(workers=1), tmp_path, steps=5)
    for folder in (tmp_path / "checkpoints").iterdir():
        (folder / "model.safetensors").unlink()
    with pytest.raises(UsageError, match=r"has no checkpoint, so there is no model; checkpoint at-.* is damaged"):
        trained_model(tmp_path)


# ---- the task's files -----------------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def texts(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A run of task text on two kinds of sentences."""
    folder = tmp_path_factory.mktemp("texts")
    rows = "the day is good and bright,fine\n" * 30 + "the night was bad and dark,foul\n" * 30
    (folder / "t.csv").write_text("text,label\n" + rows)
    arguments = ["train", "text", "--data", str(folder / "t.csv"), "--run", str(folder / "run"), "--on", "sim"]
    settings = ["--set", "embedding=8", "--set", "filters=4", "--epochs", "10", "-n", "2"]
    assert CliRunner().invoke(app, arguments + settings).exit_code == 0
    return folder / "run"


def test_a_run_of_text_keeps_its_vocabulary_and_labels_and_classify_uses_them(texts: Path) -> None:
    (texts.parent / "t.csv").unlink(missing_ok=True)  # neither is the data needed
    assert Classifier.load(texts / "task" / CLASSIFIER).labels == ["fine", "foul"]
    asked = ["classify", str(texts), "a bright good day", "bad dark night unheard"]
    done = CliRunner().invoke(app, asked)
    assert [line.split()[0] for line in done.output.splitlines()] == ["fine", "foul"], done.output
    rows = json.loads(CliRunner().invoke(app, [*asked, "--json"]).output)["texts"]
    assert [row["label"] for row in rows] == ["fine", "foul"] and all(0.5 < row["probability"] <= 1 for row in rows)


def test_classify_refuses_a_run_of_another_task(result: Result) -> None:
    done = CliRunner().invoke(app, ["classify", str(result.directory), "a text"])
    assert isinstance(done.exception, UsageError) and "needs a run of task text" in str(done.exception)


@pytest.mark.parametrize("files", [{"../x": "y"}, {"x": 1}, ["x"]], ids=str)
def test_files_that_cannot_be_kept_are_refused_before_training(files: Any, tmp_path: Path) -> None:
    class Odd(Blobs):
        def files(self) -> dict[str, str | bytes]:
            return files  # type: ignore[no-any-return]

    with pytest.raises(TaskError, match=r"files\(\) of task Odd returned .*: return a dict of texts"):
        train_quietly(Odd(), Single(), Sim(workers=1), tmp_path, steps=1)
