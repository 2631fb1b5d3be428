"""What README.md and docs/ tell people to type: every program, and every command that needs nothing else, runs."""

from __future__ import annotations

import ast
import inspect
import re
import shlex
import signal
import subprocess
import sys
import textwrap
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import typer

from test_cluster import free_address
from test_layers import LAYERS, PARTS, SOURCE
from tether.cli import app as cli
from tether.task import Length, Task

ROOT = Path(__file__).parents[1]
#: all documents, by their path from the root of the project
DOCUMENTS = sorted(str(path.relative_to(ROOT)) for path in [*ROOT.glob("*.md"), *(ROOT / "docs").rglob("*.md")])


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


def test_the_programs_of_the_document_on_tasks_run_one_after_another_as_in_a_notebook(tmp_path: Path) -> None:
    printed = printed_by("\n".join(blocks("docs/tasks.md", "python")), tmp_path)
    assert "Linear(in_features=2" in printed and "careful-circle-elastic" in printed
    assert re.search(r"^worker-0, step 1: TypeError: .* in loss\) \(task Broken\); correct", printed, re.MULTILINE)


def test_the_document_on_tasks_explains_everything_that_a_task_has_and_its_defaults() -> None:
    text = (ROOT / "docs/tasks.md").read_text()
    rows = dict(re.findall(r"^\| `(\w+)(?:\([\w, ]*\))?` \|.*\| (.*) \|$", text, re.MULTILINE))
    assert set(rows) == {name for name in vars(Task) if not name.startswith("_")}
    assert rows["batch_size"] == str(Task.batch_size) and rows["epochs"] == str(Task.epochs)
    assert rows["protocol"] == f"`{Task.protocol}`".replace("'", '"')
    headings = "\n".join(re.findall(r"^## (.*)$", text, re.MULTILINE))
    for name, method in inspect.getmembers(Task, inspect.isfunction):
        if not name.startswith("_"):
            assert f"{name}({', '.join(list(inspect.signature(method).parameters)[1:])})" in headings
    fields = re.findall(r"^\| `length\.(\w+)", text, re.MULTILINE)
    assert set(fields) == {name for name in vars(Length(1, 1.0, 1))} | {"after_epochs"}


def test_the_examples_are_the_program_of_the_readme_and_one_that_runs(tmp_path: Path) -> None:
    programs = {path.name: path.read_text() for path in (ROOT / "examples").glob("*.py")}
    assert programs.keys() == {"digits.py", "what_if.py"}
    readme = ast.parse(blocks("README.md", "python")[0])
    assert [ast.dump(node) for node in ast.parse(programs["digits.py"]).body[1:]] == [*map(ast.dump, readme.body)]
    printed = printed_by(programs["what_if.py"].replace("epochs=10", "epochs=0.5"), tmp_path)
    assert len(re.findall(r"^ *10?gbit (server|averaging) .* s  computing \d+%$", printed, re.MULTILINE)) == 4


#: what makes a command of minutes short and leaves what it shows
SHORTER = {
    "tether train digits --workers 4": "--epochs 1",
    "tether train my_task.py:Digits": "--epochs 1",
    "tether train my_task.py:Ring": "--epochs 1 --on sim",
    "tether train digits --on sim --workers 64": "--epochs 1",
    "tether train text": "--epochs 1 --set embedding=8 --set filters=4",
    "tether study digits": "--epochs 0.2",
    "tether swarm": "--seeds 5",
    "tether chaos": "--kills 1",
    "tether resume RUN": "--epochs 2",
}
#: commands that need a data set which is to be fetched, and runs of it, or Spark, which has a test of its own
ELSEWHERE = ("--data DIR", "report single", "--on spark", "--on ray", "--hosts a,b,c")


#: the documents whose commands run, and the program in each that they call my_task.py
MY_TASK = {"README.md": ("README.md", 0), "docs/faults.md": ("README.md", 0), "docs/tasks.md": ("docs/tasks.md", -1)}


