"""Training on the rows of a Spark DataFrame, by the conventions of pyspark.ml.

    estimator = TetherEstimator(model=lambda: torch.nn.Linear(4, 3), workers=3)
    model = Pipeline(stages=[indexer, assembler, estimator]).fit(frame)
    model.transform(frame)                 # with the columns rawPrediction, probability and prediction

`FrameTask` is the task behind it, for people who call `tether.run` themselves. Preprocessing stays in Spark.
"""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterator, Sequence
from dataclasses import asdict, replace
from typing import TYPE_CHECKING, Any

import cloudpickle
import numpy as np
import torch
from msgspec import ValidationError, convert, to_builtins
from safetensors import SafetensorError
from safetensors.torch import load as load_weights
from safetensors.torch import save as save_weights
from torch import Tensor, nn
from torch.nn import functional
from torch.utils.data import TensorDataset

from tether.errors import TaskError, UsageError, missing_extra, unknown
from tether.protocols import Options, known
from tether.recipe import Recipe, recipe_of, recipe_of_module
from tether.run import run
from tether.runtimes.feed import Columns, Source, array_of, as_frame
from tether.runtimes.spark import Spark
from tether.store import Field
from tether.task import Task

try:
    import pyarrow
    from pyspark.ml import Estimator, Model
    from pyspark.ml.functions import array_to_vector
    from pyspark.ml.param import Param, Params, TypeConverters
    from pyspark.ml.param.shared import (
        HasFeaturesCol,
        HasLabelCol,
        HasPredictionCol,
        HasProbabilityCol,
        HasRawPredictionCol,
        HasSeed,
    )
    from pyspark.ml.util import DefaultParamsReader, DefaultParamsWriter, MLReadable, MLReader, MLWritable, MLWriter
    from pyspark.sql import functions as sql
    from pyspark.sql.pandas.functions import arrow_udf
    from pyspark.sql.types import BinaryType
except ImportError:
    raise missing_extra("pyspark", "spark") from None

if TYPE_CHECKING:
    from pyspark import RDD
    from pyspark.sql import Column, DataFrame, SparkSession

#: losses by name, and whether their labels are classes
LOSSES: dict[str, tuple[Callable[[Tensor, Tensor], Tensor], bool]] = {
    "cross_entropy": (functional.cross_entropy, True),
    "mse": (lambda outputs, labels: functional.mse_loss(outputs.flatten(), labels), False),
}
#: rows that go through the model at once where nothing is learned: bounds its memory
CHUNK_ROWS = 1000
#: how much is handed to the JVM at once when a file is written
CHUNK_BYTES = 2**22


