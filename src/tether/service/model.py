"""The text task as the service uses it: made for an upload, and answering from a run directory."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Callable, Sequence
from pathlib import Path
from threading import Lock
from typing import NamedTuple

from tether.tasks.text import CLASSIFIER, Classifier, Text


def make_task(train: Path, test: Path, encoder: Path | None) -> Text:
    """What is trained for an upload; nothing is asked of the owner."""
    return Text(data=train, test=test, header=False, multilabel=True, encoder=str(encoder) if encoder else None)


class Model:
    """A trained classifier, loaded from its run directory; while the run goes on, its linear model alone."""

    def __init__(self, run_dir: Path, encoder: Path | None) -> None:
        self._classifier = Classifier.load(run_dir, encoder)
        self.labels = self._classifier.labels
        self.stage = self._classifier.stage
        self.memory_bytes = self._classifier.memory_bytes

    def classify(self, texts: Sequence[str], top: int = 10) -> list[list[tuple[str, float]]]:
        """For each text the `top` most likely classes with their probabilities, descending."""
        found = self._classifier.classify(texts, top=top)
        return [[(answer.label, answer.probability) for answer in answers] for answers in found]

    def out_of_scope(self, texts: Sequence[str]) -> list[bool]:
        """Whether each text is unlike all that it was trained on."""
        return self._classifier.out_of_scope(texts)


class _Loaded(NamedTuple):
    model: Model
    #: when its file was written; a run that ends replaces it
    written: int


class Models:
    """The classifiers that answered most recently, in memory."""

    def __init__(self, run_dir: Callable[[str], Path], encoder: Path | None, bytes_max: int) -> None:
        """`run_dir` says where the run of a classifier is."""
        self._run_dir, self._encoder, self._bytes_max = run_dir, encoder, bytes_max
        self._lock, self._loading = Lock(), Lock()
        self._loaded: OrderedDict[str, _Loaded] = OrderedDict()

    def get(self, classifier_id: str) -> Model | None:
        """None while there is nothing that could answer."""
        run_dir = self._run_dir(classifier_id)
        try:
            written = (run_dir / "task" / CLASSIFIER).stat().st_mtime_ns
        except OSError:
            return None
        model = self._find(classifier_id, written)
        if model is not None:
            return model
        with self._loading:  # one at a time, and each only once
            model = self._find(classifier_id, written)
            if model is not None:
                return model
            model = Model(run_dir, self._encoder)
            with self._lock:
                self._loaded[classifier_id] = _Loaded(model, written)
                while (
                    len(self._loaded) > 1
                    and sum(one.model.memory_bytes for one in self._loaded.values()) > self._bytes_max
                ):
                    self._loaded.popitem(last=False)
        return model

    def _find(self, classifier_id: str, written: int) -> Model | None:
        with self._lock:
            found = self._loaded.get(classifier_id)
            if found is None or found.written != written:
                return None
            self._loaded.move_to_end(classifier_id)
            return found.model

    def drop(self, classifier_id: str) -> None:
        with self._lock:
            self._loaded.pop(classifier_id, None)
