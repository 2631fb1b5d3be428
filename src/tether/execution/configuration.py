"""run.json: what was run and how it ended, with a hash that shows damage."""

from __future__ import annotations

import hashlib
import json
from pathlib import Path
from typing import Any

import msgspec

from tether.errors import Damaged, UsageError
from tether.execution.checkpoint import Count, replacing

#: of run.json; version 1 had no hash
VERSION = 2


class _Named(msgspec.Struct):
    name: str


class _Config(msgspec.Struct):
    """What readers of run.json rely on; it may hold more."""

    version: Count
    status: str
    task: _Named
    protocol: _Named
    runtime: _Named
    workers: Count
    reason: str = ""
    error: str | None = None
    request: dict[str, Any] = {}
    result: dict[str, Any] | None = None
    checkpoints: str | None = None


def write_config(path: Path, config: dict[str, Any]) -> None:
    """Replace the file as a whole."""
    plain = json.loads(json.dumps(config, default=str))
    with replacing(path) as partial:
        partial.write_text(json.dumps({**plain, "sha256": _hash(plain)}, indent=2))


def read_config(path: Path) -> dict[str, Any]:
    """What was written; Damaged if the file is not that, UsageError if a newer Tether wrote it."""
    try:
        config: dict[str, Any] = json.loads(path.read_bytes())
        version = msgspec.convert(config, _Config).version
    except OSError as error:
        raise Damaged(f"run.json cannot be read: {error.strerror}") from None
    except (ValueError, RecursionError) as error:
        raise Damaged(f"run.json is damaged: {error}") from None
    stored = config.pop("sha256", None)
    if (stored is not None or version == VERSION) and stored != _hash(config):
        raise Damaged("run.json is damaged: its content does not match its hash")
    if version > VERSION:
        raise UsageError(f"{path} has version {version}, and this Tether reads up to {VERSION}: use the newer Tether")
    return config


def _hash(config: dict[str, Any]) -> str:
    return hashlib.sha256(json.dumps(config, sort_keys=True).encode()).hexdigest()
