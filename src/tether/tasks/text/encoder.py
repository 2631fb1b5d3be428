"""A pretrained encoder from a local folder, for people who have one: texts as dense vectors beside the sparse ones.

The folder has HuggingFace's layout: config.json, model.safetensors and a tokenizer. Nothing is fetched, no code of the
folder runs, and weights are never unpickled. The encoder is not trained: it turns every text into one vector, the mean
of what it gives for the text's tokens, which the linear model then uses as further features.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Sequence
from functools import lru_cache
from pathlib import Path
from typing import Any

import numpy as np
import torch

from tether.errors import UsageError, missing_extra
from tether.tasks.text.features import Floats

_CONFIG, _WEIGHTS, _POOLING = "config.json", "model.safetensors", "1_Pooling/config.json"
#: tokens of a text that the encoder sees at most, and texts that go through it at once
_TOKENS_MAX, _CHUNK = 256, 32


class Encoder:
    """The encoder of a folder. Its `digest` tells it from others."""

    def __init__(self, folder: Path) -> None:
        missing = [name for name in (_CONFIG, _WEIGHTS) if not (folder / name).is_file()]
        if missing:
            raise UsageError(
                f"encoder {folder} has no {missing[0]}: name a folder in HuggingFace's layout, with {_CONFIG}, "
                f"{_WEIGHTS} and tokenizer.json"
            )
        try:
            from transformers import AutoModel, AutoTokenizer
            from transformers.utils import logging
        except ImportError:
            raise missing_extra("transformers", "huggingface") from None
        logging.disable_progress_bar()  # of what takes a moment
        try:
            self._tokenizer: Any = AutoTokenizer.from_pretrained(folder, local_files_only=True)
            self._model: Any = AutoModel.from_pretrained(folder, local_files_only=True, use_safetensors=True).eval()
            pooling = json.loads((folder / _POOLING).read_text()) if (folder / _POOLING).is_file() else {}
            self._first_token = bool(pooling.get("pooling_mode_cls_token"))
            self.width = int(self._model.config.hidden_size)
            self(["a"])  # shows now whether tokenizer and model belong together
        except Exception as error:  # whatever a folder of somebody else's makes transformers raise
            raise UsageError(f"encoder {folder} cannot be used: {' '.join(str(error).split())}") from error
        finally:
            logging.enable_progress_bar()
        digest = hashlib.sha256()
        for name in (_CONFIG, _WEIGHTS, "tokenizer.json"):
            if (folder / name).is_file():
                digest.update((folder / name).read_bytes())
        self.digest = digest.hexdigest()

    @staticmethod
    @lru_cache(maxsize=2)
    def open(folder: Path) -> Encoder:
        """The encoder of a folder, loaded once for all classifiers of a process."""
        return Encoder(folder)

    def __call__(self, texts: Sequence[str]) -> Floats:
        """A vector for each text."""
        order = sorted(range(len(texts)), key=lambda place: len(texts[place]))  # little padding
        found = np.empty((len(texts), self.width), np.float32)
        for start in range(0, len(order), _CHUNK):
            places = order[start : start + _CHUNK]
            found[places] = self._vectors([texts[place] for place in places])
        return found

    def _vectors(self, texts: Sequence[str]) -> Floats:
        inputs = self._tokenizer(
            list(texts), padding=True, truncation=True, max_length=self._tokens_max(), return_tensors="pt"
        )
        with torch.no_grad():
            hidden = self._model(**inputs).last_hidden_state.float()
        if self._first_token:
            pooled = hidden[:, 0]
        else:
            mask = inputs["attention_mask"][:, :, None].float()
            pooled = (hidden * mask).sum(1) / mask.sum(1).clamp_min(1)
        vectors: Floats = pooled.numpy()
        return vectors

    def _tokens_max(self) -> int:
        limits = (_TOKENS_MAX, self._tokenizer.model_max_length, self._model.config.max_position_embeddings)
        return min(limit for limit in limits if limit)


class Vectors:
    """An encoder with the mean of its vectors in training: what remains is of length 1, as other features are."""

    def __init__(self, encoder: Encoder, mean: Floats) -> None:
        self.encoder, self.mean = encoder, mean

    @staticmethod
    def of(encoder: Encoder, texts: Sequence[str]) -> tuple[Vectors, Floats]:
        """With the mean of these texts, and the vectors of these texts."""
        found = encoder(texts)
        vectors = Vectors(encoder, found.mean(0))
        return vectors, vectors._centered(found)

    def __call__(self, texts: Sequence[str]) -> Floats:
        return self._centered(self.encoder(texts))

    def _centered(self, found: Floats) -> Floats:
        # the vectors of one encoder all point in much the same direction; what tells texts apart is the rest
        rest = found - self.mean
        centered: Floats = rest / np.maximum(np.linalg.norm(rest, axis=1, keepdims=True), 1e-9)
        return centered


def reopened(folder: Path | str | None, digest: str, mean: Floats) -> Vectors:
    """The encoder that a classifier was trained with."""
    if folder is None:
        raise UsageError("this classifier was trained with an encoder: name its folder with --encoder DIR")
    encoder = Encoder.open(Path(folder))
    if encoder.digest != digest:
        raise UsageError(f"encoder {folder} is not the one that this classifier was trained with: name that one")
    return Vectors(encoder, mean)
