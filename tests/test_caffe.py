"""Caffe files: layers against hand-computed values, solvers against formulas, nets against published sizes."""

from __future__ import annotations

import importlib.util
import json
import math
import random
import warnings
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor

from tether import CaffeTask, Elastic, Server, Sim, Single, UsageError, run
from tether.caffe.convert import from_lmdb, to_lmdb
from tether.caffe.data import Transform, decode_datum
from tether.caffe.drawing import boxes_of
from tether.caffe.net import Net
from tether.caffe.reading import read_net, read_solver, state_of
from tether.caffe.schema import message
from tether.caffe.solver import CaffeSolver, Policy, slots
from tether.caffe.task import parse_sources
from tether.caffe.weights import SolverState, load_weights, read_blobs, read_state, write_state, write_weights
from tether.execution.progress import make_progress
from tether.task import Length

EXAMPLES = Path(__file__).parents[1] / "examples" / "caffe"
QUIET = make_progress(quiet=True)


def net_of(folder: Path, text: str, phase: str = "TRAIN", **shapes: Any) -> Net:
    path = folder / "net.prototxt"
    path.write_text(text)
    source = read_net(path)
    return Net(source, state_of(source.net, phase), shapes).fill()


def one_layer(folder: Path, kind: str, more: str, *inputs: Tensor, phase: str = "TRAIN", tops: int = 1) -> Net:
    """A net of one layer between inputs and tops."""
    text = "".join(
        f'layer {{ name: "in{i}" type: "Input" top: "in{i}" input_param {{ shape {{ '
        f"{' '.join(f'dim: {n}' for n in value.shape)} }} }} }}\n"
        for i, value in enumerate(inputs)
    )
    bottoms = " ".join(f'bottom: "in{i}"' for i in range(len(inputs)))
    names = " ".join(f'top: "out{i}"' for i in range(tops))
    return net_of(folder, f'{text}layer {{ name: "it" type: "{kind}" {bottoms} {names} {more} }}', phase)


def result(folder: Path, kind: str, more: str, *inputs: Tensor, phase: str = "TRAIN") -> Tensor:
    net = one_layer(folder, kind, more, *inputs, phase=phase)
    return net.compute({f"in{i}": value for i, value in enumerate(inputs)})["out0"]


@pytest.mark.parametrize(
    ("size", "kernel", "stride", "pad"), [(7, 3, 2, 0), (8, 3, 2, 0), (7, 3, 2, 1), (6, 2, 3, 1), (9, 4, 3, 2)]
)
@pytest.mark.parametrize("method", ["MAX", "AVE"])
def test_pooling_equals_a_loop_over_caffes_windows(
    tmp_path: Path, size: int, kernel: int, stride: int, pad: int, method: str
) -> None:
    x = torch.randn(2, 3, size, size + 1, generator=torch.Generator().manual_seed(0))
    found = result(
        tmp_path, "Pooling", f"pooling_param {{ pool: {method} kernel_size: {kernel} stride: {stride} pad: {pad} }}", x
    )
    counts = []
    for length in x.shape[2:]:
        count = math.ceil((length + 2 * pad - kernel) / stride) + 1
        counts.append(count - 1 if pad and (count - 1) * stride >= length + pad else count)
    assert list(found.shape[2:]) == counts
    for i in range(counts[0]):
        for j in range(counts[1]):
            top, left = i * stride - pad, j * stride - pad
            bottom, right = min(top + kernel, x.shape[2] + pad), min(left + kernel, x.shape[3] + pad)
            window = x[:, :, max(top, 0) : min(bottom, x.shape[2]), max(left, 0) : min(right, x.shape[3])].flatten(2)
            expected = window.amax(2) if method == "MAX" else window.sum(2) / ((bottom - top) * (right - left))
            torch.testing.assert_close(found[:, :, i, j], expected)


def test_lrn_divides_by_a_power_of_the_mean_square_around(tmp_path: Path) -> None:
    x = torch.randn(1, 7, 5, 5, generator=torch.Generator().manual_seed(1))
    across = result(tmp_path, "LRN", "lrn_param { local_size: 5 alpha: 0.5 beta: 0.75 k: 2 }", x)
    for c in range(7):
        total = x[:, max(0, c - 2) : c + 3].square().sum(1)
        torch.testing.assert_close(across[:, c], x[:, c] * (2 + 0.1 * total) ** -0.75)
    within = result(tmp_path, "LRN", "lrn_param { local_size: 3 alpha: 0.9 beta: 0.5 norm_region: WITHIN_CHANNEL }", x)
    assert within[0, 0, 0, 0].item() == pytest.approx(
        (x[0, 0, 0, 0] * (1 + 0.1 * x[0, 0, :2, :2].square().sum()) ** -0.5).item(), rel=1e-5
    )


def test_batch_norm_keeps_sums_with_a_common_factor(tmp_path: Path) -> None:
    x = torch.randn(6, 2, 3, 3, generator=torch.Generator().manual_seed(2)) * 3 + 1
    net = one_layer(tmp_path, "BatchNorm", "batch_norm_param { moving_average_fraction: 0.9 }", x)
    for _ in range(2):
        out = net.compute({"in0": x})["out0"]
    assert out.mean((0, 2, 3)).abs().max() < 1e-5
    mean, variance, factor = (net.value(blob) for blob in net.blobs)
    torch.testing.assert_close(factor, torch.tensor([1.9]))
    torch.testing.assert_close(mean / factor, x.mean((0, 2, 3)))
    torch.testing.assert_close(variance / factor, x.transpose(0, 1).flatten(1).var(1))
    tested = net.eval().compute({"in0": x})["out0"]
    expected = (x - x.mean((0, 2, 3), keepdim=True)) / (
        x.transpose(0, 1).flatten(1).var(1).view(1, 2, 1, 1) + 1e-5
    ).sqrt()
    torch.testing.assert_close(tested, expected)


def test_losses_have_caffes_normalizers(tmp_path: Path) -> None:
    scores = torch.randn(2, 3, 4, generator=torch.Generator().manual_seed(3))
    labels = torch.tensor([[0.0, 1, 2, 255], [2, 2, 1, 0]])
    logs = scores.log_softmax(1)
    total = -sum(logs[n, int(labels[n, i]), i] for n in range(2) for i in range(4) if labels[n, i] != 255)
    for mode, divisor in {"VALID": 7, "FULL": 8, "BATCH_SIZE": 2, "NONE": 1}.items():
        found = result(
            tmp_path, "SoftmaxWithLoss", f"loss_param {{ ignore_label: 255 normalization: {mode} }}", scores, labels
        )
        assert found.item() == pytest.approx(total.item() / divisor, rel=1e-5)  # type: ignore[union-attr]
    a, b = scores.flatten(1), scores.flatten(1).flip(0)
    assert result(tmp_path, "EuclideanLoss", "", a, b).item() == pytest.approx(
        ((a - b) ** 2).sum().item() / 4, rel=1e-5
    )
    bce = torch.nn.functional.binary_cross_entropy_with_logits(a, (b > 0).float(), reduction="sum").item()
    assert result(tmp_path, "SigmoidCrossEntropyLoss", "", a, (b > 0).float()).item() == pytest.approx(
        bce / 2, rel=1e-5
    )


def test_accuracy_counts_ties_against_the_right_class_and_knows_top_k(tmp_path: Path) -> None:
    scores = torch.tensor([[1.0, 1, 0], [3, 2, 1], [0, 1, 2]])
    labels = torch.tensor([0.0, 1, 2])
    assert result(tmp_path, "Accuracy", "", scores, labels).item() == pytest.approx(1 / 3)
    assert result(tmp_path, "Accuracy", "accuracy_param { top_k: 2 }", scores, labels).item() == 1


