"""How learners agree: each file is one protocol, from its rules to its machines, which are pure."""

from __future__ import annotations

from tether.protocols.averaging import Averaging
from tether.protocols.base import Options
from tether.protocols.elastic import Elastic
from tether.protocols.grid import Grid
from tether.protocols.ledger import DEALING
from tether.protocols.mpca import Mpca
from tether.protocols.server import Server
from tether.protocols.single import Single

__all__ = ["DEALING", "Averaging", "Elastic", "Grid", "Mpca", "Options", "Server", "Single", "known"]


def known() -> dict[str, type[Options]]:
    """Every protocol by its name."""
    return {options.name: options for options in (Single, Server, Averaging, Elastic, Mpca, Grid)}
