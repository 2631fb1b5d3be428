"""The built-in tasks read what they say they read, learn, and refuse what is wrong in words a user understands."""

from __future__ import annotations

import gzip
import os
import pickle
import re
import subprocess
import sys
from itertools import islice
from pathlib import Path
from typing import Any

import cloudpickle
import numpy as np
import pytest
import torch
from torch import nn
from torch.utils.data import TensorDataset

from tether import tasks
from tether.core.vector import Vector
from tether.errors import UsageError
from tether.learner.data import Batches
from tether.learner.learner import Learner, build_model, evaluate
from tether.learner.synthetic import SyntheticTask
from tether.task import Length, Task
from tether.tasks.chars import Chars
from tether.tasks.cifar import Cifar
from tether.tasks.classification import Classification
from tether.tasks.digits import Digits, _samples
from tether.tasks.fashion import Fashion
from tether.tasks.text import Text

SHARED = Path(__file__).resolve().parents[2] / "shared" / "data"
TEXT = "the quick brown fox jumps over the lazy dog\n" * 60


def needs(name: str) -> pytest.MarkDecorator:
    return pytest.mark.skipif(not (SHARED / name).exists(), reason=f"{SHARED / name} is not there")


def idx(values: np.ndarray[Any, Any]) -> bytes:
    header = bytes([0, 0, 8, values.ndim])
    return header + b"".join(n.to_bytes(4, "big") for n in values.shape) + values.astype(np.uint8).tobytes()


def write_fashion(folder: Path, zipped: bool = True) -> Path:
    """Eight training and four test images; image i is all pixels of value i and has label i."""
    folder.mkdir(parents=True, exist_ok=True)
    for part, count in (("train", 8), ("t10k", 4)):
        labels = np.arange(count, dtype=np.uint8)
        images = np.broadcast_to(labels[:, None, None], (count, 28, 28))
        for name, values in ((f"{part}-images-idx3-ubyte", images), (f"{part}-labels-idx1-ubyte", labels)):
            if zipped:
                (folder / f"{name}.gz").write_bytes(gzip.compress(idx(values)))
            else:
                (folder / name).write_bytes(idx(values))
    return folder


def write_npz(path: Path, **changes: Any) -> Path:
    rng = np.random.default_rng(0)
    arrays: dict[str, Any] = {}
    for part, count in (("train", 12), ("test", 6)):
        arrays[f"x_{part}"] = rng.integers(0, 256, (count, 3, 32, 32), dtype=np.uint8)
        arrays[f"y_{part}"] = np.arange(count, dtype=np.uint8) % 10
    arrays |= changes
    np.savez(path, **{name: value for name, value in arrays.items() if value is not None})
    return path


def write_cifar(folder: Path) -> Path:
    """Two images in each batch; image k of batch i is all pixels of value 10 * i + k and has label i."""
    folder.mkdir(parents=True, exist_ok=True)
    for i, name in enumerate(["test_batch.bin", *(f"data_batch_{i}.bin" for i in range(1, 6))]):
        (folder / name).write_bytes(b"".join(bytes([i]) + bytes([10 * i + k]) * 3072 for k in range(2)))
    return folder


def write_text(path: Path) -> Path:
    path.write_text(TEXT, encoding="utf-8")
    return path


def write_csv(path: Path) -> Path:
    rows = [f"{word} {i},{word}\n" for i in range(6) for word in ("sun", "rain")]
    path.write_text("text,label\n" + "".join(rows), encoding="utf-8")
    return path


@pytest.fixture
def small(tmp_path: Path) -> dict[str, Classification]:
    """Every built-in task that has a model, with data of a few samples."""
    fashion = write_fashion(tmp_path / "fashion")
    npz = write_npz(tmp_path / "c.npz")
    text = write_text(tmp_path / "t.txt")
    return {
        "digits": Digits(),
        "fashion mlp": Fashion(fashion, batch_size=4),
        "fashion cnn": Fashion(fashion, batch_size=4, network="cnn"),
        "cifar cnn": Cifar(npz, batch_size=4),
        "cifar resnet": Cifar(npz, batch_size=4, network="resnet"),
        "chars transformer": Chars(text, context=16, batch_size=4),
        "chars lstm": Chars(text, context=16, batch_size=4, network="lstm"),
        "text": Text(write_csv(tmp_path / "t.csv"), batch_size=4),
    }


