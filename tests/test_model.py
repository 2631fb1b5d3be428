"""The hand-over through shared memory under a model checker: every order of steps, and a death at every step."""

from __future__ import annotations

import re
import shutil
import subprocess
from pathlib import Path

import pytest

MODEL = Path(__file__).parents[1] / "models" / "handover.pml"

pytestmark = pytest.mark.skipif(
    not (shutil.which("spin") and shutil.which("cc")),
    reason="needs the model checker Spin and a C compiler: apt-get install spin gcc",
)


def errors(directory: Path, *defined: str) -> tuple[int, str]:
    """How many errors the checker finds in the model, and all it says."""
    macros = [f"-D{name}" for name in defined]
    for command in (
        ["spin", *macros, "-a", str(MODEL)],
        ["cc", "-O1", "-w", "-DSAFETY", "-o", "pan", "pan.c"],
        ["./pan", "-m1000000"],
    ):
        done = subprocess.run(command, cwd=directory, capture_output=True, text=True, timeout=300)
        assert done.returncode == 0, done.stdout + done.stderr
    found = re.search(r"errors: (\d+)", done.stdout)
    assert found is not None and "max search depth too small" not in done.stdout, done.stdout
    return int(found[1]), done.stdout


def test_gadei_theorems_2_and_3_no_deadlock_and_every_gradient_exactly_once_whoever_dies(tmp_path: Path) -> None:
    assert errors(tmp_path)[0] == 0


@pytest.mark.parametrize(
    ("rule", "found"),
    [
        ("REUSE_LENT", "assertion violated (content"),
        ("RETURN_EARLY", "assertion violated (content"),
        ("FORGET_LIVING", "assertion violated (content"),
        ("LEND_LATE", "assertion violated (dead"),
        ("KEEP_DEAD", "assertion violated (dead"),
        ("NO_NEWS", "invalid end state"),
        ("WAIT_FOR_ROOM", "invalid end state"),
    ],
)
def test_without_any_one_of_the_rules_it_goes_wrong(rule: str, found: str, tmp_path: Path) -> None:
    count, said = errors(tmp_path, rule)
    assert count > 0 and found in said
