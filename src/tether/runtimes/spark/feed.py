"""How rows get from Spark to the agents of a run.

Agents are tasks that never end, so they are outside the lineage of any data, and other tasks bring them their rows. A
`RowSource` checks its rows by one job before training begins, and distributes them over one partition per agent. An
ordinary task streams each partition to the `RowReceiver` of its agent. Spark may run such a task again. When an agent
is replaced, only the task of its partition runs again: the rows are still there, in the files of the shuffle.

The conversation on a connection begins once each end knows that the other belongs to the run (`handshake`). The agent
says how many rows it has. If it has none yet, the task sends an Arrow stream of raw bytes and the number of rows, which
the agent repeats. The first complete stream is the data; streams that break off are dropped.
"""

from __future__ import annotations

import contextlib
import math
import os
import reprlib
import socket
import struct
import tempfile
import threading
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from functools import partial
from typing import TYPE_CHECKING, Any, BinaryIO

import numpy as np
from torch.utils.data import TensorDataset

from tether.errors import RunError, TetherError, UsageError, WireError
from tether.runtimes.process.handshake import AuthenticatedConnection, Keys, Listener, authenticate, receive
from tether.runtimes.spark.store import Array, Field, Store

if TYPE_CHECKING:
    from pyspark import RDD
    from pyspark.sql import Column, DataFrame

#: in place of a row count: the agent has no rows yet, or could not be reached
NO_COUNT = -1
#: fewer rows than this are distributed by one task, so that every agent gets the same number
FEW_ROWS = 10_000
CONNECT_SECONDS = 30.0
#: how much of a stream is read at once
READ_BYTES = 2**24
#: how often the listener closes connections that have not proved in time that they belong to the run
ACCEPT_SECONDS = 1.0

#: what the keys of these connections are for
_PURPOSE = "feed"
_COUNT = struct.Struct("<q")
#: the types that features can have, and Spark's names of them
_TYPES = {"float32": "float", "int64": "bigint"}
#: the lower bits of a `monotonically_increasing_id` number the row, the others its partition
_ROW_BITS = 33


@dataclass(frozen=True)
class Columns:
    """Which columns of a frame are the features of a row and its label.

    Features are one column of vectors, arrays or bytes, or any number of columns of numbers; bytes stay bytes. With
    `classes` the label is the number of a class, from 0; otherwise it is any number.
    """

    features: tuple[str, ...]
    label: str
    classes: bool = True
    dtype: str = "float32"
    #: the shape of a row's features, if they are not a flat vector
    shape: tuple[int, ...] | None = None

    def __post_init__(self) -> None:
        if not self.features:
            raise UsageError("features names no column: name at least one")
        if self.dtype not in _TYPES:
            raise UsageError(f"features can be {' or '.join(_TYPES)}, not {self.dtype!r}")

    def rows_of(self, frame: DataFrame) -> Column:
        """The features as one column: an array of numbers of one type, or bytes."""
        from pyspark.ml.functions import vector_to_array
        from pyspark.ml.linalg import VectorUDT
        from pyspark.sql import functions as sql
        from pyspark.sql.types import ArrayType, BinaryType

        _check_names(frame, self.features)
        types = [frame.schema[name].dataType for name in self.features]
        element = _TYPES[self.dtype]
        if len(types) == 1:
            column = sql.col(_quoted(self.features[0]))
            if isinstance(types[0], VectorUDT):
                return vector_to_array(column, "float32").cast(f"array<{element}>")
            if isinstance(types[0], BinaryType):
                return column
            if isinstance(types[0], ArrayType) and _is_number(types[0].elementType):
                return column.cast(f"array<{element}>")
        for name, kind in zip(self.features, types, strict=True):
            if not _is_number(kind):
                hint = (
                    "index it with StringIndexer"
                    if kind.typeName() == "string"
                    else "cast it, or make one column of all features with VectorAssembler"
                )
                raise UsageError(f"feature column {name!r} is {kind.simpleString()}, which is not a number: {hint}")
        return sql.array(*(sql.col(_quoted(name)).cast(element) for name in self.features))

    def label_of(self, frame: DataFrame) -> Column:
        from pyspark.sql import functions as sql

        _check_names(frame, [self.label])
        kind = frame.schema[self.label].dataType
        if not _is_number(kind):
            hint = "index it with StringIndexer" if kind.typeName() == "string" else "cast it to a number"
            raise UsageError(f"label column {self.label!r} is {kind.simpleString()}, which is not a number: {hint}")
        return sql.col(_quoted(self.label)).cast("double")


