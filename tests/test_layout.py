"""Data goes down the layers of the package and never up, no modules import one another in a circle, and names are unique."""

import ast
from collections import Counter
from functools import cache
from graphlib import CycleError, TopologicalSorter
from pathlib import Path

import pytest

PACKAGE = Path(__file__).parents[1] / "propcheck"

# Each package imports only from those below it. The last line is the ground floor: these may be imported from everywhere.
LAYERS = (
    ("__main__",),
    ("cli",),
    ("testing",),
    ("__init__",),
    ("api",),
    ("render",),
    ("comparison",),
    ("rules",),
    ("analysis",),
    ("execution",),
    ("measure",),
    ("tracing",),
    ("deferred_init",),
    ("targets",),
    ("config",),
    ("records",),
    ("formatting", "errors", "progress", "seeding"),
)
LEVEL = {name: level for level, names in enumerate(reversed(LAYERS)) for name in names}
# The same file name in two packages where both mean the same thing, each in its package's way.
SHARED_NAMES = {
    "baseline": "the file, and the making of one",
    "decoder": "the settings of the reference decoder, and the decoder",
    "growth": "the record, and its derivation",
    "options": "the table of options, and its form on the command line",
    "parameters": "the rules of parameters, and what they judge",
    "run": "the record, and the object around it",
    "compare": "the comparison itself, its public function, and its command",
    "gate": "the verdict itself, its public function, and its command",
    "scan": "the public function and its command",
    "sweep": "the public function and its command",
}


@cache
def modules() -> dict[str, Path]:
    """Every module of the package by its dotted name without ``propcheck.``; packages by their own name."""
    paths = {path.relative_to(PACKAGE).with_suffix("").as_posix().replace("/", "."): path for path in PACKAGE.rglob("*.py")}
    return {name.removesuffix(".__init__"): path for name, path in paths.items()}


@cache
def imports() -> dict[str, frozenset[str]]:
    """The modules that each module imports, at the top, inside functions, or for its annotations alone."""
    return {name: frozenset(_imported(path) - {name}) for name, path in modules().items()}


def _imported(path: Path) -> set[str]:
    names: set[str] = set()
    for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
        if isinstance(node, ast.ImportFrom) and node.module and node.module.partition(".")[0] == "propcheck":
            package = node.module.removeprefix("propcheck").removeprefix(".")
            inside = [f"{package}.{alias.name}".removeprefix(".") for alias in node.names]
            names |= {module if module in modules() else package or "__init__" for module in inside}
        elif isinstance(node, ast.Import):
            names |= {alias.name.removeprefix("propcheck.") for alias in node.names if alias.name.startswith("propcheck.")}
    return names


def layer(module: str) -> str:
    return module.partition(".")[0]


def test_every_module_belongs_to_a_layer():
    assert {layer(module) for module in modules()} == set(LEVEL)


def test_no_import_points_upwards():
    # The version is the one name that every layer takes from the package itself.
    upwards = [
        f"{importer} -> {imported}"
        for importer, names in imports().items()
        for imported in names
        if LEVEL[layer(imported)] > LEVEL[layer(importer)] and imported != "__init__"
    ]
    assert not upwards


def test_only_the_version_is_taken_from_the_package_itself():
    for name, path in modules().items():
        for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
            if isinstance(node, ast.ImportFrom) and node.module == "propcheck":
                own = {alias.name for alias in node.names if alias.name not in modules()}
                assert own <= {"__version__"} or layer(name) in ("cli", "testing"), name


def test_no_modules_import_one_another_in_a_circle():
    # What a package re-exports is not an import of the modules that use the package's name.
    graph = {name: {other for other in names if other != "__init__"} for name, names in imports().items()}
    try:
        TopologicalSorter(graph).prepare()
    except CycleError as error:
        pytest.fail(" -> ".join(reversed(error.args[1])))


def test_no_module_name_occurs_twice_unless_it_means_the_same():
    names = Counter(name.rpartition(".")[2] for name in modules())
    repeated = {name for name, count in names.items() if count > 1}
    assert repeated <= set(SHARED_NAMES)


def test_no_public_class_name_occurs_twice():
    classes: Counter[str] = Counter()
    for path in modules().values():
        tree = ast.parse(path.read_text(encoding="utf-8"))
        classes.update(node.name for node in tree.body if isinstance(node, ast.ClassDef) and not node.name.startswith("_"))
    # `propcheck.Run` wraps the record, with DataFrames and files.
    assert {name for name, count in classes.items() if count > 1} <= {"Run"}
