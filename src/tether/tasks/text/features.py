"""Texts as sparse vectors: words, pairs of words, and runs of 2 to 5 characters within words, weighted by tf-idf.

A feature is known by a 64-bit hash of its characters, and the features that were seen in training are a sorted list of
such hashes. So texts become vectors by arithmetic on arrays, a vocabulary of a million features is one tensor, and two
features share a hash with a probability of less than one in ten million.
"""

from __future__ import annotations

import re
import unicodedata
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

Floats = NDArray[np.float32]
Integers = NDArray[np.int64]
Hashes = NDArray[np.uint64]

#: characters of scripts that write words without spaces between them, or with endings that hide the word: Chinese and
#: Japanese characters, Hangul syllables, Thai
_UNSPACED = "\u0e00-\u0e7f\u3005-\u3007\u3040-\u30ff\u3400-\u4dbf\u4e00-\u9fff\uac00-\ud7af\uf900-\ufaff"
#: one such character; or a word or number, including apostrophes inside it; or one punctuation mark
_WORD = re.compile(rf"[{_UNSPACED}]|[^\W{_UNSPACED}]+(?:'[^\W{_UNSPACED}]+)*|[^\w\s]")
#: for runs of characters: words as they are written, in every script
_RUN = re.compile(r"\w+|[^\w\s]")
#: vowel signs of Arabic and the stroke that stretches words, which most writers leave out; and one form for letters
#: that are written in several ways
_ARABIC_SIGNS = re.compile("[\u0610-\u061a\u0640\u064b-\u065f\u0670]")
_ARABIC_FORMS = str.maketrans("أإآٱىةؤئ", "ااااي" + "هوي")
#: characters of the texts that become features at once, which bounds memory
_CHUNK_CHARACTERS = 1 << 20
_LENGTHS = (2, 3, 4, 5)
#: odd, so it has an inverse modulo 2 ** 64
_BASE = 0x9E3779B97F4A7C15
_INVERSE = pow(_BASE, -1, 1 << 64)
#: with more rows than this, features that only one row has are left out
_PRUNED_ROWS = 3000
#: features that are known at most: the most frequent ones
_FEATURES_MAX = 1 << 20


def normalize(text: str) -> str:
    """Lower case, one form for each character, and Arabic without vowel signs."""
    text = unicodedata.normalize("NFKC", text).lower()
    if any("\u0600" <= character <= "\u06ff" for character in text):
        text = _ARABIC_SIGNS.sub("", text).translate(_ARABIC_FORMS)
    return text


def tokens(text: str) -> list[str]:
    """The words and punctuation marks of a text; in Japanese, Chinese, Korean and Thai, its characters."""
    return _WORD.findall(normalize(text))


@dataclass(frozen=True)
class Matrix:
    """Sparse rows: `columns[starts[i]:starts[i + 1]]` are the features of row i, with the weights `values`."""

    starts: Integers
    columns: Integers
    values: Floats

    def __len__(self) -> int:
        return len(self.starts) - 1

    def with_dense(self, vectors: Floats, column: int) -> Matrix:
        """The rows with a dense vector behind each, whose first value has this column."""
        count, width = vectors.shape
        ends = np.repeat(self.starts[1:], width)
        columns = np.tile(np.arange(column, column + width), count)
        starts = self.starts + width * np.arange(count + 1)
        return Matrix(starts, np.insert(self.columns, ends, columns), np.insert(self.values, ends, vectors.reshape(-1)))


