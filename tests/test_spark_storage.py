"""Checkpoints in a file system of Hadoop's: the local one stands in for HDFS, through its own URL scheme."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

from tether import Averaging, Local, UsageError, resume, run
from tether.execution.progress import make_progress
from tether.runtimes.spark.hadoop import HadoopStorage
from tether.tasks import load

pytest.importorskip("pyspark", reason="pyspark is not installed")
pytestmark = pytest.mark.spark


@pytest.fixture
def storage(spark: Any, tmp_path: Path) -> HadoopStorage:
    return HadoopStorage(f"file://{tmp_path}/there/")


def test_files_and_folders_are_there_as_a_whole_and_come_back(storage: HadoopStorage, tmp_path: Path) -> None:
    (tmp_path / "made").mkdir()
    (tmp_path / "made" / "state.json").write_text("{}")
    assert storage.names() == [] == storage.names("checkpoints")
    storage.put(tmp_path / "made", "checkpoints/at-1")
    assert storage.names("checkpoints") == ["at-1"] and storage.names() == ["checkpoints"]
    storage.get("checkpoints/at-1", tmp_path / "back")
    assert [path.name for path in (tmp_path / "back").iterdir()] == ["state.json"]
    storage.remove("checkpoints/at-1")
    assert storage.names("checkpoints") == []
    with pytest.raises(FileNotFoundError, match=r"there/checkpoints/at-1 does not exist"):
        storage.get("checkpoints/at-1", tmp_path / "again")


def test_a_file_is_replaced_and_found_at_every_moment(storage: HadoopStorage, tmp_path: Path) -> None:
    for text in ("old", "new"):
        (tmp_path / "run.json").write_text(text)
        storage.put(tmp_path / "run.json", "run.json")
    storage.get("run.json", tmp_path / "back")
    assert (tmp_path / "back").read_text() == "new" and storage.names() == ["run.json"]
    (tmp_path / "there" / "run.json").rename(tmp_path / "there" / ".run.json.partial")  # a driver that died in between
    storage.get("run.json", tmp_path / "again")
    assert (tmp_path / "again").read_text() == "new"


def test_what_is_no_file_system_is_refused(spark: Any) -> None:
    with pytest.raises(UsageError, match=r'No FileSystem for scheme "nowhere"'):
        HadoopStorage("nowhere://host/run")
    with pytest.raises(UsageError, match="is not a URL such as hdfs://HOST/PATH"):
        HadoopStorage("/tmp/run")


def test_a_run_is_continued_by_the_url_of_its_checkpoints_alone(
    spark: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    url, quiet = f"file://{tmp_path}/there", make_progress(quiet=True)
    first = run(
        load("digits"), Averaging(), Local(1), steps=20, run_dir=tmp_path / "run", checkpoints=url, progress=quiet
    )
    assert not list((tmp_path / "run" / "checkpoints").iterdir())
    (tmp_path / "empty").mkdir()
    monkeypatch.chdir(tmp_path / "empty")
    further = resume(url, load("digits"), steps=40, progress=quiet)
    assert further.figures["steps"] == 40 and further.directory.parent.resolve() == tmp_path / "empty" / "runs"
    assert not torch.equal(*(next(result.model.parameters()) for result in (first, further)))
    again = resume(further.directory, load("digits"), steps=50, progress=quiet)
    assert again.figures["steps"] == 50, "the new directory knows where its checkpoints are"
    with pytest.raises(UsageError, match="holds a run already"):
        run(
            load("digits"),
            Averaging(),
            Local(1),
            steps=20,
            run_dir=tmp_path / "another",
            checkpoints=url,
            progress=quiet,
        )


def test_damage_to_a_run_in_a_file_system_elsewhere_is_seen_and_told(
    spark: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    url, quiet = f"file://{tmp_path}/there", make_progress(quiet=True)
    run(load("digits"), Averaging(), Local(1), steps=20, run_dir=tmp_path / "run", checkpoints=url, progress=quiet)
    resume(tmp_path / "run", load("digits"), steps=40, progress=quiet)
    newest = sorted((tmp_path / "there" / "checkpoints").glob("at-*"))[-1]
    data = bytearray((newest / "model.safetensors").read_bytes())
    data[-9] ^= 1
    (newest / "model.safetensors").write_bytes(data)
    (newest / ".model.safetensors.crc").unlink(missing_ok=True)  # the local file system of Hadoop would see it too
    (tmp_path / "there" / "run.json").write_bytes(b"[")
    (tmp_path / "there" / ".run.json.crc").unlink(missing_ok=True)
    monkeypatch.chdir(tmp_path)
    further = resume(url, load("digits"), steps=60, progress=quiet)
    notes = (further.directory / "metrics.jsonl").read_text()
    assert further.figures["steps"] == 60
    assert "run.json is damaged" in notes and f"checkpoint {newest.name} is damaged (model.safetensors" in notes
