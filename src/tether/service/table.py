"""The CSV of an upload: rows of a text and its classes, and line and column of everything that is wrong in it.

The form is that of the original service: UTF-8 without a header, `text,class[,class...]`; quotes around a value with
commas or quotes, which are doubled inside; no tabs, line ends or NUL inside a value, but the escapes \\t, \\n and \\r
in a text. Lines end with LF, CRLF or CR. A byte order mark, blank lines and a missing last line end are accepted.
"""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass, field

from tether.service.problems import Problem
from tether.service.settings import Settings

_LINE_END = re.compile(r"\r\n|\r|\n")
_QUOTED = re.compile(r'"((?:[^"]|"")*)"')
_ESCAPED = re.compile(r"\\([tnr\\])")
_UNESCAPED = {"t": "\t", "n": "\n", "r": "\r", "\\": "\\"}
_FORBIDDEN = re.compile(r"[\x00\t\v\f\x1c-\x1e\x85\u2028\u2029]")
#: problems and duplicates that are listed; all are counted
LISTED_MAX = 1_000

TOO_SMALL, TOO_MANY, TOO_LONG, MALFORMED = (
    "Data too small",
    "Too many data instances",
    "Phrase too long",
    "Malformed data",
)


@dataclass(frozen=True)
class Row:
    line: int
    text: str
    classes: tuple[str, ...]


@dataclass(frozen=True)
class Mistake:
    """Something wrong at a place of the file; the first line and the first column are 1."""

    line: int
    column: int
    kind: str
    message: str

    def __str__(self) -> str:
        return f"{self.kind}: line {self.line}, column {self.column}: {self.message}"


@dataclass
class Table:
    """What was found in a file. `mistakes` and `duplicates` list the first thousand of each."""

    rows: list[Row] = field(default_factory=list)
    mistakes: list[Mistake] = field(default_factory=list)
    mistake_count: int = 0
    #: lines that repeat the text and classes of an earlier line, and that line
    duplicates: list[tuple[int, int]] = field(default_factory=list)
    duplicate_count: int = 0
    #: lines with the text of an earlier line but other classes, and that line
    conflicts: list[tuple[int, int]] = field(default_factory=list)
    conflict_count: int = 0
    classes: Counter[str] = field(default_factory=Counter)

    def add_mistake(self, mistake: Mistake) -> None:
        self.mistake_count += 1
        if len(self.mistakes) < LISTED_MAX:
            self.mistakes.append(mistake)

    def check(self) -> None:
        """Raise the first mistake as the answer to an upload."""
        if self.mistakes:
            more = f"{self.mistake_count} mistakes; the first are: " if self.mistake_count > 1 else ""
            raise Problem(400, str(self.mistakes[0]), more + "; ".join(map(str, self.mistakes[:20])) if more else "")


def read_table(data: bytes, settings: Settings) -> Table:
    """Read a file, wrong or not; what is wrong is in `mistakes`."""
    table = Table()
    try:
        text = data.decode("utf-8-sig")
    except UnicodeDecodeError as error:
        before = data[: error.start].decode("utf-8-sig", "replace")
        lines = _LINE_END.split(before)
        message = f"byte 0x{data[error.start]:02x} is not UTF-8; save the file in that encoding"
        table.add_mistake(Mistake(len(lines), len(lines[-1]) + 1, MALFORMED, message))
        return table
    seen: dict[str, Row] = {}
    #: a line is not split when it is longer than its values can be, doubled quotes and escapes included
    line_characters_max = 2 * (settings.text_characters_max + settings.row_classes_max * settings.class_characters_max)
    for number, line in _lines(text):
        if not line.strip():
            continue
        if len(table.rows) >= settings.rows_max:
            message = f"more than {settings.rows_max:,} rows"
            table.add_mistake(Mistake(number, 1, TOO_MANY, message))
            break
        if len(line) > line_characters_max:
            message = f"the line has {len(line):,} characters"
            table.add_mistake(Mistake(number, line_characters_max + 1, TOO_LONG, message))
            continue
        row = _row(line, number, table, settings)
        if row is None:
            continue
        table.rows.append(row)
        table.classes.update(set(row.classes))
        earlier = seen.setdefault(row.text, row)
        if earlier is not row:
            same = set(earlier.classes) == set(row.classes)
            table.duplicate_count += same
            table.conflict_count += not same
            listed = table.duplicates if same else table.conflicts
            if len(listed) < LISTED_MAX:
                listed.append((number, earlier.line))
    if not table.mistakes:
        _check_size(table, settings)
    return table


