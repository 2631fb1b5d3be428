"""Write layers.npz: what Caffe computes for every line of cases.txt. Run it with Caffe's own Python.

A line has a type of layer, its settings, its bottoms, the number of its tops, the phase, and whether gradients count
too. A bottom is a kind of values and a shape: normal (n), a hundred times that (N), positive (u), rows that sum to one
(s), small whole numbers (i), 0 or 1 (b), or numbers below another (l5).
"""

import os
import sys

import numpy as np

HERE = os.path.dirname(os.path.abspath(__file__))
#: for these, a gradient counts for this many bottoms only; others take labels or numbers
GRADIENTS = {
    "SoftmaxWithLoss": 1,
    "SigmoidCrossEntropyLoss": 1,
    "HingeLoss": 1,
    "MultinomialLogisticLoss": 1,
    "LSTM": 1,
    "RNN": 1,
    "Crop": 1,
    "ContrastiveLoss": 2,
    "LSTMUnit": 2,
}


def cases():
    with open(os.path.join(HERE, "cases.txt")) as file:
        for number, line in enumerate(file):
            kind, body, bottoms, tops, phase, what = (part.strip() for part in line.split("|"))
            yield number, kind, body, bottoms.split(), int(tops), phase, what == "gradients"


def values(random, spec):
    kind, _, lengths = spec.partition(":")
    shape = [int(length) for length in lengths.split(",") if length]
    if kind in ("n", "N"):
        found = random.randn(*shape) * (100 if kind == "N" else 1)
    elif kind in ("u", "s"):
        found = random.uniform(0.1, 1, shape)
        found = found / found.sum(1, keepdims=True) if kind == "s" else found
    else:
        low, high = {"i": (-2, 3), "b": (0, 2)}.get(kind) or (0, int(kind[1:]))
        found = random.randint(low, high, shape)
    return np.asarray(found, np.float32)


def given(number, kind, body, bottoms):
    """The bottoms, and what draws parameters and gradients of tops, the same here and in the test."""
    random = np.random.RandomState(number)
    return [values(random, spec) for spec in bottoms], random


def parameter(random, kind, body, shape):
    if "bilinear" in body:
        return None
    return np.asarray(random.uniform(*((0.5, 2) if kind == "BatchNorm" else (-1, 1)), shape), np.float32)


def text(kind, body, bottoms, tops):
    """The net of a case."""
    parts = ["force_backward: true"]
    for number, spec in enumerate(bottoms):
        dims = " ".join("dim: " + length for length in spec.partition(":")[2].split(",") if length)
        parts.append(
            f'layer {{ name: "in{number}" type: "Input" top: "in{number}" input_param {{ shape {{ {dims} }} }} }}'
        )
    names = [f'bottom: "in{number}"' for number in range(len(bottoms))] + [f'top: "out{n}"' for n in range(tops)]
    if kind in GRADIENTS:
        names += [f"propagate_down: {str(n < GRADIENTS[kind]).lower()}" for n in range(len(bottoms))]
    parts.append('layer {{ name: "it" type: "{}" {} {} }}'.format(kind, " ".join(names), body))
    return "\n".join(parts) + "\n"


def compute(number, kind, body, bottoms, tops, phase, backward):
    import caffe

    path = "/tmp/oracle.prototxt"
    with open(path, "w") as file:
        file.write(text(kind, body, bottoms, tops))
    net = caffe.Net(path, getattr(caffe, phase))
    inputs, random = given(number, kind, body, bottoms)
    parameters = net.params.get("it", [])
    for blob in parameters:
        drawn = parameter(random, kind, body, blob.data.shape)
        if drawn is not None:
            blob.data[...] = drawn
    for index, value in enumerate(inputs):
        net.blobs[f"in{index}"].data[...] = value
    net.forward()
    found = {f"top{index}": net.blobs[f"out{index}"].data.copy() for index in range(tops)}
    if kind == "BatchNorm":
        found.update((f"after{index}", blob.data.copy()) for index, blob in enumerate(parameters))
    if backward:
        if not kind.endswith("Loss"):
            for index in range(tops):
                blob = net.blobs[f"out{index}"]
                blob.diff[...] = random.randn(*blob.data.shape)
        net._backward(len(net.layers) - 1, 0)
        for index in range(min(GRADIENTS.get(kind, 99), len(bottoms))):
            found[f"grad{index}"] = net.blobs[f"in{index}"].diff.copy()
        if kind != "BatchNorm":
            found.update((f"param{index}", blob.diff.copy()) for index, blob in enumerate(parameters))
    return found


if __name__ == "__main__":
    import caffe  # noqa: F401  # here, so that the processes below have it at once

    results = {}
    for case in cases():
        # a process for each, since Caffe ends the process on an error
        child = os.fork()
        if not child:
            np.savez("/tmp/oracle.npz", **compute(*case))
            os._exit(0)
        if os.waitpid(child, 0)[1]:
            sys.exit(f"Caffe refuses case {case[0]}: {case[1:]}")
        with np.load("/tmp/oracle.npz") as one:
            results.update((f"{case[0]}/{name}", one[name]) for name in one)
    np.savez_compressed(os.path.join(HERE, "layers.npz"), **results)
