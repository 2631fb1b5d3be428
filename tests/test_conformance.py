"""Every protocol and every runtime passes the kit."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from tether import Averaging, Local, Server, Sim, Single
from tether.machine import Message
from tether.protocols import Options, known
from tether.protocols.averaging import Effort, Joint
from tether.protocols.server import Push, Weights
from tether.testing import check_messages, check_protocol, check_runtime

VARIANTS = [options for cls in known().values() for options in cls.variants()]

EXAMPLES: dict[type[Options], list[Message]] = {
    Single: [],
    Server: [Weights(3, torch.arange(4.0)), Push(3, torch.ones(2), torch.zeros(0), 16)],
    Averaging: [Joint(1, 5, torch.arange(3.0)), Effort(None, 0.1), Effort(0.2, 0.1)],
}


@pytest.mark.parametrize("options", VARIANTS, ids=str)
def test_every_protocol_keeps_its_promises_in_the_simulator(options: Options, tmp_path: Path) -> None:
    check_protocol(options, tmp_path)


@pytest.mark.parametrize("cls", [cls for cls in known().values() if cls.messages], ids=lambda cls: cls.name)
def test_every_message_survives_the_wire(cls: type[Options]) -> None:
    check_messages(cls(), EXAMPLES[cls])


def test_the_simulator_keeps_the_promises_of_a_runtime(tmp_path: Path) -> None:
    check_runtime(lambda workers: Sim(workers=workers), tmp_path)


def test_processes_on_one_machine_keep_the_promises_of_a_runtime(tmp_path: Path) -> None:
    check_runtime(lambda workers: Local(workers=workers), tmp_path)
