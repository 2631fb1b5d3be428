"""The text task as the service uses it: made for an upload, and answering from a run directory."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from tether.tasks.text import Classifier, Text


def make_task(train: Path, test: Path) -> Text:
    """What is trained for an upload; nothing is asked of the owner."""
    return Text(data=train, test=test, header=False, multilabel=True)


class Model:
    """A trained classifier, loaded from its run directory."""

    def __init__(self, run_dir: Path) -> None:
        self._classifier = Classifier.load(run_dir)
        self.labels = self._classifier.labels
        self.memory_bytes = self._classifier.memory_bytes

    def classify(self, texts: Sequence[str], top: int = 10) -> list[list[tuple[str, float]]]:
        """For each text the `top` most likely classes with their probabilities, descending."""
        found = self._classifier.classify(texts, top=top)
        return [[(answer.label, answer.probability) for answer in answers] for answers in found]