@pytest.fixture
def tether(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Callable[[str], int]]:
    """Runs a command line in a directory that has the files that documents name, except for my_task.py."""
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


@pytest.mark.parametrize(
    ("document", "line"),
    [(document, line) for document in MY_TASK for line in commands(document) if not any(e in line for e in ELSEWHERE)],
)
def test_a_command_of_a_document_runs(
    document: str, line: str, tether: Callable[[str], int], capsys: pytest.CaptureFixture[str]
) -> None:
    source, block = MY_TASK[document]
    Path("my_task.py").write_text(blocks(source, "python")[block])
    if " RUN" in line and "--run RUN" not in line:
        trained = "text --data FILE.csv --set embedding=8 --set filters=4" if " classify " in line else "digits"
        assert tether(f"tether train {trained} --on sim --epochs 1 --run RUN") == 0
    shorter = next((more for begins, more in SHORTER.items() if line.startswith(begins)), "")
    assert tether(f"{line} {shorter}") == 0, capsys.readouterr().err
    assert capsys.readouterr().out


def test_the_commands_of_the_document_on_protocols_run_one_after_another(
    tether: Callable[[str], int], capsys: pytest.CaptureFixture[str]
) -> None:
    Path("my_task.py").write_text(blocks("README.md", "python")[0])
    for line in commands("docs/protocols.md"):
        if "--data DIR" not in line:
            assert tether(line if " report " in line else f"{line} --epochs 2 --on sim") == 0, capsys.readouterr().err
    assert Path("report/report.png").exists()


def test_every_command_of_every_document_has_the_options_that_it_is_given() -> None:
    program: Any = typer.main.get_command(cli.app)
    assert len(commands("README.md")) > 10 and len(commands("docs/spark.md")) > 5
    for line in [line for document in DOCUMENTS for line in commands(document)]:
        _, name, *words = shlex.split(line)
        command = program.commands[name]
        if name == "bench":
            command = command.commands[words[0]]
        known = {option for parameter in command.load().params for option in parameter.opts}
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


def test_the_programs_of_the_document_on_faults_run_one_after_another_as_in_a_notebook(tmp_path: Path) -> None:
    printed = printed_by("".join(blocks("docs/faults.md", "python")), tmp_path)
    assert "Result(error=0." in printed and printed.rstrip().endswith("7232")


def test_the_program_of_the_document_on_loops_runs_alone_launched_and_resumed(tmp_path: Path) -> None:
    (program,) = blocks("docs/loops.md", "python")
    assert "epoch 4: error 0." in printed_by(program, tmp_path)
    (tmp_path / "train.py").write_text(program)
    for line in commands("docs/loops.md"):
        words = [sys.executable, "-m", *shlex.split(line.replace("-n 4", "-n 2"))]
        ended = subprocess.run(words, cwd=tmp_path, capture_output=True, text=True, timeout=300)
        assert ended.returncode == 0, ended.stderr
    assert (tmp_path / "model.pt").exists()


def test_the_commands_of_the_document_on_clusters_train_on_workers_that_join(tmp_path: Path) -> None:
    text = (ROOT / "docs/cluster.md").read_text().replace("10.0.0.1:7000", free_address())
    keys, train, worker = (shlex.split(line) for line in re.findall(r"^   (tether .*)$", text, re.MULTILINE))
    subprocess.run([sys.executable, "-m", *keys], cwd=tmp_path, check=True, capture_output=True, timeout=60)
    started = [[*train, "--run", "run", "--epochs", "2"], worker, worker]
    nodes = [
        subprocess.Popen([sys.executable, "-m", *words], cwd=tmp_path, stderr=subprocess.PIPE) for words in started
    ]
    try:
        ended = [node.communicate(timeout=200)[1].decode() for node in nodes]
    finally:
        for node in nodes:
            node.kill()
    assert [node.returncode for node in nodes] == [0, 0, 0], ended
    assert (tmp_path / "run" / "checkpoints").exists()


