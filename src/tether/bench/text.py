"""How well and how soon task text classifies, with nothing set, beside TF-IDF with a linear SVM on the same rows.

The SVM is scikit-learn's LinearSVC on word 1-2-grams and character 2-5-grams, sublinear. A run of the task is what
`tether train text` does on two workers, with a tenth of the training rows set aside as always. Its first answer is that
of the linear model; CPU seconds are those of all its processes.
"""

from __future__ import annotations

import csv
import resource
import tempfile
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Annotated, Any

import numpy as np
import typer

from tether.api import run
from tether.bench.common import NEVER, Report, Row, names
from tether.errors import UsageError
from tether.execution.progress import make_progress
from tether.tasks.text import Classifier, Text

#: by name: the file of training rows, the file of test rows (a tenth of the others if None), text and label column,
#: which have no names in a file without a header
SETS: dict[str, tuple[str, str | None, str | None, str | None]] = {
    "trec_coarse": ("trec_train.csv", "trec_test.csv", "text", "coarse"),
    "trec_fine": ("trec_train.csv", "trec_test.csv", "text", "fine"),
    "mr": ("mr_polarity.csv", None, "text", "label"),
    "banking77": ("banking77_train.csv", "banking77_test.csv", "text", "category"),
    "icd10": ("nlc/ICD-10-GT-AA.csv", None, None, None),
}
Rows = list[tuple[str, str]]


def text(
    data: Annotated[Path | None, typer.Option(help="The folder with the texts; always needed.")] = None,
    sets: Annotated[Sequence[str], names("Which sets. Use one for a first look.", "trec_fine,mr")] = tuple(SETS),
    per_class: Annotated[
        int | None, typer.Option(min=2, help="Train on this many rows of each label only, to see what few rows give.")
    ] = None,
    seed: Annotated[int, typer.Option(help="Of the run, and of the split of sets without test rows.")] = 0,
) -> Report:
    """Accuracy, macro-F1 and seconds of task text and of a linear SVM, and how many points more than the SVM."""
    if data is None:
        raise UsageError(f"benchmark 'text' needs a folder with {SETS['mr'][0]} and others: --data DIR")
    rows: list[Row] = []
    ratios: dict[str, float] = {}
    for name in sets:
        if name not in SETS:
            raise UsageError(f"there is no set {name!r}; there are {', '.join(SETS)}")
        train, test = _split(data, name, seed)
        if per_class is not None:
            train = _few(train, per_class, seed)
        svm, ours = _svm(train, test), _ours(train, test, seed)
        rows.append({"set": name, "rows": len(train), "labels": len({label for _, label in train}), **svm, **ours})
        ratios[f"points above the SVM, {name}"] = ours["accuracy"] - svm["svm_accuracy"]
    return {"benchmark": "text", "per_class": per_class, "seed": seed, "rows": rows, "ratios": ratios}


def _split(folder: Path, name: str, seed: int) -> tuple[Rows, Rows]:
    train_file, test_file, text_column, label_column = SETS[name]

    def read(file: str) -> Rows:
        try:
            with (folder / file).open(encoding="utf-8", newline="") as lines:
                if text_column is None or label_column is None:
                    return [(row[0].strip(), row[1].strip()) for row in csv.reader(lines) if row]
                return [(row[text_column].strip(), row[label_column].strip()) for row in csv.DictReader(lines)]
        except OSError as error:
            raise UsageError(f"{folder / file} cannot be read: {error.strerror}") from error

    rows = read(train_file)
    if test_file is not None:
        return rows, read(test_file)
    order = np.random.default_rng(seed).permutation(len(rows)).tolist()
    tenth = len(rows) // 10
    return [rows[i] for i in order[tenth:]], [rows[i] for i in order[:tenth]]


def _few(rows: Rows, per_class: int, seed: int) -> Rows:
    order = np.random.default_rng(seed).permutation(len(rows)).tolist()
    left: dict[str, int] = {}
    kept = []
    for place in order:
        label = rows[place][1]
        left[label] = left.get(label, per_class) - 1
        if left[label] >= 0:
            kept.append(rows[place])
    return kept


def _svm(train: Rows, test: Rows) -> dict[str, Any]:
    try:
        from sklearn.feature_extraction.text import TfidfVectorizer
        from sklearn.pipeline import make_pipeline, make_union
        from sklearn.svm import LinearSVC
    except ImportError:
        raise UsageError("benchmark 'text' needs scikit-learn: pip install 'tether[tasks]'") from None
    began, cpu = time.monotonic(), _cpu_seconds()
    model = make_pipeline(
        make_union(
            TfidfVectorizer(ngram_range=(1, 2), sublinear_tf=True),
            TfidfVectorizer(analyzer="char_wb", ngram_range=(2, 5), sublinear_tf=True),
        ),
        LinearSVC(),
    ).fit([text for text, _ in train], [label for _, label in train])
    found = model.predict([text for text, _ in test]).tolist()
    return {
        "svm_accuracy": _accuracy(found, test),
        "svm_macro_f1": _macro_f1(found, test),
        "svm_seconds": time.monotonic() - began,
        "svm_cpu_seconds": _cpu_seconds() - cpu,
    }


def _ours(train: Rows, test: Rows, seed: int) -> dict[str, Any]:
    with tempfile.TemporaryDirectory() as place:
        file = Path(place, "rows.csv")
        with file.open("w", encoding="utf-8", newline="") as lines:
            csv.writer(lines).writerows([("text", "label"), *train])
        began, cpu, first = time.monotonic(), _cpu_seconds(), 0.0

        def answers(_: float) -> None:
            nonlocal first
            first = time.monotonic() - began

        task = Text(file, holdout=0)
        task.on_linear = answers
        folder = Path(place, "run")
        run(task, run_dir=folder, seed=seed, evaluate_every=NEVER, trace=False, progress=make_progress(quiet=True))
        seconds, cpu_seconds = time.monotonic() - began, _cpu_seconds() - cpu
        found = [answer[0].label for answer in Classifier.load(folder).classify([text for text, _ in test], top=1)]
    return {
        "accuracy": _accuracy(found, test),
        "macro_f1": _macro_f1(found, test),
        "first_seconds": first,
        "seconds": seconds,
        "cpu_seconds": cpu_seconds,
    }


def _accuracy(found: Sequence[str], test: Rows) -> float:
    """In points of 100."""
    return 100 * sum(label == true for label, (_, true) in zip(found, test, strict=True)) / len(test)


def _macro_f1(found: Sequence[str], test: Rows) -> float:
    """In points of 100, over the labels that occur in answers or test rows."""
    true = [label for _, label in test]
    scores = []
    for label in {*found, *true}:
        hits = sum(label == answer == other for answer, other in zip(found, true, strict=True))
        scores.append(2 * hits / (found.count(label) + true.count(label)))
    return 100 * sum(scores) / len(scores)


def _cpu_seconds() -> float:
    """Of this process and of its children that have ended."""
    used = [resource.getrusage(who) for who in (resource.RUSAGE_SELF, resource.RUSAGE_CHILDREN)]
    return sum(usage.ru_utime + usage.ru_stime for usage in used)