class FrameTask(Task):
    """Learn the label of a row from its features.

    Features are one column of vectors, arrays of numbers, or bytes, or several columns of numbers; the model gets a
    batch of them as floats in the given `shape`, bytes as fractions of 255. With `dtype="int64"` it gets whole numbers,
    such as those of words. The label is a class, a whole number from 0, if the loss is "cross_entropy"; for "mse" and
    losses of your own it is any number.

    Rows are checked when the task is made. The frame is computed once for that and once for training: cache it if that
    is much work, or if it is another each time.
    """

    def __init__(
        self,
        frame: DataFrame | RDD[Any],
        *,
        features: str | Sequence[str] = "features",
        label: str = "label",
        model: nn.Module | Callable[[], nn.Module],
        loss: str | Callable[[Tensor, Tensor], Tensor] = "cross_entropy",
        optimizer: Callable[[nn.Module], torch.optim.Optimizer] | None = None,
        batch_size: int = 32,
        epochs: float = 5,
        validation: DataFrame | float | None = None,
        validation_rows: int = 10_000,
        shape: Sequence[int] | None = None,
        dtype: str = "float32",
        seed: int = 0,
    ) -> None:
        """Metrics are taken on `validation`: a frame, or the fraction of rows held out; `validation_rows` at most.

        model: a module, or a function that makes one.
        loss: "cross_entropy", "mse", or a function of the model's outputs and the labels.
        optimizer: a function that makes one for a model; Adam at 0.001 unless given.
        """
        if isinstance(loss, str) and loss not in LOSSES:
            raise unknown("loss", loss, LOSSES)
        if not isinstance(model, nn.Module) and not callable(model):
            raise UsageError(f"model must be a torch module or a function that makes one, not {model!r}")
        self._loss, classes = LOSSES[loss] if isinstance(loss, str) else (loss, False)
        self._model = model
        self._optimizer = optimizer
        self.batch_size = batch_size
        self.epochs = epochs
        self.columns = Columns(
            (features,) if isinstance(features, str) else tuple(features),
            label,
            classes,
            dtype,
            tuple(shape) if shape is not None else None,
        )
        frame, held_out = _split(as_frame(frame), validation, seed)
        self.source = Source(frame, self.columns)
        #: what a row has
        self.fields: tuple[Field, ...] = self.source.fields
        self._with_last_class: Source | None = self.source
        self._held_out: TensorDataset | None = None
        if held_out is not None:
            # a frame of its own must have rows of the same kind
            source = Source(held_out, replace(self.columns, shape=self.fields[0].shape))
            self._with_last_class = max(self.source, source, key=lambda each: each.classes)
            self._held_out = source.collect(validation_rows, seed)
        self.classes = self._with_last_class.classes

    @property
    def name(self) -> str:
        return "frame"

    def model(self) -> nn.Module:
        return copy.deepcopy(self._model) if isinstance(self._model, nn.Module) else self._model()

    def optimizer(self, model: nn.Module) -> torch.optim.Optimizer:
        return super().optimizer(model) if self._optimizer is None else self._optimizer(model)

    def train_data(self) -> Any:
        if self.source is None:
            raise TaskError("the rows of a FrameTask are brought to it by Spark: run it with on=tether.Spark(...)")
        self._check_model()
        return range(self.source.rows)

    def loss(self, model: nn.Module, batch: Any) -> Tensor:
        features, labels = batch
        return self._loss(model(inputs(features)), labels)

    def evaluate(self, model: nn.Module) -> dict[str, float]:
        if self._held_out is None:
            return {}
        features, labels = self._held_out.tensors
        outputs = predict(model, features)
        metrics = {"loss": float(self._loss(outputs, labels))}
        if self.columns.classes:
            metrics["error"] = float((outputs.argmax(1) != labels).double().mean())
        return metrics

    def _check_model(self) -> None:
        """That it takes a row, and has an output for every class."""
        field = self.fields[0]
        try:
            outputs = predict(self.model(), torch.zeros(2, *field.shape, dtype=getattr(torch, field.dtype)))
        except (RuntimeError, ValueError, TypeError) as error:
            raise TaskError(
                f"the model does not take a batch of shape {(2, *field.shape)}, which is two rows of "
                f"{', '.join(self.columns.features)}: {error}"
            ) from error
        if self.columns.classes and (outputs.dim() != 2 or outputs.shape[1] < self.classes):
            assert self._with_last_class is not None
            raise TaskError(
                f"label column {self.columns.label!r} has classes up to {self.classes - 1}, as in "
                f"{self._with_last_class.where_the_last_class_is()}, for which the model must have {self.classes} "
                f"outputs; two rows gave the shape {tuple(outputs.shape)}"
            )

    def __getstate__(self) -> dict[str, Any]:
        """Neither the frame nor the rows held out travel."""
        return {**vars(self), "source": None, "_with_last_class": None, "_held_out": None}


def inputs(features: Tensor) -> Tensor:
    """What a model is given: bytes as fractions of 255, anything else as it is."""
    return features.float() / 255 if features.dtype == torch.uint8 else features


@torch.no_grad()
def predict(model: nn.Module, features: Tensor) -> Tensor:
    """The outputs of a model that learns nothing from them."""
    training = model.training
    model.eval()
    try:
        return torch.cat([model(inputs(part)) for part in torch.split(features, CHUNK_ROWS)])
    finally:
        model.train(training)


