"""Bodies of requests: read with a bound, inflated with a bound, and the parts of an upload taken from their bytes.

Clients differ in the shape of an upload: some give both parts a file name, some none, some send it in chunks without a
length. So the parts are told apart by their names alone, and never by what a client calls its file.
"""

from __future__ import annotations

import asyncio
import json
import zlib
from collections.abc import AsyncIterator, Collection
from tempfile import SpooledTemporaryFile
from typing import Any

from python_multipart.exceptions import MultipartParseError
from python_multipart.multipart import MultipartParser, parse_options_header
from starlette.requests import ClientDisconnect, Request

from tether.service.problems import Problem

_PARTS_MAX = 1_000
_HEADER_BYTES_MAX = 8_192
#: larger parts go to a file
_MEMORY_BYTES_MAX = 2**20

Spool = SpooledTemporaryFile[bytes]


async def read_body(request: Request, bytes_max: int) -> bytearray:
    """The whole body, inflated if it was compressed; 413 if it is larger than allowed."""
    whole = bytearray()
    async for chunk in _inflated(request, bytes_max):
        whole += chunk
    return whole


async def read_json(request: Request, bytes_max: int) -> Any:
    """The body as JSON; 400 if it is not."""
    body = await read_body(request, bytes_max)
    try:
        return json.loads(body.decode("utf-8-sig"), parse_constant=_refuse_constant)
    except (ValueError, RecursionError):
        raise Problem(400, "The body is not JSON") from None


def _refuse_constant(name: str) -> None:
    raise ValueError(name)


async def read_file(request: Request, bytes_max: int, seconds_max: float) -> Spool:
    """The whole body, in a file if it is large."""
    file = _spool()
    try:
        async with asyncio.timeout(seconds_max):
            async for chunk in _inflated(request, bytes_max):
                file.write(chunk)
    except TimeoutError:
        raise _too_slow(seconds_max) from None
    return file


def contents(file: Spool) -> bytes:
    """All that is in a file."""
    file.seek(0)
    return file.read()


def _spool() -> Spool:
    return SpooledTemporaryFile(_MEMORY_BYTES_MAX)


async def read_parts(request: Request, names: Collection[str], bytes_max: int, seconds_max: float) -> dict[str, Spool]:
    """The parts of a multipart body that have these names."""
    kind, options = parse_options_header(request.headers.get("content-type", ""))
    boundary = options.get(b"boundary", b"")
    if kind != b"multipart/form-data" or not boundary:
        raise Problem(415, "Expected a body of type multipart/form-data")
    parts = _Parts(names)
    try:
        parser = MultipartParser(boundary, parts.callbacks())  # type: ignore[arg-type]
        async with asyncio.timeout(seconds_max):
            async for chunk in _inflated(request, bytes_max):
                parser.write(chunk)
        parser.finalize()
    except TimeoutError:
        raise _too_slow(seconds_max) from None
    except MultipartParseError as error:
        raise Problem(400, f"The multipart body is malformed: {error}") from None
    if not parts.ended:
        raise Problem(400, "The multipart body is malformed: it has no end")
    return parts.found


class _Parts:
    """Collects those of the parts that a parser finds which have certain names."""

    def __init__(self, names: Collection[str]) -> None:
        self.found: dict[str, Spool] = {}
        self.ended = False
        self._names = names
        self._count = 0
        self._field = bytearray()
        self._value = bytearray()
        self._headers: dict[bytes, bytes] = {}
        self._data: Spool | None = None

    def callbacks(self) -> dict[str, Any]:
        return {
            "on_part_begin": self._begin,
            "on_header_field": self._on_field,
            "on_header_value": self._on_value,
            "on_header_end": self._on_header,
            "on_headers_finished": self._on_headers,
            "on_part_data": self._on_data,
            "on_end": self._on_end,
        }

    def _begin(self) -> None:
        self._headers = {}
        self._count += 1
        if self._count > _PARTS_MAX:
            raise Problem(400, f"The multipart body has more than {_PARTS_MAX} parts")

    def _on_field(self, data: bytes, start: int, end: int) -> None:
        self._field += data[start:end]
        self._check_header()

    def _on_value(self, data: bytes, start: int, end: int) -> None:
        self._value += data[start:end]
        self._check_header()

    def _check_header(self) -> None:
        if len(self._field) + len(self._value) > _HEADER_BYTES_MAX:
            raise Problem(400, "The multipart body has a header that is too long")

    def _on_header(self) -> None:
        self._headers[bytes(self._field).lower()] = bytes(self._value)
        self._field, self._value = bytearray(), bytearray()

    def _on_headers(self) -> None:
        _, options = parse_options_header(self._headers.get(b"content-disposition", b""))
        name = options.get(b"name", b"").decode("utf-8", "replace")
        self._data = None
        if name in self._names:
            if name in self.found:
                raise Problem(400, f"The multipart body has two parts {name}")
            self._data = self.found[name] = _spool()

    def _on_data(self, data: bytes, start: int, end: int) -> None:
        if self._data is not None:
            self._data.write(data[start:end])

    def _on_end(self) -> None:
        self.ended = True


async def _inflated(request: Request, bytes_max: int) -> AsyncIterator[bytes]:
    encoding = request.headers.get("content-encoding", "identity").strip().lower()
    if encoding not in ("identity", "", "gzip"):
        raise Problem(415, f"Content-Encoding {encoding[:50]!r} is not known; send gzip or none")
    length = request.headers.get("content-length", "0")
    if length.isdigit() and int(length) > bytes_max:
        raise _too_large(bytes_max)
    inflate = zlib.decompressobj(16 + zlib.MAX_WBITS) if encoding == "gzip" else None
    received = 0
    try:
        async for chunk in request.stream():
            while chunk:
                piece = chunk
                chunk = b""
                if inflate is not None:
                    try:
                        piece = inflate.decompress(piece, 2**20)
                    except zlib.error:
                        raise Problem(400, "The body is not gzip, although it says so") from None
                    chunk = inflate.unconsumed_tail
                received += len(piece)
                if received > bytes_max:
                    raise _too_large(bytes_max)
                yield piece
    except ClientDisconnect:
        raise Problem(400, "The body ended early") from None
    if inflate is not None and not inflate.eof:
        raise Problem(400, "The gzip body ended early")


def _too_slow(seconds_max: float) -> Problem:
    return Problem(408, f"The body did not arrive within {seconds_max:g} seconds")


def _too_large(bytes_max: int) -> Problem:
    return Problem(413, f"The body is too large: at most {bytes_max:,} bytes are allowed")
