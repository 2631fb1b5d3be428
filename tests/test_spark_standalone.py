"""A standalone cluster of real processes, a master and three workers, that knows nothing of Tether."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from tether.hosts import Host, standalone

pytest.importorskip("pyspark", reason="pyspark is not installed")
pytestmark = [pytest.mark.spark, pytest.mark.slow]

TRAIN = """
import sys
import tether
from tether.runtimes import jvm

spark = jvm.session(None)
places = spark.sparkContext.parallelize(range(3), 3).map(lambda _: __import__("tether").__file__).collect()
assert all(sys.argv[2] in place for place in places), places
on = tether.Spark(spark, workers=3)
result = tether.run(tether.tasks.load("digits"), tether.Mpca(), on, epochs=10, run_dir=sys.argv[1])
assert result.metrics["error"] < 0.06, result
"""


@pytest.fixture(scope="module")
def master() -> Iterator[str]:
    with standalone([Host()] * 4, cores=3, megabytes=1500) as url:
        yield url


def test_the_command_line_trains_on_it(master: str, tmp_path: Path) -> None:
    words = ["train", "digits", "--on", "spark", "--master", master, "-n", "3", "-p", "averaging", "--epochs", "10"]
    environment = {**os.environ, "PYSPARK_PYTHON": sys.executable, "SPARK_LOCAL_IP": "127.0.0.1"}
    command = [sys.executable, "-m", "tether", *words, "--set", "tau=10", "--json", "--run", str(tmp_path / "run")]
    done = subprocess.run(command, check=True, capture_output=True, timeout=300, env=environment)
    assert json.loads(done.stdout)["metrics"]["error"] < 0.08


def test_spark_submit_brings_the_package_along(master: str, tmp_path: Path) -> None:
    import pyspark

    source = Path(__file__).parents[1] / "src"
    shutil.make_archive(str(tmp_path / "tether"), "zip", source, "tether")
    (tmp_path / "train.py").write_text(TRAIN)
    command = [
        *(str(Path(pyspark.__file__).parent / "bin" / "spark-submit"), "--master", master),
        *("--py-files", str(tmp_path / "tether.zip"), "--executor-cores", "3", "--executor-memory", "1g"),
        *("--conf", "spark.task.maxFailures=16", "--conf", "spark.driver.maxResultSize=0"),
        *(str(tmp_path / "train.py"), str(tmp_path / "run"), "tether.zip"),
    ]
    environment = {**os.environ, "PYSPARK_PYTHON": bare_python(tmp_path), "SPARK_LOCAL_IP": "127.0.0.1"}
    environment.pop("PYTHONPATH", None)
    subprocess.run(command, check=True, timeout=300, env=environment, cwd=tmp_path)


def bare_python(directory: Path) -> str:
    """An interpreter that has what this one has installed, but for what is installed for editing: Tether."""
    import torch

    subprocess.run([sys.executable, "-m", "venv", "--without-pip", directory / "env"], check=True)
    packages = next((directory / "env" / "lib").iterdir()) / "site-packages"
    (packages / "all.pth").write_text(str(Path(torch.__file__).parents[1]))
    return str(directory / "env" / "bin" / "python")
