"""Read the configuration of a run: the value of each key comes from the defaults, atts.toml, ATTS_*
variables or flags.
"""

from __future__ import annotations

import json
import os
import re
import tomllib
from collections.abc import Generator, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import asdict, dataclass, replace
from difflib import get_close_matches
from functools import cache
from hashlib import blake2b
from itertools import chain
from pathlib import Path
from types import MappingProxyType
from typing import TYPE_CHECKING, Annotated, Any, Literal, cast, get_args

import msgspec

from atts.api.engines import budget_of
from atts.api.keys import KINDS, PREFIX, Key, flat, keys_of, nested
from atts.api.pairs import PAIR, Pair, PairChoice, find_pair
from atts.api.setup import LENGTHS, Setup, setup_keys
from atts.core import Role
from atts.errors import DatasetError, OptionError
from atts.files import read_ordinary
from atts.graph import Limit
from atts.journal import Json, Setting
from atts.ledger import Caps, Price, read_prices
from atts.methods import preset
from atts.pipelines import COMBINE_KEYS, Policy
from atts.run import Shard, check_logs

if TYPE_CHECKING:
    from atts.evaluators import Dataset


FILE = "atts.toml"
"""The settings file that is read from the working directory if no other file is named."""
CONFIG_VARIABLE = "ATTS_CONFIG"
ELSEWHERE = (CONFIG_VARIABLE, "ATTS_API_KEY", "ATTS_SERVE_KEY", "ATTS_CHROMIUM", "ATTS_SHARED_DATA")
"""ATTS_* variables that are not configuration keys: the name of the settings file, API keys, and
paths for tests.
"""

Said = tuple[Key, object, str, str]
"""A value that the user gave for a key: the key, the value, the origin of the value, and the
origin's name in error messages.
"""


def from_file(path: Path, keys: Mapping[str, Key]) -> Iterator[Said]:
    """Yield the values of a TOML file; a key inside a table has a dotted name, such as
    "sampling.top_p".

    :raises OptionError: the file cannot be read, is not TOML, or has an unknown key.
    """
    for name, value in flat(_file_tables(path)):
        key = _known_key(name, keys, str(path))
        label = f"{name} ({path})"
        if (
            key.kind in (int, float, bool)
            and isinstance(value, str)
            and value.lower() not in ("none", "null")
        ):
            # Environment variables and flags are always texts, which are converted later. In a
            # TOML file, a number in quotation marks is probably a mistake.
            raise OptionError(
                label,
                f"{value!r} is a string, not {KINDS[key.kind]}; leave out the quotation marks",
            )
        yield key, value, str(path), label


def from_environment(environment: Mapping[str, str], keys: Mapping[str, Key]) -> Iterator[Said]:
    """Yield the values of ATTS_* variables.

    :raises OptionError: a variable is unknown.
    """
    by_variable = {key.variable: key for key in keys.values()}
    for variable, words in environment.items():
        if variable.startswith(PREFIX) and variable not in ELSEWHERE:
            if variable not in by_variable:
                raise OptionError(
                    "environment",
                    f"unknown variable {variable!r}{_nearest_key(variable, [*by_variable])}",
                )
            key = by_variable[variable]
            yield key, words, variable, f"{key.name} ({variable})"


def from_flags(
    flags: Mapping[str, object], pairs: Sequence[str], keys: Mapping[str, Key]
) -> Iterator[Said]:
    """Yield the values of flags or call arguments that are not None, then the values of "key=value"
    strings.

    :raises OptionError: a key is unknown, or a text is not of the form KEY=VALUE.
    """
    for name, value in flags.items():
        if value is not None:
            origin = "--" + _FLAGS.get(name, name).replace("_", "-")
            yield _known_key(name, keys, "flags"), value, origin, origin
    for pair in pairs:
        name, mark, words = (part.strip() for part in pair.partition("="))
        if not (mark and name):
            raise OptionError(
                "--set", f"{pair!r} is not KEY=VALUE, such as sampling.temperature=0.6"
            )
        yield _known_key(name, keys, "--set"), words, "--set", f"--set {name}"


def _file_tables(path: Path) -> dict[str, Any]:
    try:
        return tomllib.loads(read_ordinary(path).decode("utf-8"))
    except UnicodeDecodeError as error:
        raise OptionError(str(path), f"is not UTF-8 text (byte {error.start})") from error
    except (tomllib.TOMLDecodeError, RecursionError, ValueError) as error:
        raise OptionError(str(path), f"is not TOML: {error}") from error
    except OSError as error:
        raise OptionError(str(path), f"cannot be read: {error.strerror}") from error


