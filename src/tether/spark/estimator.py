"""Training on the rows of a Spark DataFrame, by the conventions of pyspark.ml.

    estimator = TetherEstimator(model=lambda: torch.nn.Linear(4, 3), workers=3)
    model = Pipeline(stages=[indexer, assembler, estimator]).fit(frame)
    model.transform(frame)                 # adds the columns rawPrediction, probability and prediction

Preprocessing stays in Spark.
"""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterator
from typing import TYPE_CHECKING, Any

import cloudpickle
import numpy as np
import torch
from msgspec import convert
from torch import Tensor, nn

from tether.api import run
from tether.errors import UsageError, missing_extra, unknown
from tether.runtimes.spark.feed import Columns, array_of
from tether.runtimes.spark.runtime import Spark
from tether.runtimes.spark.store import Field
from tether.spark.frame import FrameTask, predict
from tether.spark.recipe import Recipe

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
    from pyspark.sql import functions as sql
    from pyspark.sql.pandas.functions import arrow_udf
    from pyspark.sql.types import BinaryType

    from tether.spark.saving import OBJECTS, Saveable, from_recipe, is_module, load_into, recipe_for, weight_bytes
except ImportError:
    raise missing_extra("pyspark", "spark") from None

if TYPE_CHECKING:
    from pyspark.sql import Column, DataFrame


def accessors(cls: type[Params]) -> type[Any]:
    """Add a getter and a setter for every Param of a class, as pyspark.ml has them: getEpochs, setEpochs."""

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


class _Shared(HasFeaturesCol, HasLabelCol, HasPredictionCol, HasProbabilityCol, HasRawPredictionCol):
    """The params that estimator and model share. A column with the name "" is left out of predictions."""


@accessors
class TetherEstimator(Estimator["TetherModel"], _Shared, HasSeed, Saveable):
    """Trains a torch model on the rows of a frame, one worker on each executor. `FrameTask` describes the columns.

    Every argument is a Param: `setEpochs(3)`, `fit(frame, {estimator.epochs: 3})`, a grid for a CrossValidator.
    """

    model = _param("model", "a torch module, or a function that makes one")
    loss = _param("loss", "cross_entropy, mse, or a function of the model's outputs and the labels")
    optimizer = _param("optimizer", "a function that makes one for a model; Adam with a rate of 0.001 by default")
    protocol = _param("protocol", "how the workers agree; tether.Tide() by default")
    workers = _param("workers", "how many workers train, one on each executor", TypeConverters.toInt)
    batchSize = _param("batchSize", "rows in a worker's mini-batch", TypeConverters.toInt)
    epochs = _param("epochs", "passes over the rows by all workers together", TypeConverters.toFloat)
    validation = _param("validation", "fraction of the rows that metrics are computed on", TypeConverters.toFloat)
    shape = _param("shape", "the shape of a row's features, if they are not a flat vector", TypeConverters.toListInt)
    dtype = _param("dtype", "the type of the features: float32 or int64", TypeConverters.toString)
    memoryMB = _param(
        "memoryMB", "memory for a worker's rows; if there are more, they go to the local disk", TypeConverters.toFloat
    )
    runDir = _param("runDir", "the run directory; a new one in runs/ by default", TypeConverters.toString)

    def __init__(self, **params: Any) -> None:
        """The params by name: TetherEstimator(model=..., featuresCol="x", epochs=3)."""
        super().__init__()
        self._setDefault(loss="cross_entropy", workers=2, batchSize=32, epochs=5.0, seed=0)
        self._setDefault(dtype="float32", memoryMB=1024.0)
        self.setParams(**params)

    def setParams(self, **params: Any) -> TetherEstimator:
        """Set several params at once."""
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

    def _saved(self) -> tuple[dict[str, Any], dict[str, Any], dict[str, bytes]]:
        """Params that are objects are saved as recipes; those without a recipe are pickled together."""
        params = {param.name: value for param, value in self._paramMap.items()}
        objects = {
            name: params.pop(name) for name in OBJECTS.keys() & params.keys() if not isinstance(params[name], str)
        }
        recipes = {name: found for name, value in objects.items() if (found := recipe_for(name, value)) is not None}
        pickled = {name: value for name, value in objects.items() if name not in recipes}
        files = {"objects.pickle": cloudpickle.dumps(pickled)} if pickled else {}
        files |= {f"{name}.safetensors": weight_bytes(objects[name]) for name in recipes if is_module(objects[name])}
        return params, {"objects": recipes, "pickled": sorted(pickled)}, files

    @classmethod
    def _restored(cls, metadata: dict[str, Any], file: Callable[[str], bytes]) -> TetherEstimator:
        pickled = cloudpickle.loads(file("objects.pickle")) if metadata.get("pickled", True) else {}
        estimator = cls(**pickled)
        for name, recipe in metadata.get("objects", {}).items():
            if name not in OBJECTS:
                raise unknown("object", name, OBJECTS)
            value = from_recipe(name, recipe)
            if is_module(value):
                load_into(value, file(f"{name}.safetensors"))
            estimator._set(**{name: value})
        return estimator


