"""Checks of a release: a bill of materials of the lock file, and the contents of sdist and wheel."""

from __future__ import annotations

import hashlib
import json
import re
import shutil
import subprocess
import sys
import tarfile
import tempfile
import tomllib
import uuid
import zipfile
from collections.abc import Iterator
from dataclasses import dataclass
from importlib.metadata import PackageNotFoundError, metadata
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[2]
LOCK = ROOT / "scripts" / "lock.txt"
CONSTRAINTS = ROOT / "constraints.txt"
FOLDERS = ("atts", "calibration", "evaluators", "pipelines")
"""Folders whose files are installed."""
_SOURCES = (*FOLDERS, "pyproject.toml", "README.md", "LICENSE")
_PIN = re.compile(r"([A-Za-z0-9][A-Za-z0-9._-]*)==([^\s;\\]+)")
_HASH = re.compile(r"--hash=sha256:([0-9a-f]{64})")


@dataclass(frozen=True, slots=True)
class Pinned:
    """One package of the lock file, with the hashes of all files of its version."""

    name: str
    version: str
    hashes: tuple[str, ...]


def normal(name: str) -> str:
    """Return a package's name as indexes compare it.

    >>> normal("Jinja2"), normal("ast_serialize")
    ('jinja2', 'ast-serialize')
    """
    return re.sub(r"[-_.]+", "-", name).lower()


def read_lock(text: str) -> list[Pinned]:
    """Return the packages of a lock file.

    :raises ValueError: a requirement is not pinned, or has no hash.
    """
    pins = list[Pinned]()
    for entry in re.split(r"\n(?=\S)", text):
        if not entry.strip() or entry.startswith("#"):
            continue
        pin = _PIN.match(entry)
        hashes = _HASH.findall(entry)
        if pin is None or not hashes:
            raise ValueError(f"expected a pinned package with hashes, got: {entry.splitlines()[0]}")
        pins.append(Pinned(normal(pin[1]), pin[2], tuple(hashes)))
    return pins


def bill_of_materials(pins: list[Pinned]) -> dict[str, Any]:
    """Return the packages as a CycloneDX document; equal lock files give equal documents."""
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    components = [_component(pin) for pin in sorted(pins, key=lambda pin: pin.name)]
    digest = hashlib.sha256(json.dumps(components, sort_keys=True).encode()).digest()
    return {
        "bomFormat": "CycloneDX",
        "specVersion": "1.5",
        "serialNumber": f"urn:uuid:{uuid.UUID(bytes=digest[:16], version=4)}",
        "version": 1,
        "metadata": {
            "component": {
                "type": "library",
                "name": project["name"],
                "version": project["version"],
                "licenses": [{"license": {"id": project["license"]}}],
                "purl": f"pkg:pypi/{project['name']}@{project['version']}",
            }
        },
        "components": components,
    }


def _component(pin: Pinned) -> dict[str, Any]:
    url = f"pkg:pypi/{pin.name}@{pin.version}"
    component: dict[str, Any] = {
        "type": "library",
        "bom-ref": url,
        "name": pin.name,
        "version": pin.version,
        "purl": url,
        # A version has a file per platform. CycloneDX has one hash per algorithm for a component,
        # so each file's hash is a property.
        "properties": [{"name": "file:sha256", "value": digest} for digest in pin.hashes],
    }
    license_name = _license(pin.name)
    if license_name:
        component["licenses"] = [{"license": {"name": license_name}}]
    return component


def _license(name: str) -> str:
    """Return the license that an installed package states, or "" if there is none."""
    try:
        stated = metadata(name)
    except PackageNotFoundError:
        return ""
    for field in ("License-Expression", "License"):
        # Some packages put the whole licence text into the field for the licence's name.
        if field in stated and stated[field] and "\n" not in stated[field]:
            return stated[field]
    classes = [
        line.rpartition("::")[2].strip()
        for line in stated.get_all("Classifier") or []
        if line.startswith("License ::")
    ]
    return "; ".join(classes)


