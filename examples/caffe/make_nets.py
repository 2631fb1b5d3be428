"""Writes the definitions of well-known nets and their solvers into this folder: python examples/caffe/make_nets.py."""

from __future__ import annotations

import sys
from pathlib import Path

WEIGHTS = "param {{ lr_mult: 1 decay_mult: 1 }} param {{ lr_mult: 2 decay_mult: {} }}"


class Writer:
    """Layers, one after another; `last` is the top of the newest."""

    def __init__(self, name: str, inputs: str = "", filler: str = 'type: "xavier"', decay: int = 0) -> None:
        self.lines = [f'name: "{name}"', *inputs.splitlines()]
        self.filler, self.decay, self.last = filler, decay, "data"

    def layer(self, kind: str, name: str, more: str = "", bottoms: tuple[str, ...] = (), top: str = "") -> str:
        bottoms = bottoms or (self.last,)
        self.last = top or name
        taken = " ".join(f'bottom: "{bottom}"' for bottom in bottoms)
        self.lines.append(f'layer {{ name: "{name}" type: "{kind}" {taken} top: "{self.last}" {more}}}')
        return self.last

    def conv(self, name: str, outputs: int, kernel: int, *, pad: int = 0, stride: int = 1, group: int = 1,
             bias: bool = True, bottom: str = "", filler: str = "") -> str:  # fmt: skip
        settings = f"num_output: {outputs} kernel_size: {kernel}"
        settings += f" pad: {pad}" * (pad > 0) + f" stride: {stride}" * (stride > 1) + f" group: {group}" * (group > 1)
        settings += "" if bias else " bias_term: false"
        specs = WEIGHTS.format(self.decay) if bias else "param { lr_mult: 1 }"
        weights = f"weight_filler {{ {filler or self.filler} }}"
        more = f"{specs} convolution_param {{ {settings} {weights} }} "
        return self.layer("Convolution", name, more, (bottom,) if bottom else ())

    def inner(self, name: str, outputs: int, bottom: str = "", filler: str = "") -> str:
        weights = f"weight_filler {{ {filler or self.filler} }}"
        more = f"{WEIGHTS.format(self.decay)} inner_product_param {{ num_output: {outputs} {weights} }} "
        return self.layer("InnerProduct", name, more, (bottom,) if bottom else ())

    def relu(self, name: str) -> str:
        return self.layer("ReLU", name, top=self.last)

    def dropout(self, name: str, ratio: float = 0.5) -> str:
        return self.layer("Dropout", name, f"dropout_param {{ dropout_ratio: {ratio} }} ", top=self.last)

    def pool(self, name: str, method: str, kernel: int, stride: int, pad: int = 0, bottom: str = "") -> str:
        more = f"pooling_param {{ pool: {method} kernel_size: {kernel} stride: {stride}{f' pad: {pad}' * (pad > 0)} }} "
        return self.layer("Pooling", name, more, (bottom,) if bottom else ())

    def lrn(self, name: str, size: int, alpha: float, region: str = "ACROSS_CHANNELS") -> str:
        settings = f"local_size: {size} alpha: {alpha} beta: 0.75 norm_region: {region}"
        return self.layer("LRN", name, f"lrn_param {{ {settings} }} ")

    def norm(self, name: str) -> str:
        self.layer("BatchNorm", f"bn_{name}", top=self.last)
        return self.layer("Scale", f"scale_{name}", "scale_param { bias_term: true } ", top=self.last)

    def ending(self, scores: str = "", prefix: str = "", weight: float = 1.0, top5: bool = False) -> None:
        scores = scores or self.last
        share = f"loss_weight: {weight} " if weight != 1 else ""
        test = "include { phase: TEST } "
        for k in (1, 5) if top5 else (1,):
            name = f"{prefix}top-{k}" if top5 else "accuracy"
            self.layer("Accuracy", name, f"{test}accuracy_param {{ top_k: {k} }} ", (scores, "label"))
        self.layer("SoftmaxWithLoss", f"{prefix}loss", share, (scores, "label"))

    def text(self) -> str:
        return "\n".join(self.lines) + "\n"


