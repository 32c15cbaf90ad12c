"""One typed configuration for command line and code: defaults < atts.toml < ATTS_* < flags, origins kept."""

from __future__ import annotations

import json
import os
import re
from collections.abc import Generator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from functools import cache
from hashlib import blake2b
from pathlib import Path
from types import MappingProxyType
from typing import Any, Literal, cast, get_args

from atts.api.keys import Key, filled, keys_of, leaves
from atts.api.layers import CONFIG_VARIABLE, FILE, from_defaults, from_environment, from_file, from_flags, from_pairs
from atts.api.setup import CalibrationMode, Setup
from atts.api.words import WORDS
from atts.core import Role
from atts.errors import CalibrationInputError, OptionError
from atts.graph import Limit
from atts.journal import Json, Setting
from atts.pipelines import Policy, preset
from atts.run import Conditions

ReportKind = Literal["html", "markdown", "json", "none"]

_SETUP: Mapping[str, Any] = MappingProxyType(
    {
        "draft": str,
        "target": str,
        "method": str,
        "rate": float,
        "mode": CalibrationMode,
        "conditions": Conditions,
        "warmup": int,
        "seed": int,
        "rollouts": int,
    }
)
"""The fields of a setup that a text can say; the policy's are read off the policy."""
_NEUTRAL = ("out", "runs", "report", "rollouts", "conditions")
"""Keys that leave a run's results what they are, as the limits do."""


@dataclass(frozen=True, slots=True)
class Job:
    """What is evaluated, and where that is kept; `out` None is a folder of its own under `runs`."""

    dataset: str = "arithmetic[:40]"
    limit: int | None = None
    out: str | None = None
    runs: str = "runs"
    report: ReportKind = "html"

    def __post_init__(self) -> None:
        if self.report not in get_args(ReportKind):
            raise OptionError("report", f"unknown value {self.report!r}", get_args(ReportKind), self.report)
        if self.limit is not None and self.limit < 1:
            raise OptionError("limit", f"{self.limit} leaves no problem; give at least 1")


@dataclass(frozen=True, slots=True)
class _Scores:
    scores: str | None = None


@cache
def keys() -> Mapping[str, Key]:
    """Every key there is, by name, in the order in which they are shown.

    >>> keys()["samples"].default, keys()["chunking.stop"].variable
    (8, 'ATTS_CHUNKING_STOP')
    """
    setup = Setup()
    found = [
        *keys_of(Job, Job(), WORDS),
        *(Key(name, kind, getattr(setup, name), "no", WORDS[name]) for name, kind in _SETUP.items()),
        *keys_of(_Scores, _Scores(), WORDS),
        *keys_of(Policy, setup.policy, WORDS),
        *(key for role in get_args(Role) for key in keys_of(Limit, Limit(), WORDS, f"limits.{role}.")),
    ]
    return MappingProxyType({key.name: key for key in found})


@dataclass(frozen=True, slots=True)
class Configuration:
    """A value for every key, and where it came from; made by `configure`."""

    settings: Mapping[str, Setting]

    def __getitem__(self, name: str) -> Any:
        """The value of a key."""
        return self.settings[name].value

    @property
    def job(self) -> Job:
        """What is evaluated, and where that is kept."""
        with _origins(self.settings):
            return Job(**{name: self[name] for name, _ in leaves(Job())})

    @property
    def directory(self) -> Path:
        """Where the run is kept: as said, or a folder that belongs to this configuration alone."""
        job = self.job
        if job.out is not None:
            return Path(job.out)
        name = re.sub(r"[^\w.]+", "-", f"{Path(job.dataset).name}-{self['method']}").strip("-")
        return Path(job.runs) / f"{name}-{self.digest}"

    @property
    def digest(self) -> str:
        """A short name for everything that decides the results."""
        deciding = {
            name: held.value
            for name, held in self.settings.items()
            if name not in _NEUTRAL and not name.startswith("limits.")
        }
        return blake2b(json.dumps(deciding, sort_keys=True).encode(), digest_size=4).hexdigest()

    def setup(self) -> Setup:
        """The setup these words describe.

        :raises OptionError: a value is impossible.
        :raises CalibrationInputError: the file of scores cannot be read as one.
        """
        with _origins(self.settings):
            own = {name: self[name] for name in _SETUP}
            limits = {role: filled(Limit(), self._of(f"limits.{role}."), f"limits.{role}.") for role in get_args(Role)}
            return Setup(
                **own,
                policy=_policy(self.settings),
                stored=_stored(self["scores"]),
                limits={role: limit for role, limit in limits.items() if limit != Limit()},
                given=self.settings,
            )

    def _of(self, prefix: str) -> dict[str, Json]:
        return {name: held.value for name, held in self.settings.items() if name.startswith(prefix)}