XAVIER = 'weight_filler { type: "xavier" } }'
GRADIENTS = {
    "Convolution": ("convolution_param { num_output: 4 kernel_size: 3 pad: 1 group: 2 " + XAVIER, (2, 4, 5, 5)),
    "Deconvolution": ("convolution_param { num_output: 4 kernel_size: 3 stride: 2 group: 2 " + XAVIER, (1, 4, 3, 3)),
    "InnerProduct": ("inner_product_param { num_output: 3 transpose: true " + XAVIER, (2, 3, 2, 2)),
    "PReLU": ("", (2, 3, 2, 2)),
    "ELU": ("elu_param { alpha: 0.5 }", (2, 5)),
    "BNLL": ("", (2, 5)),
    "Power": ("power_param { power: 2 scale: 0.5 shift: 3 }", (2, 5)),
    "Exp": ("exp_param { base: 2 scale: 0.5 shift: 0.1 }", (2, 5)),
    "Log": ("log_param { base: 10 scale: 0.1 shift: 9 }", (2, 5)),
    "LRN": ("lrn_param { local_size: 3 }", (1, 5, 2, 2)),
    "BatchNorm": ("", (4, 2, 3, 3)),
    "Scale": ("scale_param { bias_term: true }", (2, 3, 2, 2)),
    "MVN": ("", (2, 2, 3, 3)),
    "Reduction": ("reduction_param { operation: SUMSQ axis: 1 coeff: 0.5 }", (2, 3, 2)),
    "Tile": ("tile_param { axis: 1 tiles: 3 }", (2, 2)),
    "Softmax": ("", (2, 4, 2)),
    "ReLU": ("relu_param { negative_slope: 0.1 }", (2, 5)),
    "Sigmoid": ("", (2, 5)),
    "TanH": ("", (2, 5)),
    "AbsVal": ("", (2, 5)),
    "Swish": ("swish_param { beta: 1.5 }", (2, 5)),
    "Clip": ("clip_param { min: -0.5 max: 0.7 }", (2, 5)),
    "Bias": ("", (2, 3, 2)),
    "Flatten": ("", (2, 3, 2)),
    "SPP": ("spp_param { pyramid_height: 2 pool: AVE }", (1, 2, 3, 4)),
    "Im2col": ("convolution_param { kernel_size: 2 pad: 1 }", (1, 2, 3, 3)),
    "Reshape": ("reshape_param { shape { dim: 0 dim: 2 dim: -1 } }", (2, 6)),
    "Pooling": ("pooling_param { pool: AVE kernel_size: 3 stride: 2 pad: 1 }", (1, 2, 5, 4)),
}  # fmt: skip


@pytest.mark.parametrize("kind", GRADIENTS)
def test_gradients_of_a_layer_equal_numerical_ones(tmp_path: Path, kind: str) -> None:
    torch.manual_seed(4)
    more, shape = GRADIENTS[kind]
    x = torch.randn(shape, dtype=torch.float64, requires_grad=True)
    net = one_layer(tmp_path, kind, more, x).double()
    parameters = [p for p in net.parameters() if p.requires_grad]
    assert torch.autograd.gradcheck(lambda value, *_: net.compute({"in0": value})["out0"], (x, *parameters), atol=1e-4)


SEVERAL = {
    "Eltwise": ("eltwise_param { operation: SUM coeff: 2 coeff: -0.5 coeff: 1 }", [(2, 3)] * 3),
    "Eltwise PROD": ("eltwise_param { operation: PROD }", [(2, 3)] * 2),
    "Eltwise MAX": ("eltwise_param { operation: MAX }", [(2, 3)] * 2),
    "Concat": ("concat_param { axis: 2 }", [(2, 1, 3), (2, 1, 2)]),
    "Crop": ("crop_param { axis: 1 offset: 1 offset: 0 }", [(2, 4, 5), (2, 3, 3)]),
    "Scale": ("scale_param { axis: 0 }", [(2, 3, 2), (2, 3)]),
    "Bias": ("bias_param { axis: 1 }", [(2, 3, 2), (3,)]),
    "EuclideanLoss": ("", [(3, 2), (3, 2)]),
}  # fmt: skip


@pytest.mark.parametrize("kind", SEVERAL)
def test_gradients_of_a_layer_with_several_bottoms_equal_numerical_ones(tmp_path: Path, kind: str) -> None:
    torch.manual_seed(11)
    more, shapes = SEVERAL[kind]
    inputs = [torch.randn(shape, dtype=torch.float64, requires_grad=True) for shape in shapes]
    net = one_layer(tmp_path, kind.split()[0], more, *inputs).double()
    assert torch.autograd.gradcheck(
        lambda *values: net.compute({f"in{i}": value for i, value in enumerate(values)})["out0"], inputs
    )


LABELLED = {
    "SoftmaxWithLoss": ("", (3, 4), [0, 3, 1]),
    "SigmoidCrossEntropyLoss": ("", (2, 2), [[0, 1], [1, 1]]),
    "MultinomialLogisticLoss": ("", (3, 4), [0, 3, 1]),
    "HingeLoss": ("hinge_loss_param { norm: L2 }", (3, 4), [0, 3, 1]),
}  # fmt: skip


@pytest.mark.parametrize("kind", LABELLED)
def test_gradients_of_a_loss_equal_numerical_ones(tmp_path: Path, kind: str) -> None:
    torch.manual_seed(12)
    more, shape, labels = LABELLED[kind]
    x = torch.rand(shape, dtype=torch.float64) + 0.1
    wanted = torch.tensor(labels, dtype=torch.float64)
    net = one_layer(tmp_path, kind, more, x, wanted).double()
    assert torch.autograd.gradcheck(
        lambda value: net.compute({"in0": value, "in1": wanted})["out0"], (x.requires_grad_(),)
    )


@pytest.mark.parametrize("kind", ["LSTM", "RNN"])
def test_gradients_through_time_equal_numerical_ones(tmp_path: Path, kind: str) -> None:
    torch.manual_seed(13)
    x, static = (torch.randn(shape, dtype=torch.float64, requires_grad=True) for shape in ((3, 2, 2), (2, 3)))
    cont = torch.tensor([[0.0, 0], [1, 1], [1, 0]], dtype=torch.float64)
    filler = 'weight_filler { type: "uniform" min: -0.5 max: 0.5 }'
    net = one_layer(tmp_path, kind, f"recurrent_param {{ num_output: 2 {filler} }}", x, cont, static).double()
    parameters = [p for p in net.parameters() if p.requires_grad]
    assert len(parameters) == {"LSTM": 4, "RNN": 6}[kind]
    assert torch.autograd.gradcheck(
        lambda a, b, *_: net.compute({"in0": a, "in1": cont, "in2": b})["out0"], (x, static, *parameters)
    )


def test_an_rnn_follows_its_two_equations_and_exposes_its_state(tmp_path: Path) -> None:
    torch.manual_seed(14)
    x, cont, first = torch.randn(3, 2, 2), torch.tensor([[1.0, 0], [1, 1], [0, 1]]), torch.randn(1, 2, 3)
    more = 'recurrent_param { num_output: 3 expose_hidden: true weight_filler { type: "xavier" } '
    more += 'bias_filler { type: "uniform" } }'
    net = one_layer(tmp_path, "RNN", more, x, cont, first, tops=2)
    found = net.compute({"in0": x, "in1": cont, "in2": first})
    w, b, u, v, c = (net.value(blob) for blob in net.blobs)
    h = first[0]
    for t in range(3):
        h = (x[t] @ w.t() + b + (cont[t, :, None] * h) @ u.t()).tanh()
        torch.testing.assert_close(found["out0"][t], (h @ v.t() + c).tanh())
    torch.testing.assert_close(found["out1"], h.unsqueeze(0))


def test_what_a_sequence_leaves_behind_is_there_in_the_next_batch(tmp_path: Path) -> None:
    torch.manual_seed(15)
    x, cont = torch.randn(4, 1, 2), torch.tensor([[0.0], [1], [1], [1]])
    more = 'recurrent_param { num_output: 2 weight_filler { type: "xavier" } }'
    net = one_layer(tmp_path, "LSTM", more, x[:2], cont[:2])
    parts = [net.compute({"in0": x[i : i + 2], "in1": cont[i : i + 2]})["out0"] for i in (0, 2)]
    whole = one_layer(tmp_path, "LSTM", more, x, cont)
    whole.load_state_dict(net.state_dict())
    torch.testing.assert_close(torch.cat(parts), whole.compute({"in0": x, "in1": cont})["out0"])


