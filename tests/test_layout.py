"""Tests of the package's structure: layers, public names of packages, no import cycles, fast
imports.
"""

import ast
import importlib
import re
import subprocess
import sys
import tomllib
from collections.abc import Iterator, Mapping
from functools import cache
from graphlib import CycleError, TopologicalSorter
from pathlib import Path

import pytest

pytestmark = pytest.mark.checkout
ROOT = Path(__file__).resolve().parents[1]
SETUPTOOLS = tomllib.loads((ROOT / "pyproject.toml").read_text())["tool"]["setuptools"]
MAPPING: dict[str, str] = SETUPTOOLS["package-dir"]
HEAVY = ("torch", "transformers", "sympy", "numpy", "anyio")

FLOORS: list[set[str]] = [
    {"atts.concurrency", "atts.errors", "atts.sampling"},
    {"atts.core", "atts.files", "atts.interrupts"},
    {"atts.engine"},
    {
        "atts.calibration",
        "atts.evaluators",
        "atts.graph",
        "atts.journal",
        "atts.ledger",
        "atts.models",
    },
    {"atts.local", "atts.servers", "atts.testing", "atts.pipelines"},
    {"atts.analysis", "atts.accel", "atts.importers", "atts.methods", "atts.run"},
    {"atts.api"},
    {"atts.adapters"},
    {"atts.serving"},
    {"atts.cli"},
    {"atts.__main__"},
]
FLOOR = {unit: number for number, units in enumerate(FLOORS) for unit in units}


SHELVES = {"atts.models"}
"""Packages without public names of their own: each module is imported by its own name."""


@cache
def sources() -> Mapping[str, Path]:
    """Return the dotted name and path of every module in the package's directories, without
    `atts/__init__`.
    """
    found = dict[str, Path]()
    for package, folder in MAPPING.items():
        for path in sorted((ROOT / folder).rglob("*.py")):
            inner = path.relative_to(ROOT / folder)
            if any(
                (ROOT / folder / parent).is_symlink()
                for parent in inner.parents
                if parent != Path()
            ):
                continue  # the links inside atts/ lead to folders that are listed separately
            parts = [package, *inner.with_suffix("").parts]
            if parts[-1] == "__init__":
                parts.pop()
            if parts != ["atts"]:
                found[".".join(parts)] = path
    return found


@cache
def tree(name: str) -> ast.Module:
    """Parse the source of a module."""
    return ast.parse(sources()[name].read_text(), name)


def unit(name: str) -> str:
    """Return the first two parts of a module's dotted name."""
    return ".".join(name.split(".")[:2])


def imports(name: str) -> Iterator[tuple[str, str]]:
    """Yield the module and name of every import below `atts`, including imports in functions and
    under TYPE_CHECKING. The name is "" if the module itself is imported.
    """
    for node in ast.walk(tree(name)):
        if isinstance(node, ast.Import):
            found = [(alias.name, "") for alias in node.names]
        elif isinstance(node, ast.ImportFrom):
            assert node.level == 0, f"{name}:{node.lineno}: relative import"
            found = [(node.module or "", alias.name) for alias in node.names]
            if node.module == "atts":
                found = [(f"atts.{alias.name}", "") for alias in node.names]
        else:
            continue
        assert ("atts", "") not in found, (
            f"{name}:{node.lineno}: import the module that has the name, not `atts`"
        )
        yield from ((module, part) for module, part in found if module.startswith("atts."))


def face(package: str) -> set[str]:
    """Return the public names of a package: its `__all__` or, if that is computed, its re-exports
    for type checkers.
    """
    for node in tree(package).body:
        if (
            isinstance(node, ast.Assign)
            and ast.unparse(node.targets[0]) == "__all__"
            and isinstance(node.value, ast.List)
        ):
            return set(ast.literal_eval(node.value))
    imported = [node for node in ast.walk(tree(package)) if isinstance(node, ast.ImportFrom)]
    return {alias.name for node in imported for alias in node.names if alias.asname == alias.name}


@pytest.mark.parametrize("name", sources())
def test_imports_point_to_lower_floors(name: str) -> None:
    """Modules import other units only from a strictly lower floor of `FLOORS`."""
    for target, _ in imports(name):
        if unit(target) != unit(name):
            assert FLOOR[unit(target)] < FLOOR[unit(name)], (
                f"{name} (floor {FLOOR[unit(name)]}) imports {target}"
            )


def test_there_is_no_import_cycle() -> None:
    """Modules can be ordered so that each imports only earlier ones, with imports inside functions
    included.
    """
    graph = {
        name: {f"{m}.{n}" if f"{m}.{n}" in sources() else m for m, n in imports(name)}
        for name in sources()
    }
    try:
        TopologicalSorter(graph).prepare()
    except CycleError as error:
        pytest.fail(" -> ".join(error.args[1]))


def deep_imports() -> Iterator[str]:
    """Yield imports that reach inside another package, or take a name that the package does not
    make public.
    """
    for name, path in sources().items():
        for target, part in imports(name):
            here = unit(target)
            if here in SHELVES or (unit(name), here) == ("atts.accel", "atts.local"):
                # accelerators of the local engine may import its inner modules, because they are
                # built from them
                continue
            if here != unit(name) and sources()[here].name == "__init__.py":
                if target != here or (part and part not in face(here)):
                    yield f"{path.relative_to(ROOT)}: {target} {part}".strip()


def long_calls() -> Iterator[str]:
    """Yield calls with more than 6 positional arguments."""
    for name, path in sources().items():
        for node in ast.walk(tree(name)):
            if (
                isinstance(node, ast.Call)
                and sum(not isinstance(part, ast.Starred) for part in node.args) > 6
            ):
                yield f"{path.relative_to(ROOT)}: {ast.unparse(node.func)}"


