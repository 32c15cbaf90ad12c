"""The manifest of a run, which records the settings that must not change when the run is resumed."""

from __future__ import annotations

import json
import platform
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import asdict, dataclass, field
from functools import cache
from hashlib import blake2b
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any, Literal, TypeAlias

import msgspec

from atts.core import Grading, Problem
from atts.engine import first_values, is_other_model
from atts.errors import DISTRIBUTION, FingerprintError, JournalCorrupt
from atts.files import plain_fields, read_ordinary, storage, write_atomic
from atts.journal.events import SCHEMA
from atts.journal.lines import other_version

Json: TypeAlias = "Mapping[str, Json] | Sequence[Json] | str | int | float | bool | None"

JudgedUnit = Literal["chunks", "problems"]
"""The unit that a run's gate decides about: single chunks, or whole problems."""

_ADVICE = "Choose another run directory, or use the stored settings"


@dataclass(frozen=True, slots=True)
class Setting:
    """The value of a setting and where it came from: "default", or the name of a file, an
    environment variable or a flag.
    """

    value: Json
    origin: str = "default"


@dataclass(frozen=True, slots=True)
class Manifest:
    """The data that is needed to interpret a run's results.

    When a run is resumed, `configuration`, `engines`, `dataset` and `seed` must be the same.
    Origins, versions and dates are only for people. So is `settings`, which has all settings as the
    user wrote them. `engines` maps each role to the fields of its engine's spec. `dataset` is the
    digest that `dataset_digest` computes.
    """

    seed: int = 0
    dataset: str = ""
    # number of problems in the dataset; None if it is not known at the start
    problems: int | None = None
    configuration: Mapping[str, Setting] = field(default_factory=dict[str, Setting])
    engines: Mapping[str, Mapping[str, Json]] = field(default_factory=dict[str, Mapping[str, Json]])
    versions: Mapping[str, str] = field(default_factory=lambda: versions())
    created: float = 0.0  # time at which the run was started, in seconds since the Unix epoch
    schema: int = SCHEMA
    settings: Mapping[str, Setting] = field(default_factory=dict[str, Setting])
    # For each role: the log-probabilities of a fixed text. If they differ in a later session, the
    # server has another model.
    known_logprobs: Mapping[str, Sequence[float]] = field(
        default_factory=dict[str, Sequence[float]]
    )

    @property
    def judged_unit(self) -> JudgedUnit:
        """Return the unit that the run's gate decides about: chunks or problems."""
        policy = self.configuration.get("policy")
        values = policy.value if policy is not None else None
        escalates = values.get("escalates") if isinstance(values, Mapping) else None
        return "problems" if escalates == "problem" else "chunks"

    def check(self, stored: Manifest, directory: Path) -> None:
        """Check that the stored run has the same settings as the run that resumes it.

        :raises FingerprintError: if a setting differs; the message names every field that differs.
        """
        old = dict(stored.decisive())
        new = dict(self.decisive())
        missing = object()
        differences = [
            (name, old.get(name), new.get(name))
            for name in old | new
            if old.get(name, missing) != new.get(name, missing)
        ]
        for role in self.known_logprobs.keys() & stored.known_logprobs.keys():
            was = stored.known_logprobs[role]
            now = self.known_logprobs[role]
            if is_other_model(was, now):
                name = f"engines.{role}: log-probabilities of a fixed text"
                differences.append((name, first_values(was), first_values(now)))
        if differences:
            raise FingerprintError(f"the run in {directory}", differences, _ADVICE)

    def text(self) -> str:
        """Return the manifest as JSON, with indentation so that people can read it."""
        return json.dumps(asdict(self), indent=2, default=sorted)

    def decisive(self) -> Iterator[tuple[str, Json]]:
        """Yield the full name and value of each field that must be the same when the run is
        resumed.
        """
        plain = json.loads(self.text())
        yield "seed", plain["seed"]
        yield "dataset", plain["dataset"]
        for name, setting in plain["configuration"].items():
            yield from _flat(f"configuration.{name}", setting["value"])
        yield from _flat("engines", plain["engines"])