def configure(
    flags: Mapping[str, object] | None = None,
    pairs: Sequence[str] = (),
    *,
    file: str | Path | None = None,
    environment: Mapping[str, str] | None = None,
    folder: str | Path = ".",
) -> Configuration:
    """The configuration here and now: defaults, then `file` (or atts.toml in `folder`), then ATTS_*, then `flags`.

    `pairs` are "key=value" texts, which count as flags. What the method itself settles is settled by it.

    :raises OptionError: an unknown key, a value of another type, or one that the method contradicts.

    >>> configure({"rate": 0.3}, ["sampling.temperature=0.6"], environment={}).settings["rate"]
    Setting(value=0.3, origin='--rate')
    """
    environment = os.environ if environment is None else environment
    settings = dict(from_defaults(keys()))
    source = _file(file or environment.get(CONFIG_VARIABLE), Path(folder))
    if source is not None:
        settings |= from_file(source, keys())
    settings |= from_environment(environment, keys())
    settings |= {**from_flags(flags or {}, keys()), **from_pairs(pairs, keys())}
    settings |= _settled(settings)
    return Configuration(MappingProxyType(settings))


def describe(setup: Setup) -> dict[str, Setting]:
    """Every key as the setup has it; the origin is what was given, "default", or "code" for what a program set.

    What is evaluated, and where that is kept, a setup knows only when it was made by `configure`.
    """
    policy = preset(setup.method).policy(setup.policy)
    values: dict[str, Json] = {name: _plain(getattr(setup, name)) for name in _SETUP} | dict(leaves(policy))
    values |= {f"limits.{role}.{name}": value for role, held in setup.limits.items() for name, value in leaves(held)}
    found = dict[str, Setting]()
    known = keys().items() if setup.given else ((name, key) for name, key in keys().items() if name in values)
    for name, key in known:
        given = setup.given.get(name, Setting(key.default))
        value = values.get(name, given.value)
        found[name] = given if given.value == value else Setting(value, "code")
    return found


def _file(named: str | Path | None, folder: Path) -> Path | None:
    if named is not None:
        return Path(named)
    usual = folder / FILE
    return usual if usual.exists() else None


def _policy(settings: Mapping[str, Setting]) -> Policy:
    """The setup's own policy with the values; a target with some sampling of its own shares the rest with the draft."""
    values = {name: held.value for name, held in settings.items()}
    base = Setup().policy
    if any(values[name] is not None for name in values if name.startswith("target_sampling.")):
        base = replace(base, target_sampling=filled(base.sampling, values, "sampling."))
    return filled(base, values)


def _settled(settings: Mapping[str, Setting]) -> dict[str, Setting]:
    """What the method settles, and nobody may contradict."""
    with _origins(settings):
        method = cast(str, settings["method"].value)
        chosen, base = preset(method), _policy(settings)
        before = dict(leaves(base))
        found = dict[str, Setting]()
        for name, value in leaves(chosen.policy(base)):
            if name not in settings or value == before.get(name, settings[name].value):
                continue
            if settings[name].origin != "default":
                raise OptionError(name, f"the method {method} makes it {value!r}; leave it out, or take another method")
            found[name] = Setting(value, f"method {method}")
    return found


@contextmanager
def _origins(settings: Mapping[str, Setting]) -> Generator[None, None, None]:
    """An impossible value is blamed on whoever gave it."""
    try:
        yield
    except OptionError as error:
        held = settings.get(error.option)
        if held is None or held.origin == "default":
            raise
        flag = f"--set {error.option}" if held.origin == "--set" else held.origin
        label = flag if flag.startswith("--") else f"{error.option} ({held.origin})"
        raise OptionError(label, str(error).removeprefix(f"{error.option}: ")) from error


def _stored(file: str | None) -> Any:
    if file is None:
        return ()
    from atts.api.calibrating import scores_of
    from atts.calibration import read_scores

    if Path(file).is_dir():
        return scores_of(file)
    try:
        return read_scores(Path(file))
    except OSError as error:
        raise CalibrationInputError("scores", file, f"a file that can be read ({error.strerror})") from error


def _plain(value: object) -> Json:
    return value if isinstance(value, str | int | float) else type(value).__name__