@dataclass(frozen=True)
class Features:
    """The features of the texts that it was made from, and how much each counts."""

    #: ascending; the lowest bit says whether it is a run of characters
    hashes: Hashes
    #: inverse document frequencies
    weights: Floats

    @staticmethod
    def of(texts: Sequence[str]) -> tuple[Features, Matrix]:
        """The features of these texts, and the texts as vectors."""
        rows, hashes, counts = _joined(texts)
        found, inverse, frequency = np.unique(hashes, return_inverse=True, return_counts=True)
        kept = frequency >= (2 if len(texts) > _PRUNED_ROWS else 1)
        if kept.sum() > _FEATURES_MAX:
            kept &= frequency > np.partition(frequency, -_FEATURES_MAX)[-_FEATURES_MAX]
        weights = (np.log((1 + len(texts)) / (1 + frequency[kept])) + 1).astype(np.float32)
        features = Features(found[kept], weights)
        places = np.where(kept, np.cumsum(kept) - 1, -1)[inverse]
        return features, features._matrix(len(texts), rows, places, counts)

    def matrix(self, texts: Sequence[str]) -> Matrix:
        """Texts as vectors; what was not seen before is left out."""
        rows, hashes, counts = _joined(texts)
        if not len(self.hashes):
            return self._matrix(len(texts), rows, np.full(len(rows), -1), counts)
        places = np.searchsorted(self.hashes, hashes)
        places[places == len(self.hashes)] = 0
        places[self.hashes[places] != hashes] = -1
        return self._matrix(len(texts), rows, places, counts)

    def _matrix(self, count: int, rows: Integers, places: Integers, counts: Integers) -> Matrix:
        """(1 + ln tf) x idf, words and runs of characters each of length 1, and a constant as the last column."""
        known = places >= 0
        rows, places = rows[known], places[known]
        values = ((1 + np.log(counts[known])) * self.weights[places]).astype(np.float32)
        block = 2 * rows + (self.hashes[places] & np.uint64(1)).astype(np.int64)
        norms = np.sqrt(np.bincount(block, values * values, 2 * count))
        values = (values / norms[block]).astype(np.float32)
        # rows are ascending already: the constant goes behind each row's features
        ends = np.cumsum(np.bincount(rows, minlength=count))
        columns = np.insert(places, ends, len(self.hashes))
        starts = np.concatenate(([0], ends + np.arange(1, count + 1)))
        return Matrix(starts, columns, np.insert(values, ends, 1.0))

    def coverage(self, texts: Sequence[str]) -> Floats:
        """How much of each text was seen in training: the share of its words, of which rare ones count more."""
        text_of, starts, ends, digest = _segments([normalize(text) for text in texts], _WORD)
        words = _mixed(digest(starts, ends), 1) & ~np.uint64(1)
        places = np.searchsorted(self.hashes, words)
        places[places == len(self.hashes)] = 0
        known = self.hashes[places] == words if len(self.hashes) else np.zeros(len(words), bool)
        # a word that no row had is as rare as a word can be
        weights = np.where(known, self.weights[places], self.weights.max()) if len(self.hashes) else np.ones(len(words))
        whole = np.bincount(text_of, weights, len(texts))
        found: Floats = (np.bincount(text_of, weights * known, len(texts)) / np.maximum(whole, 1e-9)).astype(np.float32)
        return found

    @property
    def count(self) -> int:
        """Columns of a matrix."""
        return len(self.hashes) + 1


# ---- hashes ---------------------------------------------------------------------------------------------------------


def _joined(texts: Sequence[str]) -> tuple[Integers, Hashes, Integers]:
    """Every feature of every text, ordered by text: which text, its hash, how often."""
    parts = list(_in_chunks(texts))
    if not parts:
        return np.empty(0, np.int64), np.empty(0, np.uint64), np.empty(0, np.int64)
    rows, hashes, counts = (np.concatenate(part) for part in zip(*parts, strict=True))
    return rows, hashes, counts


