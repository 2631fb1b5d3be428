"""`tether doctor`."""

from __future__ import annotations

import json
from dataclasses import asdict

import typer

from tether.cli.options import JsonOption
from tether.cli.output import out
from tether.testing.doctor import examine


def doctor(as_json: JsonOption = False) -> None:
    """Check that this machine and its devices have what Tether needs. The exit status is 1 if a check fails."""
    findings = []
    for finding in examine():
        findings.append(finding)
        if not as_json:
            out.print(f"{finding.state:8}{finding.name}: {finding.text}", highlight=False, markup=False, soft_wrap=True)
    failed = sum(finding.state == "failed" for finding in findings)
    if as_json:
        print(json.dumps({"ok": not failed, "findings": [asdict(finding) for finding in findings]}))
    if failed:
        raise typer.Exit(1)
