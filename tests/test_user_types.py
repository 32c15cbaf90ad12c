"""Tests that type checkers understand the installed package in another project's environment."""

import subprocess
import sys
import sysconfig
import venv
from pathlib import Path

import pytest

import atts

HOME = Path(atts.__file__).resolve().parents[1]
ROOT = Path(__file__).resolve().parents[1]
TOOLS = Path(sys.executable).parent
PROGRAM = '''"""What a user of the package writes: every public package, by its public names."""

from typing import assert_type

import atts
from atts.api import find_pair
from atts.calibration import Calibrator
from atts.evaluators import Estimate, equivalent
from atts.pipelines import ConformalGate, Policy


async def asked(question: str) -> str | None:
    setup = atts.Setup(rate=0.2, policy=Policy(samples=4))
    outcome = await atts.solve(question, setup)
    assert_type(outcome.answer, str | None)
    async with atts.Session(setup) as session:
        assert_type(await session.solve(question), atts.Outcome)
    return outcome.answer


def measured(folder: str) -> float:
    result = atts.evaluate_sync("arithmetic", atts.Setup(), limit=4, directory=folder)
    assert_type(result, atts.RunResult)
    assert_type(result.accuracy, Estimate)
    return result.accuracy.value


def calibrated() -> ConformalGate:
    return ConformalGate(Calibrator(0.2, "aci"))


assert_type(equivalent("1/2", "0.5").status == "equal", bool)
assert_type(find_pair("embedded").draft, str)
'''


@pytest.fixture(scope="module")
def python(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Return the interpreter of an environment in which the package is installed as a user would
    install it.
    """
    if (HOME / "pyproject.toml").exists():  # the checkout's environment, made by ./scripts/install
        if Path(sys.prefix).resolve() != ROOT / ".venv":
            pytest.skip("needs the environment that ./scripts/install makes")
        subprocess.run([ROOT / "scripts/install"], check=True, timeout=600)
        return Path(sys.executable)
    folder = tmp_path_factory.mktemp("environment")
    venv.create(folder, symlinks=True)
    site = Path(sysconfig.get_path("purelib", vars={"base": str(folder)}))
    (site / "installed.pth").write_text(f"{HOME}\n{sysconfig.get_path('purelib')}\n")
    return folder / "bin/python"


def found(folder: Path, program: str, *words: str | Path) -> str:
    """Return a type checker's errors on a program in a separate project, or "" if it reports none."""
    (folder / "user.py").write_text(program)
    ran = subprocess.run(
        [*words, "user.py"], cwd=folder, capture_output=True, text=True, check=False
    )
    return "" if ran.returncode == 0 else ran.stdout + ran.stderr


def test_pyright_follows_every_public_name(tmp_path: Path, python: Path) -> None:
    """Pyright in strict mode reports no unresolved import and no unknown type in a program that
    uses every public name.
    """
    strict = f"# pyright: strict\n{PROGRAM}"
    assert found(tmp_path, strict, TOOLS / "pyright", "--warnings", "--pythonpath", python) == ""


def test_mypy_finds_every_public_module(tmp_path: Path, python: Path) -> None:
    """mypy finds each imported module of atts; a separate slow test checks the types."""
    imports = "".join(
        line + "\n" for line in PROGRAM.splitlines() if line.startswith(("import", "from"))
    )
    options = ("--strict", "--follow-imports=skip", f"--cache-dir={tmp_path / 'cache'}")
    assert found(tmp_path, imports, TOOLS / "mypy", *options, "--python-executable", python) == ""


@pytest.mark.slow
def test_mypy_follows_every_public_name(tmp_path: Path, python: Path) -> None:
    """mypy in strict mode reports no error in a program that uses every public name."""
    options = ("--strict", f"--cache-dir={tmp_path / 'cache'}")
    assert found(tmp_path, PROGRAM, TOOLS / "mypy", *options, "--python-executable", python) == ""