class RowSource:
    """The rows of a DataFrame or RDD, checked. Used by the driver."""

    #: the runtime that brings them
    engine = "spark"

    def __init__(self, data: DataFrame | RDD[Any], columns: Columns) -> None:
        from pyspark.sql import functions as sql

        frame = as_frame(data)
        self._frame = frame
        self._columns = columns
        label = columns.label_of(frame)
        self._rows = frame.select(columns.rows_of(frame).alias("features"), label.alias("label"))
        #: how many rows and classes there are; 0 classes where labels are not classes
        self.rows, self.classes, field = self._check()
        self.fields = (field, Field("label", "int64" if columns.classes else "float32"))
        self._rows = self._rows.withColumn("label", sql.col("label").cast("bigint" if columns.classes else "float"))
        self._partitions: RDD[bytes] | None = None

    def stream_to(
        self, addresses: Sequence[tuple[str, int]], keys: Keys, only: Sequence[int] | None = None
    ) -> list[int]:
        """Stream a partition to each agent, or to `only` some; how many rows each has, or NO_COUNT if unreachable."""
        if self._partitions is None or self._partitions.getNumPartitions() != len(addresses):
            self._partitions = self._partitioned(len(addresses))
        stream = partial(_stream_partition, self._schema(), self.fields, tuple(addresses), keys)
        sent = self._partitions.mapPartitionsWithIndex(stream)
        counts: list[int] = sent.context.runJob(sent, list, None if only is None else list(only))
        for place, count in zip(range(len(addresses)) if only is None else only, counts, strict=True):
            if count == 0:
                raise UsageError(
                    f"of {self.rows} rows worker {place} of {len(addresses)} got none: use fewer workers, or cache the "
                    "frame if its rows differ each time that it is computed"
                )
        return counts

    def describe_last_class(self) -> str:
        """A row that has the largest label: its place and its values."""
        return self._describe_row(self._last_class)

    def collect(self, rows_max: int, seed: int = 0) -> TensorDataset:
        """At most this many rows, brought to the driver; drawn at random if there are more."""
        rows = self._rows
        if self.rows > rows_max:
            rows = rows.sample(fraction=min(1.0, 1.2 * rows_max / self.rows + 1e-6), seed=seed).limit(rows_max)
        store = Store(self.fields, memory_mb=math.inf)
        for batch in rows.toArrow().to_batches():
            store.add([array_of(column, field) for column, field in zip(batch.columns, self.fields, strict=True)])
        return store.dataset()

    def _partitioned(self, parts: int) -> RDD[bytes]:
        """Batches of rows in Arrow's format, as the JVM makes them: Python never handles single rows."""
        from pyspark import RDD
        from pyspark.serializers import NoOpSerializer

        rows = self._rows.coalesce(1) if self.rows < FEW_ROWS else self._rows
        frame: Any = rows.repartition(parts)
        return RDD(frame._jdf.toArrowBatchRdd().toJavaRDD(), frame.sparkSession.sparkContext, NoOpSerializer())

    def _schema(self) -> bytes:
        from pyspark.sql.pandas.types import to_arrow_schema

        serialized: bytes = to_arrow_schema(self._rows.schema).serialize().to_pybytes()
        return serialized

    def _check(self) -> tuple[int, int, Field]:
        """One job that looks at every value; an error names the column and the row."""
        from pyspark.sql import functions as sql
        from pyspark.sql.types import BinaryType

        columns = self._columns
        raw = isinstance(self._rows.schema["features"].dataType, BinaryType)
        features, label, row = sql.col("features"), sql.col("label"), sql.col("row")
        numbered = self._rows.withColumn("row", sql.monotonically_increasing_id())
        length = sql.length(features) if raw else sql.size(features)
        faults: dict[str, Column] = {"null": features.isNull(), "label null": label.isNull()}
        if not raw:
            faults["null inside"] = sql.exists(features, lambda value: value.isNull())
            # Spark orders NaN above every other number
            top, bottom = sql.array_max(features).cast("double"), sql.array_min(features).cast("double")
            faults["not finite"] = sql.isnan(top) | (top == math.inf) | (bottom == -math.inf)
        finite = ~sql.isnan(label) & (sql.abs(label) < math.inf)
        faults["label not finite"] = ~finite
        if columns.classes:
            faults["no class"] = (label % 1 != 0) | (label < 0)
        found = numbered.agg(
            sql.count("*").alias("rows"),
            sql.min(sql.when(features.isNotNull(), sql.struct(length.alias("length"), row))).alias("shortest"),
            sql.max(sql.when(features.isNotNull(), sql.struct(length.alias("length"), row))).alias("longest"),
            sql.max(sql.struct(label.alias("label"), row)).alias("last_class"),
            *(sql.min(sql.when(condition, row)).alias(name) for name, condition in faults.items()),
        ).collect()[0]
        if found["rows"] == 0:
            raise UsageError("the frame has no rows")
        named = ", ".join(repr(name) for name in columns.features)
        says = {
            "null": f"feature column {named} is null",
            "label null": f"label column {columns.label!r} is null",
            "null inside": f"feature column {named} has a null",
            "not finite": f"feature column {named} has a value that is not finite",
            "label not finite": f"label column {columns.label!r} is not finite",
            "no class": f"label column {columns.label!r} is not a class, which is a whole number from 0,",
        }
        for name in faults:
            if found[name] is not None:
                raise UsageError(f"{says[name]} in {self._describe_row(found[name])}")
        short, long = found["shortest"], found["longest"]
        if short["length"] != long["length"]:
            raise UsageError(
                f"feature column {named} has rows of different lengths: {short['length']} in "
                f"{self._describe_row(short['row'])}, and {long['length']} in {self._describe_row(long['row'])}"
            )
        width = short["length"]
        if width == 0:
            raise UsageError(f"feature column {named} has no values in its rows")
        shape = columns.shape or (width,)
        if math.prod(shape) != width:
            raise UsageError(f"feature column {named} has {width} values in a row, which do not make the shape {shape}")
        self._last_class = found["last_class"]["row"]
        return (
            found["rows"],
            int(found["last_class"]["label"]) + 1 if columns.classes else 0,
            Field("features", "uint8" if raw else columns.dtype, shape),
        )

    def _describe_row(self, number: int) -> str:
        """The place of a row and its values."""
        from pyspark.sql import functions as sql

        columns = self._columns
        place = f"row {number % 2**_ROW_BITS} of partition {number >> _ROW_BITS}"
        numbered = self._frame.select(
            *(sql.col(_quoted(name)) for name in dict.fromkeys((*columns.features, columns.label))),
            sql.monotonically_increasing_id().alias("tether row"),
        )
        row = numbered.where(sql.col("`tether row`") == number).drop("tether row").head()
        return place if row is None else f"{place} ({reprlib.repr(row.asDict())})"


