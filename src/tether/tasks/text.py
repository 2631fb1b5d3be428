"""Text classification: learns a classifier from a CSV of texts and their labels."""

from __future__ import annotations

import csv
import io
import json
import math
import re
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from functools import cached_property
from pathlib import Path
from typing import ClassVar, NamedTuple

import numpy as np
import torch
from torch import Tensor, nn
from torch.utils.data import TensorDataset

from tether.errors import UsageError
from tether.tasks.classification import Classification
from tether.tasks.networks import TextCnn

#: a word or number, including apostrophes inside it, or one punctuation mark
_TOKEN = re.compile(r"\w+(?:'\w+)*|[^\w\s]")
_PADDING, _UNKNOWN = 0, 1
#: the files that a run keeps beside the model
VOCABULARY, LABELS = "vocabulary.json", "labels.json"
#: GaDei, table 3: the mini-batch size for fewer training rows than this
_BATCH_SIZES = ((10_000, 2), (100_000, 4), (math.inf, 32))
#: the paper's learning rate for SGD, and an equally careful one for Adam, which classifies 90 % of TREC correctly after
#: 2 epochs; SGD classifies 78 % correctly after 5
_SGD_RATE, _ADAM_RATE = 0.01, 0.001
#: stop after this many epochs without improvement, or after this many samples if that is longer: an epoch of few rows
#: changes little, and the error on few rows says little
_PATIENCE, _PATIENCE_SAMPLES = 5, 5000


