"""Rows of labelled texts: read from a CSV, checked, and split."""

from __future__ import annotations

import csv
import io
import re
from pathlib import Path
from typing import NamedTuple

import numpy as np

from tether.errors import UsageError

#: separates the labels in a label column
SEPARATOR = "|"


class Row(NamedTuple):
    """A text, its labels (one unless rows may have several), and its line in the file."""

    text: str
    labels: tuple[str, ...]
    line: int

    @property
    def label(self) -> str:
        """The first of the labels."""
        return self.labels[0]


def find(data: str | Path | None) -> Path:
    if data is None:
        raise UsageError("task text needs a CSV with a text and its label in each row: pass --data FILE.csv")
    path = Path(data).expanduser().resolve()
    if path.is_dir():
        raise UsageError(f"{path} is a folder: pass --data FILE.csv")
    return path


def find_test(data: str | Path | None, test: str | Path | None) -> Path | None:
    """The file of held-out rows that was given, or else the one beside the training rows."""
    if test is not None:
        return Path(test).expanduser().resolve()
    path = find(data)
    beside = path.with_name(re.sub(r"train$", "test", path.stem) + path.suffix)
    return beside if beside != path and beside.is_file() else None


def read(path: Path, columns: tuple[str | None, str | None] | None, multilabel: bool = False) -> list[Row]:
    """The rows of a CSV; `columns` names its text and label columns and is None for a file without a header.

    With `multilabel`, a row may have several labels: all fields after the text, or the parts of the label column.
    """
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
        if len(fields) != len(first) and not (multilabel and columns is None and len(fields) > 1):
            raise UsageError(
                f"{path}, line {line} has {len(fields)} field{'' if len(fields) == 1 else 's'} and line {first_line} "
                f'has {len(first)}: separate text and label by a comma, and put a text with commas into quotes (")'
            )
        given = [fields[label_place]]
        if multilabel:
            given = fields[1:] if columns is None else fields[label_place].split(SEPARATOR)
        labels = tuple(dict.fromkeys(label.strip() for label in given if label.strip()))
        row = Row(fields[text_place].strip(), labels, line)
        if not row.text or not labels:
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


def split(rows: list[Row], share: float) -> tuple[list[Row], list[Row]]:
    """Set this share of the rows of every label aside, always the same rows; one row of each label always stays."""
    labels = np.array([row.label for row in rows])
    order = np.random.default_rng(0).permutation(len(rows))
    order = order[np.argsort(labels[order], kind="stable")]
    again = np.append(False, labels[order][1:] == labels[order][:-1])
    several = order[again]
    aside = set(several[np.arange(0, len(several), 1 / share).astype(int)].tolist())
    return [row for i, row in enumerate(rows) if i not in aside], [row for i, row in enumerate(rows) if i in aside]
