"""Classifies texts with what a run of task text has made, and needs neither the task nor its data."""

from __future__ import annotations

import json
import math
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import torch
from safetensors.numpy import load, save
from torch import Tensor

from tether.errors import Damaged, UsageError
from tether.tasks.networks import TextCnn
from tether.tasks.text.encoder import Vectors, reopened
from tether.tasks.text.features import Features, Floats, tokens
from tether.tasks.text.linear import Weights, scores
from tether.tasks.text.mixture import Mixture

#: the file that has all of a classifier
CLASSIFIER = "classifier.safetensors"
PADDING, UNKNOWN = 0, 1
#: texts that go through the models at once, which bounds memory
_CHUNK = 256


class Answer(NamedTuple):
    """A label and its probability."""

    label: str
    probability: float


class Classifier:
    """Linear model, convolution once there is one, and how they are combined."""

    def __init__(
        self,
        labels: Sequence[str],
        features: Features,
        weights: Weights,
        mixture: Mixture,
        network: tuple[TextCnn, Mapping[str, int], int] | None = None,
        *,
        vectors: Vectors | None = None,
        familiar_min: float | None = None,
    ) -> None:
        """`weights` are those of the linear model; `network` comes with its words and the length of a text.

        `vectors` are the linear model's further features; texts less familiar than `familiar_min` are out of scope.
        """
        self.labels = list(labels)
        self._features, self._weights, self._mixture, self._network = features, weights, mixture, network
        self._vectors, self._familiar_min = vectors, familiar_min

    @property
    def multilabel(self) -> bool:
        """Whether a text may have several labels; each then has a probability by itself."""
        return self._mixture.multilabel

    @property
    def memory_bytes(self) -> int:
        """What the arrays take in memory."""
        network = self._network[0].state_dict().values() if self._network is not None else ()
        linear = self._features.hashes.nbytes + self._features.weights.nbytes + self._weights.nbytes
        return linear + sum(int(value.nbytes) for value in network)

    @property
    def stage(self) -> str:
        """ "linear" while only the linear model answers, then "final"."""
        return "linear" if self._network is None else "final"

    @staticmethod
    def load(path: Path | str, encoder: Path | str | None = None) -> Classifier:
        """From a run directory, a folder with a classifier, or the file itself. It works while the run goes on.

        A classifier that was trained with an encoder needs the folder of that encoder.
        """
        path = Path(path)
        for file in (path / "task" / CLASSIFIER, path / CLASSIFIER, path):
            if file.is_file():
                return Classifier.from_bytes(file.read_bytes(), encoder)
        raise UsageError(f"{path} has no {CLASSIFIER}: name the directory of a run of task text, or that file")

    def save(self, path: Path | str) -> None:
        """Write the classifier to one file, which `load` reads."""
        Path(path).write_bytes(self.to_bytes())

    def to_bytes(self) -> bytes:
        """The classifier as a safetensors file."""
        settings: dict[str, Any] = {
            "labels": self.labels,
            "mixture": self._mixture.described(),
            "familiar_min": self._familiar_min,
        }
        tensors = {
            "linear.hashes": self._features.hashes.view(np.int64),
            "linear.frequencies": self._features.weights,
            "linear.weights": self._weights.astype(np.float16),
        }
        if self._vectors is not None:
            settings["encoder"] = self._vectors.encoder.digest
            tensors["encoder.mean"] = self._vectors.mean
        if self._network is not None:
            model, words, length = self._network
            settings |= {"words": list(words), "length": length}
            tensors |= {f"network.{name}": value.numpy() for name, value in model.state_dict().items()}
        tensors["settings"] = np.frombuffer(json.dumps(settings, ensure_ascii=False).encode(), np.uint8)
        return save({name: np.ascontiguousarray(value) for name, value in tensors.items()})

    @staticmethod
    def from_bytes(data: bytes, encoder: Path | str | None = None) -> Classifier:
        """The classifier of such a file, and the folder of its encoder if it was trained with one."""
        try:
            tensors = load(data)
            settings = json.loads(tensors["settings"].tobytes())
            features = Features(tensors["linear.hashes"].view(np.uint64), tensors["linear.frequencies"])
            # they stay in half precision: with many labels they are most of the memory
            weights, mixture = tensors["linear.weights"], Mixture(**settings["mixture"])
            network = None
            if "words" in settings:
                state = {
                    name.removeprefix("network."): torch.from_numpy(value.copy())
                    for name, value in tensors.items()
                    if name.startswith("network.")
                }
                words, embedding = state["embedding.weight"].shape
                model = TextCnn(words, len(settings["labels"]), embedding, len(state["filters.0.bias"]))
                model.load_state_dict(state)
                index = {word: number for number, word in enumerate(settings["words"], UNKNOWN + 1)}
                network = model.eval(), index, int(settings["length"])
            digest, mean = settings.get("encoder"), tensors.get("encoder.mean")
            familiar_min = settings.get("familiar_min")
        except Exception as error:  # safetensors has errors of its own
            raise Damaged(f"{CLASSIFIER} is damaged ({error}): train again") from error
        vectors = None if digest is None or mean is None else reopened(encoder, digest, mean)
        return Classifier(
            settings["labels"], features, weights, mixture, network, vectors=vectors, familiar_min=familiar_min
        )

    def probabilities(self, texts: Sequence[str]) -> Tensor:
        """Of every label for each text."""
        parts = [self._chunk(texts[start : start + _CHUNK]) for start in range(0, len(texts), _CHUNK)]
        return torch.cat(parts) if parts else torch.empty(0, len(self.labels))

    def classify(self, texts: Sequence[str], top: int = 10) -> list[list[Answer]]:
        """For each text, its most likely labels with their probabilities, in descending order."""
        best = self.probabilities(texts).topk(min(top, len(self.labels)))
        return [
            [Answer(self.labels[place], value) for place, value in zip(places, values, strict=True)]
            for places, values in zip(best.indices.tolist(), best.values.tolist(), strict=True)
        ]

    def out_of_scope(self, texts: Sequence[str]) -> list[bool]:
        """Whether each text is less like the training rows than nearly all rows were that had been set aside."""
        if self._familiar_min is None:
            return [False] * len(texts)
        found: list[bool] = []
        for start in range(0, len(texts), _CHUNK):
            part = texts[start : start + _CHUNK]
            found += (familiarity(self._features, part, self._linear(part)) < self._familiar_min).tolist()
        return found

    def _linear(self, texts: Sequence[str]) -> Floats:
        return linear_scores(texts, self._features, self._vectors, self._weights)

    def _chunk(self, texts: Sequence[str]) -> Tensor:
        linear = torch.from_numpy(self._linear(texts))
        network = None
        if self._network is not None:
            model, words, length = self._network
            with torch.no_grad():
                network = model(encode(texts, words, length))
        return self._mixture.probabilities(linear, network)