#: type and settings, bottoms, and what a hand finds as the first top
BY_HAND = [
    ("ReLU", "", [[-1.0, 2]], [[0, 2]]),
    ("ReLU", "relu_param { negative_slope: 0.5 }", [[-1.0, 2]], [[-0.5, 2]]),
    ("ELU", "elu_param { alpha: 2 }", [[-1.0, 2]], [[2 * (math.exp(-1) - 1), 2]]),
    ("Sigmoid", "", [[0.0, math.log(3)]], [[0.5, 0.75]]),
    ("TanH", "", [[0.0, math.log(2)]], [[0, 0.6]]),
    ("AbsVal", "", [[-3.0, 4]], [[3, 4]]),
    ("Swish", "swish_param { beta: 2 }", [[0.0, math.log(3) / 2]], [[0, 0.75 * math.log(3) / 2]]),
    ("Clip", "clip_param { min: -1 max: 1 }", [[-3.0, 0.5, 4]], [[-1, 0.5, 1]]),
    ("Threshold", "threshold_param { threshold: 1 }", [[1.0, 1.5]], [[0, 1]]),
    ("Power", "power_param { power: 2 scale: 3 shift: 1 }", [[0.0, 1]], [[1, 16]]),
    ("Power", "power_param { power: 0 }", [[0.0, 5]], [[1, 1]]),
    ("Exp", "exp_param { base: 2 scale: 2 shift: 1 }", [[0.0, 1]], [[2, 8]]),
    ("Log", "log_param { base: 2 scale: 2 shift: 2 }", [[1.0, 3]], [[2, 3]]),
    ("BNLL", "", [[0.0, math.log(3)]], [[math.log(2), math.log(4)]]),
    ("PReLU", "", [[[-4.0], [2]]], [[[-1], [2]]]),
    ("Bias", 'bias_param { filler { type: "constant" value: 3 } }', [[1.0, 2]], [[4, 5]]),
    ("Scale", 'scale_param { filler { value: 3 } bias_term: true bias_filler { value: 1 } }', [[1.0, 2]], [[4, 7]]),
    ("Flatten", "flatten_param { axis: 0 end_axis: 1 }", [[[1.0, 2], [3, 4]]], [[1, 2], [3, 4]]),
    ("Reshape", "reshape_param { shape { dim: -1 } axis: 1 }", [[[1.0, 2], [3, 4]]], [[1, 2, 3, 4]]),
    ("Reshape", "reshape_param { shape { dim: 1 } axis: 1 num_axes: 0 }", [[1.0, 2]], [[[1, 2]]]),
    ("Tile", "tile_param { axis: 1 tiles: 2 }", [[1.0, 2]], [[1, 2, 1, 2]]),
    ("Reduction", "reduction_param { operation: SUM axis: 1 coeff: 2 }", [[1.0, -2], [3, 4]], [-2, 14]),
    ("Reduction", "reduction_param { operation: ASUM }", [[1.0, -2], [3, 4]], 10),
    ("Reduction", "reduction_param { operation: SUMSQ axis: -1 }", [[1.0, -2], [3, 4]], [5, 25]),
    ("Reduction", "reduction_param { operation: MEAN axis: 1 }", [[1.0, -2], [3, 4]], [-0.5, 3.5]),
    ("Softmax", "", [[0.0, math.log(3)]], [[0.25, 0.75]]),
    ("ArgMax", "", [[1.0, 3, 3, 2]], [[[2]]]),
    ("ArgMax", "argmax_param { top_k: 2 out_max_val: true }", [[1.0, 4, 3, 2]], [[[1, 2], [4, 3]]]),
    ("ArgMax", "argmax_param { axis: 0 }", [[1.0, 4], [3, 2]], [[1, 0]]),
    ("ArgMax", "argmax_param { axis: 1 out_max_val: true }", [[1.0, 4], [3, 2]], [[4], [3]]),
]  # fmt: skip


@pytest.mark.parametrize(("kind", "more", "bottom", "top"), BY_HAND, ids=[f"{i} {c[0]}" for i, c in enumerate(BY_HAND)])
def test_a_layer_gives_what_a_hand_finds(tmp_path: Path, kind: str, more: str, bottom: Any, top: Any) -> None:
    first = [bottom] if kind == "Flatten" else bottom
    expected = torch.tensor(top, dtype=torch.float32)
    found = result(tmp_path, kind, more, torch.tensor(first, dtype=torch.float32))
    torch.testing.assert_close(found, expected.reshape(found.shape) if kind == "Flatten" else expected)


def test_layers_with_several_bottoms_or_tops_give_what_a_hand_finds(tmp_path: Path) -> None:
    a, b, c = (torch.tensor(values) for values in ([[1.0, 2]], [[3.0, -1]], [[5.0, 0]]))

    def found(kind: str, more: str, *inputs: Tensor) -> Any:
        return result(tmp_path, kind, more, *inputs).tolist()

    assert found("Eltwise", "eltwise_param { coeff: 1 coeff: -1 coeff: 2 }", a, b, c) == [[8, 3]]
    assert found("Eltwise", "eltwise_param { operation: PROD }", a, b, c) == [[15, 0]]
    assert found("Eltwise", "eltwise_param { operation: MAX }", a, b) == [[3, 2]]
    assert found("Concat", "", a, b) == [[1, 2, 3, -1]]
    assert found("Concat", "concat_param { concat_dim: 0 }", a, b) == [[1, 2], [3, -1]]
    assert found("Scale", "scale_param { axis: 0 }", a, torch.tensor([2.0])) == [[2, 4]]
    assert found("Bias", "bias_param { axis: 1 }", a, torch.tensor([2.0, 3])) == [[3, 5]]
    grid = torch.arange(16.0).view(1, 1, 4, 4)
    like = torch.zeros(1, 1, 2, 3)
    assert found("Crop", "crop_param { offset: 1 }", grid, like) == [[[[5, 6, 7], [9, 10, 11]]]]
    assert found("Crop", "crop_param { axis: 3 offset: 0 }", grid, torch.zeros(1, 1, 4, 2))[0][0][1] == [4, 5]
    row = torch.arange(6.0).view(1, 6)
    sliced = one_layer(tmp_path, "Slice", "slice_param { slice_point: 1 slice_point: 3 }", row, tops=3)
    parts = sliced.compute({"in0": row})
    assert [parts[f"out{i}"].tolist() for i in range(3)] == [[[0]], [[1, 2]], [[3, 4, 5]]]
    even = one_layer(tmp_path, "Slice", "slice_param { axis: -1 }", row, tops=2).compute({"in0": row})
    assert even["out1"].tolist() == [[3, 4, 5]]
    twice = one_layer(tmp_path, "Split", "", row, tops=2).compute({"in0": row})
    assert twice["out0"].equal(row) and twice["out1"].equal(row)


def test_embedding_takes_rows_and_passes_their_gradients(tmp_path: Path) -> None:
    x = torch.tensor([[0.0, 2]])
    more = 'embed_param { input_dim: 3 num_output: 2 weight_filler { type: "gaussian" } bias_filler { value: 1 } }'
    net = one_layer(tmp_path, "Embed", more, x)
    weight, bias = (net.value(blob) for blob in net.blobs)
    found = net.compute({"in0": x})["out0"]
    torch.testing.assert_close(found, torch.stack([weight[0], weight[2]])[None] + bias)
    found.sum().backward()
    first, second = net.parameters()
    assert first.grad is not None and first.grad.tolist() == [[1, 1], [0, 0], [1, 1]]
    assert second.grad is not None and second.grad.tolist() == [2, 2]


def test_hinge_and_contrastive_losses_have_caffes_values_and_gradients(tmp_path: Path) -> None:
    scores, labels = torch.tensor([[2.0, 0.5, -3], [0, 0, 1]]), torch.tensor([0.0, 1])
    # margins: max(0, 1 - 2), 1.5, 0; 1, 1, 2
    assert result(tmp_path, "HingeLoss", "", scores, labels).item() == pytest.approx(5.5 / 2)
    squared = result(tmp_path, "HingeLoss", "hinge_loss_param { norm: L2 }", scores, labels)
    assert squared.item() == pytest.approx((2.25 + 1 + 1 + 4) / 2)
    one, other = torch.tensor([[0.0, 0], [0, 0], [1, 1]]), torch.tensor([[3.0, 4], [0.3, 0.4], [1, 1]])
    similar = torch.tensor([1.0, 0, 0])
    # squares 25, 0.25, 0; apart (1 - 0.5)^2 and 1, or by the older rule 1 - 0.25 and 1
    assert result(tmp_path, "ContrastiveLoss", "", one, other, similar).item() == pytest.approx((25 + 0.25 + 1) / 6)
    older = result(tmp_path, "ContrastiveLoss", "contrastive_loss_param { legacy_version: true }", one, other, similar)
    assert older.item() == pytest.approx((25 + 0.75 + 1) / 6)
    net = one_layer(tmp_path, "ContrastiveLoss", "", one[:2], other[:2], similar[:2]).double()
    pair = tuple(x[:2].double().requires_grad_() for x in (one, other))
    assert torch.autograd.gradcheck(
        lambda a, b: net.compute({"in0": a, "in1": b, "in2": similar[:2].double()})["out0"], pair
    )


def test_dropout_scales_what_it_keeps_and_dummy_data_is_drawn_anew(tmp_path: Path) -> None:
    torch.manual_seed(16)
    x = torch.ones(100, 100)
    net = one_layer(tmp_path, "Dropout", "dropout_param { dropout_ratio: 0.2 }", x)
    found = net.compute({"in0": x})["out0"]
    assert set(found.unique().tolist()) == {0.0, 1.25} and found.mean().item() == pytest.approx(1, abs=0.02)
    assert net.eval().compute({"in0": x})["out0"].equal(x)
    assert result(tmp_path, "Dropout", "", x, phase="TEST").equal(x)
    made = net_of(
        tmp_path,
        'layer { name: "d" type: "DummyData" top: "a" top: "b" dummy_data_param { shape { dim: 2 dim: 3 } '
        'data_filler { value: 7 } data_filler { type: "gaussian" } } }',
    )
    first, second = made.compute({}), made.compute({})
    assert first["a"].tolist() == [[7] * 3] * 2 and first["a"].equal(second["a"])
    assert first["b"].shape == (2, 3) and not first["b"].equal(second["b"])


