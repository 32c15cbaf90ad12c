"""The result of a run: its numbers, its finished problems, and its rollouts.

The first part of the module checks if data from other runs (stored scores, judges, labelled runs)
fit the settings of a run.
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import asdict, dataclass, field, fields, replace
from functools import cached_property
from html import escape
from importlib import import_module
from pathlib import Path
from types import MappingProxyType
from typing import Any, Literal, get_args

from atts.calibration import Abstention, check_fingerprint
from atts.core import Outcome, Role, Sampling, Usage
from atts.engine import Speculated
from atts.errors import CheckFailed, EngineError, FingerprintError, OptionError, UsageError, counted
from atts.evaluators import Estimate, Sequential, accuracy_estimate, mean_estimate, share_estimate
from atts.files import from_json, jsonable
from atts.journal import (
    MERGED,
    FinishedProblem,
    Json,
    Manifest,
    Setting,
    Truncation,
    open_run,
    truncation,
)
from atts.ledger import PRICES, money_of, recorded_prices
from atts.pipelines import Chunking, CombineSummary, Policy, ScoreRule, summarise_combinations

Conditions = Literal["match", "ignore"]
"""What to do if the stored scores were recorded under other conditions than those of this run.

"match": refuse the scores. "ignore": use the scores, with a warning.
"""
_SPEC = ("engine", "model", "tokenizer", "dtype", "logprobs", "weights")
_POLICY: Mapping[str, type] = MappingProxyType(
    {"sampling": Sampling, "target_sampling": Sampling, "chunking": Chunking, "score": ScoreRule}
)
# Texts that are added to every problem. They are conditions only if they differ from the default, so
# that scores without this record still fit runs with the default texts.
_PROMPTS: Mapping[str, str] = MappingProxyType(
    {"system": Policy().system, "instruction": Policy().instruction}
)
_ADVICE = (
    "Compute new scores with the settings of this run, or use the stored scores anyway with "
    "--set conditions=ignore"
)

_ADVICE_TO_FIT = (
    "Fit the judge again on a run with the settings of this run, or use the judge anyway with "
    "--set conditions=ignore"
)


def conditions_of(manifest: Manifest) -> dict[str, object]:
    """Return the conditions under which a run makes its scores: models, sampling, chunking, score
    rule and changed prompts, but not the problems.
    """
    conditions: dict[str, object] = {}
    for role, spec in manifest.engines.items():
        for name, value in spec.items():
            if name in _SPEC or name.startswith("probe."):
                conditions[f"{role}.{name}"] = value
    setting = manifest.configuration.get("policy")
    policy: Mapping[str, Any] = {}
    if setting is not None and isinstance(setting.value, Mapping):
        policy = setting.value
    for name in _POLICY:
        part = policy.get(name)
        if isinstance(part, Mapping):
            for key, value in part.items():
                conditions[f"{name}.{key}"] = list(value) if isinstance(value, tuple) else value
    for name, text in _PROMPTS.items():
        if policy.get(name, text) != text:
            conditions[name] = policy[name]
    return conditions


def read_conditions(given: Mapping[str, str]) -> dict[str, object]:
    """Convert conditions that were given as strings to values of the types that runs record. The
    names are those of `conditions_of`.

    >>> read_conditions({"target.model": "QwQ-32B", "sampling.temperature": "0.7"})
    {'target.model': 'QwQ-32B', 'sampling.temperature': 0.7}

    :raises OptionError: a name is not the name of a condition.
    """
    of_models = [f"{role}.{name}" for role in get_args(Role) for name in _SPEC]
    of_policy = [f"{part}.{field.name}" for part, kind in _POLICY.items() for field in fields(kind)]
    of_policy += _PROMPTS
    conditions = dict[str, object]()
    for name, text in given.items():
        if name not in of_models + of_policy and name.partition(".")[2][:6] != "probe.":
            raise OptionError(
                "condition",
                f"{name!r} is not a condition that atts records for a run",
                [*of_models, *of_policy],
                name,
            )
        conditions[name] = text
        if name in of_policy:
            with suppress(ValueError):
                conditions[name] = from_json(text)
    return conditions


def check_conditions(
    manifest: Manifest,
    recorded: Mapping[str, object],
    conditions: Conditions,
    what: Literal["the stored scores", "the judge"] = "the stored scores",
) -> str:
    """Return a warning if stored scores or a judge were made under other conditions than the run,
    otherwise "".

    For stored scores, the warning also names conditions of the run that the scores do not record.

    :raises FingerprintError: if a recorded condition differs, and `conditions` is "match".
    """
    now = conditions_of(manifest)
    is_judge = what == "the judge"
    if not recorded and is_judge:
        return "the judge's file does not record the conditions under which the judge was fitted"
    if not recorded:
        return "the stored scores do not record their conditions, so they may not fit this run"
    compared = {name: now[name] for name in recorded if name in now}
    # Runs record a prompt only if it is not the default. Scores that record chunks come from a run.
    if any(name.startswith("chunking.") for name in recorded):
        compared |= {name: now[name] for name in _PROMPTS if name in now}
    try:
        check_fingerprint("scores", recorded, compared)
    except FingerprintError as error:
        if conditions == "match":
            name = what if is_judge else "the stored calibration"
            advice = _ADVICE_TO_FIT if is_judge else _ADVICE
            raise FingerprintError(name, error.differences, advice) from None
        names = ", ".join(name for name, _, _ in error.differences)
        if is_judge:
            return (
                "the judge is used although it was fitted under conditions that differ from "
                f"those of this run: {names}"
            )
        return (
            "the stored scores are used although they were made under conditions that differ "
            f"from those of this run: {names}"
        )
    if is_judge:
        return ""
    unknown = ", ".join(name for name in now if name not in recorded)
    return f"the stored scores do not record {unknown}" if unknown else ""


_OWN = (
    "seed",
    "dataset",
    *(f"configuration.{name}" for name in ("abstain", "until", "shard", MERGED)),
)
"""Names of the settings that may differ between a run and its labelled run, because they do not
affect the votes.
"""
_ADVICE_TO_LABEL = (
    "Start a labelled run with the settings of this run, or give this run the settings of the "
    "labelled run"
)


@dataclass(frozen=True, slots=True)
class Abstain:
    """A certified threshold on the agreement of votes, and the manifest of the labelled run that
    certified it.
    """

    found: Abstention
    labelled: Manifest

    def setting(self) -> dict[str, Setting]:
        """Return the abstention settings for the manifest. They must be the same when the run is
        resumed.
        """
        promise = {"guarantee": self.found.guarantee, "voided_by": self.found.voided_by}
        return {"abstain": Setting({**asdict(self.found), **promise}, "setup")}

    def check(self, manifest: Manifest) -> None:
        """Check that a run has the same settings as the labelled run, but other problems.

        :raises FingerprintError: if the settings differ.
        :raises OptionError: if the run's problems are the labelled problems.
        """
        if manifest.dataset and manifest.dataset == self.labelled.dataset:
            raise OptionError(
                "abstain",
                "the labelled run has the same problems as this run; use a labelled run "
                "on other problems",
            )
        old = _settings(self.labelled)
        new = _settings(manifest)
        differences = [
            (name, _brief(old.get(name)), _brief(new.get(name)))
            for name in sorted(old.keys() | new.keys())
            if old.get(name) != new.get(name)
        ]
        if differences:
            raise FingerprintError("the labelled run", differences, _ADVICE_TO_LABEL)

    def applied(self, outcome: Outcome) -> Outcome:
        """Return the outcome, with its answer removed if too few votes agree."""
        threshold = self.found.threshold
        if outcome.answer is None or threshold is None or outcome.agreement >= threshold - 1e-9:
            return outcome
        why = (
            f"abstained: {100 * outcome.agreement:.0f} % of the votes agree, but an answer needs "
            f"{100 * threshold:.0f} %"
        )
        return replace(outcome, answer=None, status="unanswered", why=why)


@dataclass(frozen=True, slots=True)
class Answered:
    """The results of a run that may abstain: the fractions of answered problems and of wrong
    answers, and the guarantee.
    """

    share: Estimate
    wrong: Estimate  # share (0 to 1) of wrong answers among the answered and graded problems
    guarantee: str
    voided_by: str


def answered(problems: tuple[FinishedProblem, ...], manifest: Manifest) -> Answered | None:
    """Return the results of abstention; None for a run that may not abstain."""
    setting = manifest.configuration.get("abstain")
    if setting is None or not isinstance(setting.value, dict):
        return None
    given = [one for one in problems if one.answer is not None]
    return Answered(
        share_estimate((one.answer is not None, 1) for one in problems),
        share_estimate((not one.is_correct, 1) for one in given if one.verdict is not None),
        str(setting.value["guarantee"]),
        str(setting.value["voided_by"]),
    )


def _settings(manifest: Manifest) -> dict[str, Json]:
    """Return the settings that affect the votes, without the dataset."""
    return {name: value for name, value in manifest.decisive() if not name.startswith(_OWN)}


def _brief(value: Json) -> Json:
    text = json.dumps(value)
    return value if len(text) <= 40 else text[:39] + "…"


# If a rollout has, on average, at most this many judged chunks, a warning says that the chunks are
# too long.
COARSE_CHUNKS = 2.0
# The advice of this warning. A similar warning before the run ends with it too.
SHORTER_CHUNKS = (
    "for shorter chunks use --set chunking.draft_tokens=N, or a string that ends a chunk: "
    "--set 'chunking.stop=[\"\\n\\n\"]'"
)


@dataclass(frozen=True, slots=True)
class Summary:
    """The statistics of a run. Accuracies are NaN if no answer was graded.

    `rate` is the fraction of judged chunks that were escalated; `answers` is the accuracy of the
    votes.
    """

    problems: int
    samples: int
    answers: Estimate
    samples_right: Estimate
    rate: Estimate
    usage: Usage
    seconds: float
    failed: int  # number of problems with at least one failed rollout
    unanswered: int
    truncation: Truncation

    @property
    def target_share(self) -> float:
        """Return the fraction of the written tokens that the target wrote."""
        return self.usage.target_share

    def as_json(self) -> dict[str, Any]:
        """Return the statistics as a dictionary for JSON."""
        estimates = {
            name: getattr(self, name).as_json() for name in ("answers", "samples_right", "rate")
        }
        cut = {**self.truncation.as_json(), "warning": self.truncation.warning}
        return {**asdict(self), **estimates, "target_share": self.target_share, "truncation": cut}


def summarise(
    problems: Sequence[FinishedProblem], seconds: float, truncation: Truncation
) -> Summary:
    """Return the summary of a run's finished problems."""
    graded = [one for one in problems if one.verdict is not None]
    return Summary(
        problems=len(problems),
        samples=sum(len(one.samples) for one in problems),
        answers=accuracy_estimate(one.is_right for one in graded),
        samples_right=_of_samples(graded),
        rate=share_estimate((one.escalated, one.judged) for one in problems),
        usage=sum((problem.usage for problem in problems), Usage()),
        seconds=seconds,
        failed=sum(not one.is_complete for one in problems),
        unanswered=sum(one.status == "unanswered" for one in problems),
        truncation=truncation,
    )


