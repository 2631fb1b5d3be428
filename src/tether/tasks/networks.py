"""The small models of the built-in tasks."""

from __future__ import annotations

from itertools import pairwise
from typing import ClassVar, cast

import torch
from torch import Tensor, nn
from torch.nn import functional


def mlp(*sizes: int) -> nn.Module:
    """Fully connected layers from the first size to the last."""
    layers: list[nn.Module] = [nn.Flatten()]
    for inputs, outputs in pairwise(sizes):
        layers += [nn.Linear(inputs, outputs), nn.ReLU()]
    return nn.Sequential(*layers[:-1])


def cnn(side: int, *channels: int, hidden: int, batch_norm: bool = False, classes: int = 10) -> nn.Module:
    """Convolutions, each followed by a halving of the sides, then two fully connected layers."""
    layers: list[nn.Module] = []
    for inputs, outputs in pairwise(channels):
        # BatchNorm has a bias of its own; pooling comes first because what follows then costs a quarter
        layers += [nn.Conv2d(inputs, outputs, 3, padding=1, bias=not batch_norm), nn.MaxPool2d(2)]
        layers += [nn.BatchNorm2d(outputs), nn.ReLU()] if batch_norm else [nn.ReLU()]
        side //= 2
    return nn.Sequential(*layers, mlp(channels[-1] * side * side, hidden, classes))


def resnet(blocks: int = 1, classes: int = 10) -> nn.Module:
    """The residual network of He et al. (2015), section 4.2, for 32 x 32 images, with 6 * blocks + 2 layers."""
    layers: list[nn.Module] = [nn.Conv2d(3, 16, 3, padding=1, bias=False), nn.BatchNorm2d(16), nn.ReLU()]
    inputs = 16
    for outputs in (16, 32, 64):
        for _ in range(blocks):
            layers.append(_Residual(inputs, outputs))
            inputs = outputs
    return nn.Sequential(*layers, nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(inputs, classes))


class _Residual(nn.Module):
    """Two convolutions with a shortcut around them; where the width grows, the sides halve."""

    def __init__(self, inputs: int, outputs: int) -> None:
        super().__init__()
        stride = 1 if inputs == outputs else 2
        self.first = nn.Conv2d(inputs, outputs, 3, stride, padding=1, bias=False)
        self.first_norm = nn.BatchNorm2d(outputs)
        self.second = nn.Conv2d(outputs, outputs, 3, padding=1, bias=False)
        self.second_norm = nn.BatchNorm2d(outputs)
        self.carry: nn.Module = nn.Identity()
        if stride == 2:
            self.carry = nn.Sequential(nn.Conv2d(inputs, outputs, 1, stride, bias=False), nn.BatchNorm2d(outputs))

    def forward(self, x: Tensor) -> Tensor:
        inner = functional.relu(self.first_norm(self.first(x)))
        return functional.relu(self.second_norm(self.second(inner)) + self.carry(x))


class Transformer(nn.Module):
    """A causal transformer over symbols: at each place, the scores of every possible next symbol.

    The embedding is also the output layer (one tied weight). There is no dropout: a step depends only on the weights
    and the batch, so runs repeat.
    """

    def __init__(self, symbols: int, context: int, width: int = 64, layers: int = 2, heads: int = 4) -> None:
        super().__init__()
        self.embedding = nn.Embedding(symbols, width)
        self.place = nn.Parameter(torch.zeros(context, width))
        self.blocks = nn.Sequential(*(_Block(width, heads) for _ in range(layers)))
        self.norm = nn.LayerNorm(width)
        self.output = nn.Linear(width, symbols, bias=False)
        # with the usual N(0, 1) of an embedding, the output layer would start with scores of about +-sqrt(width)
        nn.init.normal_(self.embedding.weight, std=0.02)
        nn.init.normal_(self.place, std=0.02)
        self.output.weight = self.embedding.weight

    def forward(self, text: Tensor) -> Tensor:
        x = self.embedding(text) + self.place[: text.shape[1]]
        scores: Tensor = self.output(self.norm(self.blocks(x)))
        return scores