def _split(frame: DataFrame, validation: DataFrame | float | None, seed: int) -> tuple[DataFrame, DataFrame | None]:
    if isinstance(validation, int | float):
        if not 0 < validation < 1:
            raise UsageError(f"validation must be a frame or a fraction between 0 and 1, not {validation}")
        train, held_out = frame.randomSplit([1.0 - validation, float(validation)], seed)
        return train, held_out
    return frame, None if validation is None else as_frame(validation)


# ---- pyspark.ml -----------------------------------------------------------------------------------------------------


def accessors(cls: type[Params]) -> type[Any]:
    """A getter and a setter for every Param of a class, as pyspark.ml has them: getEpochs, setEpochs."""

    def add(name: str) -> None:
        ending = name[0].upper() + name[1:]
        if not hasattr(cls, f"get{ending}"):
            setattr(cls, f"get{ending}", lambda self: self.getOrDefault(name))
        setattr(cls, f"set{ending}", lambda self, value: self._set(**{name: value}))

    for name in dir(cls):
        if isinstance(getattr(cls, name), Param):
            add(name)
    return cls


def _param(name: str, doc: str, convert: Callable[[Any], Any] | None = None) -> Any:
    return Param(Params._dummy(), name, doc, convert)


class _Kept(Params, MLReadable[Any], MLWritable):
    """Can be saved in any file system that Spark knows: params as pyspark.ml keeps them, anything else in files.

    Loading runs no code of the files: objects are kept as recipes, weights as safetensors. Objects without a recipe are
    pickled, and load only where that is asked for.
    """

    def _parts(self) -> tuple[dict[str, Any], dict[str, Any], dict[str, bytes]]:
        """Params, more of what JSON can hold, and files."""
        raise NotImplementedError

    @classmethod
    def _made_of(cls, metadata: dict[str, Any], file: Callable[[str], bytes]) -> Any:
        raise NotImplementedError

    def write(self) -> MLWriter:
        return _Writer(self)

    @classmethod
    def read(cls) -> _Reader:
        return _Reader(cls)

    @classmethod
    def load(cls, path: str, trust: bool = False) -> Any:
        """What was saved there. With `trust`, whoever wrote it may have any code run here, as pickle allows."""
        return cls.read().trust(trust).load(path)


class _Writer(MLWriter):
    def __init__(self, instance: _Kept) -> None:
        super().__init__()
        self._instance = instance

    def saveImpl(self, path: str) -> None:
        params, more, files = self._instance._parts()
        DefaultParamsWriter.saveMetadata(self._instance, path, self.sparkSession, more, params)
        for name, data in files.items():
            place, system = _place(self.sparkSession, f"{path}/{name}")
            stream = system.create(place, True)
            try:
                for first in range(0, len(data), CHUNK_BYTES):
                    stream.write(data[first : first + CHUNK_BYTES])
            finally:
                stream.close()


class _Reader(MLReader[Any]):
    def __init__(self, cls: type[_Kept]) -> None:
        super().__init__()
        self._cls = cls
        self._trust = False

    def trust(self, trust: bool = True) -> _Reader:
        """Whether pickled objects may be loaded, which run whatever code their writer has chosen."""
        self._trust = trust
        return self

    def load(self, path: str) -> Any:
        metadata = DefaultParamsReader.loadMetadata(path, self.sparkSession)

        def file(name: str) -> bytes:
            if name.endswith(".pickle") and not self._trust:
                raise UsageError(
                    f"{path} has objects that were saved as code, which may do anything here. If you trust whoever "
                    f"wrote it, load it with {self._cls.__name__}.load({path!r}, trust=True). {_SAFE}"
                )
            place, system = _place(self.sparkSession, f"{path}/{name}")
            stream = system.open(place)
            try:
                jvm: Any = self.sparkSession._jvm
                return bytes(jvm.org.apache.commons.io.IOUtils.toByteArray(stream))
            finally:
                stream.close()

        instance = self._cls._made_of(metadata, file)
        instance._resetUid(metadata["uid"])
        DefaultParamsReader.getAndSetParams(instance, metadata)
        return instance


