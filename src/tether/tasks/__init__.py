"""The tasks that come with Tether, and how a task is found by its name or file.

A task's options are the parameters of its constructor, which has their types and defaults, and the attributes that
every task has, such as clip_norm. An `options` dict on the class documents the parameters: it maps each to what it is
for.
"""

from __future__ import annotations

import ast
import hashlib
import importlib.util
import inspect
import sys
import traceback
import types
from contextvars import ContextVar
from pathlib import Path
from typing import get_type_hints

import cloudpickle

from tether.core import settings as _settings
from tether.errors import TetherError, UsageError, unknown
from tether.learner.synthetic import SyntheticTask
from tether.task import Task
from tether.tasks.chars import Chars
from tether.tasks.cifar import Cifar
from tether.tasks.digits import Digits
from tether.tasks.fashion import Fashion
from tether.tasks.text import Text

#: attributes of every task that have a plain value, and so need no parameter of the constructor
ATTRIBUTES = (
    "batch_size",
    "accumulate",
    "clip_norm",
    "clip_value",
    "precision",
    "device",
    "ema",
    "num_workers",
    "prefetch",
)

__all__ = ["find", "is_solver", "known", "load", "not_while_importing", "options", "settable"]


def known() -> dict[str, type[Task]]:
    """The built-in tasks by name."""
    return {
        "digits": Digits,
        "fashion": Fashion,
        "cifar": Cifar,
        "chars": Chars,
        "text": Text,
        "synthetic": SyntheticTask,
    }


def load(spec: str, *, data: Path | None = None, settings: dict[str, str] | None = None) -> Task:
    """The task called `spec`: a built-in name, path/to/file.py:ClassName or solver.prototxt.

    `data` and `settings` become arguments of its constructor; the values of `settings` are converted to the annotated
    types of its parameters.
    """
    if is_solver(spec):
        settings = {**(settings or {}), "solver": spec}
    return _construct(spec, find(spec), data, settings or {})


def is_solver(spec: str) -> bool:
    """Whether a task is named by a solver file of Caffe."""
    return spec.endswith((".prototxt", ".pbtxt"))


def find(spec: str) -> type[Task]:
    """The class that `spec` names."""
    if is_solver(spec):
        from tether.caffe.task import CaffeTask

        return CaffeTask
    if ":" in spec or spec.endswith(".py"):
        return _class_in_file(spec)
    if spec not in known():
        raise UsageError(f"{unknown('task', spec, known())} A task of your own is written path/to/file.py:ClassName")
    return known()[spec]


def settable(cls: type[Task]) -> set[str]:
    """What `--set` can set: the parameters of the constructor except for the data, and attributes of every task."""
    attributes = set() if cls is SyntheticTask else set(ATTRIBUTES)
    return {*_settings.parameters(cls), *attributes} - {"data"}


def options(cls: type[Task]) -> list[_settings.Option]:
    """The options of a task, in the order of its constructor."""
    return _settings.options(cls, getattr(cls, "options", {}))


# ---- tasks in the user's files --------------------------------------------------------------------------------------


def _class_in_file(spec: str) -> type[Task]:
    name, colon, class_name = spec.rpartition(":")
    if not colon or class_name.endswith(".py"):
        name, class_name = spec, ""
    path = Path(name).expanduser().resolve()
    if not path.is_file():
        raise UsageError(f"task {spec!r}: there is no file {path}")
    module = _import(path)
    found = getattr(module, class_name, None) if class_name else None
    if isinstance(found, type) and issubclass(found, Task):
        return found
    if found is None:
        what = f"has no class {class_name}" if class_name else "is a file: add the name of the task's class"
    else:
        what = f"has {class_name}, but that is not a subclass of tether.Task"
    classes = [n for n, c in vars(module).items() if isinstance(c, type) and issubclass(c, Task) and c is not Task]
    have = "Its tasks: " + ", ".join(f"{name}:{n}" for n in classes) if classes else "It has no subclass of tether.Task"
    raise UsageError(f"{name} {what}. {have}")


#: the file that this thread is importing
_importing: ContextVar[Path | None] = ContextVar("importing", default=None)
#: the module made from each file, with the version of the file that it was made from
_imported: dict[Path, tuple[tuple[int, int], types.ModuleType]] = {}


class _RunReached(BaseException):
    """The file starts a run. Not an Exception, so that no `except` in the file catches it."""


def not_while_importing() -> None:
    """End the import of a task's file at the first run that it starts: the caller wants the task, not that run."""
    if _importing.get() is not None:
        raise _RunReached