def _of_samples(graded: Sequence[FinishedProblem]) -> Estimate:
    """Return the mean over problems of the fraction of correct rollouts among those that were not
    stopped early.
    """
    # one list for each problem: the verdicts on its rollouts that ran to their end
    verdicts: list[list[str]] = []
    for problem in graded:
        verdicts.append([one.verdict for one in problem.complete_samples if one.verdict])
    num_rollouts = sum(map(len, verdicts))
    unscored = sum(of_problem.count("unscored") for of_problem in verdicts)

    def share(*counted: str) -> Estimate:
        shares: list[float] = []
        for of_problem in verdicts:
            if of_problem:
                correct = sum(verdict in counted for verdict in of_problem)
                shares.append(correct / len(of_problem))
        return mean_estimate(shares, num_rollouts)

    return share("correct").with_best_case(share("correct", "unscored"), unscored)


RunStatus = Literal["finished", "decided", "interrupted", "stopped", "incomplete", "failed"]
"""The status of a run. "finished": all problems are finished. "decided": the comparison with an
earlier run was decided, so the remaining problems were skipped. "interrupted": the user ended the
run. "stopped": a spending cap was reached, or the time ran out. "incomplete": some problems failed.
"failed": all problems failed.
"""
INTERRUPTED = 130


@dataclass(slots=True)
class IncompleteTally:
    """Counts of the problems and rollouts that failed; the next session runs them again."""

    problems: int = 0
    whole: int = 0  # number of problems whose rollouts all failed
    rollouts: int = 0
    first: str = ""

    def add(self, line: FinishedProblem) -> None:
        """Count a problem that failed or has failed rollouts."""
        failures = line.failures
        self.problems += 1
        self.whole += line.status == "failed"
        self.rollouts += len(failures)
        self.first = self.first or next(iter(failures), line.why)

    def words(self, problems: int) -> str:
        """Return a sentence that counts the failed problems and rollouts, and quotes the first
        error.
        """
        rollouts = f": {counted(self.rollouts, 'rollout')} failed" if self.rollouts else ""
        return (
            f"could not complete {self.problems} of {counted(problems, 'problem')}{rollouts}; "
            f"first error: {self.first}"
        )