#: what needs no trust
_SAFE = (
    "No trust is needed for what can be saved by name: a torch.nn module, a class of modules, or a function of an "
    "importable module that is annotated to return one, with plain arguments (functools.partial)"
)


def _weights(data: bytes, module: nn.Module) -> None:
    """Put weights that were saved into a module of the same shape."""
    try:
        module.load_state_dict(load_weights(data), assign=True)
    except (SafetensorError, RuntimeError, ValueError) as error:
        raise UsageError(f"the saved weights do not fit the model, or are damaged: {error}") from error


def _weight_bytes(module: nn.Module) -> bytes:
    return save_weights({name: tensor.detach().cpu().clone() for name, tensor in module.state_dict().items()})


def _place(spark: SparkSession, path: str) -> tuple[Any, Any]:
    """A path as Hadoop knows it, and its file system."""
    jvm: Any = spark._jvm
    jsc: Any = spark.sparkContext._jsc
    place = jvm.org.apache.hadoop.fs.Path(path)
    return place, place.getFileSystem(jsc.hadoopConfiguration())


class _Shared(HasFeaturesCol, HasLabelCol, HasPredictionCol, HasProbabilityCol, HasRawPredictionCol):
    """The params that estimator and model have in common. A column whose name is "" is left out of predictions."""


@accessors
class TetherEstimator(Estimator["TetherModel"], _Shared, HasSeed, _Kept):
    """Trains a torch model on the rows of a frame, one worker on each executor. FrameTask says what columns may be.

    Every argument is a Param: `setEpochs(3)`, `fit(frame, {estimator.epochs: 3})`, a grid for a CrossValidator.
    """

    model = _param("model", "a torch module, or a function that makes one")
    loss = _param("loss", "cross_entropy, mse, or a function of the model's outputs and the labels")
    optimizer = _param("optimizer", "a function that makes one for a model; Adam at 0.001 unless given")
    protocol = _param("protocol", "how the workers agree; tether.Averaging() unless given")
    workers = _param("workers", "how many executors train", TypeConverters.toInt)
    batchSize = _param("batchSize", "rows in a worker's mini-batch", TypeConverters.toInt)
    epochs = _param("epochs", "passes over the rows by all workers together", TypeConverters.toFloat)
    validation = _param("validation", "fraction of the rows that metrics are taken on", TypeConverters.toFloat)
    shape = _param("shape", "of a row's features, if they are no flat vector", TypeConverters.toListInt)
    dtype = _param("dtype", "of the features: float32, or int64", TypeConverters.toString)
    memoryMB = _param("memoryMB", "rows beyond that go to the local disk of an executor", TypeConverters.toFloat)
    runDir = _param("runDir", "the directory of the run; a new one in runs/ unless given", TypeConverters.toString)

    def __init__(self, **params: Any) -> None:
        """Any of the params by name: TetherEstimator(model=..., featuresCol="x", epochs=3)."""
        super().__init__()
        self._setDefault(loss="cross_entropy", workers=2, batchSize=32, epochs=5.0, seed=0)
        self._setDefault(dtype="float32", memoryMB=1024.0)
        self.setParams(**params)

    def setParams(self, **params: Any) -> TetherEstimator:
        """Several params at once."""
        for name in params:
            if not self.hasParam(name):
                raise unknown("param", name, (param.name for param in self.params))
        self._set(**params)
        return self

    def _fit(self, dataset: DataFrame) -> TetherModel:
        if not self.isSet(self.model):
            raise UsageError("TetherEstimator has no model: give one, such as model=lambda: torch.nn.Linear(4, 3)")
        task = FrameTask(
            dataset,
            features=self.getFeaturesCol(),
            label=self.getLabelCol(),
            model=self.getOrDefault("model"),
            loss=self.getOrDefault("loss"),
            optimizer=self._given("optimizer"),
            batch_size=self.getOrDefault("batchSize"),
            epochs=self.getOrDefault("epochs"),
            validation=self._given("validation"),
            shape=self._given("shape"),
            dtype=self.getOrDefault("dtype"),
            seed=self.getSeed(),
        )
        workers, memory_mb = self.getOrDefault("workers"), self.getOrDefault("memoryMB")
        where = Spark(dataset.sparkSession, workers, memory_mb=memory_mb)
        result = run(task, self._given("protocol"), where, seed=self.getSeed(), run_dir=self._given("runDir"))
        model = TetherModel(result.model, task.fields[0], task.classes, self.getOrDefault("model"))
        model._resetUid(self.uid)
        return self._copyValues(model)

    def _given(self, name: str) -> Any:
        return self.getOrDefault(name) if self.isDefined(name) else None

    def _parts(self) -> tuple[dict[str, Any], dict[str, Any], dict[str, bytes]]:
        """Params that are objects are kept as recipes, or else pickled together."""
        params = {param.name: value for param, value in self._paramMap.items()}
        objects = {
            name: params.pop(name) for name in _OBJECTS.keys() & params.keys() if not isinstance(params[name], str)
        }
        recipes = {name: found for name, value in objects.items() if (found := _recipe(name, value)) is not None}
        pickled = {name: value for name, value in objects.items() if name not in recipes}
        files = {"objects.pickle": cloudpickle.dumps(pickled)} if pickled else {}
        files |= {f"{name}.safetensors": _weight_bytes(objects[name]) for name in recipes if _is_module(objects[name])}
        return params, {"objects": recipes, "pickled": sorted(pickled)}, files

    @classmethod
    def _made_of(cls, metadata: dict[str, Any], file: Callable[[str], bytes]) -> TetherEstimator:
        pickled = cloudpickle.loads(file("objects.pickle")) if metadata.get("pickled", True) else {}
        made = cls(**pickled)
        for name, recipe in metadata.get("objects", {}).items():
            if name not in _OBJECTS:
                raise unknown("object", name, _OBJECTS)
            value = _made(name, recipe)
            if _is_module(value):
                _weights(file(f"{name}.safetensors"), value)
            made._set(**{name: value})
        return made