def test_every_document_with_a_program_is_tested() -> None:
    tested = {"caffe.md", "cluster.md", "faults.md", "loops.md", "protocols.md", "ray.md", "spark.md", "tasks.md"}
    assert {path.name for path in (ROOT / "docs").rglob("*.md") if "```" in path.read_text()} == tested


# ---- documents among each other --------------------------------------------------------------------------------------


def test_the_picture_of_the_architecture_has_the_folders_in_the_rows_that_the_layer_test_allows() -> None:
    """Names are on the left, lowest row last; a part imports only what is below its row."""
    rows = [re.findall(r"\w+", line.partition("   ")[0]) for line in blocks("ARCHITECTURE.md")[0].splitlines()]
    drawn = [part for row in rows for part in row]
    assert sorted(drawn) == sorted(PARTS) == sorted(LAYERS)
    for number, row in enumerate(rows):
        below = {part for lower in rows[number + 1 :] for part in lower}
        for part in row:
            assert LAYERS[part] <= below, part


def anchors(document: Path) -> set[str]:
    """The names by which a link can reach the headings of a document, as GitHub makes them."""
    headings = re.findall(r"^#+ (.*)$", re.sub(r"^```.*?^```$", "", document.read_text(), flags=re.M | re.S), re.M)
    return {re.sub(r"[^\w\- ]", "", heading.lower()).replace(" ", "-") for heading in headings}


@pytest.mark.parametrize("document", DOCUMENTS)
def test_every_link_leads_to_a_file_or_a_heading_that_is_there(document: str) -> None:
    text = re.sub(r"```.*?```|`[^`\n]*`", "", (ROOT / document).read_text(), flags=re.DOTALL)
    for target in re.findall(r"\]\(([^)\s]+)\)", text):
        if "://" in target:
            continue
        file, _, heading = target.partition("#")
        found = (ROOT / document).parent / file if file else ROOT / document
        assert found.exists(), target
        assert not heading or heading in anchors(found), target


@pytest.mark.parametrize("document", DOCUMENTS)
def test_a_document_names_only_files_and_methods_that_are_there(document: str) -> None:
    """Files from the root of the project or of the package; methods as `Class.method`."""
    source = "".join(path.read_text() for path in SOURCE.rglob("*.py"))
    named = re.findall(r"`([^`\n]+)`", re.sub(r"^```.*?^```$", "", (ROOT / document).read_text(), flags=re.M | re.S))
    for name in named if document != "CHANGELOG.md" else ():  # which is about earlier times too
        if re.fullmatch(r"(src|tests|models|protocols|runtimes|execution|core|learner)/[a-z_/]+\.[a-z]+", name):
            assert (ROOT / name).exists() or (SOURCE / name).exists(), name
        elif method := re.fullmatch(r"([A-Z]\w+)\.([a-z]\w*)", name):
            body = re.search(rf"^class {method[1]}\b.*?(?=^\S|\Z)", source, re.M | re.S)
            assert body is not None and re.search(rf"\b{method[2]}\b", body[0]), name


def test_the_readme_leads_to_every_document() -> None:
    linked = set(re.findall(r"\]\(([^)#\s]+)", (ROOT / "README.md").read_text()))
    assert {path for path in DOCUMENTS if path.count("/") < 2} - {"README.md"} <= linked


def test_every_decision_is_in_the_index_and_has_its_three_parts() -> None:
    folder = ROOT / "docs" / "decisions"
    names = sorted(path.name for path in folder.glob("[0-9]*.md"))
    assert names and re.findall(r"^- \[\d{4}\]\((.*?)\)", (folder / "README.md").read_text(), re.M) == names
    for name in names:
        text = (folder / name).read_text()
        assert re.match(rf"# {name[:4]}\. ", text)
        assert re.findall(r"^## (.*)$", text, re.M) == ["Context", "Decision", "Consequence"], name
