"""Caffe's layers as torch modules, with Caffe's own rules for shapes, edges, divisors and defaults.

A layer is made from its message and from tensors on the device "meta" that have the shapes of its bottoms. It copies
the settings that it needs, since messages cannot be copied to other processes. Parameters are `blobs`, in the order
that a .caffemodel has; they hold no values until the net fills them.
"""

from __future__ import annotations

from tether.caffe.layers import elementwise, losses, normalizing, pooling, recurrent, shaping, values, weighted
from tether.caffe.layers.base import Layer

#: every layer that computes something, by its type
LAYERS: dict[str, type[Layer]] = {
    name: kind
    for family in (weighted, recurrent, elementwise, pooling, normalizing, shaping, losses, values)
    for name, kind in vars(family).items()
    if isinstance(kind, type) and issubclass(kind, Layer) and kind not in (Layer, recurrent.Recurrent)
}
# what forks call a quicker convolution with as many groups as channels
LAYERS["DepthwiseConvolution"] = LAYERS["ConvolutionDepthwise"] = weighted.Convolution
#: layers that have data from outside, whose tops are inputs of the net
SOURCES = ("Data", "ImageData", "HDF5Data", "MemoryData", "WindowData", "Input")
