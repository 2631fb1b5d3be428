"""Text classification: learns a classifier from a CSV of texts and their labels."""

from __future__ import annotations

import json
import math
import time
from collections import Counter
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any, ClassVar

import numpy as np
import torch
from torch import Tensor, nn
from torch.nn import functional
from torch.optim.lr_scheduler import LambdaLR, LRScheduler
from torch.utils.data import TensorDataset

from tether.errors import UsageError
from tether.task import Length
from tether.tasks.classification import Classification
from tether.tasks.networks import TextCnn
from tether.tasks.text.classifier import (
    CLASSIFIER,
    UNKNOWN,
    Classifier,
    encode,
    familiarity,
    least_familiar,
    linear_scores,
)
from tether.tasks.text.encoder import Encoder, Vectors
from tether.tasks.text.features import Features, Floats, Matrix, tokens
from tether.tasks.text.linear import Linear
from tether.tasks.text.mixture import Mixture
from tether.tasks.text.reader import Row, find, find_test, read, split

#: the file of held-out rows with what the classifier answered
HELD_OUT = "held_out.json"
#: mini-batch size and epochs of the convolution for fewer training rows than this, from trials on short texts: GaDei's
#: mini-batches of 2 to 32 (table 3) with as many steps are no better, and slower
_BATCH_SIZES = ((200, 8), (6_000, 32), (30_000, 64), (math.inf, 128))
_EPOCHS = ((3_000, 25), (20_000, 10), (math.inf, 3))
_SGD_RATE, _ADAM_RATE = 0.01, 0.003
#: share of the run in which the learning rate rises; afterwards it falls to 0
_WARMUP = 0.05
#: words of a text that the convolution sees at most
_LENGTH_MAX = 100


@dataclass
class _LinearPart:
    """The linear model without the held-out rows, and its scores of them."""

    features: Features
    matrix: Matrix
    targets: Floats
    #: how many rows it was fitted on; the matrix goes on with the rows that were set aside
    fitted: int
    linear: Linear
    validated: Tensor
    held_out: Tensor
    vectors: Vectors | None
    #: what the classifier takes for out of scope
    familiar_min: float | None

    @property
    def columns(self) -> int:
        return self.features.count + (self.vectors.encoder.width if self.vectors is not None else 0)