def _import(path: Path) -> types.ModuleType:
    """Import a file as a module of its own, once, up to the first run that it starts itself.

    As with `python file.py`, it may import modules from its own folder. They and the file itself are pickled by value,
    so other processes and machines need neither.
    """
    version = (path.stat().st_mtime_ns, path.stat().st_size)
    if path in _imported and _imported[path][0] == version:
        return _imported[path][1]
    name = f"tether_task_{path.stem}_{hashlib.sha256(str(path).encode()).hexdigest()[:8]}"
    spec = importlib.util.spec_from_file_location(name, path)
    if spec is None or spec.loader is None:
        raise UsageError(f"{path} is not a Python file: a task of your own is written path/to/file.py:ClassName")
    module = importlib.util.module_from_spec(spec)
    if str(path.parent) not in sys.path:
        sys.path.insert(0, str(path.parent))
    before = set(sys.modules)
    sys.modules[name] = module
    token = _importing.set(path)
    try:
        spec.loader.exec_module(module)
    except _RunReached as reached:
        if (below := _defined_below(path, line := _lines(reached, path)[0])) is not None:
            del sys.modules[name]
            raise UsageError(
                f"{path}:{line} starts a run, above the definition of {below}: move the code that runs under "
                "'if __name__ == \"__main__\":' at the end of the file"
            ) from None
    except (Exception, SystemExit) as error:
        del sys.modules[name]
        raise UsageError(f"{path} could not be imported: {_describe(error, path)}") from error
    finally:
        _importing.reset(token)
    for other in [sys.modules[n] for n in set(sys.modules) - before] + [module]:
        file = getattr(other, "__file__", None)
        if file and Path(file).parent == path.parent:
            cloudpickle.register_pickle_by_value(other)
    _imported[path] = version, module
    return module


def _defined_below(path: Path, line: int) -> str | None:
    """The first function or class that a file defines below a line."""
    found = (node for node in ast.parse(path.read_bytes()).body if node.lineno > line)
    return next((node.name for node in found if isinstance(node, ast.FunctionDef | ast.ClassDef)), None)


def _lines(error: BaseException, path: Path) -> list[int]:
    """The lines of a file in the traceback of an exception, the outermost first."""
    frames = traceback.extract_tb(error.__traceback__)
    return [frame.lineno for frame in frames if frame.filename == str(path) and frame.lineno is not None]


def _describe(error: BaseException, path: Path) -> str:
    """The exception and the line of the user's file that it came from."""
    lines = _lines(error, path)
    if isinstance(error, SyntaxError) and error.filename == str(path) and error.lineno is not None:
        lines = [error.lineno]
    where = f" (line {lines[-1]})" if lines else ""
    text = error.msg if isinstance(error, SyntaxError) else str(error)
    return f"{type(error).__name__}: {text}{where}"


def _construct(spec: str, cls: type[Task], data: Path | None, settings: dict[str, str]) -> Task:
    parameters = _settings.parameters(cls)
    if "data" in settings:
        raise UsageError(f"the data of task {spec} is not one of its options: pass it as --data")
    hints = get_type_hints(Task)
    for name in settings.keys() - settable(cls):
        raise unknown(f"option of task {spec}", name, settable(cls))
    attributes = {
        name: _settings.convert(f"option {name} of task {spec}", text, hints[name])
        for name, text in settings.items()
        if name not in parameters
    }
    given = {name: text for name, text in settings.items() if name in parameters}
    arguments = _settings.arguments(cls, f"task {spec}", given)
    if data is not None:
        if "data" not in parameters:
            raise UsageError(f"task {spec} takes no data: leave out --data (its constructor has no parameter 'data')")
        path = Path(data).expanduser().resolve()
        if not path.exists():
            raise UsageError(f"there is no file or folder {path} for the data of task {spec}")
        arguments["data"] = str(path) if _settings.type_of(cls, parameters["data"]) is str else path
    missing = [n for n, p in parameters.items() if p.default is p.empty and n not in arguments]
    if missing:
        how = " ".join("--data" if name == "data" else f"--set {name}=VALUE" for name in missing)
        raise UsageError(f"the constructor of task {spec} needs {', '.join(missing)}: pass {how}")
    try:
        task = cls(**arguments)
    except TetherError:
        raise
    except Exception as error:  # the user's code may raise anything
        where = Path(inspect.getfile(cls))
        raise UsageError(f"the constructor of task {spec} failed: {_describe(error, where)}") from error
    for name, value in attributes.items():
        setattr(task, name, value)
    return task
