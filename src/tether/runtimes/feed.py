"""Data on its way from Spark to the agents of a run.

Agents are tasks that never end, so they are outside the lineage of any data: it is brought to them. A `Source` has its
rows checked by one job before anything is trained, deals them out to one partition per agent, and has each partition
streamed by an ordinary task to the `Intake` of its agent. Spark may run such a task again, and whoever replaces an
agent is fed by the task of that partition alone: its rows are still there, in the files of the shuffle.

What is said on a connection, once each end knows that the other belongs to the run (`handshake`): the agent says how
many rows it has. If it has none, they come as an Arrow stream of raw bytes and their number, which the agent repeats.
The first whole stream is the data; those that break off are forgotten.
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
from tether.runtimes.handshake import Keys, Listener, Visitor, introduce, receive
from tether.store import Array, Field, Store

if TYPE_CHECKING:
    from pyspark import RDD
    from pyspark.sql import Column, DataFrame

#: a row count that says that there are no rows yet, or that an agent could not be reached
NONE = -1
#: fewer rows than this are dealt out by one task, so that every agent gets as many
FEW_ROWS = 10_000
CONNECT_SECONDS = 30.0
#: how much of a stream is read at once
READ_BYTES = 2**24
#: how often strangers who take too long are looked for
TIDY_SECONDS = 1.0

#: what the keys of these connections are for
_PURPOSE = "feed"
_COUNT = struct.Struct("<q")
#: types of features that can be asked for, and what Spark calls them
_TYPES = {"float32": "float", "int64": "bigint"}
#: monotonically_increasing_id: the partition, and the row in it
_ROW_BITS = 33


@dataclass(frozen=True)
class Columns:
    """Which columns of a frame are the features of a row and its label.

    Features are one column of vectors, arrays or bytes, or any number of columns of numbers; bytes stay bytes. With
    `classes` the label is the number of a class, from 0; else it is any number.
    """

    features: tuple[str, ...]
    label: str
    classes: bool = True
    dtype: str = "float32"
    #: of a row's features, if they are no flat vector
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
                raise UsageError(f"feature column {name!r} is {kind.simpleString()}, which is no number: {hint}")
        return sql.array(*(sql.col(_quoted(name)).cast(element) for name in self.features))

    def label_of(self, frame: DataFrame) -> Column:
        from pyspark.sql import functions as sql

        _check_names(frame, [self.label])
        kind = frame.schema[self.label].dataType
        if not _is_number(kind):
            hint = "index it with StringIndexer" if kind.typeName() == "string" else "cast it to a number"
            raise UsageError(f"label column {self.label!r} is {kind.simpleString()}, which is no number: {hint}")
        return sql.col(_quoted(self.label)).cast("double")


class Source:
    """The rows of a DataFrame or RDD, checked. Belongs to the driver."""

    def __init__(self, data: DataFrame | RDD[Any], columns: Columns) -> None:
        from pyspark.sql import functions as sql

        frame = as_frame(data)
        self._frame = frame
        self._columns = columns
        label = columns.label_of(frame)
        self._rows = frame.select(columns.rows_of(frame).alias("features"), label.alias("label"))
        #: how many rows there are, and of how many classes; 0 where labels are no classes
        self.rows, self.classes, field = self._check()
        self.fields = (field, Field("label", "int64" if columns.classes else "float32"))
        self._rows = self._rows.withColumn("label", sql.col("label").cast("bigint" if columns.classes else "float"))
        self._dealt: RDD[bytes] | None = None

    def feed(self, addresses: Sequence[tuple[str, int]], keys: Keys, only: Sequence[int] | None = None) -> list[int]:
        """Stream to each agent its part, or to `only` some of them; how many rows each got, or NONE if unreachable."""
        if self._dealt is None or self._dealt.getNumPartitions() != len(addresses):
            self._dealt = self._deal(len(addresses))
        send = partial(_send, self._schema(), self.fields, tuple(addresses), keys)
        sent = self._dealt.mapPartitionsWithIndex(send)
        counts: list[int] = sent.context.runJob(sent, list, None if only is None else list(only))
        for place, count in zip(range(len(addresses)) if only is None else only, counts, strict=True):
            if count == 0:
                raise UsageError(
                    f"of {self.rows} rows worker {place} of {len(addresses)} got none: use fewer workers, or cache the "
                    "frame if it is another each time that it is computed"
                )
        return counts

    def where_the_last_class_is(self) -> str:
        """A row that has the largest label."""
        return self._tell(self._last_class)

    def collect(self, rows_max: int, seed: int = 0) -> TensorDataset:
        """So many rows at the driver, drawn at random if there are more."""
        rows = self._rows
        if self.rows > rows_max:
            rows = rows.sample(fraction=min(1.0, 1.2 * rows_max / self.rows + 1e-6), seed=seed).limit(rows_max)
        store = Store(self.fields, memory_mb=math.inf)
        for batch in rows.toArrow().to_batches():
            store.add([array_of(column, field) for column, field in zip(batch.columns, self.fields, strict=True)])
        return store.dataset()

    def _deal(self, parts: int) -> RDD[bytes]:
        """Batches of rows in Arrow's format, as the JVM makes them: no row of its own is ever made in Python."""
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
        """One job that looks at every value; a fault is told with its column and row."""
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
            "no class": f"label column {columns.label!r} is no class: a whole number from 0",
        }
        for name in faults:
            if found[name] is not None:
                raise UsageError(f"{says[name]} in {self._tell(found[name])}")
        short, long = found["shortest"], found["longest"]
        if short["length"] != long["length"]:
            raise UsageError(
                f"feature column {named} has rows of different lengths: {short['length']} in {self._tell(short['row'])}"
                f", and {long['length']} in {self._tell(long['row'])}"
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

    def _tell(self, number: int) -> str:
        """Where a row is, and what is in it."""
        from pyspark.sql import functions as sql

        columns = self._columns
        place = f"row {number % 2**_ROW_BITS} of partition {number >> _ROW_BITS}"
        numbered = self._frame.select(
            *(sql.col(_quoted(name)) for name in dict.fromkeys((*columns.features, columns.label))),
            sql.monotonically_increasing_id().alias("tether row"),
        )
        row = numbered.where(sql.col("`tether row`") == number).drop("tether row").head()
        return place if row is None else f"{place} ({reprlib.repr(row.asDict())})"


class Intake:
    """Where an agent's part of the data comes in. Belongs to the agent."""

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
        self._thread = threading.Thread(target=self._listen, name="intake", daemon=True)
        self._thread.start()

    def wait(self, timeout_seconds: float | None = None) -> TensorDataset:
        """The data, once a whole stream has come."""
        with self._changed:
            there = self._changed.wait_for(lambda: self._data is not None or self._error is not None, timeout_seconds)
            if self._error is not None:
                raise self._error
            if not there or self._data is None:
                raise RunError(f"no data has come within {timeout_seconds:g} s")
            return self._data

    def close(self) -> None:
        """Listen no longer. Until then tasks that Spark runs again are told that the data is there."""
        self._over.set()
        self._listener.interrupt()
        self._thread.join()

    def _listen(self) -> None:
        with contextlib.closing(self._listener):
            while not self._over.is_set():
                for visitor in self._listener.accept(TIDY_SECONDS):
                    # a stream that hangs must not keep away the one that replaces it
                    threading.Thread(target=self._serve, args=(visitor,), daemon=True).start()

    def _serve(self, visitor: Visitor) -> None:
        store, connection = self._store(), visitor.connection
        # pyarrow's errors are kinds of these two
        with connection, contextlib.closing(store), contextlib.suppress(OSError, ValueError):
            connection.settimeout(None)
            connection.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
            with self._changed:
                have = NONE if self._data is None else len(self._data)
            visitor.answer(_COUNT.pack(have))
            if have != NONE:
                return
            try:
                self._take_in(connection, store)
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

    def _take_in(self, connection: socket.socket, store: Store) -> None:
        import pyarrow

        with connection.makefile("rb") as file:
            stream = pyarrow.ipc.open_stream(_AsItComes(file))
            if stream.schema != _wire_schema(self._fields):
                raise UsageError(f"a stream of {stream.schema.names} came for {[field.name for field in self._fields]}")
            for batch in stream:
                columns = zip(self._fields, batch.columns, strict=True)
                store.add([np.frombuffer(raw.buffers()[1], f.dtype).reshape(-1, *f.shape) for f, raw in columns])
            if file.read(_COUNT.size) != _COUNT.pack(store.rows):  # an end between two batches looks like the end
                raise ConnectionError("the stream has broken off")


class _AsItComes:
    """A file that takes the memory of what has come, however much it is asked for: lengths come from elsewhere."""

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
    """A DataFrame as it is; an RDD of tuples or Rows as one, whose columns are _1, _2 or named."""
    from pyspark import RDD
    from pyspark.sql import DataFrame, SparkSession

    if isinstance(data, RDD):
        return SparkSession(data.context).createDataFrame(data.map(_plain))
    if not isinstance(data, DataFrame):
        raise UsageError(f"the data must be a DataFrame or an RDD of Spark, not {type(data).__name__}")
    if not hasattr(data, "_jdf"):
        raise UsageError("this DataFrame is one of Spark Connect, which has no RDDs: make it with a classic session")
    return data


def local_directory() -> str:
    """The executor's directory on its local disk, or that of temporary files elsewhere."""
    return os.environ.get("SPARK_LOCAL_DIRS", "").partition(",")[0] or tempfile.gettempdir()


def _send(
    schema: bytes,
    fields: Sequence[Field],
    addresses: Sequence[tuple[str, int]],
    keys: Keys,
    index: int,
    batches: Iterable[bytes],
) -> Iterator[int]:
    """The task that feeds one agent. Who is not there will be replaced, which Spark need not hear of as a failure."""
    import pyarrow

    try:
        connection, have = _meet(addresses[index], keys)
    except (OSError, WireError):
        yield NONE
        return
    given, wire = pyarrow.ipc.read_schema(pyarrow.py_buffer(schema)), _wire_schema(fields)
    with connection, connection.makefile("wb") as file:
        if have != NONE:
            yield have
            return
        writer, rows = pyarrow.ipc.new_stream(file, wire), 0
        for batch in batches:
            came = pyarrow.ipc.read_record_batch(pyarrow.py_buffer(batch), given)
            raw = [pyarrow.py_buffer(array_of(*pair)) for pair in zip(came.columns, fields, strict=True)]
            columns = [
                pyarrow.FixedSizeBinaryArray.from_buffers(kind.type, len(came), [None, buffer])
                for kind, buffer in zip(wire, raw, strict=True)
            ]
            rows += len(came)
            try:
                writer.write_batch(pyarrow.record_batch(columns, schema=wire))
            except OSError:
                yield NONE
                return
        try:
            writer.close()
            file.write(_COUNT.pack(rows))
            file.flush()
            yield _COUNT.unpack(receive(connection, _COUNT.size))[0]
        except OSError:
            yield NONE


def _meet(address: tuple[str, int], keys: Keys) -> tuple[socket.socket, int]:
    """A connection to an agent, and how many rows it has."""
    with contextlib.ExitStack() as stack:
        connection = stack.enter_context(socket.create_connection(address, timeout=CONNECT_SECONDS))
        (have,) = _COUNT.unpack(introduce(connection, keys, _PURPOSE))
        connection.settimeout(None)
        stack.pop_all()
        return connection, have


def _wire_schema(fields: Sequence[Field]) -> Any:
    import pyarrow

    return pyarrow.schema([(field.name, pyarrow.binary(field.row_bytes)) for field in fields])


def array_of(column: Any, field: Field) -> Array:
    """A column of Arrow as an array of rows, without a copy where it is in one piece."""
    if not field.shape:
        return np.ascontiguousarray(column.to_numpy(zero_copy_only=False))
    ends = np.frombuffer(column.buffers()[1], np.int32)[column.offset : column.offset + len(column) + 1]
    if column.null_count or (np.diff(ends) != math.prod(field.shape)).any():
        raise UsageError(f"rows of {field.name!r} are null, or have another shape than {field.shape}")
    if field.dtype == "uint8":
        flat = np.frombuffer(column.buffers()[2], np.uint8)[ends[0] : ends[-1]]
    else:
        flat = column.flatten().to_numpy(zero_copy_only=False)
    return flat.reshape(len(column), *field.shape)


def _plain(row: Any) -> Any:
    """A row without numpy, which Spark does not take."""
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
