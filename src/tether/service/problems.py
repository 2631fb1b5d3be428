"""Errors as the interface shows them: `{"code", "error", "description"?}`."""

from __future__ import annotations

from typing import Any


class Problem(Exception):
    """A request that is refused. Clients show only `error`, so it says what is wrong by itself."""

    def __init__(self, code: int, error: str, description: str = "", *, retry_after: int | None = None) -> None:
        super().__init__(error)
        self.code = code
        self.error = error
        self.description = description
        self.headers = {"Retry-After": str(retry_after)} if retry_after is not None else {}
        if code == 401:
            self.headers["WWW-Authenticate"] = 'Basic realm="tether"'

    def body(self) -> dict[str, Any]:
        described = {"description": self.description} if self.description else {}
        return {"code": self.code, "error": self.error, **described}


def not_found(what: str = "Classifier not found.") -> Problem:
    """Also for what belongs to another owner, so that its existence stays private."""
    return Problem(404, what)