def data(name: str, batches: tuple[int, int], transform: str, source: str) -> str:
    """Data layers for training and for tests."""
    return "\n".join(
        f'layer {{ name: "{name}" type: "Data" top: "data" top: "label" include {{ phase: {phase} }} '
        f"transform_param {{ {transform}{' mirror: true' if phase == 'TRAIN' and 'crop' in transform else ''} }} "
        f'data_param {{ source: "{source}_{phase.lower()}_lmdb" batch_size: {batch} backend: LMDB }} }}'
        for phase, batch in zip(("TRAIN", "TEST"), batches, strict=True)
    )


CIFAR = data("cifar", (100, 100), 'mean_file: "mean.binaryproto"', "cifar10")


def imagenet(crop: int, batch: int = 32) -> str:
    return data(
        "imagenet", (batch, 50), f"crop_size: {crop} mean_value: 104 mean_value: 117 mean_value: 123", "ilsvrc12"
    )


def lenet() -> str:
    net = Writer("LeNet", data("mnist", (64, 100), "scale: 0.00390625", "mnist"), decay=1)
    net.conv("conv1", 20, 5)
    net.pool("pool1", "MAX", 2, 2)
    net.conv("conv2", 50, 5)
    net.pool("pool2", "MAX", 2, 2)
    net.inner("ip1", 500)
    net.relu("relu1")
    net.inner("ip2", 10)
    net.ending()
    return net.text()


def cifar10_quick() -> str:
    net = Writer("CIFAR10_quick", CIFAR, 'type: "gaussian" std: 0.01', decay=1)
    net.conv("conv1", 32, 5, pad=2, filler='type: "gaussian" std: 0.0001')
    net.pool("pool1", "MAX", 3, 2)
    net.relu("relu1")
    net.conv("conv2", 32, 5, pad=2)
    net.relu("relu2")
    net.pool("pool2", "AVE", 3, 2)
    net.conv("conv3", 64, 5, pad=2)
    net.relu("relu3")
    net.pool("pool3", "AVE", 3, 2)
    net.inner("ip1", 64, filler='type: "gaussian" std: 0.1')
    net.inner("ip2", 10, filler='type: "gaussian" std: 0.1')
    net.ending()
    return net.text()


def cifar10_full() -> str:
    net = Writer("CIFAR10_full", CIFAR, 'type: "gaussian" std: 0.01', decay=1)
    net.conv("conv1", 32, 5, pad=2, filler='type: "gaussian" std: 0.0001')
    net.pool("pool1", "MAX", 3, 2)
    net.relu("relu1")
    net.lrn("norm1", 3, 5e-05, "WITHIN_CHANNEL")
    net.conv("conv2", 32, 5, pad=2)
    net.relu("relu2")
    net.pool("pool2", "AVE", 3, 2)
    net.lrn("norm2", 3, 5e-05, "WITHIN_CHANNEL")
    net.conv("conv3", 64, 5, pad=2)
    net.relu("relu3")
    net.pool("pool3", "AVE", 3, 2)
    net.inner("ip1", 10)
    net.ending()
    return net.text()


def alexnet() -> str:
    net = Writer("AlexNet", imagenet(227, 256), 'type: "gaussian" std: 0.01')
    net.conv("conv1", 96, 11, stride=4)
    net.relu("relu1")
    net.lrn("norm1", 5, 0.0001)
    net.pool("pool1", "MAX", 3, 2)
    net.conv("conv2", 256, 5, pad=2, group=2)
    net.relu("relu2")
    net.lrn("norm2", 5, 0.0001)
    net.pool("pool2", "MAX", 3, 2)
    for number, outputs, group in ((3, 384, 1), (4, 384, 2), (5, 256, 2)):
        net.conv(f"conv{number}", outputs, 3, pad=1, group=group)
        net.relu(f"relu{number}")
    net.pool("pool5", "MAX", 3, 2)
    for number in (6, 7):
        net.inner(f"fc{number}", 4096, filler='type: "gaussian" std: 0.005')
        net.relu(f"relu{number}")
        net.dropout(f"drop{number}")
    net.inner("fc8", 1000)
    net.ending()
    return net.text()


