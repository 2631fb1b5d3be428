"""How estimators and models are saved: params as pyspark.ml saves them, anything else in files next to them.

Loading runs no code of the files: objects are saved as recipes (`recipe.py`), weights as safetensors. Objects without a
recipe are pickled, and load only if the caller trusts their author.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import asdict
from typing import TYPE_CHECKING, Any

import torch
from msgspec import ValidationError, convert, to_builtins
from safetensors import SafetensorError
from safetensors.torch import load as load_weights
from safetensors.torch import save as save_weights
from torch import Tensor, nn

from tether.errors import UsageError, missing_extra
from tether.protocols import Options, known
from tether.spark.recipe import Recipe, recipe_of, recipe_of_module

try:
    from pyspark.ml.param import Params
    from pyspark.ml.util import DefaultParamsReader, DefaultParamsWriter, MLReadable, MLReader, MLWritable, MLWriter
except ImportError:
    raise missing_extra("pyspark", "spark") from None

if TYPE_CHECKING:
    from pyspark.sql import SparkSession

#: how much is handed to the JVM at once when a file is written
CHUNK_BYTES = 2**22


class Saveable(Params, MLReadable[Any], MLWritable):
    """Can be saved in any file system that Spark knows."""

    def _saved(self) -> tuple[dict[str, Any], dict[str, Any], dict[str, bytes]]:
        """Params, further metadata as JSON holds it, and the contents of files."""
        raise NotImplementedError

    @classmethod
    def _restored(cls, metadata: dict[str, Any], file: Callable[[str], bytes]) -> Any:
        """The inverse of `_saved`, but for the params; `file` reads a file."""
        raise NotImplementedError

    def write(self) -> MLWriter:
        return _Writer(self)

    @classmethod
    def read(cls) -> _Reader:
        return _Reader(cls)

    @classmethod
    def load(cls, path: str, trust: bool = False) -> Any:
        """Load what was saved there. With `trust`, pickled objects load too, which can run any code of their author."""
        return cls.read().trust(trust).load(path)


class _Writer(MLWriter):
    def __init__(self, instance: Saveable) -> None:
        super().__init__()
        self._instance = instance

    def saveImpl(self, path: str) -> None:
        params, more, files = self._instance._saved()
        DefaultParamsWriter.saveMetadata(self._instance, path, self.sparkSession, more, params)
        for name, data in files.items():
            where, system = _hadoop_path(self.sparkSession, f"{path}/{name}")
            stream = system.create(where, True)
            try:
                for first in range(0, len(data), CHUNK_BYTES):
                    stream.write(data[first : first + CHUNK_BYTES])
            finally:
                stream.close()


class _Reader(MLReader[Any]):
    def __init__(self, cls: type[Saveable]) -> None:
        super().__init__()
        self._cls = cls
        self._trust = False

    def trust(self, trust: bool = True) -> _Reader:
        """Allow pickled objects to be loaded, which can run any code of their author."""
        self._trust = trust
        return self

    def load(self, path: str) -> Any:
        metadata = DefaultParamsReader.loadMetadata(path, self.sparkSession)

        def file(name: str) -> bytes:
            if name.endswith(".pickle") and not self._trust:
                raise UsageError(
                    f"{path} has pickled objects, which can run any code here. If you trust its author, load it "
                    f"with {self._cls.__name__}.load({path!r}, trust=True). {_NO_TRUST_NEEDED}"
                )
            where, system = _hadoop_path(self.sparkSession, f"{path}/{name}")
            stream = system.open(where)
            try:
                jvm: Any = self.sparkSession._jvm
                return bytes(jvm.org.apache.commons.io.IOUtils.toByteArray(stream))
            finally:
                stream.close()

        instance = self._cls._restored(metadata, file)
        instance._resetUid(metadata["uid"])
        DefaultParamsReader.getAndSetParams(instance, metadata)
        return instance


_NO_TRUST_NEEDED = (
    "No trust is needed for what can be saved by name: a torch.nn module, a class of modules, or a function of an "
    "importable module that is annotated to return one, with plain arguments (functools.partial)"
)


def load_into(module: nn.Module, data: bytes) -> None:
    """Load saved weights into a module of the same shape."""
    try:
        module.load_state_dict(load_weights(data), assign=True)
    except (SafetensorError, RuntimeError, ValueError) as error:
        raise UsageError(f"the saved weights do not fit the model, or are damaged: {error}") from error


def weight_bytes(module: nn.Module) -> bytes:
    """The weights of a module, for `load_into`."""
    return save_weights({name: tensor.detach().cpu().clone() for name, tensor in module.state_dict().items()})


def _hadoop_path(spark: SparkSession, path: str) -> tuple[Any, Any]:
    """Hadoop's object for a path, and its file system."""
    jvm: Any = spark._jvm
    jsc: Any = spark.sparkContext._jsc
    where = jvm.org.apache.hadoop.fs.Path(path)
    return where, where.getFileSystem(jsc.hadoopConfiguration())


#: params whose values are objects, and what each makes
OBJECTS: dict[str, type] = {
    "model": nn.Module,
    "loss": Tensor,
    "optimizer": torch.optim.Optimizer,
    "protocol": Options,
}


def is_module(value: Any) -> bool:
    return isinstance(value, nn.Module)


def recipe_for(name: str, value: Any) -> dict[str, Any] | None:
    """How the value of a param is made, as JSON holds it; None if it must be pickled."""
    if isinstance(value, Options):
        return {"protocol": value.name, "options": asdict(value)} if known().get(value.name) is type(value) else None
    found = recipe_of_module(value) if is_module(value) else recipe_of(value, OBJECTS[name])
    return None if found is None else {"module" if is_module(value) else "maker": to_builtins(found)}


def from_recipe(name: str, recipe: Any) -> Any:
    """The value of a param; the inverse of `recipe_for`."""
    try:
        match recipe:
            case {"protocol": str(protocol), "options": dict(options)} if name == "protocol" and protocol in known():
                return known()[protocol](**options)
            case {"module": fields} if name in ("model", "loss"):
                return convert(fields, Recipe).make(nn.Module)
            case {"maker": fields}:
                return convert(fields, Recipe).maker(OBJECTS[name])
    except (ValidationError, TypeError) as error:
        raise UsageError(f"{name} cannot be made from {recipe!r}: {error}") from error
    raise UsageError(f"{name} cannot be made from {recipe!r}")
