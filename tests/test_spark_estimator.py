"""Training on the rows of a DataFrame, and predicting, by the conventions of pyspark.ml."""

from __future__ import annotations

import gc
import json
import os
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import cloudpickle
import pytest
import torch
from torch import nn

import tether
from tether.errors import TaskError, UsageError
from tether.runtimes.spark.store import Field

pytest.importorskip("pyspark", reason="pyspark is not installed")
pytestmark = pytest.mark.spark

from pyspark.ml import Pipeline  # noqa: E402
from pyspark.ml.evaluation import RegressionEvaluator  # noqa: E402
from pyspark.ml.feature import StringIndexer, VectorAssembler  # noqa: E402
from pyspark.ml.tuning import CrossValidator, ParamGridBuilder  # noqa: E402

from tether.spark import FrameTask, TetherEstimator, TetherModel  # noqa: E402


@pytest.fixture(scope="module")
def flowers(spark: Any) -> Any:
    """Three kinds told apart by where they are, and the distance from the origin as a number to learn."""
    places = {"iris": (0.0, 4.0), "rose": (4.0, 0.0), "tulip": (-4.0, -4.0)}
    draw = torch.Generator().manual_seed(1)
    rows = []
    for i in range(300):
        kind = sorted(places)[i % 3]
        x, y = (place + float(torch.randn((), generator=draw)) for place in places[kind])
        rows.append((x, y, kind, 0.5 * x - 0.25 * y))
    return spark.createDataFrame(rows, ["x", "y", "kind", "height"]).coalesce(3).cache()


def network() -> nn.Module:
    return nn.Sequential(nn.Linear(2, 16), nn.BatchNorm1d(16), nn.ReLU(), nn.Linear(16, 3))


def quick(model: nn.Module) -> torch.optim.Optimizer:
    return torch.optim.Adam(model.parameters(), lr=0.05)


ELSEWHERE = """
import json, sys
from pyspark.ml import PipelineModel
from pyspark.sql import SparkSession
settings = {"spark.ui.enabled": "false", "spark.driver.extraJavaOptions": "-XX:TieredStopAtLevel=1"}
spark = SparkSession.builder.master("local[1]").config(map=settings).getOrCreate()
model = PipelineModel.load(sys.argv[1])
rows = model.transform(spark.read.parquet(sys.argv[2])).select("x", "prediction", "probability").collect()
with open(sys.argv[3], "w") as file:
    json.dump(sorted([row.x, row.prediction, row.probability.toArray().tolist()] for row in rows), file)
"""