def test_an_lstm_equals_torchs_cell_and_forgets_where_a_sequence_begins(tmp_path: Path) -> None:
    torch.manual_seed(5)
    x, cont = torch.randn(4, 2, 3), torch.tensor([[0.0, 0], [1, 1], [1, 0], [1, 1]])
    net = one_layer(tmp_path, "LSTM", 'recurrent_param { num_output: 5 weight_filler { type: "xavier" } }', x, cont)
    found = net.compute({"in0": x, "in1": cont})["out0"]
    w, b, u = (net.value(blob) for blob in net.blobs)
    order = torch.cat([torch.arange(5), torch.arange(5, 10), torch.arange(15, 20), torch.arange(10, 15)])
    h = c = torch.zeros(2, 5)
    for t in range(4):
        gates = (x[t] @ w.t() + b + (h * cont[t, :, None]) @ u.t())[:, order]
        i, f, g, o = gates.chunk(4, 1)
        c = f.sigmoid() * c * cont[t, :, None] + i.sigmoid() * g.tanh()
        h = o.sigmoid() * c.tanh()
        torch.testing.assert_close(found[t], h)


@pytest.mark.parametrize("kind", ["SGD", "Nesterov", "AdaGrad", "RMSProp", "AdaDelta", "Adam"])
def test_a_solver_follows_caffes_formula_over_a_change_of_the_rate(kind: str) -> None:
    generator = np.random.default_rng(6)
    w = generator.normal(size=5)
    parameter = torch.nn.Parameter(torch.tensor(w))
    solver = CaffeSolver([parameter], 0.1, type=kind, momentum=0.9, delta=1e-3, rms_decay=0.8, weight_decay=0.01)
    h, k = np.zeros(5), np.zeros(5)
    for t in range(1, 7):
        solver.param_groups[0]["lr"] = rate = 0.1 if t < 4 else 0.01
        raw = generator.normal(size=5)
        parameter.grad = torch.tensor(raw)
        solver.step()
        g = raw + 0.01 * w
        match kind:
            case "SGD":
                h = 0.9 * h + rate * g
                w = w - h
            case "Nesterov":
                before, h = h, 0.9 * h + rate * g
                w = w - (1.9 * h - 0.9 * before)
            case "AdaGrad":
                h = h + g * g
                w = w - rate * g / (np.sqrt(h) + 1e-3)
            case "RMSProp":
                h = 0.8 * h + 0.2 * g * g
                w = w - rate * g / (np.sqrt(h) + 1e-3)
            case "AdaDelta":
                h = 0.9 * h + 0.1 * g * g
                u = g * np.sqrt((k + 1e-3) / (h + 1e-3))
                k = 0.9 * k + 0.1 * u * u
                w = w - rate * u
            case "Adam":
                h, k = 0.9 * h + 0.1 * g, 0.999 * k + 0.001 * g * g
                w = w - rate * math.sqrt(1 - 0.999**t) / (1 - 0.9**t) * h / (np.sqrt(k) + 1e-3)
        np.testing.assert_allclose(parameter.detach().numpy(), w, rtol=1e-9)


def test_decay_by_l1_adds_the_sign_of_a_weight() -> None:
    parameter = torch.nn.Parameter(torch.tensor([2.0, -3, 0], dtype=torch.float64))
    solver = CaffeSolver([parameter], 0.5, momentum=0.9, weight_decay=0.1, regularization="L1")
    w, h = np.array([2.0, -3, 0]), np.zeros(3)
    for gradient in ([1.0, 1, 1], [0, -1, 2]):
        parameter.grad = torch.tensor(gradient, dtype=torch.float64)
        solver.step()
        h = 0.9 * h + 0.5 * (np.array(gradient) + 0.1 * np.sign(w))
        w = w - h
        np.testing.assert_allclose(parameter.detach().numpy(), w)


def test_gradients_of_iter_size_batches_are_clipped_as_a_sum_and_applied_as_a_mean(tmp_path: Path) -> None:
    generator = np.random.default_rng(17)
    x, y = generator.normal(size=(12, 3)).astype(np.float32), generator.normal(size=(12, 1)).astype(np.float32)
    np.savez(tmp_path / "data.npz", x=x, y=y)
    (tmp_path / "solver.prototxt").write_text(
        """base_lr: 0.1 lr_policy: "fixed" max_iter: 3 iter_size: 3 clip_gradients: 0.5 weight_decay: 0.1
net_param { name: "line"
  layer { name: "d" type: "HDF5Data" top: "x" top: "y" hdf5_data_param { source: "data.npz" batch_size: 4 } }
  layer { name: "ip" type: "InnerProduct" bottom: "x" top: "ip" param { lr_mult: 2 decay_mult: 3 }
    inner_product_param { num_output: 1 bias_term: false weight_filler { value: 1 } } }
  layer { name: "loss" type: "EuclideanLoss" bottom: "ip" bottom: "y" top: "loss" } }"""
    )
    found = run(
        CaffeTask(tmp_path / "solver.prototxt"), Single(), Sim(workers=1), run_dir=tmp_path / "run", progress=QUIET
    )
    # three batches of four are the whole data, in whatever order
    w = np.ones((1, 3))
    for _ in range(3):
        total = sum((x[i : i + 1] @ w.T - y[i : i + 1]).T @ x[i : i + 1] for i in range(12)) / 4
        total *= min(1, 0.5 / np.linalg.norm(total))
        w = w - 0.1 * 2 * (total / 3 + 0.1 * 3 * w)
    np.testing.assert_allclose(found.model.state_dict()["layers.ip.weight"].numpy(), w, rtol=1e-5)


def test_policies_have_caffes_rates() -> None:
    def rate(name: str, iteration: int) -> float:
        return Policy(name, 0.5, 0.1, 0.75, 10, (5, 20), 100).rate(iteration)

    assert (
        rate("fixed", 50) == 0.5 and rate("step", 25) == pytest.approx(0.005) and rate("exp", 2) == pytest.approx(0.005)
    )
    assert rate("inv", 30) == pytest.approx(0.5 * 4**-0.75) and rate("poly", 50) == pytest.approx(0.5 * 0.5**0.75)
    assert [rate("multistep", i) for i in (4, 5, 20)] == pytest.approx([0.5, 0.05, 0.005])
    assert rate("sigmoid", 10) == pytest.approx(0.25)


SIZES = {
    "lenet": ((64, 1, 28, 28), 431_080),
    "cifar10_quick": ((100, 3, 32, 32), 145_578),
    "cifar10_full": ((100, 3, 32, 32), 89_578),
    "alexnet": ((2, 3, 227, 227), 60_965_224),
    "vgg_a": ((1, 3, 224, 224), 132_863_336),
    "vgg16": ((1, 3, 224, 224), 138_357_544),
    "googlenet": ((1, 3, 224, 224), 13_378_280),
    "resnet50": ((1, 3, 224, 224), 25_557_032),
    "squeezenet": ((1, 3, 227, 227), 1_235_496),
}


@pytest.mark.parametrize("name", SIZES)
def test_a_well_known_net_has_its_published_number_of_parameters(name: str) -> None:
    shape, count = SIZES[name]
    source = read_net(EXAMPLES / f"{name}_train_test.prototxt")
    data = source.net.layer[0].name
    net = Net(source, state_of(source.net, "TRAIN"), {data: [shape, shape[:1]]})
    assert net.parameter_count == count and all(p.is_meta for p in net.parameters())
    losses = [weight for node in net.nodes for weight in node.loss_weights if weight]
    assert losses == ([pytest.approx(0.3), pytest.approx(0.3), 1.0] if name == "googlenet" else [1.0])


def test_the_definitions_are_what_their_script_writes() -> None:
    spec = importlib.util.spec_from_file_location("make_nets", EXAMPLES / "make_nets.py")
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    for name, make in module.NETS.items():
        assert (EXAMPLES / f"{name}_train_test.prototxt").read_text() == make()
    for name, settings in module.SOLVERS.items():
        assert (EXAMPLES / f"{name}_solver.prototxt").read_text() == module.solver(name, settings)
        solver = read_solver(EXAMPLES / f"{name}_solver.prototxt")
        assert Policy.of(solver.solver).rate(0) == pytest.approx(solver.solver.base_lr)