def _in_chunks(texts: Sequence[str]) -> Iterator[tuple[Integers, Hashes, Integers]]:
    start = 0
    while start < len(texts):
        stop, characters = start, 0
        while stop < len(texts) and (stop == start or characters + len(texts[stop]) < _CHUNK_CHARACTERS):
            characters += len(texts[stop])
            stop += 1
        rows, hashes = _features([normalize(text) for text in texts[start:stop]])
        order = np.lexsort((hashes, rows))
        rows, hashes = rows[order], hashes[order]
        first = np.flatnonzero(np.append(True, (rows[1:] != rows[:-1]) | (hashes[1:] != hashes[:-1])))[: len(rows)]
        yield rows[first] + start, hashes[first], np.diff(np.append(first, len(rows)))
        start = stop


def _features(texts: Sequence[str]) -> tuple[Integers, Hashes]:
    """The features of some texts, each as often as it occurs: the text, and the hash."""
    rows, hashes = [], []
    text_of, starts, ends, digest = _segments(texts, _WORD)
    single = _mixed(digest(starts, ends), 1)
    first, last = np.append(True, text_of[1:] != text_of[:-1]), np.append(text_of[1:] != text_of[:-1], True)
    before = np.where(first, np.uint64(1), np.roll(single, 1))
    closing = single[last] if len(single) else single
    with np.errstate(over="ignore"):
        rows += [text_of, text_of, text_of[last]] if len(single) else []
        hashes += [single, _mixed(before * np.uint64(3) + single, 2), _mixed(closing * np.uint64(3), 2)]
    hashes = [found & ~np.uint64(1) for found in hashes] if rows else []

    text_of, starts, ends, digest = _segments(texts, _RUN)
    for length in _LENGTHS:
        # a word with a space on either side has as many runs; its place is that of the space before it
        runs = np.maximum(ends - starts + 3 - length, 0)
        word = np.repeat(np.arange(len(runs)), runs)
        offset = np.arange(len(word)) - np.repeat(np.cumsum(runs) - runs, runs)
        begin = starts[word] - 1 + offset
        rows.append(text_of[word])
        hashes.append(_mixed(digest(begin, begin + length), length + 8) | np.uint64(1))
    return np.concatenate(rows), np.concatenate(hashes)


def _segments(texts: Sequence[str], pattern: re.Pattern[str]) -> tuple[Integers, Integers, Integers, _Digest]:
    """Where the tokens of texts are in one long line with single spaces between them, and its digest."""
    found = [pattern.findall(text) for text in texts]
    lengths = np.array([len(token) for text in found for token in text], np.int64)
    text_of = np.repeat(np.arange(len(found)), [len(text) for text in found])
    line = " " + "".join(f"{token} " for text in found for token in text)
    starts = np.cumsum(lengths + 1) - lengths
    return text_of, starts, starts + lengths, _Digest(line)


class _Digest:
    """Hashes of parts of a line: the sum of character x base ** place, divided by base ** start."""

    def __init__(self, line: str) -> None:
        codes = np.frombuffer(line.encode("utf-32-le", "surrogatepass"), np.uint32).astype(np.uint64)
        with np.errstate(over="ignore"):
            powers = np.cumprod(np.full(len(codes), _BASE, np.uint64))
            self._inverses = np.cumprod(np.full(len(codes) + 1, _INVERSE, np.uint64))
            self._sums = np.concatenate((np.zeros(1, np.uint64), np.cumsum((codes + np.uint64(1)) * powers)))

    def __call__(self, starts: Integers, stops: Integers) -> Hashes:
        with np.errstate(over="ignore"):
            found: Hashes = (self._sums[stops] - self._sums[starts]) * self._inverses[starts]
        return found


def _mixed(values: Hashes, salt: int) -> Hashes:
    """Values with all bits mixed (the finalizer of MurmurHash3), so that lowest bits can be spared."""
    with np.errstate(over="ignore"):
        values = values + np.uint64(salt) * np.uint64(0xA0761D6478BD642F)
        for factor in (0xFF51AFD7ED558CCD, 0xC4CEB9FE1A85EC53):
            values = (values ^ (values >> np.uint64(33))) * np.uint64(factor)
        mixed: Hashes = values ^ (values >> np.uint64(33))
    return mixed
