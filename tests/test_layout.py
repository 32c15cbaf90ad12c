"""The house keeps its shape: folders, floors, links, and a light front door."""

import ast
import importlib
import subprocess
import sys
import tomllib
from collections.abc import Iterator
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[1]
SETUPTOOLS = tomllib.loads((ROOT / "pyproject.toml").read_text())["tool"]["setuptools"]
MAPPING: dict[str, str] = SETUPTOOLS["package-dir"]
HEAVY = ("torch", "transformers", "sympy", "numpy", "anyio")

FLOORS: list[set[str]] = [
    {"atts.errors", "atts.jsonable", "atts.seeds", "atts.slots", "atts.tasks"},
    {"atts.core", "atts.files"},
    {
        "atts.engine",
        "atts.graph",
        "atts.journal",
        "atts.decode",
        "atts.tokenizing",
        "atts.calibration",
        "atts.evaluators",
    },
    {"atts.local", "atts.remote", "atts.testing", "atts.models", "atts.pipelines"},
    {"atts.analysis", "atts.methods", "atts.run"},
    {"atts.api"},
    {"atts.adapters", "atts.cli"},
    {"atts.__main__"},
]
FLOOR = {unit: number for number, units in enumerate(FLOORS) for unit in units}


def modules() -> Iterator[tuple[str, Path]]:
    """Dotted name and path of every module in a mapped directory, `atts/__init__` left out."""
    for package, folder in MAPPING.items():
        for path in sorted((ROOT / folder).rglob("*.py")):
            inner = path.relative_to(ROOT / folder)
            if any((ROOT / folder / parent).is_symlink() for parent in inner.parents if parent != Path()):
                continue  # the three links inside atts/ lead to folders that are mapped themselves
            parts = [package, *inner.with_suffix("").parts]
            if parts[-1] == "__init__":
                parts.pop()
            if parts != ["atts"]:
                yield ".".join(parts), path


def unit(name: str) -> str:
    """A module's first two dotted names."""
    return ".".join(name.split(".")[:2])


def imports(path: Path) -> Iterator[str]:
    """Every name under `atts.` that the file imports anywhere, functions and TYPE_CHECKING included."""
    for node in ast.walk(ast.parse(path.read_text(), str(path))):
        if isinstance(node, ast.Import):
            names = [alias.name for alias in node.names]
        elif isinstance(node, ast.ImportFrom):
            assert node.level == 0, f"{path}:{node.lineno}: relative import"
            names = [f"atts.{alias.name}" for alias in node.names] if node.module == "atts" else [node.module or ""]
        else:
            continue
        assert "atts" not in names, f"{path}:{node.lineno}: import the module that has the name, not `atts`"
        yield from (name for name in names if name.startswith("atts."))


@pytest.mark.parametrize(("name", "path"), [pytest.param(*pair, id=pair[0]) for pair in modules()])
def test_arrows_point_down(name: str, path: Path) -> None:
    """An import of another unit lands on a strictly lower floor."""
    for target in imports(path):
        if unit(target) != unit(name):
            assert FLOOR[unit(target)] < FLOOR[unit(name)], f"{name} (floor {FLOOR[unit(name)]}) imports {target}"


def test_every_unit_has_one_floor() -> None:
    """A new file must pick a floor, a removed one must leave it."""
    listed = [name for units in FLOORS for name in units]
    assert len(listed) == len(set(listed))
    assert set(listed) == {unit(name) for name, _ in modules()}


@pytest.mark.parametrize(("package", "folder"), MAPPING.items())
def test_the_directory_is_the_package(package: str, folder: str) -> None:
    """What is imported is what is in the folder, by mapping and by link."""
    found = importlib.import_module(package).__file__
    assert found is not None
    assert Path(found).resolve().parent == ROOT / folder
    assert (ROOT / Path(*package.split("."))).resolve() == ROOT / folder


def test_every_module_is_in_a_listed_package() -> None:
    """setuptools ships what is listed, and nothing else is there."""
    packages = {"atts"} | {name if path.name == "__init__.py" else name.rpartition(".")[0] for name, path in modules()}
    assert packages == set(SETUPTOOLS["packages"])
    assert set(MAPPING) <= set(SETUPTOOLS["packages"])


def test_import_atts_is_light() -> None:
    """The front door opens without the heavy libraries, the command line's help too."""
    code = f"import sys, atts, atts.cli.app; atts.cli.app.build([]); print([n for n in {HEAVY} if n in sys.modules])"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True, cwd=ROOT)
    assert done.stdout.strip() == "[]"


SPAWNING = ("create_task_group", "open_nursery", "TaskGroup(", "ensure_future", "asyncio.gather", "asyncio.create_task")


def test_task_groups_are_opened_in_one_place() -> None:
    """Structured concurrency has one owner; an actor, whose methods are calls from another process, has a task."""
    openers = {name for name, path in modules() if any(word in path.read_text() for word in SPAWNING)}
    assert openers == {"atts.tasks", "atts.remote.ray_host"}
