"""How workers agree. Each file or package is one protocol: rules, options, messages and pure machines."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import fields
from typing import Any

from tether.errors import unknown
from tether.protocols.averaging import Averaging
from tether.protocols.base import Options
from tether.protocols.elastic import Elastic
from tether.protocols.grid import Grid
from tether.protocols.ledger import DEALING
from tether.protocols.mpca import Mpca
from tether.protocols.server import Server
from tether.protocols.single import Single
from tether.protocols.streaming import Streaming
from tether.protocols.tide import Tide

__all__ = [
    "DEALING",
    "Averaging",
    "Elastic",
    "Grid",
    "Mpca",
    "Options",
    "Server",
    "Single",
    "Streaming",
    "Tide",
    "known",
    "make",
]


def known() -> dict[str, type[Options]]:
    """Every protocol by its name."""
    return {options.name: options for options in (Single, Server, Averaging, Streaming, Elastic, Mpca, Tide, Grid)}


def make(description: Mapping[str, Any]) -> Options:
    """The protocol with this name and these options, as a task or a run directory describes it."""
    options = dict(description)
    name = options.pop("name", None)
    if name not in known():
        raise unknown("protocol", str(name), known())
    if strange := options.keys() - {field.name for field in fields(known()[name])}:
        raise unknown(f"option of protocol {name}", min(strange), (field.name for field in fields(known()[name])))
    return known()[name](**options)