@accessors
class TetherModel(Model, _Shared, Saveable):
    """A trained model: adds its predictions to a frame.

    For classes these are rawPrediction, the model's outputs; probability, their softmax; and prediction, the likeliest
    class. Otherwise there is only prediction, the model's output: a number, or a vector if there are several.
    """

    def __init__(self, module: nn.Module, field: Field, classes: int, made_by: Any = None) -> None:
        """`made_by` is the class or function that made the module, or the module that it is a copy of."""
        super().__init__()
        self._made_by = module if made_by is None else made_by
        #: the trained torch module
        self.module = module
        self._field = field
        #: how many classes there were in training; 0 where labels are not classes
        self.classes = classes
        #: a broadcast variable with the module
        self._broadcast: Any = None

    def _transform(self, dataset: DataFrame) -> DataFrame:
        if self._broadcast is None:
            module = cloudpickle.dumps((copy.deepcopy(self.module).cpu(), self._field, self.classes))
            self._broadcast = dataset.sparkSession.sparkContext.broadcast(module)
        broadcast = self._broadcast

        def predictions(columns: Iterator[pyarrow.Array]) -> Iterator[pyarrow.Array]:
            return _predictions(broadcast.value, columns)

        kinds = "raw array<double>, probability array<double>, prediction double"
        predicted = arrow_udf(predictions, kinds)  # type: ignore[call-overload]
        name, kind = self.getFeaturesCol(), self._field.dtype
        rows = Columns((name,), "", dtype="int64" if kind == "int64" else "float32").rows_of(dataset)
        if isinstance(dataset.schema[name].dataType, BinaryType) != (kind == "uint8"):
            raise UsageError(
                f"feature column {name!r} is {dataset.schema[name].dataType.simpleString()}; the model was trained on "
                f"{'bytes' if kind == 'uint8' else 'numbers'}"
            )
        raw, probability, prediction = (
            sql.col(f"`{TEMPORARY}`.{name}") for name in ("raw", "probability", "prediction")
        )
        added: dict[str, Column] = {}
        if self.classes:
            added[self.getRawPredictionCol()] = array_to_vector(raw)
            added[self.getProbabilityCol()] = array_to_vector(probability)
        elif self._outputs() > 1:
            prediction = array_to_vector(raw)
        added[self.getPredictionCol()] = prediction
        added.pop("", None)
        return dataset.withColumn(TEMPORARY, predicted(rows)).withColumns(added).drop(TEMPORARY)

    def _outputs(self) -> int:
        row = torch.zeros(1, *self._field.shape, dtype=getattr(torch, self._field.dtype))
        return predict(self.module, row).numel()

    def _saved(self) -> tuple[dict[str, Any], dict[str, Any], dict[str, bytes]]:
        """The module as a recipe, or pickled without its weights; the weights as safetensors."""
        recipe = recipe_for("model", self._made_by)
        more = {"classes": self.classes, "dtype": self._field.dtype, "shape": self._field.shape, "module": recipe}
        params = {param.name: value for param, value in self._paramMap.items()}
        files = {"weights.safetensors": weight_bytes(self.module)}
        if recipe is None:
            module = copy.deepcopy(self.module)
            module.load_state_dict(
                {name: tensor.to("meta") for name, tensor in module.state_dict().items()}, assign=True
            )
            files["module.pickle"] = cloudpickle.dumps(module)
        return params, more, files

    @classmethod
    def _restored(cls, metadata: dict[str, Any], file: Callable[[str], bytes]) -> TetherModel:
        if (recipe := metadata.get("module")) is None:
            module = made_by = cloudpickle.loads(file("module.pickle"))
        else:
            made_by = from_recipe("model", recipe)
            module = made_by if is_module(made_by) else convert(recipe["maker"], Recipe).make(nn.Module)
        load_into(module, file("weights.safetensors"))
        field = Field("features", metadata["dtype"], tuple(metadata["shape"]))
        return cls(module, field, metadata["classes"], made_by)


#: a column that exists while predictions are made
TEMPORARY = "tether predictions"


def _predictions(pickled: bytes, columns: Iterator[pyarrow.Array]) -> Iterator[pyarrow.Array]:
    """On an executor: the predictions for the rows of each column of features."""
    module, field, classes = cloudpickle.loads(pickled)
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