def linear_scores(texts: Sequence[str], features: Features, vectors: Vectors | None, weights: Weights) -> Floats:
    """What the linear model says of each text for each label."""
    matrix = features.matrix(texts)
    if vectors is not None:
        matrix = matrix.with_dense(vectors(texts), features.count)
    return scores(matrix, weights)


def familiarity(features: Features, texts: Sequence[str], linear: Floats) -> Floats:
    """How much texts are like those of training: do one-against-the-rest scores claim them, and are the words known?"""
    found: Floats = linear.max(1) + features.coverage(texts)
    return found


def least_familiar(values: Floats) -> float | None:
    """Below which a text is out of scope: 5 of 100 texts of the kind that was trained on are, fewer if few tell."""
    if not len(values):
        return None
    return float(np.quantile(values, 0.05) - values.std() / math.sqrt(len(values)))


def encode(texts: Iterable[str], words: Mapping[str, int], length: int) -> Tensor:
    """Each text as the indices of its first `length` words; 1 is an unknown word, 0 is padding."""
    found = [[words.get(word, UNKNOWN) for word in tokens(text)[:length]] for text in texts]
    encoded = np.full((len(found), length), PADDING, np.int32)
    for row, text in zip(encoded, found, strict=True):
        row[: len(text)] = text
    return torch.from_numpy(encoded)


def figures(rows: Sequence[Mapping[str, Any]]) -> dict[str, Any]:
    """Accuracy, macro-F1, and the figures of each label, of rows as the file of held-out rows has them.

    A row's first answer is what counts; with several labels, it is right if it is one of them.
    """
    true = [list(row["labels"]) for row in rows]
    found = [row["answers"][0][0] for row in rows]
    hits, answered, have = Counter[str](), Counter(found), Counter(label for labels in true for label in labels)
    for answer, labels in zip(found, true, strict=True):
        hits[answer] += answer in labels
    classes = {
        label: {
            "precision": hits[label] / answered[label] if answered[label] else 0.0,
            "recall": hits[label] / have[label] if have[label] else 0.0,
            "f1": 2 * hits[label] / (answered[label] + have[label]),
            "rows": have[label],
        }
        for label in sorted({*answered, *have})
    }
    mean = sum(each["f1"] for each in classes.values()) / max(1, len(classes))
    return {"accuracy": hits.total() / max(1, len(true)), "macro_f1": mean, "classes": classes}
