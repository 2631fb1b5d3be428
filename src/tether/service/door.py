"""Around everything: what clients put before /v1, headers of every answer, and requests of other sites."""

from __future__ import annotations

import asyncio
import re
import secrets
from contextlib import suppress
from urllib.parse import urlsplit

from starlette.requests import Request
from starlette.responses import JSONResponse
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from tether.service.problems import Problem
from tether.service.settings import Settings

_PREFIX = re.compile(
    r"^((?:/natural-language-classifier/api)?(?:/instances/[^/]+)?(?:/natural-language-classifier/api)?)(/(?:v1|identity)/.*)$"
)
_LOOPBACK = ("localhost", "127.0.0.1", "[::1]")
#: how long, and in bytes how much, is still taken of the body of a request that is refused
_DRAIN_SECONDS, _DRAIN_BYTES = 10.0, 2**27
_SECURITY = {
    "Content-Security-Policy": "default-src 'none'; script-src 'self'; style-src 'self'; img-src 'self' data:; "
    "connect-src 'self'; base-uri 'none'; form-action 'none'; frame-ancestors 'none'",
    "X-Content-Type-Options": "nosniff",
    "Referrer-Policy": "no-referrer",
    "Cache-Control": "no-store",
}


def answered(problem: Problem) -> JSONResponse:
    """The answer to a request that is refused."""
    return JSONResponse(problem.body(), problem.code, problem.headers)


class Door:
    """An application with this around it."""

    def __init__(self, app: ASGIApp, settings: Settings) -> None:
        self._app = app
        self._settings = settings

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            return await self._app(scope, receive, send)
        transaction = secrets.token_hex(16)
        headers = dict(scope["headers"])
        body_ended = headers.get(b"content-length", b"0") == b"0" and b"transfer-encoding" not in headers

        async def take() -> Message:
            nonlocal body_ended
            message = await receive()
            body_ended = body_ended or not message.get("more_body", False)
            return message

        async def drain() -> None:
            """A client that is still sending would see its connection reset instead of the answer."""
            taken = 0
            with suppress(TimeoutError):
                async with asyncio.timeout(_DRAIN_SECONDS):
                    while not body_ended and taken < _DRAIN_BYTES:
                        taken += len((await take()).get("body", b""))

        scope["prefix"] = ""
        if (found := _PREFIX.match(scope["path"])) is not None:
            scope["prefix"] = found[1]
            scope["path"] = found[2]
            scope["raw_path"] = found[2].encode()

        async def answer(message: Message) -> None:
            if message["type"] == "http.response.start":
                await drain()
                message["headers"] = [
                    *message["headers"],
                    *((name.lower().encode(), value.encode()) for name, value in _SECURITY.items()),
                    (b"x-global-transaction-id", transaction.encode()),
                ]
            await send(message)

        try:
            self._check_site(Request(scope))
        except Problem as problem:
            return await answered(problem)(scope, take, answer)
        await self._app(scope, take, answer)

    def _check_site(self, request: Request) -> None:
        """Refuse requests from another site's page, which would act with its visitor's rights."""
        host = request.headers.get("host", "")
        if not self._settings.authenticate and re.sub(r":\d+$", "", host) not in _LOOPBACK:
            raise Problem(403, "Without keys the service answers only to a local name, such as localhost")
        origin = request.headers.get("origin")
        if origin is not None and urlsplit(origin).netloc != host:
            raise Problem(403, "Requests of other sites are refused")
        if request.headers.get("sec-fetch-site") == "cross-site" and request.method != "GET":
            raise Problem(403, "Requests of other sites are refused")
