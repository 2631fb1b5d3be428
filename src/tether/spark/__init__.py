"""Training from Spark DataFrames: an estimator for pyspark.ml pipelines."""

from tether.spark.estimator import TetherEstimator, TetherModel
from tether.spark.frame import FrameTask

__all__ = ["FrameTask", "TetherEstimator", "TetherModel"]