#: params whose values are objects, and what they make
_OBJECTS: dict[str, type] = {
    "model": nn.Module,
    "loss": Tensor,
    "optimizer": torch.optim.Optimizer,
    "protocol": Options,
}


def _is_module(value: Any) -> bool:
    return isinstance(value, nn.Module)


def _recipe(name: str, value: Any) -> dict[str, Any] | None:
    """How a param's value is made, as JSON holds it; None if only pickle can keep it."""
    if isinstance(value, Options):
        return {"protocol": value.name, "options": asdict(value)} if known().get(value.name) is type(value) else None
    found = recipe_of_module(value) if _is_module(value) else recipe_of(value, _OBJECTS[name])
    return None if found is None else {"module" if _is_module(value) else "maker": to_builtins(found)}


def _made(name: str, recipe: Any) -> Any:
    """A param's value by its recipe."""
    try:
        match recipe:
            case {"protocol": str(protocol), "options": dict(options)} if name == "protocol" and protocol in known():
                return known()[protocol](**options)
            case {"module": told} if name in ("model", "loss"):
                return convert(told, Recipe).make(nn.Module)
            case {"maker": told}:
                return convert(told, Recipe).maker(_OBJECTS[name])
    except (ValidationError, TypeError) as error:
        raise UsageError(f"{name} cannot be made of {recipe!r}: {error}") from error
    raise UsageError(f"{name} cannot be made of {recipe!r}")


