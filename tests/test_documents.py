"""What README.md and docs/ tell people to type: every program, and every command that needs nothing else, runs."""

from __future__ import annotations

import re
import shlex
import signal
import subprocess
import sys
import textwrap
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
import typer

from tether import cli

ROOT = Path(__file__).parents[1]


def blocks(document: str, kind: str = "") -> list[str]:
    """The code blocks of a document that are of a kind; "" is a shell's."""
    found = re.findall(r"^```(\w*)\n(.*?)^```$", (ROOT / document).read_text(), re.DOTALL | re.MULTILINE)
    return [text for of_kind, text in found if of_kind == kind]


def commands(document: str) -> list[str]:
    """The command lines of a document that begin with `tether`, without their comments."""
    lines = "".join(blocks(document)).splitlines()
    return [line.partition("  #")[0].strip() for line in lines if line.startswith("tether ")]


def printed_by(program: str, directory: Path) -> str:
    """What a program prints that is typed into Python; it must succeed."""
    done = subprocess.run(
        [sys.executable, "-"], cwd=directory, input=program, capture_output=True, text=True, timeout=900
    )
    assert done.returncode == 0, done.stderr
    return done.stdout


def test_the_programs_of_the_readme_run_one_after_another_as_in_a_notebook(tmp_path: Path) -> None:
    first, second = blocks("README.md", "python")
    printed = printed_by(first + second, tmp_path)
    assert "Result(error=0.0" in printed and "Linear(in_features=64" in printed
    assert len(list((tmp_path / "runs").iterdir())) == 2


#: what makes a command of minutes short and leaves what it shows
SHORTER = {
    "tether train digits --workers 4": "--epochs 1",
    "tether train my_task.py:Digits": "--epochs 1",
    "tether train digits --on sim --workers 64": "--epochs 1",
    "tether train text": "--epochs 1 --set embedding=8 --set filters=4",
    "tether train digits -p server": "--epochs 2 --on sim",
    "tether study digits": "--epochs 0.2",
    "tether swarm": "--seeds 5",
    "tether resume RUN": "--epochs 2",
}
#: commands that need a data set which is to be fetched, and runs of it, or Spark, which has a test of its own
ELSEWHERE = ("--data DIR", "report single", "--on spark")


@pytest.fixture
def tether(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Callable[[str], int]]:
    """Runs a command line in a directory that has what the documents name: a task, texts, and a run."""
    (tmp_path / "my_task.py").write_text(blocks("README.md", "python")[0])
    (tmp_path / "FILE.csv").write_text("text,label\n" + "good day now,a\nbad night then,b\n" * 50)
    monkeypatch.chdir(tmp_path)
    before = signal.getsignal(signal.SIGTERM)

    def run(line: str) -> int:
        monkeypatch.setattr("sys.argv", shlex.split(line))
        with pytest.raises(SystemExit) as ended:
            cli.main()
        return int(ended.value.code or 0)

    yield run
    signal.signal(signal.SIGTERM, before)


@pytest.mark.parametrize("line", [line for line in commands("README.md") if not any(e in line for e in ELSEWHERE)])
def test_a_command_of_the_readme_runs(
    line: str, tether: Callable[[str], int], capsys: pytest.CaptureFixture[str]
) -> None:
    if " RUN" in line:
        assert tether("tether train digits --on sim --epochs 1 --run RUN") == 0
    shorter = next((more for begins, more in SHORTER.items() if line.startswith(begins)), "")
    assert tether(f"{line} {shorter}") == 0, capsys.readouterr().err
    assert capsys.readouterr().out


def test_every_command_of_every_document_has_the_options_that_it_is_given() -> None:
    program = typer.main.get_command(cli.app)
    assert len(commands("README.md")) > 10 and len(commands("docs/spark.md")) > 5
    for line in commands("README.md") + commands("docs/spark.md"):
        _, name, *words = shlex.split(line)
        command = program.commands[name]  # type: ignore[attr-defined]
        known = {option for parameter in command.params for option in parameter.opts}
        assert {word for word in words if word.startswith("-")} <= known, line


FLOWERS = textwrap.dedent(
    """
    import random
    rows = ["a,b,c,d,species"]
    for i in range(300):
        numbers = ",".join(f"{random.gauss(i % 3, 0.2):.3f}" for _ in range(4))
        rows.append(f"{numbers},{'xyz'[i % 3]}")
    open("flowers.csv", "w").write("\\n".join(rows))

    import tether, tether.spark
    from tether.tasks.digits import Digits as MyTask
    """
)
#: the last stage by itself, which is what the document loads
SAVED = """
from tether.spark import TetherModel
model.stages[-1].save("my-model")
"""
#: `fit` was given columns of numbers, and a FrameTask is given features and labels
PREPARED = """
for stage in pipeline.getStages()[:2]:
    frame = (stage.fit(frame) if hasattr(stage, "fit") else stage).transform(frame)
"""


@pytest.mark.spark
def test_the_programs_of_the_document_on_spark_run_one_after_another_as_in_a_notebook(tmp_path: Path) -> None:
    pytest.importorskip("pyspark", reason="pyspark is not installed")
    estimator, trusted, runs, started = blocks("docs/spark.md", "python")
    printed = printed_by(FLOWERS + estimator + SAVED + trusted + PREPARED + runs + started, tmp_path)
    assert "probability" in printed and (tmp_path / "flowers-model").is_dir()
    assert len(list((tmp_path / "runs").iterdir())) >= 3


def test_every_document_with_a_program_is_tested() -> None:
    assert {path.name for path in (ROOT / "docs").rglob("*.md") if "```" in path.read_text()} == {"spark.md"}
