"""Sends requests at a fixed rate and prints how long the answers took: python -m tether.bench.load < settings as JSON.

A request's time counts from when it was due, so that a service that falls behind cannot hide it.
"""

from __future__ import annotations

import asyncio
import json
import math
import sys
import time
from typing import Any
from urllib.parse import urlsplit

_CONNECTIONS = 64


async def measure(url: str, headers: dict[str, str], body: str, rate: float, seconds: float) -> dict[str, Any]:
    """POST `body` to `url` at this rate per second."""
    parts = urlsplit(url)
    host, port = parts.hostname or "", parts.port or 80
    lines = {"Host": f"{host}:{port}", "Content-Length": str(len(body.encode())), **headers}
    head = f"POST {parts.path} HTTP/1.1\r\n" + "".join(f"{name}: {value}\r\n" for name, value in lines.items())
    request = (head + "\r\n" + body).encode()
    free: asyncio.LifoQueue[tuple[asyncio.StreamReader, asyncio.StreamWriter]] = asyncio.LifoQueue()
    opened = [await asyncio.open_connection(host, port) for _ in range(_CONNECTIONS)]
    for connection in opened:
        free.put_nowait(connection)
    took: list[float] = []
    failed = 0

    async def one(due: float) -> None:
        nonlocal failed
        reader, writer = await free.get()
        try:
            if reader.at_eof():  # a service closes connections that nobody has used for a while
                reader, writer = await asyncio.open_connection(host, port)
            writer.write(request)
            answer = (await reader.readuntil(b"\r\n\r\n")).lower()
            await reader.readexactly(int(answer.partition(b"content-length:")[2].split()[0]))
            failed += b" 200 " not in answer[:16]
            took.append(time.monotonic() - due)
        except (OSError, asyncio.IncompleteReadError, IndexError, ValueError):
            failed += 1
            reader, writer = await asyncio.open_connection(host, port)
        free.put_nowait((reader, writer))

    began = time.monotonic()
    tasks = []
    for number in range(round(rate * seconds)):
        due = began + number / rate
        await asyncio.sleep(due - time.monotonic())
        tasks.append(asyncio.create_task(one(due)))
    await asyncio.gather(*tasks)
    spent = time.monotonic() - began
    while not free.empty():
        free.get_nowait()[1].close()
    took.sort()

    def quantile(share: float) -> float:
        return 1000 * took[min(len(took) - 1, math.ceil(share * len(took)) - 1)] if took else math.nan

    return {
        "requests": len(tasks),
        "failed": failed,
        "per_second": len(took) / spent,
        "p50_ms": quantile(0.5),
        "p99_ms": quantile(0.99),
        "most_ms": quantile(1.0),
    }


if __name__ == "__main__":
    print(json.dumps(asyncio.run(measure(**json.load(sys.stdin)))))