@pytest.fixture
def solver(tmp_path: Path) -> Path:
    """A small solver with its data, which tells bright pictures from dark ones."""
    generator = np.random.default_rng(7)
    for part, count in (("train", 200), ("test", 40)):
        labels = generator.integers(0, 2, count)
        images = (generator.integers(0, 128, (count, 1, 6, 6)) + 127 * labels[:, None, None, None]).astype(np.uint8)
        to_lmdb(images, labels, tmp_path / f"{part}_lmdb")
    (tmp_path / "net.prototxt").write_text(
        """name: "small"
layers { name: "d" type: DATA top: "data" top: "label" data_param { source: "train_lmdb" batch_size: 10 backend: LMDB
  scale: 0.00390625 } include { phase: TRAIN } }
layers { name: "d" type: DATA top: "data" top: "label" data_param { source: "test_lmdb" batch_size: 20 backend: LMDB
  scale: 0.00390625 } include { phase: TEST } }
layers { name: "ip" type: INNER_PRODUCT bottom: "data" top: "ip" blobs_lr: 1 blobs_lr: 2 weight_decay: 1 weight_decay: 0
  inner_product_param { num_output: 2 weight_filler { type: "xavier" } } }
layers { name: "accuracy" type: ACCURACY bottom: "ip" bottom: "label" top: "accuracy" include { phase: TEST } }
layers { name: "loss" type: SOFTMAX_LOSS bottom: "ip" bottom: "label" top: "loss" }
"""
    )
    path = tmp_path / "solver.prototxt"
    path.write_text(
        'net: "net.prototxt" test_iter: 2 test_interval: 20 base_lr: 0.2 momentum: 0.9 weight_decay: 0.001 '
        'lr_policy: "step" gamma: 0.5 stepsize: 30 max_iter: 60 solver_type: NESTEROV'
    )
    return path


@pytest.mark.parametrize("protocol", [Single(), Elastic(), Server(sync="hard")])
def test_a_solver_trains_under_protocols_that_step_at_workers_and_at_the_hub(
    tmp_path: Path, solver: Path, protocol: Any
) -> None:
    workers = protocol.workers_max or 2
    task = CaffeTask(solver)
    assert (task.batch_size, task.run_defaults(workers, None)["steps"]) == (10, 60)
    found = run(task, protocol, Sim(workers=workers), run_dir=tmp_path / "run", progress=QUIET)
    assert found.metrics["accuracy"] > 0.9 and found.metrics["error"] == pytest.approx(1 - found.metrics["accuracy"])
    write_weights(found.model, tmp_path / "a.caffemodel")
    state, loaded = task.with_weights([tmp_path / "a.caffemodel"], 0)
    assert loaded.loaded == ("ip",) and not loaded.fresh
    for name, value in found.model.state_dict().items():
        torch.testing.assert_close(state[name], value)


SIM = "train solver.prototxt --protocol single --on sim --json"


def test_weights_are_trained_scored_and_fine_tuned_on_the_command_line(
    tmp_path: Path, solver: Path, command: Any
) -> None:
    figures = json.loads(command(f"{SIM} --run first"))
    assert figures["steps"] == 60 and figures["metrics"]["accuracy"] > 0.9
    trained = "first/task/small.caffemodel"
    scored = json.loads(command(f"caffe score --model net.prototxt --weights {trained} --json"))
    assert scored == {"batches": 2, "metrics": figures["metrics"]}
    longer = json.loads(command(f"caffe score --model net.prototxt --weights {trained} --data d=train_lmdb --json"))
    assert longer["batches"] == 10
    again = json.loads(command(f"{SIM} --run second --weights {trained} --steps 1"))
    assert again["metrics"]["accuracy"] > 0.9
    assert "cannot be read: No such file" in command("caffe score --model net.prototxt --weights nothing.caffemodel")
    assert "is a solver, and not a net" in command(f"caffe score --model solver.prototxt --weights {trained}")
    assert "is not a binary NetParameter" in command(f"{SIM} --weights net.prototxt")
    solver.write_text(solver.read_text() + f' weights: "{trained}"')
    assert json.loads(command(f"{SIM} --run third --steps 1"))["digest"] == again["digest"]


def test_a_snapshot_goes_to_caffe_and_back(tmp_path: Path, solver: Path, command: Any) -> None:
    whole = json.loads(command(f"{SIM} --run whole"))
    solver.write_text(solver.read_text() + ' snapshot: 20 snapshot_prefix: "elsewhere/snap"')
    command(f"{SIM} --run half --steps 40")
    assert sorted(path.name for path in Path("half/task").iterdir()) == [
        "snap.caffemodel",
        "snap_iter_20.caffemodel",
        "snap_iter_40.caffemodel",
    ]
    assert "iteration 40" in command("caffe snapshot half")
    state = read_state(Path("snap_iter_40.solverstate"))
    assert (state.iteration, [tuple(h.shape) for h in state.histories]) == (40, [(2, 36), (2,)])
    assert min(h.abs().max().item() for h in state.histories) > 0
    command(f"{SIM} --run rest --weights snap_iter_40.solverstate")
    config = json.loads(Path("rest/run.json").read_text())
    assert config["result"]["steps"] == 20
    # the order of the data differs, since each part begins its own; rate, momentum and weights are those of the whole
    assert config["result"]["metrics"]["loss"] == pytest.approx(whole["metrics"]["loss"], abs=0.02)
    resumed = json.loads(command("resume half --steps 60 --json"))
    assert resumed["metrics"]["loss"] == pytest.approx(whole["metrics"]["loss"], abs=1e-6)
    assert Path("half/task/snap_iter_60.caffemodel").exists()
    assert "iteration 60" in command("caffe snapshot half")
    refused = command(f"{SIM} --weights snap_iter_60.solverstate")
    assert "has max_iter 60; it must be more than 60" in refused


@pytest.mark.parametrize("kind", ["SGD", "Nesterov", "AdaGrad", "RMSProp", "AdaDelta", "Adam"])
def test_a_solver_continues_from_its_state_as_if_it_had_not_stopped(tmp_path: Path, kind: str) -> None:
    text = """layer { name: "d" type: "DummyData" top: "x" top: "y" dummy_data_param { shape { dim: 4 dim: 3 }
  data_filler { type: "constant" value: 0.5 } } }
layer { name: "bn" type: "BatchNorm" bottom: "x" top: "n" }
layer { name: "ip" type: "InnerProduct" bottom: "x" top: "ip" param { lr_mult: 1 } param { lr_mult: 0 }
  inner_product_param { num_output: 3 weight_filler { type: "xavier" } } }
layer { name: "q" type: "Scale" bottom: "ip" top: "q" }
layer { name: "loss" type: "EuclideanLoss" bottom: "q" bottom: "y" top: "loss" }
layer { name: "s" type: "Silence" bottom: "n" }"""
    momentum = 0.0 if kind in ("AdaGrad", "RMSProp") else 0.9
    (tmp_path / "solver.prototxt").write_text(
        f'type: "{kind}" base_lr: 0.01 momentum: {momentum} lr_policy: "step" gamma: 0.5 stepsize: 4 max_iter: 9 '
        f"net_param {{ {text} }}"
    )
    task = CaffeTask(tmp_path / "solver.prototxt")

    def trained(task: CaffeTask, net: Net, steps: int) -> CaffeSolver:
        learner = task.optimizer(net)
        schedule = task.scheduler(learner, Length(9, 1.0, 1))
        assert isinstance(learner, CaffeSolver) and schedule is not None
        for _ in range(steps):
            learner.zero_grad()
            net.loss({}).backward()
            learner.step()
            schedule.step()
        return learner

    torch.manual_seed(18)
    whole, parts = task.model(), task.model()
    parts.load_state_dict(whole.state_dict())
    assert isinstance(whole, Net) and isinstance(parts, Net)
    trained(task, whole, 9)
    half = trained(task, parts, 5)
    write_weights(parts, tmp_path / "it.caffemodel")
    write_state(tmp_path / "it.solverstate", SolverState(5, "it.caffemodel", half.histories(parts)), 1)
    later = CaffeTask(tmp_path / "solver.prototxt", snapshot=tmp_path / "it.solverstate")
    defaults = later.run_defaults(1, None)
    assert defaults["steps"] == 4
    fresh = later.model()
    assert isinstance(fresh, Net)
    fresh.load_state_dict(defaults["weights"])
    trained(later, fresh, 4)
    for name, value in whole.state_dict().items():
        torch.testing.assert_close(fresh.state_dict()[name], value, msg=name)
    if slots(kind) == 1:
        (tmp_path / "other.prototxt").write_text(later.path.read_text().replace(f'"{kind}"', '"AdaDelta"'))
        with pytest.raises(UsageError, match="has 6 histories, and AdaDelta has 12"):
            CaffeTask(tmp_path / "other.prototxt", snapshot=tmp_path / "it.solverstate")


def test_a_run_in_processes_resumes_with_its_policy(tmp_path: Path, solver: Path, command: Any) -> None:
    line = "train solver.prototxt --protocol elastic --on local --workers 2 --steps 40 --run run --json"
    assert json.loads(command(line))["samples"] >= 2 * 40 * 10
    figures = json.loads(command("resume run --steps 60 --json"))
    assert figures["steps"] >= 60 and figures["metrics"]["accuracy"] > 0.9
    assert Path("run/task/small.caffemodel").exists()