def test_a_pipeline_is_trained_saved_and_predicts_the_same_in_another_session(
    spark: Any, flowers: Any, tmp_path: Path
) -> None:
    """The rows do not fit the memory that they are given, so they are on disk while they are trained on."""
    stages = [
        StringIndexer(inputCol="kind", outputCol="label"),
        VectorAssembler(inputCols=["x", "y"], outputCol="features"),
        TetherEstimator(
            model=network,
            optimizer=quick,
            protocol=tether.Averaging(tau=15),
            epochs=6,
            batchSize=10,
            validation=0.2,
            memoryMB=0.001,
            runDir=f"{tmp_path}/run",
        ),
    ]
    model = Pipeline(stages=stages).fit(flowers)
    predicted = model.transform(flowers).cache()
    assert predicted.where("label = prediction").count() > 270
    rows = predicted.select("x", "prediction", "probability").collect()
    assert all(row.probability.argmax() == row.prediction for row in rows)

    model.save(f"{tmp_path}/model")
    flowers.write.parquet(f"{tmp_path}/flowers")
    paths = [f"{tmp_path}/{name}" for name in ("model", "flowers", "answer")]
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join(filter(None, sys.path))}
    subprocess.run([sys.executable, "-c", ELSEWHERE, *paths], check=True, env=environment, capture_output=True)
    here = sorted([row.x, row.prediction, row.probability.toArray().tolist()] for row in rows)
    assert json.loads(Path(paths[2]).read_text()) == here


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore:unclosed running multiprocessing pool:ResourceWarning")
def test_a_cross_validator_chooses_among_params(flowers: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    frame = VectorAssembler(inputCols=["x", "y"], outputCol="features").transform(flowers)
    estimator = TetherEstimator(model=nn.Linear(2, 1), loss="mse", optimizer=quick, labelCol="height", epochs=4)
    grid = ParamGridBuilder().addGrid(estimator.batchSize, [10]).build()
    evaluator = RegressionEvaluator(labelCol="height")
    found = CrossValidator(estimator=estimator, estimatorParamMaps=grid, evaluator=evaluator, numFolds=2).fit(frame)
    assert found.avgMetrics[0] < 0.5
    best = found.bestModel
    assert best.uid == estimator.uid and best.getLabelCol() == "height" and best.classes == 0
    assert estimator.getBatchSize() == 32, "params of a fit are those of a copy"
    assert evaluator.evaluate(best.transform(frame)) < 0.5
    gc.collect()  # of pyspark's pool, which it does not close


# ---- the parts ------------------------------------------------------------------------------------------------------


def test_params_are_set_and_got_copied_and_saved(spark: Any, tmp_path: Path) -> None:
    estimator = TetherEstimator(model=network, protocol=tether.Mpca(phases=2)).setEpochs(3).setFeaturesCol("x")
    copied = estimator.copy({estimator.batchSize: 7})
    assert (copied.getEpochs(), copied.getBatchSize(), estimator.getBatchSize()) == (3.0, 7, 32)
    estimator.save(f"{tmp_path}/estimator")
    loaded = TetherEstimator.load(f"{tmp_path}/estimator")
    assert loaded.uid == estimator.uid
    assert (loaded.getEpochs(), loaded.getFeaturesCol(), loaded.getProtocol()) == (3.0, "x", tether.Mpca(phases=2))
    assert isinstance(loaded.getModel()(), nn.Sequential)
    with pytest.raises(UsageError, match=r"unknown param 'epoch'.*Did you mean 'epochs'"):
        TetherEstimator(epoch=3)
    with pytest.raises(UsageError, match="TetherEstimator has no model"):
        TetherEstimator().fit(spark.range(3))


class Evil:
    """Pickled, it leaves a file wherever it is loaded."""

    def __init__(self, file: Path) -> None:
        self.file = file

    def __reduce__(self) -> Any:
        return Path.touch, (self.file,)


SAVED: dict[str, Callable[[], Any]] = {
    "estimator": lambda: TetherEstimator(model=lambda: nn.Linear(2, 3)),
    "model": lambda: TetherModel(nn.Linear(2, 3), Field("features", "float32", (2,)), 3, lambda: nn.Linear(2, 3)),
}


@pytest.mark.parametrize("kind", SAVED)
def test_what_was_saved_as_code_loads_only_where_its_writer_is_trusted(spark: Any, kind: str, tmp_path: Path) -> None:
    saved, path = SAVED[kind](), f"{tmp_path}/saved"
    saved.save(path)
    again = type(saved).load(path, trust=True)
    module = again.module if kind == "model" else again.getModel()()
    assert isinstance(module, nn.Linear) and module.out_features == 3
    assert type(saved).read().trust().load(path).uid == saved.uid
    (pickled,) = tmp_path.glob("saved/*.pickle")
    pickled.write_bytes(cloudpickle.dumps(Evil(tmp_path / "evil")))
    (tmp_path / "saved" / f".{pickled.name}.crc").unlink()  # Hadoop's own checksum
    for load in (type(saved).load, type(saved).read().load):
        with pytest.raises(UsageError, match=r"If you trust its author, load it with \w+.load\(.*, trust=True\)"):
            load(path)
    assert not (tmp_path / "evil").exists()


@pytest.mark.parametrize("kind", SAVED)
@pytest.mark.parametrize("name", ["os:system", "torch.fx.graph_module:reduce_graph_module"])
def test_a_name_in_a_saved_file_makes_modules_and_nothing_else(
    spark: Any, kind: str, name: str, tmp_path: Path
) -> None:
    module = nn.Linear(2, 3)
    saved = (
        TetherModel(module, Field("features", "float32", (2,)), 3) if kind == "model" else TetherEstimator(model=module)
    )
    saved.save(f"{tmp_path}/saved")
    for metadata in (tmp_path / "saved" / "metadata").glob("[!.]*"):
        metadata.write_text(metadata.read_text().replace("torch.nn.modules.linear:Linear", name))
    for checksum in (tmp_path / "saved" / "metadata").glob(".*.crc"):
        checksum.unlink()
    with pytest.raises(UsageError, match=name):
        type(saved).load(f"{tmp_path}/saved", trust=True)


def test_a_module_is_saved_with_its_weights_and_loads_without_trust(spark: Any, tmp_path: Path) -> None:
    module = network()
    estimator = TetherEstimator(model=module, loss=nn.functional.cross_entropy, optimizer=quick)
    estimator.save(f"{tmp_path}/estimator")
    loaded = TetherEstimator.load(f"{tmp_path}/estimator")
    assert not list(tmp_path.glob("*/*.pickle"))
    assert loaded.getLoss() is nn.functional.cross_entropy and loaded.getOptimizer() is quick
    for name, tensor in loaded.getModel().state_dict().items():
        assert torch.equal(tensor, module.state_dict()[name])
    (tmp_path / "estimator" / "model.safetensors").write_bytes(b"damaged")
    (tmp_path / "estimator" / ".model.safetensors.crc").unlink()
    with pytest.raises(UsageError, match="do not fit the model, or are damaged"):
        TetherEstimator.load(f"{tmp_path}/estimator")


class Words(nn.Module):
    """Has a buffer that is not among its weights."""

    def __init__(self) -> None:
        super().__init__()
        self.embedding = nn.Embedding(5, 4)
        self.output = nn.Linear(4, 2)
        self.register_buffer("scale", torch.tensor(2.0), persistent=False)

    def forward(self, words: torch.Tensor) -> torch.Tensor:
        return self.output(self.embedding(words).mean(1)) * self.scale


@pytest.mark.parametrize(
    ("make", "field", "column"),
    [
        (Words, Field("features", "int64", (3,)), "array(int(id), 1, 4)"),
        (lambda: nn.Sequential(nn.Flatten(), nn.Linear(4, 2)), Field("features", "uint8", (1, 2, 2)), "x'00ff0708'"),
    ],
    ids=["words", "bytes"],
)
def test_a_model_of_several_numbers_predicts_vectors_also_when_loaded(
    spark: Any, tmp_path: Path, make: Callable[[], nn.Module], field: Field, column: str
) -> None:
    module = make()
    model = TetherModel(module, field, 0).setPredictionCol("two")
    frame = spark.range(0, 5, 1, 1).selectExpr(f"{column} features")
    words = torch.tensor([[i, 1, 4] for i in range(5)])
    image = torch.tensor([[[[0, 255], [7, 8]]]]).expand(5, -1, -1, -1) / 255
    expected = module.eval()(words if field.dtype == "int64" else image).detach().double()
    model.save(f"{tmp_path}/model")
    for found in (model, TetherModel.load(f"{tmp_path}/model")):
        rows = found.transform(frame).collect()
        torch.testing.assert_close(torch.tensor([row.two.toArray().tolist() for row in rows]).double(), expected)
    other = "array(1, 2, 3)" if field.dtype == "uint8" else "x'010203'"
    with pytest.raises(UsageError, match=r"feature column 'features' is .*; the model was trained on"):
        model.transform(spark.range(1).selectExpr(f"{other} features"))


def task(frame: Any, **options: Any) -> FrameTask:
    return FrameTask(frame, **{"features": ["x", "y"], "label": "id", "model": lambda: nn.Linear(2, 4), **options})


def test_neither_the_frame_nor_the_rows_held_out_travel_with_the_task(spark: Any) -> None:
    frame = spark.range(0, 40, 1, 2).selectExpr("id % 4 id", "rand(1) x", "rand(2) y")
    made = task(frame, validation=0.5, validation_rows=5)
    assert made.source is not None and len(made.train_data()) == made.source.rows < 40
    metrics = made.evaluate(made.model())
    assert metrics.keys() == {"loss", "error"} and metrics["error"] * 5 in range(6)
    sent = cloudpickle.loads(cloudpickle.dumps(made))
    assert sent.source is None and sent.fields == made.fields and sent.evaluate(sent.model()) == {}
    with pytest.raises(TaskError, match="Spark brings a FrameTask its rows"):
        sent.train_data()


@pytest.mark.parametrize(
    ("options", "says"),
    [
        ({"loss": "crossentropy"}, "unknown loss 'crossentropy'.*Did you mean 'cross_entropy'"),
        ({"model": 3}, "model must be a torch module or a function"),
        ({"validation": 1.5}, "validation must be a frame or a fraction"),
        ({"features": []}, "features names no column"),
        ({"dtype": "float16"}, "features can be float32 or int64, not 'float16'"),
        ({"model": nn.Linear(3, 4)}, r"does not accept a batch of shape \(2, 2\), which is two rows of x, y"),
        (
            {"model": nn.Linear(2, 3)},
            r"'id' has classes up to 3, as in row \d+ of .*'id': 3.*, for which the model must have 4 outputs",
        ),
    ],
)
def test_what_cannot_be_trained_is_refused_before(spark: Any, options: dict[str, Any], says: str) -> None:
    frame = spark.range(0, 8, 1, 1).selectExpr("id % 4 id", "0.5D x", "0.25D y")
    with pytest.raises(UsageError, match=says):
        task(frame, **options).train_data()