class RowReceiver:
    """Receives the rows of an agent. Used by the agent."""

    def __init__(
        self,
        fields: Sequence[Field],
        keys: Keys,
        *,
        host: str = "",
        memory_mb: float = 1024,
        directory: str | None = None,
        progress: Callable[[int, int], None] | None = None,
    ) -> None:
        self._fields = tuple(fields)
        self._store = partial(Store, self._fields, memory_mb, directory or local_directory(), progress)
        self._changed = threading.Condition()
        self._data: TensorDataset | None = None
        self._error: TetherError | None = None
        self._over = threading.Event()
        self._listener = Listener(keys, _PURPOSE, host)
        #: where it listens
        self.port: int = self._listener.port
        self._thread = threading.Thread(target=self._listen, name="rows", daemon=True)
        self._thread.start()

    def wait(self, timeout_seconds: float | None = None) -> TensorDataset:
        """The data, once a complete stream has arrived."""
        with self._changed:
            arrived = self._changed.wait_for(lambda: self._data is not None or self._error is not None, timeout_seconds)
            if self._error is not None:
                raise self._error
            if not arrived or self._data is None:
                raise RunError(f"no data has arrived within {timeout_seconds:g} s")
            return self._data

    def close(self) -> None:
        """Stop listening. Until then, tasks that Spark runs again learn here that the data has arrived."""
        self._over.set()
        self._listener.interrupt()
        self._thread.join()

    def _listen(self) -> None:
        with contextlib.closing(self._listener):
            while not self._over.is_set():
                for accepted in self._listener.accept(ACCEPT_SECONDS):
                    # a stream that hangs must not block the one that replaces it
                    threading.Thread(target=self._serve, args=(accepted,), daemon=True).start()

    def _serve(self, accepted: AuthenticatedConnection) -> None:
        store, connection = self._store(), accepted.connection
        # pyarrow's errors derive from these two
        with connection, contextlib.closing(store), contextlib.suppress(OSError, ValueError):
            connection.settimeout(None)
            connection.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
            with self._changed:
                have = NO_COUNT if self._data is None else len(self._data)
            accepted.answer(_COUNT.pack(have))
            if have != NO_COUNT:
                return
            try:
                self._receive_stream(connection, store)
            except TetherError as error:
                with self._changed:
                    self._error = error
                    self._changed.notify_all()
                return
            with self._changed:
                if self._data is None:
                    self._data = store.dataset()
                have = len(self._data)
                self._changed.notify_all()
            connection.sendall(_COUNT.pack(have))

    def _receive_stream(self, connection: socket.socket, store: Store) -> None:
        import pyarrow

        with connection.makefile("rb") as file:
            stream = pyarrow.ipc.open_stream(_PiecewiseReader(file))
            if stream.schema != _wire_schema(self._fields):
                names = [field.name for field in self._fields]
                raise UsageError(f"a stream of {stream.schema.names} has arrived, and {names} was expected")
            for batch in stream:
                columns = zip(self._fields, batch.columns, strict=True)
                store.add([np.frombuffer(raw.buffers()[1], f.dtype).reshape(-1, *f.shape) for f, raw in columns])
            if file.read(_COUNT.size) != _COUNT.pack(store.rows):  # a break between two batches looks like the end
                raise ConnectionError("the stream has broken off")