class Text(Classification):
    """Classify short texts, learned from a CSV of texts and labels.

    A run first fits a linear model of words and characters, which takes seconds and can answer at once: `Classifier`
    loads it from the run directory. Workers then train a convolution, asynchronously unless a protocol is given. Rows
    that are set aside decide how much each of the two counts, and at the end the linear model is fitted on those rows
    too. The metric `error` is that of the combination, on rows that decide nothing; `validation_error` is that of the
    convolution alone, on the rows that were set aside.

    `words` (the index of each word), `length` (of a text, in words) and `labels` (one for each output of the
    convolution) are plain attributes. `encode` makes the convolution's input.
    """

    options: ClassVar = Classification.options | {
        "data": "a CSV in UTF-8 with a text and its label in each row",
        "test": "a CSV of held-out rows; by default x_test.csv beside x_train.csv, or else a tenth of the rows",
        "holdout": "share of the rows that measures the model if there is no test; 0 to measure on those set aside",
        "validation": "share of the training rows that is set aside to decide how much each model counts; 0 for none",
        "multilabel": "whether rows may have several labels: all fields after the text, or a|b in the label column",
        "text_column": "name of the column with the texts; by default the first",
        "label_column": "name of the column with the labels; by default the second",
        "header": "whether the first line has the names of the columns",
        "batch_size": "samples in a worker's mini-batch; by default 32 below 6,000 rows, 64 below 30,000, else 128",
        "learning_rate": f"step size of the optimizer; by default {_ADAM_RATE}, or {_SGD_RATE} with momentum",
        "vocabulary": "number of words to know at most, the most frequent ones",
        "length": "words of a text that the model sees; by default enough for 95 of 100 texts",
        "embedding": "values that represent a word",
        "filters": "number of filters of each width",
        "sparse": "whether a step changes only the embeddings of the words in the batch",
        "encoder": "folder of a pretrained encoder in HuggingFace's layout, whose vectors the linear model uses too",
    }
    networks: ClassVar = {"cnn": TextCnn}
    #: texts may be long
    chunk: ClassVar = 100
    #: as in GaDei: small mini-batches pay off if every gradient is applied at once, to weights that workers share
    protocol: ClassVar = {"name": "server", "sync": "async", "apply": "auto"}

    def __init__(
        self,
        data: str | Path | None = None,
        test: str | Path | None = None,
        validation: float = 0.1,
        holdout: float = 0.1,
        multilabel: bool = False,
        text_column: str | None = None,
        label_column: str | None = None,
        header: bool = True,
        batch_size: int | None = None,
        learning_rate: float | None = None,
        momentum: float | None = None,
        vocabulary: int = 20_000,
        length: int | None = None,
        embedding: int = 64,
        filters: int = 64,
        sparse: bool = False,
        encoder: str | None = None,
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
        for name, share in (("validation", validation), ("holdout", holdout)):
            if not 0 <= share <= 0.5:
                raise UsageError(f"{name} of task text is {share}; it must be at least 0 and at most 0.5")
        if not header and (text_column is not None or label_column is not None):
            raise UsageError("without a header columns have no names: leave text_column and label_column out")
        self._columns = (text_column, label_column) if header else None
        self._path, self._test_path = find(data), find_test(data, test)
        self.validation, self.holdout = validation, holdout
        #: called with the seconds that it took when the linear model can answer
        self.on_linear: Callable[[float], None] | None = None
        self._may_have_several = multilabel
        self.embedding = embedding
        self.filters = filters
        self.sparse = sparse
        self.encoder = Path(encoder).expanduser().resolve() if encoder else None
        if self.encoder is not None:
            Encoder.open(self.encoder)  # says now what is wrong with it
        train, validated, held_out = self._rows()
        texts = [tokens(row.text) for row in train]
        counts = Counter(word for text in texts for word in text)
        least = 2 if len(train) >= 1000 else 1
        kept = sorted(counts, key=lambda word: (-counts[word], word))
        kept = [word for word in kept[:vocabulary] if counts[word] >= least]
        self.words = {word: index for index, word in enumerate(kept, UNKNOWN + 1)}
        usual = math.ceil(np.percentile([len(text) for text in texts], 95))
        self.length = length or min(_LENGTH_MAX, max(widest, usual))
        self.labels = sorted({label for row in train for label in row.labels})
        self.multilabel = any(len(row.labels) > 1 for row in train)
        self._samples = self._encoded(train), self._encoded(validated), self._encoded(held_out)
        count = len(train) + len(validated)
        self.epochs = next(epochs for rows, epochs in _EPOCHS if count < rows)
        if batch_size is None:
            batch_size = min(len(train), next(size for rows, size in _BATCH_SIZES if count < rows))
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
        source = self._test_path.name if self._test_path else f"{self.holdout:.0%}" if self.holdout else "the same"
        return (
            f"{train} rows with {len(self.labels)} labels, {validated} set aside, {held_out} held out "
            f"({source}); {len(self.words)} words, {self.length} per text; mini-batches of {self.batch_size}, "
            f"learning rate {self.learning_rate:g}"
        )

    def files(self) -> dict[str, str | bytes]:
        """The linear model as a classifier that can answer while the convolution is trained."""
        began = time.monotonic()
        part = self._linear_part
        mixture = Mixture.learned(part.validated, None, self._targets(1), self.multilabel)
        found = self._classifier(part.linear, mixture).to_bytes()
        if self.on_linear is not None:
            self.on_linear(time.monotonic() - began)
        return {CLASSIFIER: found}

    def final_files(self, model: nn.Module) -> dict[str, str | bytes]:
        """The combination, with a linear model of all rows but those held out; and the answers to those."""
        part, mixture = self._linear_part, self._mixture(model)
        rows = self._rows()[2]
        held_out = mixture.probabilities(part.held_out, self._scores(model, self._samples[2]))
        best = held_out.topk(min(3, len(self.labels)))
        answers = [
            {
                "line": row.line,
                "text": row.text,
                "labels": list(row.labels),
                "answers": [[self.labels[place], value] for place, value in zip(places, values, strict=True)],
            }
            for row, places, values in zip(rows, best.indices.tolist(), best.values.tolist(), strict=True)
        ]
        linear = part.linear
        if part.fitted < len(part.matrix):
            begin = Linear(linear.weights.copy(), linear.duals.copy(), linear.scale)
            linear = Linear.fit(part.matrix, part.targets, np.arange(len(part.matrix)), part.columns, begin)
        words, embedding = model.get_parameter("embedding.weight").shape
        network = TextCnn(words, len(self.labels), embedding, self.filters)
        network.load_state_dict({name: value.cpu() for name, value in model.state_dict().items()})
        whole = self._classifier(linear, mixture, (network.eval(), self.words, self.length))
        return {CLASSIFIER: whole.to_bytes(), HELD_OUT: json.dumps({"rows": answers}, ensure_ascii=False)}

    def _classifier(
        self, linear: Linear, mixture: Mixture, network: tuple[TextCnn, Mapping[str, int], int] | None = None
    ) -> Classifier:
        part = self._linear_part
        return Classifier(
            self.labels,
            part.features,
            linear.final_weights(),
            mixture,
            network,
            vectors=part.vectors,
            familiar_min=part.familiar_min,
        )

    def scheduler(self, optimizer: torch.optim.Optimizer, length: Length) -> LRScheduler:
        """The learning rate rises in the first part of the run and then falls to 0."""
        warmup = max(1, round(_WARMUP * length.steps))

        def factor(step: int) -> float:
            left = (length.steps - step) / max(1, length.steps - warmup)
            return min(1.0, (step + 1) / warmup, max(0.0, left))

        return LambdaLR(optimizer, factor)

    def optimizer(self, model: nn.Module) -> torch.optim.Optimizer:
        if self.momentum is None:
            return torch.optim.Adam(model.parameters(), lr=self.learning_rate, betas=(0.9, 0.99))
        return super().optimizer(model)

    def loss(self, model: nn.Module, batch: Any) -> Tensor:
        inputs, targets = self.examples(batch)
        if self.multilabel:
            return functional.binary_cross_entropy_with_logits(model(inputs), targets)
        return functional.cross_entropy(model(inputs), targets)

    def encode(self, texts: Iterable[str]) -> Tensor:
        """Texts as inputs of the model."""
        return encode(texts, self.words, self.length)

    def model(self) -> nn.Module:
        words = len(self.words) + UNKNOWN + 1
        return self.networks[self.network](words, len(self.labels), self.embedding, self.filters, self.sparse)

    def train_data(self) -> TensorDataset:
        return self._samples[0]

    def validation_data(self) -> TensorDataset:
        """The samples that decide when to stop, in the form that `train_data` has."""
        return self._samples[1]

    def test_data(self) -> TensorDataset:
        return self._samples[2]

    def evaluate(self, model: nn.Module) -> dict[str, float]:
        part, mixture = self._linear_part, self._mixture(model)
        network, targets = self._scores(model, self._samples[2]), self._targets(2)
        mixed = mixture.probabilities(part.held_out, network)
        true = self._is_true(targets)
        metrics = {
            "error": _error(mixed, true),
            "loss": -float(mixed[true].clamp_min(1e-9).log().mean()),
            "macro_f1": _macro_f1(mixed.argmax(1), true),
            "linear_error": _error(part.held_out, true),
            "network_error": _error(network, true),
        }
        if len(self.validation_data()):
            own = self._scores(model, self._samples[1])
            metrics["validation_error"] = _error(own, self._is_true(self._targets(1)))
        return metrics

    def _is_true(self, targets: Tensor) -> Tensor:
        """For each row and label, whether the row has the label."""
        return targets > 0 if self.multilabel else functional.one_hot(targets, len(self.labels)).bool()

    def _mixture(self, model: nn.Module) -> Mixture:
        """Learned from the rows set aside; the default if there are none."""
        network = self._scores(model, self._samples[1])
        return Mixture.learned(self._linear_part.validated, network, self._targets(1), self.multilabel)

    def _targets(self, part: int) -> Tensor:
        return self._samples[part].tensors[1]

    def _scores(self, model: nn.Module, samples: TensorDataset) -> Tensor:
        """What the convolution alone answers."""
        device = next(model.parameters()).device
        with torch.no_grad():
            parts = [model(texts.to(device)).float().cpu() for texts in torch.split(samples.tensors[0], self.chunk)]
        return torch.cat(parts) if parts else torch.empty(0, len(self.labels))

    @cached_property
    def _linear_part(self) -> _LinearPart:
        train, validated, held_out = self._rows()
        texts, aside = [row.text for row in (*train, *validated)], [row.text for row in validated]
        features, matrix = Features.of(texts)
        vectors, columns = None, features.count
        if self.encoder is not None:
            vectors, dense = Vectors.of(Encoder.open(self.encoder), texts)
            matrix, columns = matrix.with_dense(dense, features.count), columns + dense.shape[1]
        true = torch.cat([self._is_true(self._targets(part)) for part in (0, 1)]).numpy()
        targets = np.where(true, 1, -1).astype(np.float32)
        if len(self.labels) == 2 and not self.multilabel:
            targets = np.ascontiguousarray(targets[:, 1:])
        linear = Linear.fit(matrix, targets, np.arange(len(train)), columns)
        weights = linear.final_weights()
        found, held = (
            linear_scores(part, features, vectors, weights) for part in (aside, [row.text for row in held_out])
        )
        familiar_min = least_familiar(familiarity(features, aside, found)) if aside else None
        return _LinearPart(
            features,
            matrix,
            targets,
            len(train),
            linear,
            torch.from_numpy(found),
            torch.from_numpy(held),
            vectors,
            familiar_min,
        )

    @cached_property
    def _samples(self) -> tuple[TensorDataset, TensorDataset, TensorDataset]:
        """To train on, to decide when to stop, held out. The constructor sets it; copies of the task read it again."""
        train, validated, held_out = self._rows()
        return self._encoded(train), self._encoded(validated), self._encoded(held_out)

    def _encoded(self, rows: Sequence[Row]) -> TensorDataset:
        classes = {label: number for number, label in enumerate(self.labels)}
        if self.multilabel:
            targets = torch.zeros(len(rows), len(self.labels))
            for place, row in enumerate(rows):
                targets[place, [classes[label] for label in row.labels]] = 1.0
        else:
            targets = torch.tensor([classes[row.label] for row in rows], dtype=torch.int64)
        return TensorDataset(self.encode(row.text for row in rows), targets)

    def _rows(self) -> tuple[list[Row], list[Row], list[Row]]:
        """The rows to train on, those that decide when to stop, and those held out, checked."""
        rows = read(self._path, self._columns, self._may_have_several)
        labels = {label for row in rows for label in row.labels}
        if len(labels) < 2:
            raise UsageError(f"{self._path}: all rows have the label {rows[0].label!r}; there must be two or more")
        held_out: list[Row] = []
        if self._test_path is None and self.holdout:
            rows, held_out = split(rows, self.holdout)
            if not held_out:
                raise UsageError(
                    f"{self._path} has one row of each label, so none can be held out: add rows, choose "
                    "another label_column, or set test to a CSV of held-out rows"
                )
        elif self._test_path is not None:
            held_out = read(self._test_path, self._columns, self._may_have_several)
        for row in held_out:
            for label in set(row.labels) - labels:
                raise UsageError(
                    f"{self._test_path}, line {row.line}: no row of {self._path} has the label {label!r}: correct "
                    "it, add rows to train on, or choose the column with label_column"
                )
        train, validated = split(rows, self.validation) if self.validation else (rows, [])
        if self._test_path is None and not self.holdout:
            held_out = validated or rows
        known = {label for row in train for label in row.labels}
        # a label of a row with several may be in rows set aside only
        back = [row for row in validated if not known.issuperset(row.labels)]
        if back:
            train, validated = [*train, *back], [row for row in validated if row not in back]
        return train, validated, held_out


def _error(scores: Tensor, true: Tensor) -> float:
    """The share of rows whose best label is not theirs."""
    return 1 - float(true[torch.arange(len(true)), scores.argmax(1)].float().mean())


def _macro_f1(found: Tensor, true: Tensor) -> float:
    """The mean over labels of the harmonic mean of precision and recall."""
    answered = functional.one_hot(found, true.shape[1]).bool()
    hits, sums = (answered & true).sum(0), answered.sum(0) + true.sum(0)
    return float((2 * hits[sums > 0] / sums[sums > 0]).mean())
