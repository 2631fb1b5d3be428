"""Checkpoints in any file system that Spark knows, named by a URL: hdfs://, s3a://, file://.

Hadoop's own file systems copy the files, in the JVM of the driver. A copy gets its final name when it is complete.
Where a file system cannot replace a file, there is a moment in which only the new copy exists, under its temporary
name; `get` finds it there.
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from tether.errors import UsageError
from tether.runtimes.spark import jvm


def is_url(text: str) -> bool:
    """Whether this names a place in a Hadoop file system, and not a path of this machine."""
    return re.match(r"[a-z][a-z0-9+.-]*://", text) is not None


class HadoopStorage:
    """Files and folders below a URL."""

    def __init__(self, url: str) -> None:
        if not is_url(url):
            raise UsageError(f"{url!r} is not a URL such as hdfs://HOST/PATH or file:///PATH")
        self.url = url.rstrip("/")
        self._java, settings = jvm.hadoop()
        try:
            with self._errors():
                self._files = self._path("").getFileSystem(settings)
        except OSError as error:
            raise UsageError(f"no file system for checkpoints: {error}") from None

    def put(self, source: Path, name: str) -> None:
        """Copy a file or a folder of this machine there; it appears under its name once the copy is complete."""
        with self._errors():
            final, partial = self._path(name), self._partial(name, source.is_dir())
            self._files.mkdirs(final.getParent())
            self._files.delete(partial, True)
            self._files.copyFromLocalFile(False, True, self._local(source), partial)
            if self._files.exists(final):
                self._files.delete(final, True)
            if not self._files.rename(partial, final):
                raise OSError(f"{self.url}/{name}: could not be renamed from {partial.getName()}")

    def get(self, name: str, to: Path) -> None:
        """Copy a file or a folder to a path that does not exist yet; FileNotFoundError if there is no such name."""
        with self._errors():
            found = next((path for path in (self._path(name), self._partial(name)) if self._files.exists(path)), None)
            if found is None:
                raise FileNotFoundError(f"{self.url}/{name} does not exist")
            self._files.copyToLocalFile(False, found, self._local(to), True)

    def names(self, folder: str = "") -> list[str]:
        """The names in a folder; none if it does not exist."""
        with self._errors():
            path = self._path(folder)
            return [entry.getPath().getName() for entry in self._files.listStatus(path)] if self._exists(path) else []

    def remove(self, name: str) -> None:
        with self._errors():
            self._files.delete(self._path(name), True)

    def _exists(self, path: Any) -> bool:
        return bool(self._files.exists(path))

    def _path(self, name: str) -> Any:
        return self._java.org.apache.hadoop.fs.Path(f"{self.url}/{name}" if name else self.url)

    def _partial(self, name: str, folder: bool = False) -> Any:
        """The temporary name of a copy. All folders share one, so that an interrupted copy does not stay for long."""
        parent, _, last = name.rpartition("/")
        return self._path(f"{parent}/.partial".lstrip("/") if folder else f"{parent}/.{last}.partial".lstrip("/"))

    def _local(self, path: Path) -> Any:
        return self._java.org.apache.hadoop.fs.Path(path.absolute().as_uri())

    @contextmanager
    def _errors(self) -> Iterator[None]:
        """Turns Java exceptions into OSError."""
        from py4j.protocol import Py4JError, Py4JJavaError

        try:
            yield
        except Py4JJavaError as error:
            raise OSError(f"{self.url}: {error.java_exception.toString()}") from None
        except Py4JError as error:
            raise OSError(f"{self.url}: {error}") from None
