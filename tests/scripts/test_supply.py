"""Tests of the supply chain: every version has hashes, and a release contains exactly its files."""

from __future__ import annotations

import json
import re
import subprocess
import sys
import tomllib
import zipfile
from pathlib import Path

import pytest

from scripts.studies.supply import (
    CONSTRAINTS,
    LOCK,
    ROOT,
    Built,
    bill_of_materials,
    build,
    normal,
    read_lock,
    wrong_contents,
)

pytestmark = pytest.mark.checkout


def constrained() -> dict[str, str]:
    """Read the versions of constraints.txt."""
    lines = CONSTRAINTS.read_text().splitlines()
    pins = (line.split("==") for line in lines if line and not line.startswith("#"))
    return {normal(name): version for name, version in pins}


def test_the_lock_has_the_tested_versions_with_hashes() -> None:
    """The lock file and the constraints agree on each package, and each requirement of the project
    is locked.
    """
    locked = {pin.name: pin.version for pin in read_lock(LOCK.read_text())}
    tested = constrained()
    differing = {name for name in locked.keys() & tested.keys() if locked[name] != tested[name]}
    assert not differing, "run scripts/supply lock"
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    extras = project["optional-dependencies"]
    required = [*project["dependencies"], *extras["dev"], *extras["local"], *extras["servers"]]
    names = {normal(re.split(r"[\[<>=~!; ]", line)[0]) for line in required}
    assert names - {"atts-llm"} <= locked.keys(), "run scripts/supply lock"


def test_a_lock_without_a_hash_is_refused() -> None:
    """A lock file with a line without a hash is refused, because that package would be installed
    unchecked.
    """
    whole = f"one==1.0 \\\n    --hash=sha256:{'a' * 64}\n"
    assert [(pin.name, pin.version) for pin in read_lock(whole)] == [("one", "1.0")]
    for wrong in ("two==2.0\n", f"two>=2 \\\n    --hash=sha256:{'b' * 64}\n"):
        with pytest.raises(ValueError, match="two"):
            read_lock(whole + wrong)


def test_the_bill_of_materials_names_everything() -> None:
    """The bill of materials is CycloneDX with licences, and has the same bytes every time."""
    command = [sys.executable, "-m", "scripts.studies.supply", "sbom"]
    runs = [
        subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=True).stdout
        for _ in range(2)
    ]
    assert runs[0] == runs[1]
    bill = json.loads(runs[0])
    assert (bill["bomFormat"], bill["specVersion"]) == ("CycloneDX", "1.5")
    by_name = {one["name"]: one for one in bill["components"]}
    assert by_name.keys() == {pin.name for pin in read_lock(LOCK.read_text())}
    assert by_name["anyio"]["purl"] == f"pkg:pypi/anyio@{constrained()['anyio']}"
    assert by_name["anyio"]["licenses"] == [{"license": {"name": "MIT"}}]
    assert bill == bill_of_materials(read_lock(LOCK.read_text()))


@pytest.fixture(scope="module")
def built(tmp_path_factory: pytest.TempPathFactory) -> Built:
    """Build an sdist and a wheel of this checkout."""
    if not (ROOT / ".git").exists():
        pytest.skip("not a git checkout, so which files belong to the project is not known")
    return build(tmp_path_factory.mktemp("release"))


def test_a_release_holds_every_file_and_nothing_else(built: Built) -> None:
    """The wheel, built from the sdist, has every tracked file of the four source folders and no
    other file.
    """
    assert list(wrong_contents(built)) == []


def test_a_stray_file_and_a_missing_one_are_reported(built: Built, tmp_path: Path) -> None:
    """The check reports extra files as well as missing files."""
    changed = tmp_path / built.wheel.name
    with zipfile.ZipFile(built.wheel) as old, zipfile.ZipFile(changed, "w") as new:
        for name in old.namelist():
            if name != "atts/core.py":
                new.writestr(name, old.read(name))
        new.writestr("atts/secret.env", "KEY=1")
    assert list(wrong_contents(Built(built.sdist, changed))) == [
        "wheel: atts/core.py is missing",
        "wheel: atts/secret.env should not be there",
    ]