def _known_key(name: str, keys: Mapping[str, Key], source: str) -> Key:
    if name not in keys:
        raise OptionError(source, f"unknown key {name!r}{_nearest_key(name, [*keys])}")
    return keys[name]


def _nearest_key(name: str, known: Sequence[str]) -> str:
    """Suggest the key that is nearest to a misspelt name, or the command that lists all keys if
    none is near.
    """
    # Compare a misspelt name with whole keys ("sampling.temperature") and with their last parts
    # ("temperature").
    short = {each.rpartition(".")[2]: each for each in known} | {each: each for each in known}
    near = get_close_matches(name, short, n=1) or get_close_matches(
        name.rpartition(".")[2], short, n=1
    )
    return f"; did you mean {short[near[0]]!r}?" if near else "; `atts config show` lists all keys"


ReportKind = Literal["html", "markdown", "json", "none"]

_FLAGS: Mapping[str, str] = {"sampling.temperature": "temperature", "sampling.top_p": "top_p"}
"""Keys inside a table whose command-line option omits the table: --temperature, not
--sampling.temperature.
"""

_NEUTRAL = (
    "out",
    "runs",
    "report",
    "log",
    "concurrency",
    "conditions",
    "on_unscored",
    "give_up_after",
    "speculate",
    "max_cost",
    "max_total_tokens",
    "max_seconds",
    "prices",
    *(key.name for key in keys_of(PairChoice, PairChoice())),
)
"""Keys that do not change a run's results, such as limits. Runs that differ only in these keys have
the same digest.

The name of a pair is among these keys, because the digest already contains the values that the pair
sets.
"""


@dataclass(frozen=True, slots=True)
class Job:
    """Settings for the problems to evaluate, and for the directory and the report of the run."""

    dataset: Annotated[
        str, "benchmark, file or hub:owner/name; a slice may follow: math500[:50]"
    ] = "arithmetic[:40]"
    limit: Annotated[
        int | None, "number of problems to run, starting with the first; none: all problems"
    ] = None
    file: Annotated[str | None, "file to read the benchmark from, instead of the hub"] = None
    column: Annotated[
        tuple[str, ...],
        "columns of the file that contain the fields, as FIELD=COLUMN, such as text=Question",
    ] = ()
    relative: Annotated[
        float | None,
        "relative tolerance for answers whose reference is a decimal number; 0.01 "
        "allows a difference of 1 %",
    ] = None
    absolute: Annotated[
        float | None,
        "absolute tolerance for numbers: largest accepted difference from the reference",
    ] = None
    units: Annotated[
        Literal["optional", "required"] | None,
        "unit of an answer: required, or optional (a missing unit is accepted)",
    ] = None
    choices: Annotated[
        Literal["letter", "text"] | None,
        "accepted answers to multiple-choice problems: letter (only the letter), or text (the "
        "letter, or the text of the choice)",
    ] = None
    references: Annotated[
        Literal["required", "optional"],
        "reference answers: required for every problem, or optional",
    ] = "required"
    shots: Annotated[
        str | None, "file of worked examples that the prompt shows before every problem"
    ] = None
    out: Annotated[
        str | None,
        "run directory; none: a new folder under runs, named after the method, dataset and "
        "settings",
    ] = None
    runs: Annotated[str, "parent folder of run directories, used if out is not set"] = "runs"
    report: Annotated[
        ReportKind,
        "format of the report that is written when the run ends",
    ] = "html"
    max_cost: Annotated[
        float | None, "cost in dollars at which a run stops, computed from the prices of its models"
    ] = None
    max_total_tokens: Annotated[
        int | None,
        "number of tokens at which a run stops: prompt, scored and written tokens of all calls "
        "together",
    ] = None
    max_seconds: Annotated[
        float | None,
        "seconds after which a run stops; all sessions of a resumed run count together",
    ] = None
    prices: Annotated[
        str | None, "TOML file with the prices of models, in dollars per million tokens"
    ] = None
    log: Annotated[
        tuple[str, ...],
        "trackers that also receive the run's metrics: wandb, mlflow, tensorboard, trackio or "
        "otel; NAME:PROJECT names a project, experiment or folder",
    ] = ()
    compare_to: Annotated[str | None, "earlier run to compare this run with, for stop_when"] = None
    stop_when: Annotated[
        str | None,
        "when to stop early: decided (this run is shown to be better or worse than compare_to), or "
        "decided=2 (also when the accuracies are shown to differ by at most 2 points); none: never",
    ] = None

    def __post_init__(self) -> None:
        if self.limit is not None and self.limit < 1:
            raise OptionError("limit", f"{self.limit} leaves no problem; give at least 1")
        _ = self.caps  # The property `caps` raises an error if the value of a cap is impossible.
        check_logs(self.log)
        for pair in self.column:
            if not all(pair.partition("=")):
                raise OptionError("column", f"{pair!r} is not FIELD=COLUMN, such as text=Question")

    @property
    def caps(self) -> Caps:
        """Return the caps on what the run may spend.

        :raises OptionError: a cap is impossible.
        """
        return Caps(
            max_total_tokens=self.max_total_tokens,
            max_cost=self.max_cost,
            max_seconds=self.max_seconds,
        )

    @property
    def price_list(self) -> dict[str, Price]:
        """Return the prices of models, keyed by the model's name; the result is empty if no file of
        prices is set.

        :raises OptionError: the file cannot be read as prices.
        """
        return {} if self.prices is None else read_prices(Path(self.prices))

    @property
    def comparison(self) -> dict[str, Any]:
        """Return the arguments that make `evaluate` compare this run with an earlier one."""
        return {"compare_to": self.compare_to, "stop_when": self.stop_when}

    def load(self) -> Dataset:
        """Load the problems, with a record of their source.

        :raises DatasetError: the problems cannot be read, or there are none.
        """
        from atts.evaluators import LoadOptions, load_dataset

        columns = dict(pair.split("=", 1) for pair in self.column)
        file = None if self.file is None else Path(self.file)
        grading = {
            name: getattr(self, name) for name in ("relative", "absolute", "units", "choices")
        }
        shots = Path(self.shots) if self.shots else None
        options = LoadOptions(
            columns=columns, file=file, answers=self.references, grading=grading, shots=shots
        )
        dataset = load_dataset(self.dataset, options=options)
        if not dataset.problems:
            raise DatasetError(self.dataset, "the dataset has no problem")
        return replace(dataset, problems=dataset.problems[: self.limit])


