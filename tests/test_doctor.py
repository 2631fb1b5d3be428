"""`tether doctor` says what works on this machine, and fails if something does not."""

from __future__ import annotations

import json
import socket
from typing import Any

import pytest
from typer.testing import CliRunner

from tether.cli.app import app
from tether.testing.doctor import examine


def test_every_check_of_a_working_machine_passes_or_says_what_to_install() -> None:
    ended = CliRunner().invoke(app, ["doctor", "--json"])
    told = json.loads(ended.stdout)
    by_name = {finding["name"]: finding for finding in told["findings"]}
    assert {"cores", "shared memory", "ports", "name resolution", "java", "extra spark"} <= by_name.keys()
    assert by_name["shared memory"]["state"] == by_name["ports"]["state"] == "ok"
    assert all("pip install" in finding["text"] for finding in told["findings"] if "not installed" in finding["text"])
    assert told["ok"] == (ended.exit_code == 0)


def test_a_host_whose_name_does_not_resolve_is_told_what_to_do(monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(name: Any) -> str:
        raise socket.gaierror("unknown")

    monkeypatch.setattr(socket, "gethostbyname", refuse)
    found = {finding.name: finding for finding in examine()}["name resolution"]
    assert found.state == "failed" and "/etc/hosts" in found.text
    assert CliRunner().invoke(app, ["doctor"]).exit_code == 1


def test_a_check_that_raises_has_failed_and_the_others_go_on(monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(*_: Any, **__: Any) -> Any:
        raise PermissionError("no sockets here")

    monkeypatch.setattr(socket, "create_server", refuse)
    found = {finding.name: finding for finding in examine()}
    assert found["ports"].state == "failed" and "no sockets here" in found["ports"].text
    assert found["cores"].state == "ok"