def _check_size(table: Table, settings: Settings) -> None:
    if len(table.rows) < settings.rows_min:
        message = f"{len(table.rows)} rows; at least {settings.rows_min} are needed"
        table.add_mistake(Mistake(1, 1, TOO_SMALL, message))
    elif len(table.classes) < 2:
        message = f"all rows have the class {next(iter(table.classes))!r:.100}; at least two classes are needed"
        table.add_mistake(Mistake(1, 1, TOO_SMALL, message))
    elif len(table.classes) > settings.classes_max:
        message = f"{len(table.classes):,} classes; at most {settings.classes_max:,} are allowed"
        table.add_mistake(Mistake(1, 1, TOO_MANY, message))


def _lines(text: str) -> Iterator[tuple[int, str]]:
    """Every line with its number, without a copy of the whole."""
    start, number = 0, 1
    for end in _LINE_END.finditer(text):
        yield number, text[start : end.start()]
        start, number = end.end(), number + 1
    yield number, text[start:]


def _row(line: str, number: int, table: Table, settings: Settings) -> Row | None:
    """The row in a line, or None where it has a mistake, which is added to the table."""

    def wrong(column: int, message: str, kind: str = MALFORMED) -> Row | None:
        table.add_mistake(Mistake(number, column, kind, message))
        return None

    forbidden = _FORBIDDEN.search(line)
    if forbidden is not None:
        name = {"\t": "a tab", "\0": "a NUL"}.get(forbidden[0], f"U+{ord(forbidden[0]):04X}")
        return wrong(forbidden.start() + 1, f"{name} is not allowed; write \\t for a tab in a text")
    values: list[tuple[int, str]] = []
    at = 0
    while True:
        if len(values) > settings.row_classes_max:
            return wrong(at + 1, f"more than {settings.row_classes_max} classes in one row")
        start = at
        while start < len(line) and line[start] == " ":
            start += 1
        if line.startswith('"', start):
            quoted = _QUOTED.match(line, start)
            if quoted is None:
                return wrong(start + 1, "this quote is not closed on its line; write a quote inside a value twice")
            values.append((start + 1, quoted[1].replace('""', '"')))
            at = quoted.end()
            while at < len(line) and line[at] == " ":
                at += 1
            if at < len(line) and line[at] != ",":
                return wrong(at + 1, "expected a comma after the closing quote; write a quote inside a value twice")
        else:
            end = line.find(",", at)
            end = end if end >= 0 else len(line)
            value = line[at:end]
            if '"' in value:
                return wrong(at + value.index('"') + 1, "a value with a quote must be in quotes, with that quote twice")
            values.append((start + 1, value))
            at = end
        if at >= len(line):
            break
        at += 1
    if len(values) < 2:
        return wrong(len(line) + 1, "expected a text, a comma and a class")
    (text_column, raw), *labels = values
    text = _ESCAPED.sub(lambda found: _UNESCAPED[found[1]], raw).strip()
    if not text:
        return wrong(text_column, "the text is empty")
    if len(text) > settings.text_characters_max:
        message = f"the text has {len(text):,} characters; at most {settings.text_characters_max:,} are allowed"
        return wrong(text_column + settings.text_characters_max, message, TOO_LONG)
    classes: dict[str, None] = {}
    for column, label in labels:
        name = label.strip()
        if not name:
            return wrong(column, "the class is empty")
        if len(name) > settings.class_characters_max:
            message = f"the class has {len(name):,} characters; at most {settings.class_characters_max:,} are allowed"
            return wrong(column, message, TOO_LONG)
        classes[name] = None
    return Row(number, text, tuple(classes))