class _PiecewiseReader:
    """A file that allocates memory only for bytes that have arrived: a sender may announce any length."""

    def __init__(self, file: BinaryIO) -> None:
        self._file = file
        self.closed = False

    def read(self, size: int) -> bytes:
        parts = []
        while size > 0 and (part := self._file.read(min(size, READ_BYTES))):
            parts.append(part)
            size -= len(part)
        return parts[0] if len(parts) == 1 else b"".join(parts)

    def close(self) -> None:
        self.closed = True


def as_frame(data: DataFrame | RDD[Any]) -> DataFrame:
    """The data as a DataFrame. The columns of an RDD of tuples are _1, _2 and so on, those of Rows have their names."""
    from pyspark import RDD
    from pyspark.sql import DataFrame, SparkSession

    if isinstance(data, RDD):
        return SparkSession(data.context).createDataFrame(data.map(_plain))
    if not isinstance(data, DataFrame):
        raise UsageError(f"the data must be a DataFrame or an RDD of Spark, not {type(data).__name__}")
    if not hasattr(data, "_jdf"):
        raise UsageError("this DataFrame belongs to Spark Connect, which has no RDDs: make it with a classic session")
    return data


def local_directory() -> str:
    """The executor's directory on its local disk; outside of executors, the directory of temporary files."""
    return os.environ.get("SPARK_LOCAL_DIRS", "").partition(",")[0] or tempfile.gettempdir()