@dataclass(frozen=True)
class RunResult:
    """The result of a run so far. `problems` has the finished problems in the order of the
    dataset.
    """

    status: RunStatus
    problems: tuple[FinishedProblem, ...]
    manifest: Manifest
    seconds: float  # running time in seconds, summed over all sessions of the run
    sessions: int = 1
    directory: Path | None = None
    why: str = ""
    comparison: Sequential | None = None  # the result of the comparison with an earlier run
    # the outcomes with their rollouts; empty if the run has a directory
    kept: tuple[Outcome, ...] = field(default=(), repr=False)
    # numbers of tokens that the target's speculative decoding proposed and accepted during the run;
    # None if it proposed no tokens
    speculated: Speculated | None = None
    unscored: int = 0  # number of the gate's decisions that were made without a usable score
    # For each problem that an interrupted run has begun but not finished: the number of recorded
    # tokens. A resumed run reuses them.
    saved_tokens: tuple[int, ...] = ()

    def __str__(self) -> str:
        """Summarise the result in one line."""
        said = (
            f"{self.status}: {counted(len(self.problems), 'problem')}, "
            f"accuracy {self.accuracy.brief('not measured')}"
        )
        if self.rate.n_samples:
            said += f", escalated {self.rate.counted()}"
        return said if self.directory is None else f"{said}, in {self.directory}"

    @cached_property
    def summary(self) -> Summary:
        """Return the statistics of the finished problems."""
        return summarise(self.problems, self.seconds, self.truncation)

    @property
    def coarse_chunks(self) -> str:
        """Return a warning if rollouts consist of very few judged chunks on average, otherwise "".

        Such chunks are so long that one escalation rewrites most of a solution. The gate then in
        effect decides about whole rollouts.
        """
        rollouts = sum(len(problem.complete_samples) for problem in self.problems)
        judged = sum(problem.judged for problem in self.problems)
        if self.manifest.judged_unit != "chunks" or not 0 < judged <= COARSE_CHUNKS * rollouts:
            return ""
        return (
            f"{judged / rollouts:.1f} chunks per rollout were judged, so an escalation rewrites "
            f"most of a solution; {SHORTER_CHUNKS}"
        )

    @property
    def unscored_words(self) -> str:
        """Return a sentence on the number of decisions without a score; "" if every decision had
        one.
        """
        if not self.unscored:
            return ""
        judged = sum(problem.judged for problem in self.problems)
        unit = self.manifest.judged_unit
        return f"{self.unscored:,} of {judged:,} {unit} had to be decided without a score"

    @property
    def saved_words(self) -> str:
        """Return a sentence on the saved work of unfinished problems; "" if there is none."""
        if not self.saved_tokens:
            return ""
        problems = counted(len(self.saved_tokens), "unfinished problem")
        return (
            f"{sum(self.saved_tokens):,} tokens of {problems}, not counted above; a resumed run "
            "reuses them"
        )

    @property
    def accuracy(self) -> Estimate:
        """Return the fraction of problems whose voted answer is correct, with its interval over
        problems.
        """
        return self.summary.answers

    @property
    def rate(self) -> Estimate:
        """Return the fraction of judged chunks that were escalated, with an interval clustered by
        problem.
        """
        return self.summary.rate

    @property
    def usage(self) -> Usage:
        """Return the usage summed over all finished problems."""
        return self.summary.usage

    @property
    def cost(self) -> float | None:
        """Return the cost of all finished problems in dollars, or None if the price of a model is
        unknown.
        """
        setting = self.manifest.settings.get(PRICES)
        return None if setting is None else money_of(self.usage, recorded_prices(setting.value))

    @cached_property
    def combined(self) -> CombineSummary | None:
        """Return how the target's selection or synthesis changed the answers of split votes; None
        if only votes decided.
        """
        return summarise_combinations(self.problems)

    @property
    def answered(self) -> Answered | None:
        """Return the results of abstention; None if the run may not abstain."""
        return answered(self.problems, self.manifest)

    def to_dict(self) -> dict[str, Any]:
        """Return the statistics and all problems of the run, as `atts eval --json` prints them.

        Undefined numbers (NaN) become None, so that the JSON has null instead.
        """
        problems = [problem.as_json() for problem in self.problems]
        directory = None if self.directory is None else str(self.directory)
        return {
            "status": self.status,
            "directory": directory,
            **self.as_json(),
            "by_problem": problems,
        }

    def as_json(self) -> dict[str, Any]:
        """Return the statistics of the run as a dictionary for JSON, in which undefined numbers
        (NaN) are None.

        If available, it also contains the cost, the comparison with an earlier run, the speculation
        counters, and the results of selection, synthesis and abstention.
        """
        plain = self.summary.as_json()
        if self.cost is not None:
            plain["cost"] = self.cost
        if self.comparison is not None:
            plain["comparison"] = self.comparison.as_json()
        if self.combined is not None:
            plain["combined"] = jsonable(self.combined)
        if self.answered is not None:
            plain["answered"] = jsonable(self.answered)
        if self.speculated is not None:
            plain["speculated"] = jsonable(self.speculated)
        return plain

    def to_pandas(self) -> Any:
        """Return a data frame with one row per problem.

        :raises UsageError: pandas is not installed.
        """
        try:
            pandas: Any = import_module("pandas")
        except ImportError as error:
            raise UsageError(
                "to_pandas needs pandas, which is not installed; to install it, run pip install pandas"
            ) from error
        return pandas.DataFrame([_row(problem) for problem in self.problems])

    def _repr_html_(self) -> str:
        """Return an HTML table of the run's statistics and their intervals; notebooks display
        it.
        """
        summary = self.summary
        rows = [
            ("status", f"{self.status}: {self.why}" if self.why else self.status),
            ("problems", f"{summary.problems:,} with {counted(summary.samples, 'rollout')}"),
            ("accuracy", str(summary.answers)),
            (f"escalated {self.manifest.judged_unit}", summary.rate.counted()),
            (
                "tokens",
                f"{summary.usage.draft_tokens:,} by the draft, {summary.usage.target_tokens:,} by "
                f"the target",
            ),
            ("kept in", "memory" if self.directory is None else str(self.directory)),
        ]
        cells = (
            f"<tr><th scope=row>{escape(name)}</th><td>{escape(words)}</td></tr>"
            for name, words in rows
        )
        return f"<table>{''.join(cells)}</table>"

    @property
    def truncation(self) -> Truncation:
        """Return how many rollouts were cut at each token or turn limit before they gave an answer.
        Its `warning` is "" unless many rollouts were cut.
        """
        return truncation(self.problems, self.manifest)

    @property
    def exit_code(self) -> int:
        """Return the exit code of the command: 0 for success, 130 for a run that ended early and
        can continue.

        It is 3 if a problem failed, and 5 if the run finished but could not decide the requested
        comparison.
        """
        if self.status in ("incomplete", "failed"):
            return EngineError.exit_code
        if (
            self.status == "finished"
            and self.comparison is not None
            and self.comparison.settled == "undecided"
        ):
            return CheckFailed.exit_code
        return INTERRUPTED if self.status in ("interrupted", "stopped") else 0

    def outcomes(self) -> Iterator[Outcome]:
        """Yield the outcomes of finished problems with their rollouts, in the order of finishing.
        They are read from the journal, if there is one.

        :raises JournalError: the journal cannot be read.
        """
        if self.directory is None:
            yield from self.kept
        else:
            yield from open_run(self.directory).outcomes()


def _row(problem: FinishedProblem) -> dict[str, Any]:
    """Return one problem as a row of the table, keyed by column."""
    plain = problem.as_json()
    counted = {
        "samples": len(problem.samples),
        "votes": problem.votes.get(problem.answer or "", 0.0),
    }
    kept = {name: value for name, value in plain.items() if name != "usage"}
    return {**kept, **counted, **plain["usage"]}
