"""Data from Spark to the agents: what is refused before training, and that every row arrives once."""

from __future__ import annotations

import socket
from collections.abc import Iterator
from contextlib import closing, contextmanager
from typing import Any

import numpy as np
import pytest
import torch

from tether.errors import RunError, UsageError
from tether.runtimes.process.handshake import Keys, receive
from tether.runtimes.spark import feed
from tether.runtimes.spark.feed import NO_COUNT, Columns, RowReceiver, RowSource
from tether.runtimes.spark.store import Field, MappedDataset

pytest.importorskip("pyspark", reason="pyspark is not installed")
pytestmark = pytest.mark.spark
KEYS = Keys.make()


@contextmanager
def receivers(
    source: RowSource, count: int, **options: Any
) -> Iterator[tuple[list[RowReceiver], list[tuple[str, int]]]]:
    made = [RowReceiver(source.fields, KEYS, host="127.0.0.1", **options) for _ in range(count)]
    try:
        yield made, [("127.0.0.1", receiver.port) for receiver in made]
    finally:
        for receiver in made:
            receiver.close()


@pytest.fixture(scope="module")
def frame(spark: Any) -> Any:
    """Sixty rows with every kind of column; the label tells the row."""
    from pyspark.ml.linalg import Vectors

    rows = [
        (
            i,
            float(i) / 2,
            i % 2 == 0,
            [float(i), float(-i)],
            Vectors.dense([i, 1.0, 2.0]) if i % 2 else Vectors.sparse(3, [0, 1, 2], [i, 1.0, 2.0]),
            bytes([i, 255 - i, 7, 9]),
            f"name {i}",
        )
        for i in range(60)
    ]
    names = ["id", "half", "even", "pair", "vector", "raw", "name"]
    return spark.createDataFrame(spark.sparkContext.parallelize(rows, 4), names).cache()


ROW = torch.arange(60.0)
EXPECTED = {
    ("pair",): torch.stack([ROW, -ROW], 1),
    ("vector",): torch.stack([ROW, torch.ones(60), torch.full((60,), 2.0)], 1),
    ("id", "half", "even"): torch.stack([ROW, ROW / 2, (ROW % 2 == 0).float()], 1),
    ("raw",): torch.stack([ROW, 255 - ROW, torch.full((60,), 7.0), torch.full((60,), 9.0)], 1).to(torch.uint8),
}


@pytest.mark.parametrize("features", EXPECTED, ids="+".join)
def test_every_row_arrives_once_at_one_agent(frame: Any, features: tuple[str, ...]) -> None:
    source = RowSource(frame, Columns(features, "id"))
    assert (source.rows, source.classes) == (60, 60)
    with receivers(source, 3) as (agents, addresses):
        assert source.stream_to(addresses, KEYS) == [20, 20, 20]
        parts = [agent.wait(0.0) for agent in agents]
    rows, labels = (torch.cat([part.tensors[i] for part in parts]) for i in range(2))
    order = labels.argsort()
    assert torch.equal(labels[order], torch.arange(60))
    assert torch.equal(rows[order], EXPECTED[features])


def test_a_replaced_agent_gets_the_rows_of_the_one_before(frame: Any) -> None:
    source = RowSource(frame, Columns(("vector",), "half", classes=False, shape=(3, 1)))
    with receivers(source, 2) as (agents, addresses):
        assert source.stream_to(addresses, KEYS) == [30, 30]
        before = agents[1].wait(0.0)
        assert source.stream_to(addresses, KEYS, only=[1]) == [30], "a task that Spark runs again is told so"
        assert agents[1].wait(0.0) is before
        agents[1].close()
        assert source.stream_to(addresses, KEYS, only=[1]) == [NO_COUNT], "nobody is there"
        with receivers(source, 1) as ((replacement,), (address,)):
            assert source.stream_to([addresses[0], address], Keys.make(), only=[1]) == [NO_COUNT]
            assert source.stream_to([addresses[0], address], KEYS, only=[1]) == [30]
            after = replacement.wait(0.0)
    assert before.tensors[0].shape == (30, 3, 1) and before.tensors[1].dtype == torch.float32
    assert [sorted_rows(tensor) for tensor in before.tensors] == [sorted_rows(tensor) for tensor in after.tensors]


def sorted_rows(tensor: torch.Tensor) -> list[Any]:
    return sorted(tensor.tolist())


def test_an_rdd_of_rows_with_arrays_of_numpy_is_taken_and_spilled(spark: Any) -> None:
    rdd = spark.sparkContext.range(2000, numSlices=3).map(lambda i: (np.full(8, i, np.float32), np.int64(i % 5)))
    source = RowSource(rdd, Columns(("_1",), "_2"))
    told: list[tuple[int, int]] = []
    with receivers(source, 1, memory_mb=0.02, progress=lambda *so_far: told.append(so_far)) as ((agent,), addresses):
        assert source.stream_to(addresses, KEYS) == [2000]
        data = agent.wait(0.0)
    assert isinstance(data, MappedDataset) and told[-1] == (2000, 2000 * 40)
    assert sorted_rows(data.tensors[0]) == [[float(i)] * 8 for i in range(2000)]
    held_out = source.collect(100)
    assert len(held_out) == 100 and held_out.tensors[0][:, 0].unique().numel() == 100


def columns(features: str, label: str = "id", **options: Any) -> Columns:
    return Columns(tuple(features.split()), label, **options)


