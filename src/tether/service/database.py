"""A small door to SQLite or PostgreSQL: statements with `?`, rows as dictionaries, a connection for each thread."""

from __future__ import annotations

import sqlite3
import threading
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from tether.errors import UsageError, missing_extra

_BUSY_SECONDS = 30.0


class Database:
    """Statements run in a transaction, which is on disk when `transaction` returns."""

    def __init__(self, path: Path, url: str = "") -> None:
        """An SQLite file, or PostgreSQL at a URL such as postgresql://user@host/name."""
        self._path = path
        self._url = url
        self._local = threading.local()
        if url and not url.startswith(("postgresql://", "postgres://")):
            raise UsageError(f"database {url.partition('://')[0]!r} is not known: pass postgresql://USER@HOST/NAME")
        self._errors: tuple[type[Exception], ...] = (sqlite3.OperationalError,)
        if url:
            try:
                import psycopg
            except ImportError:
                raise missing_extra("psycopg", "serve") from None
            self._errors = (psycopg.OperationalError, psycopg.InterfaceError)
        try:
            self._connection()
        except self._errors as error:
            raise UsageError(f"the database cannot be opened: {error}") from None

    def _connection(self) -> Any:
        connection = getattr(self._local, "connection", None)
        if connection is None:
            connection = self._local.connection = self._connect()
        return connection

    def _connect(self) -> Any:
        if self._url:
            import psycopg
            from psycopg.rows import dict_row

            return psycopg.connect(self._url, row_factory=dict_row, autocommit=True)
        connection = sqlite3.connect(self._path, timeout=_BUSY_SECONDS, isolation_level=None, check_same_thread=False)
        connection.row_factory = sqlite3.Row
        connection.execute("PRAGMA journal_mode=WAL")
        connection.execute("PRAGMA synchronous=FULL")  # an answer that was given survives a loss of power
        connection.execute("PRAGMA secure_delete=ON")
        return connection

    def query(self, statement: str, *values: Any) -> list[dict[str, Any]]:
        """The rows that a statement returns."""
        try:
            return self._run(statement, values)
        except self._errors:
            if not self._url:
                raise
            self.close()  # the server may have been restarted; reading again does no harm
            return self._run(statement, values)

    def _run(self, statement: str, values: Sequence[Any]) -> list[dict[str, Any]]:
        if self._url:  # PostgreSQL has no NUL in its texts, so nothing with one is found
            statement = statement.replace("?", "%s")
            values = [value.replace("\0", "\ufffd") if isinstance(value, str) else value for value in values]
        cursor = self._connection().execute(statement, values)
        return [dict(row) for row in cursor.fetchall()] if cursor.description else []

    @contextmanager
    def transaction(self) -> Iterator[None]:
        """All statements inside, or none of them."""
        try:
            self._connection().execute("BEGIN" if self._url else "BEGIN IMMEDIATE")
        except self._errors:
            if not self._url:
                raise
            self.close()
            self._connection().execute("BEGIN")
        try:
            yield
        except BaseException:
            try:
                self._connection().execute("ROLLBACK")
            except self._errors:
                self.close()
            raise
        self._connection().execute("COMMIT")

    def close(self) -> None:
        """Close this thread's connection; the next statement opens another."""
        connection = getattr(self._local, "connection", None)
        self._local.connection = None
        if connection is not None:
            connection.close()
