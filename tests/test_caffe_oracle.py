"""What Caffe 1.0 itself has computed and written: layers with their gradients, databases, solvers, snapshots."""

from __future__ import annotations

import importlib.util
import json
import shutil
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from tether.caffe.data import collate
from tether.caffe.layers import LAYERS
from tether.caffe.net import Net
from tether.caffe.reading import read_net, state_of
from tether.caffe.task import open_feeds
from tether.caffe.weights import read_blobs

ORACLE = Path(__file__).parent / "caffe_oracle"


@pytest.fixture(scope="module")
def oracle() -> Any:
    """The script that has made the results, which also draws the inputs."""
    spec = importlib.util.spec_from_file_location("make_layers", ORACLE / "make_layers.py")
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def computed(oracle: Any, folder: Path, case: Any) -> dict[str, torch.Tensor]:
    """What a layer gives here, named as the results of Caffe are."""
    number, kind, body, bottoms, tops, phase, backward = case
    path = folder / "net.prototxt"
    path.write_text(oracle.text(kind, body, bottoms, tops))
    source = read_net(path)
    net = Net(source, state_of(source.net, phase)).fill()
    inputs, random = oracle.given(number, kind, body, bottoms)
    for blob in net.blobs:
        drawn = oracle.parameter(random, kind, body, blob.shape)
        if drawn is not None:
            net.value(blob).copy_(torch.from_numpy(drawn))
    given = {f"in{i}": torch.from_numpy(value).requires_grad_(backward) for i, value in enumerate(inputs)}
    blobs = net.compute(given)
    found = {f"top{i}": blobs[f"out{i}"] for i in range(tops)}
    if kind == "BatchNorm":
        found.update((f"after{i}", net.value(blob)) for i, blob in enumerate(net.blobs))
    if backward:
        if kind.endswith("Loss"):
            net.loss(given).backward()
        else:
            total = sum((t * torch.tensor(random.randn(*t.shape)).float()).sum() for t in found.values())
            if kind == "BatchNorm":
                random = oracle.given(number, kind, body, bottoms)[1]
                for blob in net.blobs:
                    oracle.parameter(random, kind, body, blob.shape)
                total = (found["top0"] * torch.tensor(random.randn(*found["top0"].shape)).float()).sum()
            if isinstance(total, torch.Tensor) and total.requires_grad:
                total.backward()
        for i, value in enumerate(given.values()):
            found[f"grad{i}"] = torch.zeros_like(value) if value.grad is None else value.grad
        found.update((f"param{i}", p.grad) for i, p in enumerate(net.parameters()) if p.grad is not None)
    return found


def test_every_layer_has_caffes_values_and_gradients(oracle: Any, tmp_path: Path) -> None:
    wrong = []
    with np.load(ORACLE / "layers.npz") as file:
        expected: dict[int, dict[str, Any]] = {}
        for name in file:
            expected.setdefault(int(name.partition("/")[0]), {})[name.partition("/")[2]] = file[name]
    cases = list(oracle.cases())
    for case in cases:
        found = computed(oracle, tmp_path, case)
        for name, values in expected.get(case[0], {}).items():
            mine = found[name].detach().numpy()
            if mine.shape != values.shape or not np.allclose(mine, values, rtol=2e-4, atol=2e-5):
                wrong.append((case, name, mine, values))
    assert not wrong, wrong[:2]
    # DummyData draws its values, and the others are names of forks
    assert set(LAYERS) - {case[1] for case in cases} == {"DummyData", "DepthwiseConvolution", "ConvolutionDepthwise"}


@pytest.fixture
def folder(tmp_path: Path, command: Any, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Caffe's files in the working directory."""
    shutil.copytree(ORACLE, tmp_path / "files")
    monkeypatch.chdir(tmp_path / "files")
    return tmp_path / "files"


@pytest.mark.parametrize("phase", ["TEST", "TRAIN"])
def test_databases_that_caffe_has_written_have_caffes_pictures(folder: Path, phase: str) -> None:
    source = read_net(folder / "net.prototxt")
    feed = open_feeds(source, state_of(source.net, phase), {})[0]
    inputs = feed.inputs(collate([[feed.data[i]] for i in range(6)])[0])
    with np.load("pictures.npz") as file:
        assert (inputs["label"].numpy() == file["label"]).all()
        if phase == "TEST":  # LMDB, encoded, with a mean file and a crop
            assert np.allclose(inputs["data"].numpy(), file["data"], atol=1e-5)
    if phase == "TRAIN":  # LevelDB, as bytes, before they were encoded
        encoded = open_feeds(source, state_of(source.net, "TEST"), {})[0]
        apart = feed.data[3][0].float() - encoded.data[3][0].float()
        assert feed.data[3][0].shape == (3, 18, 16) and 0 < apart.abs().mean() < 10


def test_a_list_of_pictures_has_them_decoded_and_resized_as_in_caffes_database(folder: Path) -> None:
    (folder / "list.prototxt").write_text(
        'layer { name: "data" type: "ImageData" top: "data" top: "label" image_data_param { source: "pictures.txt" '
        'batch_size: 1 root_folder: "pictures/" new_height: 18 new_width: 16 } }'
    )
    listed = read_net(folder / "list.prototxt")
    stored = read_net(folder / "net.prototxt")
    one = open_feeds(listed, state_of(listed.net, "TRAIN"), {})[0].data
    other = open_feeds(stored, state_of(stored.net, "TRAIN"), {})[0].data
    assert len(one) == len(other) == 6
    for number in range(6):
        assert all(torch.equal(mine, theirs) for mine, theirs in zip(one[number], other[number], strict=True))


def same(one: dict[str, list[Any]], other: dict[str, list[Any]]) -> bool:
    return all(
        np.allclose(a, b, rtol=1e-4, atol=1e-5)
        for name, arrays in other.items()
        for a, b in zip(one[name], arrays, strict=True)
    )


@pytest.mark.parametrize("name", ["solver", "solver_hdf5"])
@pytest.mark.parametrize("resumed", [False, True])
def test_a_solver_ends_where_caffes_own_does_from_its_weights_and_from_its_snapshots(
    folder: Path, command: Any, name: str, resumed: bool
) -> None:
    prefix, ending = ("trained", "") if name == "solver" else ("hdf5", ".h5")
    weights = f"{prefix}_iter_6.solverstate{ending}" if resumed else "first.caffemodel"
    line = f"train {name}.prototxt --weights {weights} --protocol single --on sim --run run --json"
    metrics = json.loads(command(line))["metrics"]
    expected = json.loads(Path(f"{name}.json").read_text())
    assert {key: metrics[key] for key in expected} == pytest.approx(expected, rel=1e-4)
    ended = read_blobs(Path(f"{prefix}_iter_12.caffemodel{ending}"))
    assert same(read_blobs(Path(f"run/task/{prefix}.caffemodel")), ended)


@pytest.mark.parametrize("name", ["trained_iter_12.caffemodel", "hdf5_iter_12.caffemodel.h5"])
def test_weights_that_caffe_has_trained_score_what_they_did_there(folder: Path, command: Any, name: str) -> None:
    metrics = json.loads(command(f"caffe score --model net.prototxt --weights {name} --json"))["metrics"]
    expected = json.loads(Path("solver.json" if "trained" in name else "solver_hdf5.json").read_text())
    assert {key: metrics[key] for key in expected} == pytest.approx(expected, rel=1e-4)