def refusal(call: Any, *arguments: Any, **named: Any) -> str:
    with pytest.raises(UsageError) as caught:
        call(*arguments, **named)
    return str(caught.value)


# ---- what holds for every task --------------------------------------------------------------------------------------


def test_every_network_learns_its_first_batch_on_the_flat_vector(small: dict[str, Classification]) -> None:
    for name, task in small.items():
        batch = next(Batches(task, task.train_data(), seed=0))
        # the length of a run, since a schedule would stay in its warm-up otherwise
        learner = Learner(task, iter([batch] * 17), node="worker-0", seed=0, length=Length(32, 32.0, 1))
        losses = []
        for position in range(16):
            torch.manual_seed(0)  # the same dropout in every pass
            losses.append(learner.compute("dense", False)[1])
            learner.step(None, 1.0, position=position)
        assert losses[-1] < losses[0], f"{name}: {losses}"


def test_training_data_takes_the_vectorised_path_of_batches(small: dict[str, Classification]) -> None:
    for task in small.values():
        assert type(task.train_data()) is TensorDataset


def test_evaluation_repeats_and_leaves_random_state_and_training_mode_alone(small: dict[str, Classification]) -> None:
    for name, task in small.items():
        model = build_model(task, 0)
        before = torch.get_rng_state(), np.random.get_state()[1].tolist()
        values = {key: value.clone() for key, value in model.state_dict().items()}
        first = evaluate(task, model)
        assert first == evaluate(task, model), name
        assert list(first)[:2] == ["error", "loss"] and 0 <= first["error"] <= 1 and first["loss"] > 0
        assert torch.equal(torch.get_rng_state(), before[0])
        assert np.random.get_state()[1].tolist() == before[1]
        assert all(torch.equal(value, values[key]) for key, value in model.state_dict().items()), name
        assert model.training
        assert evaluate(task, model.eval()) == first and not model.training


def test_evaluation_in_chunks_equals_evaluation_at_once(
    small: dict[str, Classification], monkeypatch: pytest.MonkeyPatch
) -> None:
    task = small["cifar cnn"]
    model = build_model(task, 0)
    whole = evaluate(task, model)
    monkeypatch.setattr(Cifar, "chunk", 4)
    assert evaluate(task, model) == pytest.approx(whole, rel=1e-5)


def test_a_task_is_small_when_pickled_even_after_it_has_loaded_its_data(small: dict[str, Classification]) -> None:
    for name, task in small.items():
        metrics = evaluate(task, build_model(task, 0))
        task.train_data()
        pickled = pickle.dumps(task)
        assert len(pickled) < 2000, name
        copy = pickle.loads(pickled)
        assert evaluate(copy, build_model(copy, 0)) == metrics, name


def test_a_bad_learning_rate_or_network_is_refused_by_the_constructor() -> None:
    assert "greater than 0" in refusal(Digits, learning_rate=0.0)
    assert "cnn, mlp" in refusal(Fashion, network="nlp")


# ---- digits ---------------------------------------------------------------------------------------------------------


