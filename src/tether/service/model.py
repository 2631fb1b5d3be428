"""The text task as the service uses it: made for an upload, and answering from a run directory."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from tether import api
from tether.tasks.text import Text, TextClassifier


def make_task(train: Path, test: Path) -> Text:
    """What is trained for an upload; nothing is asked of the owner."""
    return Text(data=train, test=test, header=False)


class Model:
    """A trained classifier, loaded from its run directory."""

    def __init__(self, run_dir: Path) -> None:
        tensors, files = api.trained_model(run_dir)
        self._classifier = TextClassifier(files, tensors)
        self.labels = self._classifier.labels

    def classify(self, texts: Sequence[str], top: int = 10) -> list[list[tuple[str, float]]]:
        """For each text the `top` most likely classes with their probabilities, descending."""
        best = self._classifier.probabilities(texts).topk(min(top, len(self.labels)))
        return [
            [(self.labels[index], value) for index, value in zip(indices, values, strict=True)]
            for indices, values in zip(best.indices.tolist(), best.values.tolist(), strict=True)
        ]