@cache
def config_keys() -> Mapping[str, Key]:
    """Return every configuration key by name, in the order in which keys are displayed.

    >>> config_keys()["samples"].default, config_keys()["chunking.stop"].variable
    (8, 'ATTS_CHUNKING_STOP')
    """
    setup = Setup()
    keys = [
        *keys_of(Job, Job()),
        *keys_of(PairChoice, PairChoice()),
        *setup_keys(),
        Key(
            "scores",
            str,
            None,
            True,
            "calibration scores to start from: a file, or a run directory",
        ),
        *keys_of(Policy, setup.policy),
        *(
            replace(key, help=f"{key.help} at the {role}")
            for role in get_args(Role)
            for key in keys_of(Limit, Limit(), f"limits.{role}.")
        ),
    ]
    return MappingProxyType({key.name: key for key in keys})


@dataclass(frozen=True, slots=True)
class Configuration:
    """The configuration of a run: a value for every key, with the origin of the value.

    The function `configure` makes a configuration.
    """

    settings: Mapping[str, Setting]
    # names of the keys whose values were not given, but follow from the models and from other keys
    followed: frozenset[str] = frozenset()

    def __getitem__(self, name: str) -> Any:
        """Return the value of a key."""
        return self.settings[name].value

    @property
    def job(self) -> Job:
        """Return the settings for the problems to evaluate, and for the directory and report of the
        run.
        """
        with _origins(self.settings):
            return msgspec.convert(_tables(self.settings), Job)

    @property
    def directory(self) -> Path:
        """Return the run directory: the value of `out`, or a directory whose name is unique to this
        configuration.
        """
        job = self.job
        if job.out in ("", "-"):
            raise OptionError(
                "--out", f"{job.out!r} is not a directory; name a directory for the run"
            )
        if job.out is not None:
            return Path(job.out)
        name = re.sub(r"[^\w.]+", "-", f"{Path(job.dataset).name}-{self['method']}").strip("-")
        return Path(job.runs) / f"{name}-{self.digest}"

    def directory_of(self, shard: Shard | None) -> Path:
        """Return the directory of one shard: the value of `out`, or the default directory with the
        shard's number appended.
        """
        if shard is None or self.job.out is not None:
            return self.directory
        return self.directory.with_name(f"{self.directory.name}-{shard.number}-of-{shard.of}")

    @property
    def deciding(self) -> dict[str, Any]:
        """Return the values of all keys that change the results, as JSON data."""
        kept = {
            name: setting.value
            for name, setting in self.settings.items()
            if name not in _NEUTRAL and not name.startswith("limits.")
        }
        # If `combine` is "vote", the other keys in COMBINE_KEYS have no effect on the run, so they
        # are left out.
        if self["combine"] == "vote":
            for name in COMBINE_KEYS:
                del kept[name]
        return cast(dict[str, Any], json.loads(json.dumps(kept)))

    @property
    def digest(self) -> str:
        """Return a short hash of the values of all keys that change the results."""
        text = json.dumps(self.deciding, sort_keys=True)
        return blake2b(text.encode(), digest_size=4).hexdigest()

    def setup(self) -> Setup:
        """Make the `Setup` that these values describe.

        :raises OptionError: a value is impossible.
        :raises CalibrationInputError: the value of `scores` is not a valid file of scores.
        """
        # A token limit in `followed` was derived from the models. It stays None in the policy,
        # because it may become smaller once the engines are open.
        given = {
            name: setting for name, setting in self.settings.items() if name not in self.followed
        }
        tables = _tables(given)
        with _origins(self.settings):
            return Setup(
                **{key.name: self[key.name] for key in setup_keys()},
                policy=msgspec.convert(tables, Policy),
                stored=_stored(self["scores"]),
                limits=msgspec.convert(tables.get("limits", {}), dict[str, Limit]),
                provenance=self.settings,
            )