def test_arrays_become_an_lmdb_and_come_back_on_the_command_line(tmp_path: Path, command: Any) -> None:
    images, labels = np.arange(24, dtype=np.uint8).reshape(2, 3, 2, 2), np.array([4, 1])
    np.savez(tmp_path / "a.npz", x=images, y=labels)
    assert "2 records" in command("data to-lmdb a.npz db --images x --labels y")
    assert "has an LMDB already" in command("data to-lmdb a.npz db --images x --labels y")
    assert "2 images" in command("data from-lmdb db b.npz")
    with np.load("b.npz") as file:
        assert (file["data"] == images).all() and file["label"].tolist() == [4, 1]
    (tmp_path / "text.npz").write_text("no arrays")
    assert "lacks the arrays data, label; it has x, y" in command("data to-lmdb a.npz c")
    assert "is not an .npz file" in command("data to-lmdb text.npz c")
    assert "No such file" in command("data to-lmdb nothing.npz c")
    assert "is not an LMDB" in command("data from-lmdb c d.npz")


def test_lists_of_images_and_hdf5_files_are_data_too(tmp_path: Path, solver: Path, command: Any) -> None:
    import h5py
    from PIL import Image

    text = Path("net.prototxt").read_text()
    for part, count in (("train", 60), ("test", 40)):
        images, labels = from_lmdb(Path(f"{part}_lmdb"))
        for index in range(count):
            Image.fromarray(images[index, 0]).save(f"{part} {index}.png")
        lines = [f"{part} {index}.png {labels[index]}\n" for index in range(count)]
        Path(f"{part}.txt").write_text("".join(lines))
        with h5py.File(f"{part}.h5", "w") as file:
            file["data"], file["label"] = images[:count] / np.float32(256), labels[:count]
        Path(f"{part}_h5.txt").write_text(f"{part}.h5\n")
    for kind, field, more in (
        ("IMAGE_DATA", "image_data_param", "is_color: false new_height: 6 new_width: 6"),
        ("HDF5_DATA", "hdf5_data_param", ""),
    ):
        changed = (
            text.replace("type: DATA", f"type: {kind}").replace("data_param", field).replace("backend: LMDB", more)
        )
        changed = changed.replace("scale: 0.00390625", "" if kind == "HDF5_DATA" else "scale: 0.00390625")
        end = "_h5.txt" if kind == "HDF5_DATA" else ".txt"
        Path("net.prototxt").write_text(changed.replace("_lmdb", end))
        figures = json.loads(command(f"{SIM} --run {kind}"))
        assert figures["metrics"]["accuracy"] > 0.9
        Path(f"train{end}").write_text("nothing.png 1\n" if kind == "IMAGE_DATA" else "nothing.h5\n")
        assert "nothing" in command(SIM)


def test_a_path_of_data_may_have_commas_and_one_database_may_serve_both_phases(
    tmp_path: Path, solver: Path, command: Any
) -> None:
    Path("train_lmdb").rename("a,b")
    figures = json.loads(command(f"{SIM} --steps 2 --data d=a,b"))
    assert figures["samples"] == 20 and "does not say where data is" in command(f"{SIM} --data d")
    assert parse_sources("a=b,c=d") == {"a": str(tmp_path / "b"), "c": str(tmp_path / "d")}


def test_workers_share_the_iterations_of_one_if_told_to(tmp_path: Path, solver: Path) -> None:
    task = CaffeTask(solver, iterations="all", rate=3)
    defaults = task.run_defaults(4, None)
    assert defaults["steps"] == 15 and defaults["evaluate_every"] == 1.0
    optimizer = task.optimizer(task.model())
    assert optimizer.param_groups[0]["lr"] == pytest.approx(0.6)
    schedule = task.scheduler(optimizer, Length(15, 5.0, 4))
    assert schedule is not None
    rates = []
    for _ in range(15):
        rates.append(optimizer.param_groups[0]["lr"])
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            schedule.step()
    # stepsize 30 is passed at step 8, after 32 iterations
    assert rates == [pytest.approx(0.6)] * 8 + [pytest.approx(0.3)] * 7
    with pytest.raises(UsageError, match="rate is 0"):
        CaffeTask(solver, rate=0)


def test_a_net_that_draws_its_own_data_trains(tmp_path: Path) -> None:
    (tmp_path / "solver.prototxt").write_text(
        """base_lr: 0.1 lr_policy: "fixed" max_iter: 30 random_seed: 3 net_param {
layer { name: "d" type: "DummyData" top: "x" top: "y" dummy_data_param { shape { dim: 5 dim: 2 }
  data_filler { type: "gaussian" } data_filler { value: 2 } } }
layer { name: "ip" type: "InnerProduct" bottom: "x" top: "ip" inner_product_param { num_output: 2
  weight_filler { type: "gaussian" } } }
layer { name: "loss" type: "EuclideanLoss" bottom: "ip" bottom: "y" top: "loss" } }"""
    )
    task = CaffeTask(tmp_path / "solver.prototxt")
    assert task.batch_size == 5 and task.run_defaults(2, None)["seed"] == 3
    found = run(task, Elastic(), Sim(workers=2), run_dir=tmp_path / "run", progress=QUIET)
    assert found.figures["steps"] == 30 and found.figures["samples"] == 2 * 30 * 5
    torch.testing.assert_close(found.model.state_dict()["layers.ip.bias"], torch.full((2,), 2.0), atol=0.5, rtol=0)


def test_a_test_leaves_out_some_samples_if_rand_skip_says_so(tmp_path: Path, solver: Path) -> None:
    net = tmp_path / "net.prototxt"
    before = CaffeTask(solver)._test_feeds[0][0].skip
    net.write_text(net.read_text().replace('"test_lmdb" ', '"test_lmdb" rand_skip: 30 '))
    skip = CaffeTask(solver)._test_feeds[0][0].skip
    assert before == 0 and 0 < skip < 30


def test_a_drawing_has_a_box_for_every_layer_that_is_not_in_place(tmp_path: Path, command: Any) -> None:
    net = EXAMPLES / "cifar10_quick_train_test.prototxt"
    said = command(f"caffe summary {net} --input data=1,3,32,32 --draw net.svg")
    assert "145,578 parameters" in said and "<svg" in (tmp_path / "net.svg").read_text()
    source = read_net(net)
    boxes = boxes_of(Net(source, state_of(source.net, "TRAIN"), {"cifar": [(1, 3, 32, 32), (1,)]}))
    assert [box.title.split()[0] for box in boxes][:4] == ["cifar", "conv1", "pool1", "conv2"]
    assert boxes[2].in_place == ["relu1 (ReLU)"] and boxes[-1].parents == [len(boxes) - 2, 0]
    assert len({(box.row, box.place) for box in boxes}) == len(boxes)
    assert "it must be .svg, .png or .pdf" in command(f"caffe summary {net} --input data=1,3,32,32 --draw net.xyz")


def test_weights_of_older_files_have_four_axes(tmp_path: Path) -> None:
    net = one_layer(tmp_path, "InnerProduct", "inner_product_param { num_output: 2 }", torch.zeros(1, 3))
    old = message("NetParameter")
    layer = old.layers.add(name="it", type=14)
    layer.blobs.add(num=1, channels=1, height=2, width=3).data.extend(range(6))
    layer.blobs.add(num=1, channels=1, height=1, width=2).data.extend([7, 8])
    (tmp_path / "old.caffemodel").write_bytes(old.SerializeToString())
    load_weights(net, tmp_path / "old.caffemodel")
    assert net.value(net.blobs[0]).tolist() == [[0, 1, 2], [3, 4, 5]] and net.value(net.blobs[1]).tolist() == [7, 8]


def test_shared_parameters_are_one_tensor_and_an_unknown_layer_is_named_with_its_line(tmp_path: Path) -> None:
    layers = "\n".join(
        f'layer {{ name: "{n}" type: "InnerProduct" bottom: "data" top: "{n}" param {{ name: "w" }} '
        "inner_product_param { num_output: 2 bias_term: false } }"
        for n in "ab"
    )
    text = f'input: "data" input_dim: 1 input_dim: 2 input_dim: 1 input_dim: 1\n{layers}\n'
    net = net_of(tmp_path, text)
    assert net.parameter_count == 4 and len(list(net.parameters())) == 1
    with pytest.raises(UsageError, match=r"net.prototxt:4: layer 'x' \(Magic\): this type is not supported"):
        net_of(tmp_path, text + 'layer { name: "x" type: "Magic" bottom: "data" top: "x" }')
    with pytest.raises(UsageError, match=r'net.prototxt:2:\d+: .*no field named "nme"'):
        net_of(tmp_path, '\nlayer { nme: "x" }')