class Text(Classification):
    """Classify short texts, learned from a CSV of texts and labels.

    What is needed to classify other texts are plain attributes that are copied with the task: `words` (the index of
    each word), `length` (of a text, in words) and `labels` (one for each output of the model). `encode` makes the
    model's input.

    Workers train asynchronously unless a protocol is given. Mini-batch size and epochs are the careful ones of the
    GaDei paper, table 3, unless they are given. A run without a goal ends sooner: when `validation_error` has stopped
    improving, and with the model that had the best. That is the error on rows that are set aside for this decision;
    the rows of `error`, which measures the model, decide nothing.
    """

    options: ClassVar = Classification.options | {
        "data": "a CSV in UTF-8 with a text and its label in each row",
        "test": "a CSV of held-out rows; by default x_test.csv beside x_train.csv, or else a tenth of the rows",
        "validation": "share of the training rows that is set aside to decide when to stop; 0 for none",
        "text_column": "name of the column with the texts; by default the first",
        "label_column": "name of the column with the labels; by default the second",
        "header": "whether the first line has the names of the columns",
        "batch_size": "samples in a worker's mini-batch; by default 2 below 10,000 rows, 4 below 100,000, else 32",
        "learning_rate": f"step size of the optimizer; by default {_ADAM_RATE}, or {_SGD_RATE} with momentum",
        "vocabulary": "number of words to know at most, the most frequent ones",
        "length": "words of a text that the model sees; by default enough for 95 of 100 texts",
        "embedding": "values that represent a word",
        "filters": "number of filters of each width",
        "sparse": "whether a step changes only the embeddings of the words in the batch",
    }
    networks: ClassVar = {"cnn": TextCnn}
    #: texts may be long
    chunk: ClassVar = 100
    epochs = 200
    #: as in GaDei: small mini-batches pay off if every gradient is applied at once, to weights that workers share
    protocol: ClassVar = {"name": "server", "sync": "async", "apply": "auto"}

    def __init__(
        self,
        data: str | Path | None = None,
        test: str | Path | None = None,
        validation: float = 0.1,
        text_column: str | None = None,
        label_column: str | None = None,
        header: bool = True,
        batch_size: int | None = None,
        learning_rate: float | None = None,
        momentum: float | None = None,
        vocabulary: int = 20_000,
        length: int | None = None,
        embedding: int = 100,
        filters: int = 100,
        sparse: bool = False,
    ) -> None:
        widest = max(TextCnn.widths)
        for name, value, least in (
            ("vocabulary", vocabulary, 1),
            ("length", length, widest),
            ("embedding", embedding, 1),
            ("filters", filters, 1),
        ):
            if value is not None and value < least:
                raise UsageError(f"{name} of task text is {value}; it must be at least {least}")
        if not 0 <= validation <= 0.5:
            raise UsageError(f"validation of task text is {validation}; it must be at least 0 and at most 0.5")
        if not header and (text_column is not None or label_column is not None):
            raise UsageError("without a header columns have no names: leave text_column and label_column out")
        self._columns = (text_column, label_column) if header else None
        self._path, self._test_path = _find(data), _find_test(data, test)
        self.validation = validation
        self.embedding = embedding
        self.filters = filters
        self.sparse = sparse
        train, validated, held_out = self._rows()
        texts = [tokens(row.text) for row in train]
        counts = Counter(word for text in texts for word in text)
        kept = sorted(counts, key=lambda word: (-counts[word], word))[:vocabulary]
        self.words = {word: index for index, word in enumerate(kept, _UNKNOWN + 1)}
        self.length = length or max(widest, math.ceil(np.percentile([len(text) for text in texts], 95)))
        self.labels = sorted({row.label for row in train})
        self.patience = max(_PATIENCE, _PATIENCE_SAMPLES // len(train)) if validated else None
        self._samples = self._encoded(train), self._encoded(validated), self._encoded(held_out)
        if batch_size is None:
            batch_size = next(size for rows, size in _BATCH_SIZES if len(train) + len(validated) < rows)
        if learning_rate is None:
            learning_rate = _ADAM_RATE if momentum is None else _SGD_RATE
        super().__init__(
            batch_size=batch_size,
            learning_rate=learning_rate,
            momentum=momentum,
            network="cnn",
            data=self._path,
        )

    def note(self) -> str:
        train, validated, held_out = map(len, self._samples)
        source = self._test_path.name if self._test_path else "every tenth"
        return (
            f"{train} rows with {len(self.labels)} labels, {validated} to decide when to stop, {held_out} held out "
            f"({source}); {len(self.words)} words, {self.length} per text; mini-batches of {self.batch_size}, "
            f"learning rate {self.learning_rate:g}"
        )

    def files(self) -> dict[str, str]:
        """What `TextClassifier` needs besides the model: the words with their indices, and the labels in order."""
        vocabulary = {"length": self.length, "padding": _PADDING, "unknown": _UNKNOWN, "words": self.words}
        return {
            VOCABULARY: json.dumps(vocabulary, ensure_ascii=False, indent=1),
            LABELS: json.dumps(self.labels, ensure_ascii=False, indent=1),
        }

    def encode(self, texts: Iterable[str]) -> Tensor:
        """Texts as inputs of the model."""
        return encode(texts, self.words, self.length)

    def model(self) -> nn.Module:
        words = len(self.words) + _UNKNOWN + 1
        return self.networks[self.network](words, len(self.labels), self.embedding, self.filters, self.sparse)

    def train_data(self) -> TensorDataset:
        return self._samples[0]

    def validation_data(self) -> TensorDataset:
        """The samples that decide when to stop, in the form that `train_data` has."""
        return self._samples[1]

    def test_data(self) -> TensorDataset:
        return self._samples[2]

    def evaluate(self, model: nn.Module) -> dict[str, float]:
        metrics = super().evaluate(model)
        if len(self.validation_data()):
            metrics["validation_error"] = self.metrics_on(model, self.validation_data())["error"]
        return metrics

    @cached_property
    def _samples(self) -> tuple[TensorDataset, TensorDataset, TensorDataset]:
        """To train on, to decide when to stop, held out. The constructor sets it; copies of the task read it again."""
        train, validated, held_out = self._rows()
        return self._encoded(train), self._encoded(validated), self._encoded(held_out)

    def _encoded(self, rows: Sequence[_Row]) -> TensorDataset:
        classes = {label: number for number, label in enumerate(self.labels)}
        return TensorDataset(self.encode(row.text for row in rows), torch.tensor([classes[row.label] for row in rows]))

    def _rows(self) -> tuple[list[_Row], list[_Row], list[_Row]]:
        """The rows to train on, those that decide when to stop, and those held out, checked."""
        rows = _read(self._path, self._columns)
        labels = {row.label for row in rows}
        if len(labels) < 2:
            raise UsageError(f"{self._path}: all rows have the label {rows[0].label!r}; there must be two or more")
        if self._test_path is None:
            rows, held_out = _split(rows, 0.1)
            if not held_out:
                raise UsageError(
                    f"{self._path} has one row of each label, so none can be held out: add rows, choose "
                    "another label_column, or set test to a CSV of held-out rows"
                )
        else:
            held_out = _read(self._test_path, self._columns)
        for row in held_out:
            if row.label not in labels:
                raise UsageError(
                    f"{self._test_path}, line {row.line}: no row of {self._path} has the label {row.label!r}: correct "
                    "it, add rows to train on, or choose the column with label_column"
                )
        train, validated = _split(rows, self.validation) if self.validation else (rows, [])
        return train, validated, held_out


class TextClassifier:
    """Classifies texts with a model that a run of `Text` has trained, and needs neither the task nor its data."""

    def __init__(self, files: Mapping[str, str], tensors: Mapping[str, Tensor]) -> None:
        """`files` are those of `Text.files`, `tensors` the state_dict of its model."""
        vocabulary = json.loads(files[VOCABULARY])
        self._words: dict[str, int] = vocabulary["words"]
        self._length: int = vocabulary["length"]
        self.labels: list[str] = json.loads(files[LABELS])
        words, embedding = tensors["embedding.weight"].shape
        self._model = TextCnn(words, len(self.labels), embedding, len(tensors["filters.0.bias"]))
        self._model.load_state_dict(tensors)
        self._model.eval()

    def classify(self, texts: Sequence[str]) -> list[tuple[str, float]]:
        """For each text, the most likely label and its probability."""
        return [(self.labels[int(row.argmax())], float(row.max())) for row in self.probabilities(texts)]

    def probabilities(self, texts: Sequence[str]) -> Tensor:
        """A row for each text, with the probability of each of `labels`."""
        with torch.no_grad():
            scores: Tensor = self._model(encode(texts, self._words, self._length)).softmax(1)
        return scores


def tokens(text: str) -> list[str]:
    """The words and punctuation marks of a text, in lower case."""
    return _TOKEN.findall(text.lower())


def encode(texts: Iterable[str], words: Mapping[str, int], length: int) -> Tensor:
    """Each text as the indices of its first `length` words; 1 is an unknown word, 0 is padding."""
    found = [[words.get(word, _UNKNOWN) for word in tokens(text)[:length]] for text in texts]
    encoded = np.full((len(found), length), _PADDING, np.int32)
    for row, text in zip(encoded, found, strict=True):
        row[: len(text)] = text
    return torch.from_numpy(encoded)


# ---- reading --------------------------------------------------------------------------------------------------------


class _Row(NamedTuple):
    text: str
    label: str
    line: int


def _find(data: str | Path | None) -> Path:
    if data is None:
        raise UsageError("task text needs a CSV with a text and its label in each row: pass --data FILE.csv")
    path = Path(data).expanduser().resolve()
    if path.is_dir():
        raise UsageError(f"{path} is a folder: pass --data FILE.csv")
    return path


def _find_test(data: str | Path | None, test: str | Path | None) -> Path | None:
    """The file of held-out rows that was given, or else the one beside the training rows."""
    if test is not None:
        return Path(test).expanduser().resolve()
    path = _find(data)
    beside = path.with_name(re.sub(r"train$", "test", path.stem) + path.suffix)
    return beside if beside != path and beside.is_file() else None


def _read(path: Path, columns: tuple[str | None, str | None] | None) -> list[_Row]:
    """The rows of a CSV; `columns` names its text and label columns and is None for a file without a header."""
    numbered = _numbered(path)
    if not numbered:
        raise UsageError(f"{path} is empty; expected a text and its label in each row")
    first_line, first = numbered[0]
    if len(first) < 2:
        raise UsageError(f"{path} has only the column {first[0]!r}; expected text and label, separated by a comma")
    text_place, label_place = 0, 1
    if columns is not None:
        del numbered[0]
        text_place, label_place = _places(path, [name.strip() for name in first], columns)
        if not numbered:
            raise UsageError(f"{path} has no rows below its header; expected a text and its label in each row")
    rows = []
    for line, fields in numbered:
        if len(fields) != len(first):
            raise UsageError(
                f"{path}, line {line} has {len(fields)} field{'' if len(fields) == 1 else 's'} and line {first_line} "
                f'has {len(first)}: separate text and label by a comma, and put a text with commas into quotes (")'
            )
        row = _Row(fields[text_place].strip(), fields[label_place].strip(), line)
        if not row.text or not row.label:
            what = "text" if not row.text else "label"
            raise UsageError(f"{path}, line {line} has an empty {what}: fill it in, or remove the line")
        rows.append(row)
    if columns is not None and columns[1] is None and any(row.label == first[label_place].strip() for row in rows):
        raise UsageError(
            f"{path}, line {first_line} should have the names of the columns, but {first[label_place]!r} is the label "
            "of other lines too: if the file has no header, set header=false; if it has one, set label_column"
        )
    return rows


def _numbered(path: Path) -> list[tuple[int, list[str]]]:
    """The fields of each row that is not blank, with the number of its first line."""
    try:
        text = path.read_bytes().decode("utf-8-sig")
    except OSError as error:
        raise UsageError(f"{path} cannot be read: {error.strerror}") from error
    except UnicodeDecodeError as error:
        line = len((error.object[: error.start] + b".").splitlines())
        raise UsageError(f"{path}, line {line} is not UTF-8: save the file in that encoding") from error
    reader = csv.reader(io.StringIO(text, newline=""), strict=True)
    found = []
    line = 1
    try:
        for fields in reader:
            if any(field.strip() for field in fields):
                found.append((line, fields))
            line = reader.line_num + 1
    except csv.Error as error:
        raise UsageError(
            f'{path}, line {line}: {error}; a field in quotes (") ends with one, and a quote within it is written twice'
        ) from error
    return found


def _places(path: Path, header: list[str], columns: tuple[str | None, str | None]) -> tuple[int, int]:
    """The positions of text and label in a row."""
    have = f"{path} has the columns {', '.join(header)}"
    places = []
    for default, (option, name) in enumerate(zip(("text_column", "label_column"), columns, strict=True)):
        if name is not None and name not in header:
            raise UsageError(f"{have}, but no {name!r}: choose another {option}")
        places.append(default if name is None else header.index(name))
    if places[0] == places[1]:
        raise UsageError(f"{have}; {header[places[0]]!r} is both text and label: set text_column and label_column")
    return places[0], places[1]


def _split(rows: list[_Row], share: float) -> tuple[list[_Row], list[_Row]]:
    """Set this share of the rows of every label aside, always the same rows; one row of each label always stays."""
    labels = np.array([row.label for row in rows])
    order = np.random.default_rng(0).permutation(len(rows))
    order = order[np.argsort(labels[order], kind="stable")]
    again = np.append(False, labels[order][1:] == labels[order][:-1])
    several = order[again]
    aside = set(several[np.arange(0, len(several), 1 / share).astype(int)].tolist())
    return [row for i, row in enumerate(rows) if i not in aside], [row for i, row in enumerate(rows) if i in aside]