@pytest.mark.parametrize(
    ("asked", "says"),
    [
        (columns("vectors"), "no column 'vectors': the frame has id, half, even, pair, vector, raw, name"),
        (columns("vector", "name"), "label column 'name' is string.*StringIndexer"),
        (columns("vector", "pair"), "label column 'pair' is array<double>"),
        (columns("name"), "feature column 'name' is string.*StringIndexer"),
        (columns("id pair"), "feature column 'pair' is array<double>.*VectorAssembler"),
        (columns("vector", "half"), r"'half' is not a class.* in row \d+ of partition \d \(.*'half': 0.5"),
        (columns("vector", shape=(2, 2)), r"has 3 values in a row, which do not make the shape \(2, 2\)"),
    ],
)
def test_columns_that_do_not_fit_are_refused_by_name(frame: Any, asked: Columns, says: str) -> None:
    with pytest.raises(UsageError, match=says):
        RowSource(frame, asked)


@pytest.mark.parametrize(
    ("bad", "says"),
    [
        ("(null, 0)", r"feature column 'x' is null in row 3 of partition 0 \({'x': None, 'y': 0.0}\)"),
        ("(array(1, null), 0)", r"feature column 'x' has a null in row 3 of partition 0"),
        ("(array(1, double('NaN')), 0)", r"'x' has a value that is not finite in row 3 of partition 0"),
        ("(array(1, double('-Infinity')), 0)", r"'x' has a value that is not finite in row 3"),
        ("(array(1, 2), null)", r"label column 'y' is null in row 3 of partition 0"),
        ("(array(1, 2), double('NaN'))", r"label column 'y' is not finite in row 3"),
        (
            "(array(1, 2), -1)",
            r"label column 'y' is not a class, .* in row 3 of partition 0 \({'x': \[1.0, 2.0\], 'y': -1",
        ),
        ("(array(1, 2, 3), 0)", r"'x' has rows of different lengths: 2 in row 0 of .*, and 3 in row 3 of partition 0"),
    ],
)
def test_faults_in_the_data_are_told_with_their_row(spark: Any, bad: str, says: str) -> None:
    good = ", ".join(f"(array({i}, 1), {i})" for i in range(3))
    frame = spark.sql(f"select cast(x as array<double>) x, cast(y as double) y from values {good}, {bad} as t(x, y)")
    with pytest.raises(UsageError, match=says):
        RowSource(frame.coalesce(1), columns("x", "y"))


def test_no_rows_are_refused(frame: Any) -> None:
    with pytest.raises(UsageError, match="the frame has no rows"):
        RowSource(frame.where("id < 0"), columns("vector"))


# ---- an agent's side alone ------------------------------------------------------------------------------------------

FIELDS = (Field("features", "float32", (2,)), Field("label", "int64"))


def stream(receiver: RowReceiver, keys: Keys = KEYS) -> tuple[socket.socket, Any, Any]:
    import pyarrow

    connection, have = feed._connect(("127.0.0.1", receiver.port), keys)
    assert have == NO_COUNT
    file = connection.makefile("wb")
    return connection, file, pyarrow.ipc.new_stream(file, feed._wire_schema(FIELDS))


def batch(count: int) -> Any:
    import pyarrow

    arrays = [bytes(8 * count), np.arange(count).tobytes()]
    columns = [
        pyarrow.FixedSizeBinaryArray.from_buffers(pyarrow.binary(8), count, [None, pyarrow.py_buffer(raw)])
        for raw in arrays
    ]
    return pyarrow.record_batch(columns, schema=feed._wire_schema(FIELDS))


def test_a_stream_that_breaks_off_is_forgotten_as_a_whole() -> None:
    with closing(RowReceiver(FIELDS, KEYS, host="127.0.0.1")) as receiver:
        for between_batches in (True, False):
            connection, file, writer = stream(receiver)
            writer.write_batch(batch(3))
            if not between_batches:
                file.write(b"\xff\xff\xff\xff\x00")
            file.close()
            connection.shutdown(socket.SHUT_WR)
            assert connection.recv(1) == b"", "no number of rows was told"
            connection.close()
        hanging, hanging_file, _ = stream(receiver)
        connection, file, writer = stream(receiver)
        with connection, file, hanging, hanging_file:
            writer.write_batch(batch(5))
            writer.close()
            file.write(feed._COUNT.pack(5))
            file.flush()
            assert feed._COUNT.unpack(receive(connection, 8)) == (5,)
        assert receiver.wait(0.0).tensors[1].tolist() == [0, 1, 2, 3, 4]


def test_who_has_not_the_keys_is_not_listened_to() -> None:
    with closing(RowReceiver(FIELDS, KEYS, host="127.0.0.1")) as receiver:
        with pytest.raises(ConnectionError):
            stream(receiver, Keys.make())
        with pytest.raises(RunError, match="no data has arrived within 0 s"):
            receiver.wait(0.0)


def test_a_disk_that_is_full_ends_the_wait(tmp_path: Any) -> None:
    with closing(RowReceiver(FIELDS, KEYS, memory_mb=1e-6, directory=f"{tmp_path}/none")) as receiver:
        connection, file, writer = stream(receiver)
        with connection, file:
            writer.write_batch(batch(5))
            file.flush()
            with pytest.raises(RunError, match="cannot be written to"):
                receiver.wait(60.0)