def vgg(name: str, groups: tuple[int, ...]) -> str:
    net = Writer(name, imagenet(224), 'type: "gaussian" std: 0.01')
    for group, (count, outputs) in enumerate(zip(groups, (64, 128, 256, 512, 512), strict=True), 1):
        for number in range(1, count + 1):
            net.conv(f"conv{group}_{number}", outputs, 3, pad=1)
            net.relu(f"relu{group}_{number}")
        net.pool(f"pool{group}", "MAX", 2, 2)
    for number in (6, 7):
        net.inner(f"fc{number}", 4096)
        net.relu(f"relu{number}")
        net.dropout(f"drop{number}")
    net.inner("fc8", 1000)
    net.ending()
    return net.text()


def googlenet() -> str:
    net = Writer("GoogLeNet", imagenet(224))

    def step(name: str, outputs: int, kernel: int, pad: int = 0, stride: int = 1, bottom: str = "") -> str:
        net.conv(name, outputs, kernel, pad=pad, stride=stride, bottom=bottom)
        return net.relu(f"{name}/relu")

    def head(number: int, bottom: str) -> None:
        prefix = f"loss{number}/"
        net.pool(f"{prefix}ave_pool", "AVE", 5, 3, bottom=bottom)
        step(f"{prefix}conv", 128, 1)
        net.inner(f"{prefix}fc", 1024)
        net.relu(f"{prefix}relu_fc")
        net.dropout(f"{prefix}drop_fc", 0.7)
        net.inner(f"{prefix}classifier", 1000)
        net.ending(prefix=prefix, weight=0.3, top5=True)
        net.last = bottom

    step("conv1/7x7_s2", 64, 7, 3, 2)
    net.pool("pool1/3x3_s2", "MAX", 3, 2)
    net.lrn("pool1/norm1", 5, 0.0001)
    step("conv2/3x3_reduce", 64, 1)
    step("conv2/3x3", 192, 3, 1)
    net.lrn("conv2/norm2", 5, 0.0001)
    net.pool("pool2/3x3_s2", "MAX", 3, 2)
    for name, (a, b, c, d, e, f) in {
        "3a": (64, 96, 128, 16, 32, 32), "3b": (128, 128, 192, 32, 96, 64), "4a": (192, 96, 208, 16, 48, 64),
        "4b": (160, 112, 224, 24, 64, 64), "4c": (128, 128, 256, 24, 64, 64), "4d": (112, 144, 288, 32, 64, 64),
        "4e": (256, 160, 320, 32, 128, 128), "5a": (256, 160, 320, 32, 128, 128), "5b": (384, 192, 384, 48, 128, 128),
    }.items():  # fmt: skip
        start, part = net.last, f"inception_{name}"
        one = step(f"{part}/1x1", a, 1)
        step(f"{part}/3x3_reduce", b, 1, bottom=start)
        three = step(f"{part}/3x3", c, 3, 1)
        step(f"{part}/5x5_reduce", d, 1, bottom=start)
        five = step(f"{part}/5x5", e, 5, 2)
        net.pool(f"{part}/pool", "MAX", 3, 1, 1, bottom=start)
        last = step(f"{part}/pool_proj", f, 1)
        net.layer("Concat", f"{part}/output", bottoms=(one, three, five, last))
        if name in ("4a", "4d"):
            head(1 if name == "4a" else 2, net.last)
        if name in ("3b", "4e"):
            net.pool(f"pool{name[0]}/3x3_s2", "MAX", 3, 2)
    net.pool("pool5/7x7_s1", "AVE", 7, 1)
    net.dropout("pool5/drop", 0.4)
    net.inner("loss3/classifier", 1000)
    net.ending(prefix="loss3/", top5=True)
    return net.text()


