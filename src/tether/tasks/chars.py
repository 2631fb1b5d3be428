"""A language model that reads a text and predicts the next character."""

from __future__ import annotations

from functools import cached_property
from pathlib import Path
from typing import Any, ClassVar, Literal

import numpy as np
import torch
from torch import Tensor, nn
from torch.utils.data import TensorDataset

from tether.errors import UsageError
from tether.tasks.classification import Classification
from tether.tasks.networks import Recurrent, Transformer

#: windows of held-out text that `evaluate` reads: with 64 characters each, a sample of 16,000 in a fraction of a second
_TEST_WINDOWS = 256


class Chars(Classification):
    """Predict the next character of a text; its last tenth is held out. The loss is in nats per character.

    A sample is a window of the text. Windows start every `stride` characters and overlap by default; they are views of
    one tensor, so they need no more memory than the text.
    """

    options: ClassVar = Classification.options | {
        "data": "a text file in UTF-8, or a folder with tinyshakespeare.txt or a single .txt file",
        "context": "characters the model sees at once",
        "stride": "characters from the start of one training window to the next",
    }
    networks: ClassVar = {
        "transformer": Transformer,
        "lstm": lambda symbols, context: Recurrent(symbols),
    }
    chunk: ClassVar = 64

    def __init__(
        self,
        data: str | Path | None = None,
        batch_size: int = 32,
        learning_rate: float = 2e-3,
        momentum: float | None = None,
        network: Literal["transformer", "lstm"] = "transformer",
        context: int = 64,
        stride: int = 32,
    ) -> None:
        super().__init__(
            batch_size=batch_size, learning_rate=learning_rate, momentum=momentum, network=network, data=data
        )
        for name, value in (("context", context), ("stride", stride)):
            if value < 1:
                raise UsageError(f"{name} of task chars is {value}; it must be at least 1")
        self.context = context
        self.stride = stride
        self._path = _find(self.data)

    def model(self) -> nn.Module:
        _, vocabulary = self._text
        return self.networks[self.network](len(vocabulary), self.context)

    def train_data(self) -> TensorDataset:
        text, _ = self._text
        return TensorDataset(text[: self._split].unfold(0, self.context + 1, self.stride))

    def test_data(self) -> TensorDataset:
        text, _ = self._text
        windows = text[self._split :].unfold(0, self.context + 1, self.context)
        count = min(_TEST_WINDOWS, len(windows))
        return TensorDataset(windows[torch.arange(count) * len(windows) // count])

    def examples(self, batch: Any) -> tuple[Tensor, Tensor]:
        (windows,) = batch
        return windows[:, :-1], windows[:, 1:]

    @property
    def _split(self) -> int:
        """Where the held-out tenth starts."""
        text, _ = self._text
        return len(text) * 9 // 10

    @cached_property
    def _text(self) -> tuple[Tensor, str]:
        """The text as indices into its vocabulary, and the vocabulary: each character of the text once, in order."""
        try:
            text = self._path.read_text(encoding="utf-8")
        except (OSError, UnicodeDecodeError) as error:
            raise UsageError(f"{self._path} cannot be read as UTF-8 text: {error}") from error
        needed = 10 * (self.context + 1)
        if len(text) < needed:
            raise UsageError(
                f"{self._path} has {len(text)} characters; with a context of {self.context} task chars needs at least "
                f"{needed}, so that the held-out tenth has a window"
            )
        codes, indices = np.unique(np.frombuffer(text.encode("utf-32-le"), np.uint32), return_inverse=True)
        return torch.from_numpy(indices.astype(np.int64)), "".join(map(chr, codes))


def _find(data: Path | None) -> Path:
    if data is None:
        raise UsageError("task chars needs a text: pass --data FILE, any text file in UTF-8, or a folder with one")
    if data.is_file():
        return data
    known = data / "tinyshakespeare.txt"
    files = [known] if known.is_file() else sorted(data.glob("*.txt"))
    if len(files) != 1:
        names = ", ".join(file.name for file in files[:5]) or "none"
        raise UsageError(f"{data} must have exactly one .txt file and has {len(files)} ({names}): pass --data FILE")
    return files[0]