def configure(
    flags: Mapping[str, object] | None = None,
    pairs: Sequence[str] = (),
    *,
    file: str | Path | None = None,
    environment: Mapping[str, str] | None = None,
    folder: str | Path = ".",
) -> Configuration:
    """Read the configuration from defaults, `file` or atts.toml, ATTS_* variables, and `flags`;
    later sources override earlier sources.

    Without `file`, the file atts.toml in `folder` is read if it exists. `pairs` are "key=value"
    strings, which count as flags. A key that the method fixes cannot be set to another value.

    :raises OptionError: a key is unknown, or a value has the wrong type or contradicts the method.

    >>> configure({"rate": 0.3}, ["sampling.temperature=0.6"], environment={}).settings["rate"]
    Setting(value=0.3, origin='--rate')
    """
    environment = os.environ if environment is None else environment
    named = file or environment.get(CONFIG_VARIABLE)
    usual = Path(folder) / FILE
    source = Path(named) if named is not None else None
    if source is None and usual.exists():
        source = usual
    # If several sources set a key, the last one in this chain wins: flags before environment
    # variables before the file.
    layers = chain(
        from_file(source, config_keys()) if source is not None else (),
        from_environment(environment, config_keys()),
        from_flags(flags or {}, pairs, config_keys()),
    )
    settings = {name: Setting(key.default, "default") for name, key in config_keys().items()}
    settings |= {
        key.name: Setting(_read(key, value, label), origin) for key, value, origin, label in layers
    }
    # The order of the next calls matters. First the pair sets the keys that the user has not set,
    # and later the method fixes its keys. Token limits come last, because they depend on the models
    # and the method.
    settings |= _of_pair(settings)
    settings |= _prompts_of_files(settings)
    settings |= _settled(settings)
    followed = _followed(settings)
    return Configuration(MappingProxyType(settings | followed), frozenset(followed))


def _read(key: Key, value: object, label: str) -> Json:
    """Parse the value of a key. If the value of `thinking_end` is @FILE, return the text of this
    file.

    :raises OptionError: the value is impossible, or the file cannot be read.
    """
    read = key.read(value, label)
    if key.name != "thinking_end" or not isinstance(read, str) or not read.startswith("@"):
        return read
    try:
        return read_ordinary(Path(read[1:])).decode("utf-8")
    except (OSError, UnicodeDecodeError) as error:
        raise OptionError(label, f"{read[1:]} cannot be read as text ({error})") from error


def _tables(settings: Mapping[str, Setting]) -> dict[str, Any]:
    """Return the values as nested tables. The table `target_sampling` inherits the values that it
    lacks from `sampling`.
    """
    tables = nested({name: setting.value for name, setting in settings.items()})
    if "target_sampling" in tables:
        tables["target_sampling"] = tables["sampling"] | tables["target_sampling"]
    return tables