def test_digits_errs_on_less_than_5_percent_after_10_epochs() -> None:
    task = Digits()
    data = task.train_data()
    model = build_model(task, 0)
    optimizer = task.optimizer(model)
    for batch in islice(Batches(task, data, seed=0), 10 * len(data) // task.batch_size):
        optimizer.zero_grad()
        task.loss(model, batch).backward()
        optimizer.step()
    assert evaluate(task, model)["error"] < 0.05


def test_digits_holds_out_a_fifth_of_every_class() -> None:
    train, test = (data.tensors[1].bincount() for data in (Digits().train_data(), Digits().test_data()))
    assert train.sum() + test.sum() == 1797
    assert torch.all((test * 4 - train).abs() <= 4)


def test_digits_without_scikit_learn_names_the_extra(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "sklearn.datasets", None)
    _samples.cache_clear()
    assert "'.[tasks]'" in refusal(Digits().train_data)


# ---- fashion --------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("zipped", [True, False])
@pytest.mark.parametrize("folder", ["", "fashion-mnist"])
def test_fashion_finds_its_files_zipped_or_not_directly_or_in_a_subfolder(
    tmp_path: Path, folder: str, zipped: bool
) -> None:
    write_fashion(tmp_path / folder, zipped)
    images, labels = Fashion(tmp_path).train_data().tensors
    assert images.shape == (8, 1, 28, 28) and images.dtype == torch.float32
    assert labels.tolist() == list(range(8))
    assert images[:, 0, 0, 0].mul(0.3530).add(0.2860).mul(255).round().tolist() == list(range(8))
    assert len(Fashion(str(tmp_path)).test_data()) == 4


def test_fashion_without_data_says_what_to_fetch_and_where(tmp_path: Path) -> None:
    for message in (refusal(tasks.load, "fashion"), refusal(tasks.load, "fashion", data=tmp_path)):
        assert "train-images-idx3-ubyte.gz" in message and "t10k-labels-idx1-ubyte.gz" in message
        assert "zalandoresearch/fashion-mnist" in message and "--data DIR" in message


GOOD_LABELS = idx(np.zeros(8))


@pytest.mark.parametrize(
    ("content", "complaint"),
    [
        (gzip.compress(b"\0\0\x0d\x01" + GOOD_LABELS[4:]), "not an IDX file"),
        (gzip.compress(b""), "not an IDX file"),
        (gzip.compress(GOOD_LABELS[:6]), "truncated"),
        (gzip.compress(GOOD_LABELS[:-1]), "truncated"),
        (gzip.compress(GOOD_LABELS + b"\0"), "damaged"),
        (gzip.compress(GOOD_LABELS)[:-9], "cannot be read"),
        (gzip.compress(GOOD_LABELS)[:10] + b"junkjunkjunk", "cannot be read"),
        (gzip.compress(idx(np.zeros(7))), "do not belong together"),
        (gzip.compress(idx(np.zeros((8, 1)))), "do not belong together"),
        (gzip.compress(idx(np.full(8, 10))), "expected 0 to 9"),
    ],
    # bytes in a test name would differ from run to run
    ids=["magic", "empty", "header", "short", "long", "gzip-cut", "gzip-junk", "count", "axes", "range"],
)
def test_a_malformed_idx_file_is_refused_by_name(tmp_path: Path, content: bytes, complaint: str) -> None:
    write_fashion(tmp_path)
    (tmp_path / "train-labels-idx1-ubyte.gz").write_bytes(content)
    message = refusal(Fashion(tmp_path).train_data)
    assert complaint in message and re.search(r"train-(labels|images)-idx\d-ubyte.gz", message)


@needs("fashion-mnist")
def test_fashion_reads_the_published_files() -> None:
    task = tasks.load("fashion", data=SHARED)
    assert isinstance(task, Fashion)
    images, labels = task.test_data().tensors
    assert labels.bincount().tolist() == [1000] * 10
    assert abs(float(images.mean())) < 0.02 and abs(float(images.std()) - 1) < 0.02


# ---- cifar ----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("folder", ["", "cifar-10-batches-bin"])
def test_cifar_reads_binary_batches_in_order(tmp_path: Path, folder: str) -> None:
    write_cifar(tmp_path / folder)
    task = Cifar(tmp_path)
    images, labels = task.train_data().tensors
    assert images.shape == (10, 3, 32, 32) and images.dtype == torch.uint8
    assert labels.tolist() == [1, 1, 2, 2, 3, 3, 4, 4, 5, 5]
    assert images[:, 2, 31, 31].tolist() == [10, 11, 20, 21, 30, 31, 40, 41, 50, 51]
    assert task.test_data().tensors[1].tolist() == [0, 0]


def test_cifar_reads_an_npz_file_given_itself_or_by_its_folder(tmp_path: Path) -> None:
    path = write_npz(tmp_path / "photos.npz")
    for data in (path, tmp_path):
        images, labels = Cifar(data).train_data().tensors
        with np.load(path) as file:
            assert np.array_equal(images.numpy(), file["x_train"])
        assert labels.tolist() == [0, 1, 2, 3, 4, 5, 6, 7, 8, 9, 0, 1]


def test_cifar_standardises_each_batch(tmp_path: Path) -> None:
    images = torch.tensor([125.3, 123.0, 113.9]).to(torch.uint8).view(1, 3, 1, 1).expand(2, 3, 32, 32)
    inputs, _ = Cifar(write_npz(tmp_path / "c.npz")).examples([images, torch.zeros(2)])
    assert inputs.dtype == torch.float32 and float(inputs.abs().max()) < 0.02


def test_cifar_flips_only_when_asked_and_only_in_training(tmp_path: Path) -> None:
    path = write_npz(tmp_path / "c.npz")
    seen: list[torch.Tensor] = []

    class Watch(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.layer = nn.Linear(1, 10)

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            seen.append(x)
            scores: torch.Tensor = self.layer(x.mean((1, 2, 3)).unsqueeze(1))
            return scores

    plain, flipping = Cifar(path), Cifar(path, flip=True)
    batch = list(plain.train_data().tensors)
    torch.manual_seed(0)
    for task in (plain, flipping):
        task.loss(Watch(), batch)
        task.evaluate(Watch())
    straight, straight_test, flipped, flipped_test = seen
    same = (flipped == straight).flatten(1).all(1)
    mirrored = (flipped == straight.flip(3)).flatten(1).all(1)
    assert torch.all(same ^ mirrored) and same.any() and mirrored.any()
    assert torch.equal(straight_test, flipped_test)


def test_both_cifar_networks_have_buffers_in_the_vector(small: dict[str, Classification]) -> None:
    for name in ("cifar cnn", "cifar resnet"):
        vector = Vector(build_model(small[name], 0))
        assert len(vector.weights) > vector.parameter_count


def test_cifar_says_what_is_missing(tmp_path: Path) -> None:
    assert "--data DIR" in refusal(tasks.load, "cifar")
    assert "has no CIFAR-10 data" in refusal(Cifar, tmp_path)
    (write_cifar(tmp_path) / "data_batch_3.bin").unlink()
    assert "lacks data_batch_3.bin" in refusal(Cifar, tmp_path)
    several = tmp_path / "several"
    several.mkdir()
    for name in ("a.npz", "b.npz"):
        write_npz(several / name)
    assert "a.npz, b.npz" in refusal(Cifar, several)


def test_a_malformed_cifar_file_is_refused_by_name(tmp_path: Path) -> None:
    (write_cifar(tmp_path) / "data_batch_2.bin").write_bytes(b"\0" * 3072)
    assert re.search("data_batch_2.bin is truncated", refusal(Cifar(tmp_path).train_data))
    bad = tmp_path / "bad.npz"
    for changes, complaint in [
        ({"y_train": None}, "lacks an array: y_train"),
        ({"x_train": np.zeros((12, 32, 32, 3), np.uint8)}, "(n, 3, 32, 32)"),
        ({"x_train": np.zeros((12, 3, 32, 32), np.float32)}, "float32"),
        ({"y_train": np.full(12, -1)}, "expected 0 to 9"),
    ]:
        message = refusal(Cifar(write_npz(bad, **changes)).train_data)
        assert complaint in message and "bad.npz" in message
    for content in (b"", b"no zip", write_npz(bad).read_bytes()[:-50]):
        bad.write_bytes(content)
        assert "bad.npz cannot be read" in refusal(Cifar(bad).train_data)


@needs("cifar10_subset_16k_4k.npz")
def test_cifar_reads_the_test_part_of_the_subset() -> None:
    task = tasks.load("cifar", data=SHARED)
    assert isinstance(task, Cifar)
    assert task.test_data().tensors[1].bincount().tolist() == [400] * 10


# ---- chars ----------------------------------------------------------------------------------------------------------


def test_chars_windows_overlap_and_share_the_memory_of_the_text(tmp_path: Path) -> None:
    task = Chars(write_text(tmp_path / "t.txt"), context=16, stride=8)
    (windows,) = task.train_data().tensors
    vocabulary = "".join(sorted(set(TEXT)))
    assert "".join(vocabulary[i] for i in windows[3]) == TEXT[24:41]
    assert windows.untyped_storage().nbytes() == 8 * len(TEXT)
    inputs, labels = task.examples([windows[:2]])
    assert torch.equal(inputs[:, 1:], labels[:, :-1]) and inputs.shape == (2, 16)


def test_chars_never_trains_on_the_last_tenth(tmp_path: Path) -> None:
    path = tmp_path / "t.txt"
    path.write_text("a" * 900 + "b" * 100, encoding="utf-8")
    task = Chars(path, context=9, stride=1)
    assert task.train_data().tensors[0].unique().tolist() == [0]
    assert task.test_data().tensors[0].unique().tolist() == [1]


def test_chars_evaluates_on_windows_spread_over_the_held_out_text(tmp_path: Path) -> None:
    path = tmp_path / "t.txt"
    path.write_text("".join(chr(0x4E00 + i % 5000) for i in range(50_000)), encoding="utf-8")
    (windows,) = Chars(path, context=4).test_data().tensors
    assert len(windows) == 256
    assert windows[0, 0] == 0 and windows[-1, 0] > 4900 and len(windows[:, 0].unique()) == 256


def test_the_language_models_look_only_at_the_past(small: dict[str, Classification]) -> None:
    for name in ("chars transformer", "chars lstm"):
        model = build_model(small[name], 0).eval()
        text = torch.arange(16).unsqueeze(0) % 7
        other = text.clone()
        other[0, 10:] = 8
        with torch.no_grad():
            torch.testing.assert_close(model(text)[:, :10], model(other)[:, :10])


def test_the_transformer_ties_its_output_to_its_embedding_also_in_the_vector(small: dict[str, Classification]) -> None:
    model = build_model(small["chars transformer"], 0)
    vector = Vector(model)
    assert model.output.weight is model.embedding.weight
    assert vector.parameter_count == sum(p.numel() for p in model.parameters())
    vector.weights.fill_(3)
    assert float(model.output.weight.detach().mean()) == 3


def test_chars_takes_a_file_or_a_folder_with_one_text(tmp_path: Path) -> None:
    assert "--data FILE" in refusal(tasks.load, "chars")
    assert "has 0 (none)" in refusal(Chars, tmp_path)
    write_text(tmp_path / "a.txt")
    assert len(Chars(tmp_path).train_data()) == len(Chars(tmp_path / "a.txt").train_data())
    write_text(tmp_path / "b.txt")
    assert "a.txt, b.txt" in refusal(Chars, tmp_path)
    write_text(tmp_path / "tinyshakespeare.txt")
    Chars(tmp_path)


def test_chars_refuses_a_text_that_is_too_short_or_no_text_and_a_bad_context(tmp_path: Path) -> None:
    path = tmp_path / "t.txt"
    path.write_text("a" * 649, encoding="utf-8")
    assert "at least 650" in refusal(Chars(path).train_data)
    path.write_text("a" * 650, encoding="utf-8")
    assert len(Chars(path).test_data()) == 1
    path.write_bytes(b"\xff\xfe" * 500)
    assert "t.txt cannot be read as UTF-8" in refusal(Chars(path).model)
    assert "at least 1" in refusal(Chars, path, stride=0)


@needs("tinyshakespeare.txt")
def test_chars_reads_tiny_shakespeare() -> None:
    task = tasks.load("chars", data=SHARED)
    model = build_model(task, 0)
    assert model.embedding.num_embeddings == 65


# ---- finding a task by name -----------------------------------------------------------------------------------------


def test_every_known_task_lists_its_options_with_type_default_and_purpose() -> None:
    assert set(tasks.known()) == {"digits", "fashion", "cifar", "chars", "text", "synthetic"}
    for cls in tasks.known().values():
        assert tasks.options(cls)
        if issubclass(cls, Classification):
            assert all(option.doc for option in tasks.options(cls))
    listed = {option.name: option[1:3] for option in tasks.options(Cifar)}
    assert listed == {
        "data": ("path", "none"),
        "batch_size": ("whole number", "64"),
        "learning_rate": ("number", "0.001"),
        "momentum": ("number", "none"),
        "network": ("cnn | resnet", "cnn"),
        "flip": ("true | false", "false"),
    }


def test_a_built_in_task_is_loaded_with_settings_of_the_right_type(tmp_path: Path) -> None:
    path = write_npz(tmp_path / "c.npz")
    settings = {"batch_size": "16", "learning_rate": "5e-3", "network": "resnet", "flip": "yes"}
    task = tasks.load("cifar", data=path, settings=settings)
    assert isinstance(task, Cifar) and task.name == "cifar"
    assert (task.batch_size, task.learning_rate, task.network, task.flip) == (16, 0.005, "resnet", True)
    synthetic = tasks.load("synthetic", settings={"parameters": "5"})
    assert isinstance(synthetic, SyntheticTask) and synthetic.parameters == 5


@pytest.mark.parametrize(
    ("name", "value", "complaint"),
    [
        ("batch_size", "many", "'many'; expected whole number"),
        ("batch_size", "1.5", "'1.5'; expected whole number"),
        ("learning_rate", "fast", "'fast'; expected number"),
        ("network", "nlp", "'nlp'; expected cnn | resnet"),
        ("momentum", "2", "at least 0 and less than 1"),
        ("flip", "maybe", "'maybe'; expected true | false"),
        (
            "batchsize",
            "3",
            "flip, learning_rate, momentum, network, num_workers, precision, prefetch. Did you mean 'batch_size'?",
        ),
        ("data", "/tmp", "--data"),
    ],
)
def test_a_setting_that_cannot_be_is_refused(tmp_path: Path, name: str, value: str, complaint: str) -> None:
    message = refusal(tasks.load, "cifar", data=write_npz(tmp_path / "c.npz"), settings={name: value})
    assert complaint in message and name in message


def test_an_unknown_task_names_the_known_ones_and_the_form_for_files() -> None:
    message = refusal(tasks.load, "digit")
    assert "Did you mean 'digits'?" in message and "fashion" in message and "file.py:ClassName" in message


def test_data_is_refused_by_a_task_that_takes_none_and_must_exist(tmp_path: Path) -> None:
    assert "no parameter 'data'" in refusal(tasks.load, "digits", data=tmp_path)
    assert "there is no file or folder" in refusal(tasks.load, "fashion", data=tmp_path / "nowhere")


# ---- finding a task in a file ---------------------------------------------------------------------------------------

MINE = """
from __future__ import annotations
from pathlib import Path
from typing import Literal, TYPE_CHECKING
import torch
from tether.task import Task
from beside_%s import size
if TYPE_CHECKING:
    from nowhere import Unknown

class Mine(Task):
    options = {"depth": "how deep"}
    def __init__(self, data: str = "", depth: int = 2, kind: Literal["a", 3] = "a", rate=0.5, cap: int | None = 4):
        self.data, self.depth, self.kind, self.rate, self.cap = data, depth, kind, rate, cap
    def model(self):
        return torch.nn.Linear(size(), 1)

class Needy(Task):
    def __init__(self, depth): ...

class Broken(Task):
    def __init__(self, x: Unknown = 1): raise ValueError("no luck")

class Bare(Task): ...

number = 3
"""


@pytest.fixture
def mine(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setattr(sys, "path", list(sys.path))
    tag = re.sub(r"\W", "_", tmp_path.name)  # modules are cached by name: each test has its own
    (tmp_path / f"beside_{tag}.py").write_text("def size():\n    return 7\n", encoding="utf-8")
    (tmp_path / "mine.py").write_text(MINE % tag, encoding="utf-8")
    return tmp_path / "mine.py"


def test_a_task_in_a_file_is_loaded_with_data_and_settings(mine: Path, tmp_path: Path) -> None:
    task: Any = tasks.load(
        f"{mine}:Mine", data=tmp_path, settings={"depth": "3", "kind": "3", "rate": "0.25", "cap": "none"}
    )
    assert isinstance(task, Task)
    assert (task.data, task.depth, task.kind, task.rate, task.cap) == (str(tmp_path), 3, 3, 0.25, None)
    assert [option.doc for option in tasks.options(type(task)) if option.name == "depth"] == ["how deep"]
    assert tasks.load(f"{mine}:Bare").batch_size == 32


def test_a_task_in_a_file_is_copied_to_processes_that_cannot_import_it(mine: Path) -> None:
    task = tasks.load(f"{mine}:Mine")
    pickled = cloudpickle.dumps(task)
    for file in mine.parent.glob("*.py"):
        file.unlink()
    program = "import sys, cloudpickle; print(cloudpickle.load(sys.stdin.buffer).model().in_features)"
    source = Path(tasks.__file__).parents[2]
    done = subprocess.run(
        [sys.executable, "-c", program],
        input=pickled,
        capture_output=True,
        env=os.environ | {"PYTHONPATH": str(source)},
        timeout=60,
    )
    assert done.stdout == b"7\n", done.stderr.decode()


def test_files_of_the_same_name_in_two_folders_are_two_modules(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sys, "path", list(sys.path))
    found = []
    for size in (1, 2):
        folder = tmp_path / str(size)
        folder.mkdir()
        source = f"from tether.task import Task\nclass T(Task):\n    batch_size = {size}\n"
        (folder / "same.py").write_text(source, encoding="utf-8")
        found.append(tasks.load(f"{folder / 'same.py'}:T"))
    assert [task.batch_size for task in found] == [1, 2]
    assert type(found[0]).__module__ != type(found[1]).__module__


def test_what_is_wrong_with_a_task_in_a_file_is_said_in_one_line(mine: Path) -> None:
    expected = {
        f"{mine.parent / 'no.py'}:Mine": "there is no file",
        f"{mine.parent}:Mine": "there is no file",
        f"{mine}:Yours": "has no class Yours. Its tasks: ",
        f"{mine}": "add the name of the task's class",
        f"{mine}:number": "not a subclass of tether.Task",
        f"{mine}:Path": "not a subclass of tether.Task",
        f"{mine}:Needy": "needs depth",
        f"{mine}:Broken": "ValueError: no luck (line 22)",
    }
    for spec, complaint in expected.items():
        message = refusal(tasks.load, spec)
        assert complaint in message and "\n" not in message, spec
    for spec in (f"{mine}:Yours", f"{mine}", f"{mine}:number"):
        assert f"{mine}:Mine, {mine}:Needy" in refusal(tasks.load, spec)


@pytest.mark.parametrize(
    ("source", "complaint"),
    [
        ("x = 1\ny = x +\n", "SyntaxError: invalid syntax (line 2)"),
        ("import os\nimport no_such_module_at_all\n", "ModuleNotFoundError: No module named"),
        ("def f():\n    return 1 / 0\n\nf()\n", "ZeroDivisionError: division by zero (line 2)"),
        ("import sys\nsys.exit('bye')\n", "SystemExit: bye (line 2)"),
    ],
)
def test_a_file_that_fails_while_it_is_imported_is_refused_with_exception_and_line(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, source: str, complaint: str
) -> None:
    monkeypatch.setattr(sys, "path", list(sys.path))
    path = tmp_path / "unfit.py"
    path.write_text(source, encoding="utf-8")
    assert complaint in refusal(tasks.load, f"{path}:T")
    assert not any(name.startswith("tether_task_unfit") for name in sys.modules)


def test_a_file_that_is_not_python_is_refused(tmp_path: Path) -> None:
    path = tmp_path / "task.txt"
    path.write_text("hello", encoding="utf-8")
    assert "not a Python file" in refusal(tasks.load, f"{path}:T")