@dataclass(frozen=True, slots=True)
class Built:
    """The sdist and the wheel built from one tree."""

    sdist: Path
    wheel: Path


def build(folder: Path) -> Built:
    """Build sdist and wheel in a copy of the tree; the wheel is built from the sdist.

    :raises subprocess.CalledProcessError: the build failed.
    """
    source = folder / "source"
    source.mkdir()
    for name in _SOURCES:
        here = ROOT / name
        if here.is_dir():
            ignored = shutil.ignore_patterns("__pycache__")
            shutil.copytree(here, source / name, symlinks=True, ignore=ignored)
        else:
            shutil.copy(here, source / name)
    command = [sys.executable, "-m", "build", "--no-isolation", "--outdir", str(folder / "dist")]
    subprocess.run([*command, str(source)], check=True, capture_output=True)
    (sdist,) = (folder / "dist").glob("*.tar.gz")
    (wheel,) = (folder / "dist").glob("*.whl")
    return Built(sdist, wheel)


def expected_files() -> set[str]:
    """Return the tracked files of the installed folders, by the names under which they are
    installed.

    :raises subprocess.CalledProcessError: this is not a git checkout.
    """
    listed = subprocess.run(
        ["git", "ls-files", "-s", "--", *FOLDERS],
        cwd=ROOT,
        check=True,
        capture_output=True,
        text=True,
    ).stdout
    names = set[str]()
    for line in listed.splitlines():
        mode, _, path = line.partition(" ")
        path = path.partition("\t")[2]
        if mode != "120000":  # the links in atts/ lead to folders whose files are installed there
            names.add(path if path.startswith("atts/") else f"atts/{path}")
    return names


def wrong_contents(built: Built) -> Iterator[str]:
    """Yield a message for each file that the wheel or the sdist lacks, and for each unexpected
    file.
    """
    expected = expected_files()
    with zipfile.ZipFile(built.wheel) as wheel:
        names = {name for name in wheel.namelist() if not name.endswith("/")}
    yield from _compared("wheel", names, expected, re.compile(r"[^/]+\.dist-info/.*"))
    with tarfile.open(built.sdist) as sdist:
        paths = {
            member.name.partition("/")[2]
            for member in sdist.getmembers()
            if not member.isdir() and not member.name.endswith("/")
        }
    installed = {
        path
        if path.startswith("atts/") or path.partition("/")[0] not in FOLDERS
        else f"atts/{path}"
        for path in paths
    }
    extra = re.compile(r"(PKG-INFO|setup\.cfg|[^/]+\.egg-info/.*)")
    wanted = expected | {"LICENSE", "README.md", "pyproject.toml"}
    yield from _compared("sdist", installed, wanted, extra)


def _compared(
    what: str, names: set[str], expected: set[str], metadata_files: re.Pattern[str]
) -> Iterator[str]:
    for name in sorted(expected - names):
        yield f"{what}: {name} is missing"
    for name in sorted(names - expected):
        if not metadata_files.fullmatch(name):
            yield f"{what}: {name} should not be there"


def main() -> None:
    """Print the bill of materials, or check the built sdist and wheel.

    :raises SystemExit: with 2 for wrong arguments, with 1 for wrong contents.
    """
    match sys.argv[1:]:
        case ["sbom"]:
            sys.stdout.write(json.dumps(bill_of_materials(read_lock(LOCK.read_text())), indent=1))
            sys.stdout.write("\n")
        case ["contents"]:
            with tempfile.TemporaryDirectory() as folder:
                built = build(Path(folder))
                problems = list(wrong_contents(built))
                for problem in problems:
                    sys.stderr.write(f"supply: {problem}\n")
                if problems:
                    raise SystemExit(1)
                sys.stdout.write(
                    f"{built.sdist.name} and {built.wheel.name} have the expected contents\n"
                )
        case words:
            sys.stderr.write(f"supply: expected sbom or contents, got {' '.join(words)!r}\n")
            raise SystemExit(2)


if __name__ == "__main__":
    main()