def parsed_reasons() -> Iterator[str]:
    """Yield the lines of code that read a decision's `why` as data; `why` is a text for people."""
    for name, path in sources().items():
        for node in ast.walk(tree(name)):
            parts: list[ast.expr] = []
            if isinstance(node, ast.Compare):
                parts = [node.left, *node.comparators]
            elif isinstance(node, ast.Call) and isinstance(node.func, ast.Attribute):
                parts = [
                    node.func.value,
                    *(node.args if ast.unparse(node.func.value) == "re" else ()),
                ]
            elif isinstance(node, ast.Subscript):
                parts = [node.value]
            if any(
                isinstance(part, ast.Attribute) and ast.unparse(part).endswith("decision.why")
                for part in parts
            ):
                yield f"{path.relative_to(ROOT)}: {ast.unparse(node)}"


def calibrating_pipelines() -> Iterator[str]:
    """Yield modules of pipelines that import calibration, although pipelines receive plain
    functions.
    """
    for name, path in sources().items():
        if unit(name) == "atts.pipelines" and any(
            unit(target) == "atts.calibration" for target, _ in imports(name)
        ):
            yield str(path.relative_to(ROOT))


CHECKS = {
    check.__name__: check
    for check in (
        deep_imports,
        long_calls,
        parsed_reasons,
        calibrating_pipelines,
    )
}


@pytest.mark.parametrize("check", CHECKS)
def test_each_house_rule_holds(check: str) -> None:
    """Each function of `CHECKS` searches for lines that break one rule, and none finds such a line."""
    found = sorted(CHECKS[check]())
    assert not found


def test_every_unit_has_one_floor() -> None:
    """Every unit has exactly one floor: a new unit must be added to `FLOORS`, and a removed unit
    deleted.
    """
    listed = [name for units in FLOORS for name in units]
    assert len(listed) == len(set(listed))
    assert set(listed) == {unit(name) for name in sources()}


@pytest.mark.parametrize(("package", "folder"), MAPPING.items())
def test_the_directory_is_the_package(package: str, folder: str) -> None:
    """Importing a package from its own folder, and through the link in atts/, gives files of the
    same folder.
    """
    found = importlib.import_module(package).__file__
    assert found is not None
    assert Path(found).resolve().parent == ROOT / folder
    assert (ROOT / Path(*package.split("."))).resolve() == ROOT / folder


def test_every_module_is_in_a_listed_package() -> None:
    """Every module is in a package that pyproject.toml lists, because setuptools ships only these
    packages.
    """
    packages = {"atts"} | {
        name if path.name == "__init__.py" else name.rpartition(".")[0]
        for name, path in sources().items()
    }
    assert packages == set(SETUPTOOLS["packages"])
    assert set(MAPPING) <= set(SETUPTOOLS["packages"])


def test_import_atts_loads_no_heavy_library() -> None:
    """Neither `import atts` nor the command line's help loads a heavy library."""
    code = f"import sys, atts, atts.cli.app; atts.cli.app.build([]); print([n for n in {HEAVY} if n in sys.modules])"
    done = subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, check=True, cwd=ROOT
    )
    assert done.stdout.strip() == "[]"


def test_a_run_loads_neither_analysis_nor_accelerators() -> None:
    """Importing `atts.api` loads neither analysis nor accelerators, because every command waits for
    this import.
    """
    code = "import sys, atts.api.evaluation; print([n for n in ('atts.analysis', 'atts.accel') if n in sys.modules])"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.strip() == "[]"


def test_the_local_engine_imports_no_accelerator() -> None:
    """Accelerators import the local engine, but the local engine imports no accelerator."""
    assert [
        name
        for name in sources()
        if unit(name) == "atts.local"
        and any(unit(target) == "atts.accel" for target, _ in imports(name))
    ] == []


_PLAIN = """
import sys
import anyio
from atts.core import SampleRequest
from atts.local import LocalEngine, LocalOptions
from atts.models import path

async def main():
    options = LocalOptions(worker="thread", threads=1, kv_tokens=2048)
    async with LocalEngine(path("draft"), options=options) as engine:
        await engine.sample(SampleRequest((5, 6), 4))

anyio.run(main)
print([name for name in sys.modules if name.startswith("atts.accel")])
"""


def test_plain_decoding_loads_no_accelerator() -> None:
    """An engine that is built and writes a few tokens imports no accelerator."""
    done = subprocess.run(
        [sys.executable, "-c", _PLAIN], capture_output=True, text=True, check=True, cwd=ROOT
    )
    assert done.stdout.strip() == "[]"


def test_nothing_imports_scipy() -> None:
    """No module imports scipy, which would be a third of the download for users who only call
    servers.
    """
    assert [
        name
        for name, path in sources().items()
        if re.search(r"^\s*(import|from) scipy", path.read_text(), re.MULTILINE)
        and not name.startswith("scripts.")
    ] == []


SPAWNING = (
    "create_task_group",
    "open_nursery",
    "TaskGroup(",
    "ensure_future",
    "asyncio.gather",
    "asyncio.create_task",
)


def test_task_groups_are_opened_in_one_place() -> None:
    """Task groups are opened only in the module for structured concurrency, except by Ray actors,
    whose methods are called from another process.
    """
    openers = {
        name
        for name, path in sources().items()
        if any(word in path.read_text() for word in SPAWNING)
    }
    assert openers == {"atts.concurrency", "atts.servers.ray"}
