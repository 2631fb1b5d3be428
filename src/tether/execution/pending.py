"""Writes that failed, as on a full disk, and are tried again. A run never ends because of one."""

from __future__ import annotations

from collections.abc import Callable


class PendingWrites:
    """Writes things by name; a write that fails stays pending until a later one under the same name succeeds.

    A run that lacks its trace or its newest checkpoint is better than no run.
    """

    def __init__(self, note: Callable[[str], None]) -> None:
        """`note` gets a message at the first failure of each name."""
        self._note = note
        self._pending: dict[str, Callable[[], None]] = {}
        self._reported: set[str] = set()

    @property
    def names(self) -> list[str]:
        """What could not be written so far."""
        return list(self._pending)

    def write(self, name: str, write: Callable[[], None]) -> None:
        """Write now, or keep it for the next `retry`."""
        try:
            write()
        except OSError as error:
            self._pending[name] = write
            if name not in self._reported:
                self._reported.add(name)
                self._note(
                    f"{name} cannot be written ({error.strerror or error}): the run continues and will try again"
                )
        else:
            self._pending.pop(name, None)

    def retry(self) -> None:
        """Try once more to write everything that is pending."""
        for name, write in list(self._pending.items()):
            self.write(name, write)