def test_shared_parameters_may_have_another_shape_with_as_many_values(tmp_path: Path) -> None:
    def layer(name: str, bottom: str, outputs: int, mode: str) -> str:
        return (
            f'layer {{ name: "{name}" type: "InnerProduct" bottom: "{bottom}" top: "{name}" '
            f'param {{ name: "w" share_mode: {mode} }} '
            f"inner_product_param {{ num_output: {outputs} bias_term: false }} }}\n"
        )

    first = 'input: "x" input_shape { dim: 1 dim: 6 }\n' + layer("a", "x", 2, "PERMISSIVE")
    net = net_of(tmp_path, first + layer("b", "a", 6, "PERMISSIVE"))
    assert net.parameter_count == 12 and len(list(net.parameters())) == 1
    weight = next(net.parameters())
    weight.data.copy_(torch.arange(12.0).view(2, 6))
    x = torch.ones(1, 6)
    found = net.compute({"x": x})["b"]
    torch.testing.assert_close(found, (x @ weight.t()) @ weight.view(6, 2).t())
    found.sum().backward()
    assert weight.grad is not None and weight.grad.shape == (2, 6)
    write_weights(net, tmp_path / "w.caffemodel")
    assert [blob[0].shape for blob in read_blobs(tmp_path / "w.caffemodel").values()] == [(2, 6), (6, 2)]
    with pytest.raises(UsageError, match="one shape, unless share_mode is PERMISSIVE"):
        net_of(tmp_path, first + layer("b", "a", 6, "STRICT"))
    with pytest.raises(UsageError, match="as many values each"):
        net_of(tmp_path, first + layer("b", "a", 5, "PERMISSIVE"))


def test_images_are_blue_green_red_and_are_transformed_as_in_caffe(tmp_path: Path) -> None:
    import io

    from PIL import Image

    file = io.BytesIO()
    Image.new("RGB", (3, 2), (10, 20, 30)).save(file, "PNG")
    datum = message("Datum")
    datum.data, datum.encoded, datum.label = file.getvalue(), True, 4
    image, label = decode_datum(datum.SerializeToString(), "it")
    assert image.shape == (3, 2, 3) and image[:, 0, 0].tolist() == [30, 20, 10] and label == 4
    values = torch.arange(16.0).view(1, 1, 4, 4)
    cut = Transform(scale=0.5, crop=2, mean_values=(1.0,))(values)
    assert cut.flatten().tolist() == [2.0, 2.5, 4.0, 4.5]
    images = np.arange(48, dtype=np.uint8).reshape(4, 3, 2, 2)
    to_lmdb(images, np.arange(4), tmp_path / "db")
    back, labels = from_lmdb(tmp_path / "db")
    assert (back == images).all() and labels.tolist() == [0, 1, 2, 3]


def filled(folder: Path, filler: str, outputs: int = 500, inputs: int = 300) -> Tensor:
    more = f"inner_product_param {{ num_output: {outputs} weight_filler {{ {filler} }} }}"
    return one_layer(folder, "InnerProduct", more, torch.zeros(1, inputs)).state_dict()["layers.it.weight"]


def test_fillers_have_their_statistics(tmp_path: Path) -> None:
    torch.manual_seed(8)
    assert filled(tmp_path, 'type: "constant" value: 2.5').unique().tolist() == [2.5]
    flat = filled(tmp_path, 'type: "uniform" min: -1 max: 3')
    assert flat.min() >= -1 and flat.max() <= 3 and flat.mean().item() == pytest.approx(1, abs=0.02)
    assert flat.std().item() == pytest.approx(4 / math.sqrt(12), rel=0.01)
    bell = filled(tmp_path, 'type: "gaussian" mean: 0.5 std: 0.1')
    assert bell.mean().item() == pytest.approx(0.5, abs=0.002) and bell.std().item() == pytest.approx(0.1, rel=0.01)
    assert ((bell - 0.5).abs() > 0.2).float().mean().item() == pytest.approx(0.0455, abs=0.003)
    sparse = filled(tmp_path, 'type: "gaussian" std: 1 sparse: 50')
    assert (sparse != 0).float().mean().item() == pytest.approx(50 / 500, rel=0.05)
    # an inner product has 300 inputs for each of 500 outputs
    for norm, count in {"FAN_IN": 300, "FAN_OUT": 500, "AVERAGE": 400}.items():
        xavier = filled(tmp_path, f'type: "xavier" variance_norm: {norm}')
        assert xavier.abs().max() <= math.sqrt(3 / count) and xavier.abs().max() > 0.99 * math.sqrt(3 / count)
        assert xavier.std().item() == pytest.approx(math.sqrt(1 / count), rel=0.02)
        msra = filled(tmp_path, f'type: "msra" variance_norm: {norm}')
        assert msra.std().item() == pytest.approx(math.sqrt(2 / count), rel=0.02) and abs(msra.mean().item()) < 1e-3
    kernel = one_layer(
        tmp_path,
        "Convolution",
        'convolution_param { num_output: 40 kernel_size: 3 weight_filler { type: "msra" variance_norm: FAN_OUT } }',
        torch.zeros(1, 20, 5, 5),
    ).state_dict()["layers.it.weight"]
    assert kernel.std().item() == pytest.approx(math.sqrt(2 / (40 * 9)), rel=0.03)
    rows = filled(tmp_path, 'type: "positive_unitball"', 5, 9)
    torch.testing.assert_close(rows.sum(1), torch.ones(5))
    assert rows.min() >= 0


def test_a_bilinear_kernel_makes_a_deconvolution_that_interpolates(tmp_path: Path) -> None:
    x = torch.tensor([[[[1.0, 2, 4]] * 3]])
    more = "convolution_param { num_output: 1 kernel_size: 4 stride: 2 pad: 1 bias_term: false "
    net = one_layer(tmp_path, "Deconvolution", more + 'weight_filler { type: "bilinear" } }', x)
    assert net.value(net.blobs[0])[0, 0, 0].tolist() == [0.0625, 0.1875, 0.1875, 0.0625]
    inside = net.compute({"in0": x})["out0"][0, 0, 2, 1:-1]
    assert inside.tolist() == [1.25, 1.75, 2.5, 3.5]


OLDEST = """name: "oldest"
layers { layer { name: "data" type: "data" source: "train_lmdb" meanfile: "mean.binaryproto" scale: 0.5 batchsize: 8
  cropsize: 11 mirror: true rand_skip: 3 } top: "data" top: "label" }
layers { layer { name: "pad" type: "padding" pad: 2 } bottom: "data" top: "padded" }
layers { layer { name: "conv" type: "conv" num_output: 4 kernelsize: 5 stride: 2 group: 1 biasterm: false
  weight_filler { type: "gaussian" std: 0.01 } blobs_lr: 3 weight_decay: 0.5 } bottom: "padded" top: "conv" }
layers { layer { name: "relu" type: "relu" } bottom: "conv" top: "conv" }
layers { layer { name: "pool" type: "pool" pool: AVE kernelsize: 3 stride: 2 } bottom: "conv" top: "pool" }
layers { layer { name: "norm" type: "lrn" local_size: 3 alpha: 0.1 beta: 0.5 } bottom: "pool" top: "norm" }
layers { layer { name: "drop" type: "dropout" dropout_ratio: 0.25 } bottom: "norm" top: "norm" }
layers { layer { name: "ip" type: "innerproduct" num_output: 3
  weight_filler { type: "xavier" } } bottom: "norm" top: "ip" }
layers { layer { name: "loss" type: "softmax_loss" } bottom: "ip" bottom: "label" }
"""


def test_the_oldest_syntax_becomes_todays_with_padding_as_a_setting(tmp_path: Path) -> None:
    path = tmp_path / "oldest.prototxt"
    path.write_text(OLDEST)
    source = read_net(path)
    data, conv, *_ = source.net.layer
    transform = data.transform_param
    assert [layer.type for layer in source.net.layer] == [
        "Data", "Convolution", "ReLU", "Pooling", "LRN", "Dropout", "InnerProduct", "SoftmaxWithLoss"
    ]  # fmt: skip
    assert (transform.scale, transform.mean_file, transform.crop_size, transform.mirror) == (
        0.5,
        "mean.binaryproto",
        11,
        True,
    )
    assert (data.data_param.source, data.data_param.batch_size, data.data_param.rand_skip) == ("train_lmdb", 8, 3)
    assert list(conv.bottom) == ["data"] and list(conv.convolution_param.pad) == [2]
    assert [(p.lr_mult, p.decay_mult) for p in conv.param] == [(3, 0.5)] and source.lines[1] == 5
    net = Net(source, state_of(source.net, "TRAIN"), {"data": [(8, 3, 11, 11), (8,)]}).fill()
    assert [node.shapes[0] for node in net.nodes[:3:2]] == [(8, 4, 6, 6), (8, 4, 3, 3)]
    # a file of weights has names and blobs inside of its layers
    old = message("NetParameter", raw=True)
    inside = old.layers.add().layer
    inside.name, inside.type = "conv", "conv"
    blob = inside.blobs.add(num=4, channels=3, height=5, width=5)
    blob.data.append(np.arange(300, dtype="<f4").tobytes())
    (tmp_path / "old.caffemodel").write_bytes(old.SerializeToString())
    assert load_weights(net, tmp_path / "old.caffemodel").loaded == ("conv",)
    assert net.value(net.blobs[0]).flatten()[299] == 299
    path.write_text('layers { layer { name: "a" type: "convolve" } top: "a" }')
    with pytest.raises(UsageError, match=r"prototxt:1: layer 'a': unknown type 'convolve'"):
        read_net(path)