class _Block(nn.Module):
    """Attention to the past, then two layers applied to each place by itself; both are added to the input."""

    def __init__(self, width: int, heads: int) -> None:
        super().__init__()
        self.heads = heads
        self.attention_norm = nn.LayerNorm(width)
        self.attention_in = nn.Linear(width, 3 * width)
        self.attention_out = nn.Linear(width, width)
        self.inner = nn.Sequential(
            nn.LayerNorm(width), nn.Linear(width, 4 * width), nn.GELU(), nn.Linear(4 * width, width)
        )

    def forward(self, x: Tensor) -> Tensor:
        query, key, value = (
            part.unflatten(-1, (self.heads, -1)).transpose(1, 2)
            for part in self.attention_in(self.attention_norm(x)).chunk(3, dim=-1)
        )
        mixed = functional.scaled_dot_product_attention(query, key, value, is_causal=True)
        x = x + self.attention_out(mixed.transpose(1, 2).flatten(-2))
        out: Tensor = x + self.inner(x)
        return out


class Recurrent(nn.Module):
    """An LSTM over symbols: at each place, the scores of every possible next symbol."""

    def __init__(self, symbols: int, width: int = 128) -> None:
        super().__init__()
        self.embedding = nn.Embedding(symbols, width)
        self.memory = nn.LSTM(width, width, batch_first=True)
        self.output = nn.Linear(width, symbols)

    def forward(self, text: Tensor) -> Tensor:
        states, _ = self.memory(self.embedding(text))
        scores: Tensor = self.output(states)
        return scores


class TextCnn(nn.Module):
    """The convolutional model for sentences of Kim (2014), which is figure 2 of the GaDei paper.

    Filters of three widths slide over the embedded words, and the largest output of each filter counts.
    """

    widths: ClassVar[tuple[int, ...]] = (3, 4, 5)

    def __init__(
        self, words: int, classes: int, embedding: int = 100, filters: int = 100, sparse: bool = False
    ) -> None:
        super().__init__()
        self.embedding = nn.Embedding(words, embedding, padding_idx=0, sparse=sparse)
        self.filters = nn.ModuleList(nn.Linear(width * embedding, filters) for width in self.widths)
        self.dropout = nn.Dropout(0.5)
        self.output = nn.Linear(len(self.widths) * filters, classes)
        # the usual N(0, 1) outweighs what is learned of a rare word: after 2 epochs of TREC, 83 % are right, not 90 %
        nn.init.normal_(self.embedding.weight[1:], std=0.1)

    def forward(self, text: Tensor) -> Tensor:
        # padded by the widest filter: what a text gives then does not depend on the length of others
        widest, longest = max(self.widths), int((text != 0).sum(1).max()) if len(text) else 0
        words = functional.pad(self.embedding(text[:, :longest]), (0, 0, 0, widest))
        size = words.shape[-1]
        # one matrix product for all places of all filters; a filter's output is the sum over its places, shifted
        parts = [layer.weight.view(-1, width, size).transpose(0, 1) for width, layer in self._layers()]
        outputs = functional.linear(words, torch.cat([part.flatten(0, 1) for part in parts]))
        largest, start, windows = [], 0, longest + 1
        for width, layer in self._layers():
            count = len(layer.bias)
            total: Tensor = layer.bias
            for place in range(width):
                total = total + outputs[:, place : place + windows, start : start + count]
                start += count
            # the largest value before the ReLU is also the largest after it
            largest.append(total.amax(1))
        scores: Tensor = self.output(self.dropout(functional.relu(torch.cat(largest, 1))))
        return scores

    def _layers(self) -> list[tuple[int, nn.Linear]]:
        return [(width, cast(nn.Linear, layer)) for width, layer in zip(self.widths, self.filters, strict=True)]