def resnet(depth: int) -> str:
    """ResNet for CIFAR-10, with a projection where the size changes."""
    net = Writer(f"ResNet{depth}", CIFAR, 'type: "msra"')

    def step(name: str, outputs: int, kernel: int, stride: int, bottom: str = "") -> str:
        net.conv(name, outputs, kernel, pad=kernel // 2, stride=stride, bias=False, bottom=bottom)
        return net.norm(name)

    step("conv1", 16, 3, 1)
    net.relu("relu1")
    for group, outputs in enumerate((16, 32, 64), 1):
        for block in range((depth - 2) // 6):
            start, name = net.last, f"group{group}_block{block}"
            stride = 2 if group > 1 and block == 0 else 1
            beside = step(f"{name}_proj", outputs, 1, stride, start) if stride == 2 else start
            step(f"{name}_conv1", outputs, 3, stride, start)
            net.relu(f"{name}_relu1")
            last = step(f"{name}_conv2", outputs, 3, 1)
            net.layer("Eltwise", f"{name}_sum", bottoms=(beside, last))
            net.relu(f"{name}_relu2")
    net.layer("Pooling", "pool", "pooling_param { pool: AVE global_pooling: true } ")
    net.inner("fc", 10)
    net.ending()
    return net.text()


def resnet50() -> str:
    """ResNet-50 for ImageNet: bottlenecks of three convolutions, with a projection where the size changes."""
    net = Writer("ResNet-50", imagenet(224), 'type: "msra"')

    def step(name: str, outputs: int, kernel: int, stride: int, bottom: str = "") -> str:
        net.conv(name, outputs, kernel, pad=kernel // 2, stride=stride, bias=False, bottom=bottom)
        return net.norm(name)

    step("conv1", 64, 7, 2)
    net.relu("conv1_relu")
    net.pool("pool1", "MAX", 3, 2)
    for group, (outputs, count) in enumerate(((64, 3), (128, 4), (256, 6), (512, 3)), 2):
        for block in range(count):
            start, name = net.last, f"res{group}{'abcdef'[block]}"
            stride = 2 if group > 2 and block == 0 else 1
            beside = step(f"{name}_branch1", 4 * outputs, 1, stride, start) if block == 0 else start
            step(f"{name}_branch2a", outputs, 1, stride, start)
            net.relu(f"{name}_branch2a_relu")
            step(f"{name}_branch2b", outputs, 3, 1)
            net.relu(f"{name}_branch2b_relu")
            last = step(f"{name}_branch2c", 4 * outputs, 1, 1)
            net.layer("Eltwise", name, bottoms=(beside, last))
            net.relu(f"{name}_relu")
    net.pool("pool5", "AVE", 7, 1)
    net.inner("fc1000", 1000)
    net.ending(top5=True)
    return net.text()


def squeezenet() -> str:
    net = Writer("SqueezeNet", imagenet(227))
    net.conv("conv1", 64, 3, stride=2)
    net.relu("relu_conv1")
    net.pool("pool1", "MAX", 3, 2)
    for number, (small, wide) in enumerate([(16, 64)] * 2 + [(32, 128)] * 2 + [(48, 192)] * 2 + [(64, 256)] * 2, 2):
        net.conv(f"fire{number}/squeeze1x1", small, 1)
        start = net.relu(f"fire{number}/relu_squeeze1x1")
        net.conv(f"fire{number}/expand1x1", wide, 1)
        one = net.relu(f"fire{number}/relu_expand1x1")
        net.conv(f"fire{number}/expand3x3", wide, 3, pad=1, bottom=start)
        three = net.relu(f"fire{number}/relu_expand3x3")
        net.layer("Concat", f"fire{number}/concat", bottoms=(one, three))
        if number in (3, 5):
            net.pool(f"pool{number}", "MAX", 3, 2)
    net.dropout("drop9")
    net.conv("conv10", 1000, 1, filler='type: "gaussian" std: 0.01')
    net.relu("relu_conv10")
    net.layer("Pooling", "pool10", "pooling_param { pool: AVE global_pooling: true } ")
    net.ending()
    return net.text()


def siamese() -> str:
    """Two pictures as the two channels of one record; both halves share all parameters."""
    pair = (
        data("pair_data", (64, 100), "scale: 0.00390625", "mnist_siamese")
        .replace("label", "sim")
        .replace('top: "data"', 'top: "pair_data"')
    )
    net = Writer("mnist_siamese", pair)
    net.lines.append(
        'layer { name: "slice_pair" type: "Slice" bottom: "pair_data" top: "data" top: "data_p" '
        "slice_param { slice_dim: 1 slice_point: 1 } }"
    )
    for end in ("", "_p"):
        net.last = f"data{end}"
        first = len(net.lines)
        net.conv(f"conv1{end}", 20, 5)
        net.pool(f"pool1{end}", "MAX", 2, 2)
        net.conv(f"conv2{end}", 50, 5)
        net.pool(f"pool2{end}", "MAX", 2, 2)
        net.inner(f"ip1{end}", 500)
        net.relu(f"relu1{end}")
        net.inner(f"ip2{end}", 10)
        net.inner(f"feat{end}", 2)
        for place in range(first, len(net.lines)):
            name = net.lines[place].split('"')[1].removesuffix(end) if end else net.lines[place].split('"')[1]
            line = net.lines[place].replace("param { lr_mult: 1 d", f'param {{ name: "{name}_w" lr_mult: 1 d')
            net.lines[place] = line.replace("param { lr_mult: 2", f'param {{ name: "{name}_b" lr_mult: 2')
    net.layer("ContrastiveLoss", "loss", "contrastive_loss_param { margin: 1 } ", ("feat", "feat_p", "sim"))
    return net.text()


NETS = {
    "lenet": lenet,
    "cifar10_quick": cifar10_quick,
    "cifar10_full": cifar10_full,
    "alexnet": alexnet,
    "vgg_a": lambda: vgg("VGG_A", (1, 1, 2, 2, 2)),
    "vgg16": lambda: vgg("VGG_ILSVRC_16_layers", (2, 2, 3, 3, 3)),
    "googlenet": googlenet,
    **{f"resnet{depth}": lambda depth=depth: resnet(depth) for depth in (20, 32, 44, 56, 110)},  # type: ignore[misc]
    "resnet50": resnet50,
    "squeezenet": squeezenet,
    "siamese": siamese,
}


def solver(name: str, settings: str) -> str:
    """A solver file for one of the nets."""
    lines = [
        f'net: "examples/caffe/{name}_train_test.prototxt"',
        *settings.split("; "),
        f'snapshot_prefix: "{name}"',
        "solver_mode: CPU",
    ]
    return "\n".join(lines) + "\n"


SGD = "momentum: 0.9; weight_decay:"
IMAGENET_TEST = "test_iter: 1000; test_interval: 1000"
#: rate, policy and length of training, as published with each net
SOLVERS = {
    "lenet": 'test_iter: 100; test_interval: 500; base_lr: 0.01; lr_policy: "inv"; gamma: 0.0001; power: 0.75; '
    f"{SGD} 0.0005; max_iter: 10000; snapshot: 5000",
    "cifar10_quick": 'test_iter: 40; test_interval: 500; base_lr: 0.001; lr_policy: "fixed"; '
    f"{SGD} 0.004; max_iter: 4000; snapshot: 4000",
    "cifar10_full": 'test_iter: 100; test_interval: 1000; base_lr: 0.001; lr_policy: "multistep"; gamma: 0.1; '
    f"stepvalue: 60000; stepvalue: 65000; {SGD} 0.004; max_iter: 70000; snapshot: 10000",
    "alexnet": f'{IMAGENET_TEST}; base_lr: 0.01; lr_policy: "step"; gamma: 0.1; stepsize: 100000; {SGD} 0.0005; '
    "max_iter: 450000; snapshot: 10000",
    "googlenet": f'{IMAGENET_TEST}; base_lr: 0.01; lr_policy: "poly"; power: 0.5; {SGD} 0.0002; max_iter: 2400000; '
    "snapshot: 40000",
    **{
        f"resnet{depth}": 'test_iter: 100; test_interval: 1000; base_lr: 0.1; lr_policy: "multistep"; gamma: 0.1; '
        f"stepvalue: 32000; stepvalue: 48000; {SGD} 0.0001; max_iter: 64000; snapshot: 8000"
        for depth in (20, 32, 44, 56, 110)
    },
    "siamese": 'test_iter: 100; test_interval: 500; base_lr: 0.01; lr_policy: "inv"; gamma: 0.0001; power: 0.75; '
    f"{SGD} 0; max_iter: 50000; snapshot: 5000",
}

if __name__ == "__main__":
    folder = Path(sys.argv[1]) if len(sys.argv) > 1 else Path(__file__).parent
    for name, make in NETS.items():
        (folder / f"{name}_train_test.prototxt").write_text(make())
    for name, settings in SOLVERS.items():
        (folder / f"{name}_solver.prototxt").write_text(solver(name, settings))