def test_comments_may_be_in_any_encoding_and_binary_files_are_refused(tmp_path: Path) -> None:
    text = 'layer { name: "a" type: "Input" top: "a" input_param { shape { dim: 1 } } }'
    for content in (b"\xef\xbb\xbf" + text.encode(), b"# \xd6\xd0\xce\xc4\n" + text.encode()):
        (tmp_path / "net.prototxt").write_bytes(content)
        assert read_net(tmp_path / "net.prototxt").net.layer[0].name == "a"
    (tmp_path / "net.prototxt").write_bytes(b"\x0a\x03net\x00")
    with pytest.raises(UsageError, match="not a text file"):
        read_net(tmp_path / "net.prototxt")


ALEX = """name: "n"
layer { name: "data" type: "Data" top: "data" top: "label" include { phase: TRAIN }
  transform_param { crop_size: 227 } data_param { source: "nowhere" batch_size: 256 backend: LMDB } }
layer { name: "data" type: "Data" top: "data" include { phase: TEST stage: "deep" } data_param { batch_size: 2 } }
layer { name: "ip" type: "InnerProduct" bottom: "data" top: "ip" inner_product_param { num_output: 2 } }
"""


def test_a_summary_needs_no_data_where_the_settings_or_the_user_tell_its_shape(tmp_path: Path, command: Any) -> None:
    (tmp_path / "n.prototxt").write_text(ALEX)
    assert json.loads(command("caffe summary n.prototxt --json"))["layers"][0]["shapes"] == [[256, 3, 227, 227], [256]]
    said = command("caffe summary n.prototxt --phase TEST")
    assert "n.prototxt:5: layer 'ip'" in said and "layer 'data' (line 2) makes it, but its include" in said
    said = command("caffe summary n.prototxt --phase TEST --stage deep")
    assert "n.prototxt:4: layer 'data' (Data)" in said and "--input data=N,C,H,W" in said
    found = command("caffe summary n.prototxt --phase TEST --stage deep --input data=2,1,4,4 --json")
    assert json.loads(found)["parameters"] == 2 * 16 + 2
    assert "Did you mean 'data'?" in command("caffe summary n.prototxt --input date=2,1,4,4")


@pytest.mark.parametrize(
    ("text", "error"),
    [
        ('layer { name: "b" type: "ReLU" bottom: "a" top: "b" }\nlayer { name: "a" type: "ReLU" bottom: "b" top: "a" }',
         "prototxt:1: layer 'b' (ReLU): there is no blob 'a' above it; layer 'a' (line 2) makes it below"),
        ('layer { name: "b" type: "ReLU" bottom: "nowhere" top: "b" }', "there is no blob 'nowhere' above it"),
        (2 * 'layer { name: "x" type: "DummyData" top: "x" dummy_data_param { shape { dim: 1 } } }\n',
         "prototxt:2: layer 'x' (DummyData): an earlier layer has the top 'x' too"),
        ('layer { name: "b" type: "Upsample" top: "b" upsample_param { scale: 2 } }',
         'has no field named "upsample_param"'),
    ],
)  # fmt: skip
def test_nets_that_cannot_be_are_refused_with_their_line(tmp_path: Path, text: str, error: str) -> None:
    with pytest.raises(UsageError) as refused:
        net_of(tmp_path, text)
    assert error in str(refused.value) and ":" in str(refused.value)


def test_a_label_that_no_class_has_is_named(tmp_path: Path) -> None:
    net = one_layer(tmp_path, "SoftmaxWithLoss", "", torch.zeros(2, 3), torch.zeros(2))
    with pytest.raises(UsageError, match="labels are from 1 to 7, and there are 3 classes"):
        net.compute({"in0": torch.zeros(2, 3), "in1": torch.tensor([1.0, 7.0])})


def test_stochastic_pooling_draws_by_size_and_tests_with_the_mean_over_draws(tmp_path: Path) -> None:
    settings = "pooling_param { pool: STOCHASTIC kernel_size: 2 stride: 2 }"
    x = torch.tensor([[[[1.0, 3, 2, 0], [0, 4, 0, 0], [5, 0, 0, 0]]]])
    tested = result(tmp_path, "Pooling", settings, x, phase="TEST")
    assert tested.flatten().tolist() == [pytest.approx(26 / 8), 2, 5, 0]
    net = one_layer(tmp_path, "Pooling", settings, x)
    torch.manual_seed(0)
    drawn = torch.stack([net.compute({"in0": x})["out0"].flatten() for _ in range(2000)])
    assert set(drawn[:, 0].tolist()) == {1, 3, 4} and drawn[:, 1:].unique(dim=0).tolist() == [[2, 5, 0]]
    assert drawn[:, 0].mean().item() == pytest.approx(26 / 8, abs=0.1)


def test_the_matrix_of_an_infogain_loss_may_be_in_a_file(tmp_path: Path) -> None:
    blob = message("BlobProto", raw=True)
    blob.num = blob.channels = 1
    blob.height = blob.width = 3
    blob.data.append(np.eye(3, dtype="<f4").tobytes())
    (tmp_path / "matrix.binaryproto").write_bytes(blob.SerializeToString())
    x, labels = torch.randn(4, 3), torch.tensor([0.0, 2, 1, 1])
    found = result(tmp_path, "InfogainLoss", 'infogain_loss_param { source: "matrix.binaryproto" }', x, labels)
    # with the identity it is softmax with loss
    assert found.item() == pytest.approx(result(tmp_path, "SoftmaxWithLoss", "", x, labels).item(), rel=1e-5)


def test_a_database_smaller_than_a_mini_batch_fills_it_several_times(tmp_path: Path, solver: Path) -> None:
    text = (tmp_path / "net.prototxt").read_text()
    (tmp_path / "net.prototxt").write_text(text.replace("batch_size: 10", "batch_size: 250"))
    task = CaffeTask(solver)
    assert len(task.train_data()) == 400
    found = run(task, Single(), Sim(workers=1), run_dir=tmp_path / "run", progress=QUIET, steps=2)
    assert math.isfinite(found.metrics["loss"])


def mutations(folder: Path, count: int) -> None:
    """Mutated nets, weights and records: every one is read, or refused with a clear error."""
    chance = random.Random(9)
    texts = [(EXAMPLES / f"{n}_train_test.prototxt").read_bytes() for n in ("lenet", "squeezenet", "siamese")]
    net = one_layer(folder, "InnerProduct", "inner_product_param { num_output: 2 }", torch.zeros(1, 3))
    write_weights(net, folder / "w.caffemodel")
    datum = message("Datum")
    datum.channels, datum.height, datum.width, datum.data = 1, 2, 2, b"abcd"
    solver_text = (EXAMPLES / "resnet20_solver.prototxt").read_bytes() + b'net_param { layer { name: "a" } }'
    write_state(folder / "w.solverstate", SolverState(3, "w.caffemodel", (torch.ones(2, 3), torch.ones(2))))
    states = [(folder / name).read_bytes() for name in ("w.caffemodel", "w.solverstate")]
    seeds = [*texts, states[0], datum.SerializeToString(), solver_text.partition(b"\n")[2], states[1], OLDEST.encode()]
    for _ in range(count):
        kind = chance.randrange(len(seeds))
        content = bytearray(seeds[kind])
        for _ in range(chance.randint(1, 4)):
            place = chance.randrange(len(content))
            match chance.randrange(4):
                case 0:
                    content[place] = chance.randrange(256)
                case 1:
                    del content[place : place + chance.randint(1, 30)]
                case 2:
                    content[place:place] = content[place : place + chance.randint(1, 60)]
                case _:
                    content[place:place] = chance.choice([b"9", b"-", b"{", b"}", b"0", b'"', b"\xff", b"999999"])
            content = content or bytearray(b" ")
        try:
            if kind == 4:
                decode_datum(bytes(content), "it")
            elif kind == 3:
                (folder / "m.caffemodel").write_bytes(content)
                load_weights(net, folder / "m.caffemodel")
            elif kind == 5:
                (folder / "m.prototxt").write_bytes(content)
                Policy.of(read_solver(folder / "m.prototxt").solver)
            elif kind == 6:
                (folder / "m.solverstate").write_bytes(content)
                read_state(folder / "m.solverstate")
            else:
                (folder / "m.prototxt").write_bytes(content)
                source = read_net(folder / "m.prototxt")
                shapes = {layer.name: [(2, 2, 64, 64), (2,)] for layer in source.net.layer if not layer.bottom}
                Net(source, state_of(source.net, "TRAIN"), shapes)
        except UsageError as error:
            assert str(error)


def test_mutated_files_are_read_or_refused_with_a_clear_error(tmp_path: Path) -> None:
    mutations(tmp_path, 150)


@pytest.mark.slow
def test_twenty_thousand_mutated_files_are_read_or_refused_with_a_clear_error(tmp_path: Path) -> None:
    mutations(tmp_path, 20_000)
