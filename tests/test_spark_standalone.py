"""A standalone cluster of real processes, a master and three workers, that knows nothing of Tether."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from tether.bench.hosts import standalone
from tether.tasks import load
from tether.testing.hosts import Host, hosts

pytest.importorskip("pyspark", reason="pyspark is not installed")
pytestmark = [pytest.mark.spark, pytest.mark.slow]

#: a driver, its session and its agents must have started within it, however busy the machine is
START_SECONDS = 900

TRAIN = """
import sys
import tether
from tether.runtimes.spark import jvm

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


@pytest.mark.skipif(
    os.geteuid() != 0 or not (shutil.which("ip") and shutil.which("tc")),
    reason="hosts are made by root with ip and tc: apt-get install iproute2",
)
def test_a_driver_that_was_killed_is_continued_on_another_host_by_a_url(tmp_path: Path) -> None:
    url = f"file://{tmp_path}/shared/run"
    with hosts(5, "1gbit") as places, standalone(places[:3], cores=3, megabytes=1500) as master:

        def tether(host: Host, name: str, *words: str) -> subprocess.Popen[bytes]:
            """A driver on a host, with a disk of its own that is empty."""
            (tmp_path / name).mkdir()
            environment = {**os.environ, "PYSPARK_PYTHON": sys.executable, "SPARK_LOCAL_IP": host.address}
            command = [*host.words, sys.executable, "-m", "tether", *words, "--master", master]
            return subprocess.Popen(command, env=environment, cwd=tmp_path / name, stdout=subprocess.PIPE)

        words = ["--on", "spark", "-n", "2", "-p", "mpca", "--epochs", "100000", "--checkpoint-seconds", "2"]
        driver = tether(places[3], "one", "train", "digits", *words, "--checkpoints", url)
        folder = tmp_path / "shared" / "run" / "checkpoints"
        deadline = time.monotonic() + START_SECONDS
        while not list(folder.glob("at-*")) and driver.poll() is None and time.monotonic() < deadline:
            time.sleep(0.5)
        driver.kill()
        driver.communicate()
        saved = max(int(path.name.split("-")[1]) for path in folder.glob("at-*"))
        further = str(1.2 * saved / len(load("digits").train_data()))
        again = tether(places[4], "another", "resume", url, "--epochs", further, "--json")
        figures = json.loads(again.communicate(timeout=START_SECONDS)[0])
    assert figures["workers"] == 2 and figures["samples"] > saved > 0 and figures["metrics"]["error"] < 0.1
    assert max(int(path.name.split("-")[1]) for path in folder.glob("at-*")) == figures["samples"]


def bare_python(directory: Path) -> str:
    """An interpreter that has what this one has installed, but for what is installed for editing: Tether."""
    import torch

    subprocess.run([sys.executable, "-m", "venv", "--without-pip", directory / "env"], check=True)
    packages = next((directory / "env" / "lib").iterdir()) / "site-packages"
    (packages / "all.pth").write_text(str(Path(torch.__file__).parents[1]))
    return str(directory / "env" / "bin" / "python")