def _stream_partition(
    schema: bytes,
    fields: Sequence[Field],
    addresses: Sequence[tuple[str, int]],
    keys: Keys,
    index: int,
    batches: Iterable[bytes],
) -> Iterator[int]:
    """The task that streams one agent its rows.

    If the agent is gone, the task does not fail: Spark starts another agent, and the driver streams the rows to that.
    """
    import pyarrow

    try:
        connection, have = _connect(addresses[index], keys)
    except (OSError, WireError):
        yield NO_COUNT
        return
    given, wire = pyarrow.ipc.read_schema(pyarrow.py_buffer(schema)), _wire_schema(fields)
    with connection, connection.makefile("wb") as file:
        if have != NO_COUNT:
            yield have
            return
        writer, rows = pyarrow.ipc.new_stream(file, wire), 0
        for batch in batches:
            read = pyarrow.ipc.read_record_batch(pyarrow.py_buffer(batch), given)
            raw = [pyarrow.py_buffer(array_of(*pair)) for pair in zip(read.columns, fields, strict=True)]
            columns = [
                pyarrow.FixedSizeBinaryArray.from_buffers(kind.type, len(read), [None, buffer])
                for kind, buffer in zip(wire, raw, strict=True)
            ]
            rows += len(read)
            try:
                writer.write_batch(pyarrow.record_batch(columns, schema=wire))
            except OSError:
                yield NO_COUNT
                return
        try:
            writer.close()
            file.write(_COUNT.pack(rows))
            file.flush()
            yield _COUNT.unpack(receive(connection, _COUNT.size))[0]
        except OSError:
            yield NO_COUNT


def _connect(address: tuple[str, int], keys: Keys) -> tuple[socket.socket, int]:
    """A connection to an agent, and how many rows it has."""
    with contextlib.ExitStack() as stack:
        connection = stack.enter_context(socket.create_connection(address, timeout=CONNECT_SECONDS))
        (have,) = _COUNT.unpack(authenticate(connection, keys, _PURPOSE))
        connection.settimeout(None)
        stack.pop_all()
        return connection, have


def _wire_schema(fields: Sequence[Field]) -> Any:
    import pyarrow

    return pyarrow.schema([(field.name, pyarrow.binary(field.row_bytes)) for field in fields])


def array_of(column: Any, field: Field) -> Array:
    """An Arrow column as an array of rows, without a copy if it is contiguous."""
    if not field.shape:
        return np.ascontiguousarray(column.to_numpy(zero_copy_only=False))
    ends = np.frombuffer(column.buffers()[1], np.int32)[column.offset : column.offset + len(column) + 1]
    if column.null_count or (np.diff(ends) != math.prod(field.shape)).any():
        raise UsageError(f"rows of {field.name!r} are null, or do not have the shape {field.shape}")
    if field.dtype == "uint8":
        flat = np.frombuffer(column.buffers()[2], np.uint8)[ends[0] : ends[-1]]
    else:
        flat = column.flatten().to_numpy(zero_copy_only=False)
    return flat.reshape(len(column), *field.shape)


def _plain(row: Any) -> Any:
    """A row without numpy values, which Spark does not accept."""
    values = [value.tolist() if isinstance(value, np.ndarray | np.generic) else value for value in row]
    return type(row)(**dict(zip(row.__fields__, values, strict=True))) if hasattr(row, "__fields__") else tuple(values)


def _check_names(frame: DataFrame, names: Iterable[str]) -> None:
    for name in names:
        if name not in frame.columns:
            raise UsageError(f"there is no column {name!r}: the frame has {', '.join(frame.columns)}")


def _quoted(name: str) -> str:
    return "`" + name.replace("`", "``") + "`"


def _is_number(kind: Any) -> bool:
    from pyspark.sql.types import BooleanType, NumericType

    return isinstance(kind, BooleanType | NumericType)