def _of_pair(settings: Mapping[str, Setting]) -> dict[str, Setting]:
    """Return the settings of the chosen pair, except for keys that the user set."""
    with _origins(settings):
        choice = msgspec.convert(_tables(settings), PairChoice)
        if choice.pair is None:
            return {}
        pair = find_pair(choice.pair)
        words = {
            "draft": pair.words("draft", choice.backend, choice.draft_servers),
            "target": pair.words("target", choice.backend, choice.target_servers),
        }
    prompt = _prompt(pair, str(settings["dataset"].value))
    origin = f"{PAIR}{pair.name}"
    return {
        name: Setting(value, origin)
        for name, value in {**words, **pair.settings, **prompt}.items()
        if settings[name].origin == "default"
    }


def _prompts_of_files(settings: Mapping[str, Setting]) -> dict[str, Setting]:
    """Return each prompt that is given as @FILE, with the text of the file as its value.

    :raises OptionError: a file cannot be read.
    """
    texts = dict[str, Setting]()
    for name in ("select_prompt", "synthesis_prompt"):
        setting = settings[name]
        if isinstance(setting.value, str) and setting.value.startswith("@"):
            path = Path(setting.value[1:])
            try:
                text = read_ordinary(path).decode("utf-8").strip()
            except UnicodeDecodeError as error:
                raise OptionError(name, f"{path} is not UTF-8 text") from error
            except OSError as error:
                raise OptionError(name, f"{path} cannot be read: {error.strerror}") from error
            texts[name] = replace(setting, value=text)
    return texts


def _prompt(pair: Pair, dataset: str) -> Mapping[str, Json]:
    """Return the pair's prompt settings for this benchmark, or an empty mapping if the pair has no
    such settings.
    """
    from atts.evaluators import find_benchmark

    if not pair.prompts:
        return {}
    benchmark = find_benchmark(dataset.partition("[")[0])
    return {} if benchmark is None else pair.prompts.get(benchmark.name, {})


def _settled(settings: Mapping[str, Setting]) -> dict[str, Setting]:
    """Return the settings that the method fixes; raise an error if the user sets one of them to
    another value.
    """
    with _origins(settings):
        method = cast(str, settings["method"].value)
        base = msgspec.convert(_tables(settings), Policy)
        before = dict(flat(asdict(base)))
        settled = dict[str, Setting]()
        for name, value in flat(asdict(preset(method).policy(base))):
            # Keys that the method does not change keep their values and the origins of these
            # values.
            if name not in settings or value == before.get(name, settings[name].value):
                continue
            if settings[name].origin != "default":
                raise OptionError(
                    name,
                    f"method {method} sets this key to {value!r} itself; leave the key out, or "
                    "use another method",
                )
            settled[name] = Setting(value, f"method {method}")
    return settled


def _followed(settings: Mapping[str, Setting]) -> dict[str, Setting]:
    """Return a default value, with its origin, for each token or turn limit that is not set. The
    default token limits are those of the models.
    """
    with _origins(settings):
        policy = msgspec.convert(_tables(settings), Policy)
    method = preset(str(settings["method"].value))
    as_run = method.policy(policy)
    asked = [str(settings[role].value) for role in method.roles(as_run)]
    budget = budget_of(*asked, reads_chunks=method.reads_chunks(as_run))
    lengths = dict(flat(asdict(policy.filled(budget))))
    origins = dict.fromkeys(LENGTHS, budget.models) | {"turns": "max_tokens"}
    return {
        name: Setting(lengths[name], origin)
        for name, origin in origins.items()
        if settings[name].value is None
    }


@contextmanager
def _origins(settings: Mapping[str, Setting]) -> Generator[None, None, None]:
    """Add the source of a value (its flag, variable or file) to every error about this value."""
    try:
        yield
    except OptionError as error:
        setting = settings.get(error.option)
        if setting is None or setting.origin == "default":
            raise
        label = f"{error.option} ({setting.origin})"
        if setting.origin == "--set":
            label = f"--set {error.option}"
        elif setting.origin.startswith("--"):
            label = setting.origin
        raise OptionError(label, str(error).removeprefix(f"{error.option}: ")) from error


def _stored(file: str | None) -> Any:
    if file is None:
        return ()
    from atts.api.calibrating import stored_scores

    return stored_scores(Path(file))