def versions(
    packages: Sequence[str] = ("anyio", "numpy", "torch", "transformers"),
) -> dict[str, str]:
    """Return the versions of Python, of atts and of the installed packages, and the name of the
    platform.
    """
    versions = {"python": platform.python_version(), "platform": platform.platform()}
    for name, distribution in {"atts": DISTRIBUTION, **{name: name for name in packages}}.items():
        # If atts runs from a source checkout that is not installed, its version is not known.
        with suppress(PackageNotFoundError):
            versions[name] = _version(distribution)
    return versions


# cached, because an interactive session makes a manifest for every question
_version = cache(version)


def dataset_digest(problems: Iterable[Problem]) -> str:
    """Return a hash of all fields of all problems; it depends on their order.

    >>> dataset_digest([Problem("1", "2+2?")]) == dataset_digest([Problem("1", "2+3?")])
    False
    """
    hasher = blake2b(digest_size=16)
    for problem in problems:
        fields = plain_fields(problem)
        # The digests in manifests of older runs were computed without this field. So leave the
        # field out if it has its default value.
        if fields["grading"] and fields["grading"]["variables"] == Grading().variables:
            del fields["grading"]["variables"]
        hasher.update(json.dumps(fields, sort_keys=True).encode() + b"\n")
    return hasher.hexdigest()


def save_manifest(path: Path, manifest: Manifest) -> None:
    """Write a manifest atomically, with a checksum of its content.

    :raises StorageError: writing to the disk fails.
    """
    data = json.loads(manifest.text())
    write_atomic(
        path, (json.dumps({**data, "checksum": _checksum(data)}, indent=2) + "\n").encode()
    )


def _checksum(data: Mapping[str, Any]) -> str:
    return blake2b(json.dumps(data, sort_keys=True).encode(), digest_size=16).hexdigest()


def load_manifest(path: Path) -> Manifest | None:
    """Return the manifest stored at a path; None if there is none.

    :raises JournalCorrupt: the file is damaged.
    :raises JournalVersion: another version of atts wrote the manifest.
    :raises StorageError: the manifest cannot be read.
    """
    with storage(path):
        if not path.exists():
            return None
        text = read_ordinary(path)
    try:
        data = json.loads(text)
        schema = data["schema"]
        checksum = data.pop("checksum", None)
        if isinstance(schema, int) and schema != SCHEMA:
            raise other_version(path, schema)
        if checksum != _checksum(data):
            raise ValueError(
                "the checksum does not match, so the manifest was damaged or edited by hand"
            )
        msgspec.convert(data, _Stored)
        deciding = _settings(data.pop("configuration"))
        given = _settings(data.pop("settings", {}))
        return Manifest(configuration=deciding, settings=given, **data)
    except (ValueError, KeyError, TypeError, AttributeError, RecursionError) as error:
        raise JournalCorrupt(
            path,
            f"the file is not a manifest ({error})",
            "Nothing was overwritten. Restore the file from a copy",
        ) from error


class _Stored(msgspec.Struct, forbid_unknown_fields=True):
    """The fields of a stored manifest with their types, which are checked when the manifest is
    decoded.
    """

    schema: int
    configuration: dict[str, Any]
    seed: int = 0
    dataset: str = ""
    problems: int | None = None
    engines: dict[str, dict[str, Any]] = {}
    versions: dict[str, str] = {}
    created: float = 0.0
    settings: dict[str, Any] = {}
    known_logprobs: dict[str, list[float]] = {}


def _settings(stored: dict[str, dict[str, Any]]) -> dict[str, Setting]:
    return {name: Setting(**setting) for name, setting in stored.items()}


def _flat(name: str, value: Json) -> Iterator[tuple[str, Json]]:
    if isinstance(value, Mapping) and value:
        for key, part in value.items():
            yield from _flat(f"{name}.{key}", part)
    else:
        yield name, value