@accessors
class TetherModel(Model, _Shared, _Kept):
    """A trained model: adds to a frame what it predicts.

    Of classes it gives rawPrediction, the model's outputs; probability, their softmax; and prediction, the likeliest
    class. Else prediction is the model's output: a number, or a vector of several.
    """

    def __init__(self, module: nn.Module, field: Field, classes: int, made_by: Any = None) -> None:
        """`made_by` is what made the module: a class, a function, or a module that it is a copy of."""
        super().__init__()
        self._made_by = module if made_by is None else made_by
        #: the trained torch module
        self.module = module
        self._field = field
        #: how many classes were seen in training; 0 where labels are no classes
        self.classes = classes
        self._sent: Any = None

    def _transform(self, dataset: DataFrame) -> DataFrame:
        if self._sent is None:
            module = cloudpickle.dumps((copy.deepcopy(self.module).cpu(), self._field, self.classes))
            self._sent = dataset.sparkSession.sparkContext.broadcast(module)
        sent = self._sent

        def answers(columns: Iterator[pyarrow.Array]) -> Iterator[pyarrow.Array]:
            return _answers(sent.value, columns)

        kinds = "raw array<double>, probability array<double>, prediction double"
        answer = arrow_udf(answers, kinds)  # type: ignore[call-overload]
        name, kind = self.getFeaturesCol(), self._field.dtype
        rows = Columns((name,), "", dtype="int64" if kind == "int64" else "float32").rows_of(dataset)
        if isinstance(dataset.schema[name].dataType, BinaryType) != (kind == "uint8"):
            raise UsageError(
                f"feature column {name!r} is {dataset.schema[name].dataType.simpleString()}; the model was trained on "
                f"{'bytes' if kind == 'uint8' else 'numbers'}"
            )
        raw, probability, prediction = (sql.col(f"`{ANSWER}`.{name}") for name in ("raw", "probability", "prediction"))
        added: dict[str, Column] = {}
        if self.classes:
            added[self.getRawPredictionCol()] = array_to_vector(raw)
            added[self.getProbabilityCol()] = array_to_vector(probability)
        elif self._outputs() > 1:
            prediction = array_to_vector(raw)
        added[self.getPredictionCol()] = prediction
        added.pop("", None)
        return dataset.withColumn(ANSWER, answer(rows)).withColumns(added).drop(ANSWER)

    def _outputs(self) -> int:
        row = torch.zeros(1, *self._field.shape, dtype=getattr(torch, self._field.dtype))
        return predict(self.module, row).numel()

    def _parts(self) -> tuple[dict[str, Any], dict[str, Any], dict[str, bytes]]:
        """The module as a recipe, or else pickled without its weights; these as safetensors."""
        recipe = _recipe("model", self._made_by)
        more = {"classes": self.classes, "dtype": self._field.dtype, "shape": self._field.shape, "module": recipe}
        params = {param.name: value for param, value in self._paramMap.items()}
        files = {"weights.safetensors": _weight_bytes(self.module)}
        if recipe is None:
            module = copy.deepcopy(self.module)
            module.load_state_dict(
                {name: tensor.to("meta") for name, tensor in module.state_dict().items()}, assign=True
            )
            files["module.pickle"] = cloudpickle.dumps(module)
        return params, more, files

    @classmethod
    def _made_of(cls, metadata: dict[str, Any], file: Callable[[str], bytes]) -> TetherModel:
        if (recipe := metadata.get("module")) is None:
            module = made_by = cloudpickle.loads(file("module.pickle"))
        else:
            made_by = _made("model", recipe)
            module = made_by if _is_module(made_by) else convert(recipe["maker"], Recipe).make(nn.Module)
        _weights(file("weights.safetensors"), module)
        field = Field("features", metadata["dtype"], tuple(metadata["shape"]))
        return cls(module, field, metadata["classes"], made_by)


#: a column that is there while predictions are made
ANSWER = "tether answer"


def _answers(sent: bytes, columns: Iterator[pyarrow.Array]) -> Iterator[pyarrow.Array]:
    """Predictions for the rows of each column of features, as Spark's executors make them."""
    module, field, classes = cloudpickle.loads(sent)
    for column in columns:
        rows = array_of(column, field)
        outputs = predict(module, torch.from_numpy(rows.copy())).flatten(1).double()
        best = outputs.argmax(1).double() if classes else outputs[:, 0]
        scores = outputs.softmax(1) if classes else outputs
        yield pyarrow.StructArray.from_arrays(
            [_lists(outputs), _lists(scores), pyarrow.array(best.numpy())], names=["raw", "probability", "prediction"]
        )


def _lists(values: Tensor) -> pyarrow.Array:
    count, width = values.shape
    ends = np.arange(count + 1, dtype=np.int32) * width
    return pyarrow.ListArray.from_arrays(ends, values.numpy().ravel())
