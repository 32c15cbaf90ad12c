"""Immutable data classes that hold the results in a report."""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from importlib.resources import files
from typing import Literal

import msgspec

from atts.calibration import RateCheck, check_rate
from atts.core import Usage
from atts.engine import Speculated
from atts.errors import counted
from atts.evaluators import Estimate
from atts.pipelines import CombineSummary

Standing = Literal["good", "note", "care", "bad"]
"""The rating of an observation. good: nothing speaks against the numbers. note: the observation
speaks neither for nor against the numbers. care: read the numbers with care. bad: do not rely on
the numbers.
"""


Point = tuple[Standing, str]
"""An observation that supports or weakens the results in a report: its rating and its text."""


def worst_of(points: Iterable[Point], check: RateCheck | None) -> Standing:
    """Return the worst rating among these observations.

    If none of them is rated "bad" or "care", return "good", or "note" if there are too few
    decisions to check the rate.
    """
    standings = {standing for standing, _ in points}
    if "bad" in standings:
        return "bad"
    if "care" in standings:
        return "care"
    return "note" if check is not None and check.has_few_decisions else "good"


def rate_standing(check: RateCheck) -> Standing:
    """Return the rating of a realised rate."""
    if check.has_few_decisions:
        return "note"
    ratings: dict[str, Standing] = {"held": "good", "unclear": "care", "left": "bad"}
    return ratings[check.standing]


@dataclass(frozen=True, slots=True)
class RunVerdict:
    """The overall rating of a report, and the observations that it is computed from."""

    standing: Standing
    line: str
    points: tuple[Point, ...]


@dataclass(frozen=True, slots=True)
class ShownNumber:
    """A number on the first screen of a report: its text, its meaning, and how it was computed."""

    value: str
    what: str
    note: str


@dataclass(frozen=True, slots=True)
class Headline:
    """The result of a run in one sentence, with its most important numbers."""

    sentence: str
    numbers: tuple[ShownNumber, ...]


@dataclass(frozen=True, slots=True)
class RunFacts:
    """Facts that say which run the report is about."""

    directory: str
    version: str
    created: float
    sessions: int
    ended: str
    seconds: float
    planned: int | None
    done: int
    seed: int
    dataset: str
    draft: str
    target: str
    what: str  # one line of text with the method, the dataset and the models
    configuration: tuple[tuple[str, str, str], ...]  # one row per setting: name, value, origin
    versions: Mapping[str, str]


@dataclass(frozen=True, slots=True)
class NamedRate:
    """A rate (such as an accuracy) with its name, its interval and its meaning."""

    name: str
    estimate: Estimate
    meaning: str


@dataclass(frozen=True, slots=True)
class Spend:
    """The cost of a run. Values per problem are means over the finished problems."""

    usage: Usage
    target_share: float
    tokens_per_problem: float
    target_tokens_per_problem: float
    tokens_per_right: float
    seconds: float
    tokens_per_second: float
    dollars: float | None  # None if a model has no price
    dollars_per_right: float | None


@dataclass(frozen=True, slots=True)
class Baseline:
    """A comparison of this run with another run on the problems that are graded in both runs. A
    ratio is this run's value divided by the other run's value.

    `second_ratio` compares the mean seconds per problem of all finished problems of each run.
    """

    name: str
    method: str
    problems: int
    own: Estimate
    other: Estimate
    difference: Estimate  # accuracy of this run minus accuracy of the other run
    p_value: float  # after Holm's correction if this run is compared with several runs
    problems_needed: int | None
    token_ratio: float
    target_token_ratio: float
    second_ratio: float
    target_tokens_per_problem: float
    seconds: float


@dataclass(frozen=True, slots=True)
class GroupRate:
    """The decisions of one turn or question.

    If decisions were independent coins with the nominal rate, the shares of all groups would be
    between their `low` and `high` with 95 % probability.
    """

    name: str
    decisions: int
    escalated: int
    low: float
    high: float

    @property
    def share(self) -> float:
        """Return the realised rate."""
        return self.escalated / self.decisions

    @property
    def inside(self) -> bool:
        """Return whether the realised rate is in the band from `low` to `high`."""
        return self.low <= self.share <= self.high


@dataclass(frozen=True, slots=True)
class RatePoint:
    """The realised rate at one moment of a run: `share` of all decisions so far, and `rolling` of
    the latest decisions.

    If decisions were independent coins with the nominal rate, `share` would be between `low` and
    `high` with 95 % probability.
    """

    decisions: int
    share: float
    low: float
    high: float
    rolling: float | None


@dataclass(frozen=True, slots=True)
class Uniformity:
    """The largest distance between the distribution of p-values and the uniform distribution.

    If the p-values were `effective` independent uniform values, the distance would be at most
    `band` with 95 % probability.
    """

    n: int
    effective: float
    distance: float
    band: float
    # histogram: number of p-values in each of several equal parts of [0, 1]
    counts: tuple[int, ...]
    # distribution of the p-values: pairs of a number p from 0 to 1, and the share of p-values that
    # are at most p
    curve: tuple[tuple[float, float], ...]

    @property
    def inside(self) -> bool:
        """Return whether the curve is in the band everywhere."""
        return self.distance <= self.band


@dataclass(frozen=True, slots=True)
class DriftTest:
    """A drift test: a martingale bets that the scores of later questions differ from those of
    earlier questions.

    All values are log10 of the martingale's capital.
    """

    questions: int
    path: tuple[float, ...]
    peak: float
    # base-10 logarithm of the capital at which the test raises an alarm; the capital is 1 / level
    alarm: float


@dataclass(frozen=True, slots=True)
class DriftAlarm:
    """A drift alarm that a run raised."""

    kind: str
    scores: int
    p: float
    acted: str
    text: str


@dataclass(frozen=True, slots=True)
class StatedGuarantee:
    """A guarantee, the conditions that void the guarantee, and a description of its check."""

    mode: str
    guarantee: str
    voided_by: str
    audit: str


@dataclass(frozen=True, slots=True)
class RateControl:
    """The realised rate compared with the nominal rate; `nominal` is None if the gate does not have
    a nominal rate.
    """

    nominal: float | None
    decisions: int
    escalated: int
    forced: int
    questions: int
    rate: Estimate
    turns: tuple[GroupRate, ...]
    by_question: tuple[GroupRate, ...]
    question_rms: float
    coin_rms: float
    window: int
    moments: tuple[RatePoint, ...]
    p_values: Uniformity | None
    drift: DriftTest | None
    alarms: tuple[DriftAlarm, ...]
    # a sentence on the effective sample size of the recorded scores
    effective: str
    effective_n: float
    promise: StatedGuarantee
    metrics: Mapping[str, float]

    @property
    def controls_turns(self) -> bool:
        """Return whether the gate keeps the rate in each turn; with other rate scopes, the rate may
        differ from turn to turn.
        """
        return self.promise.mode == "question-turn"

    def check(self) -> RateCheck | None:
        """Compare the realised rate with the nominal rate; return None if the gate has no nominal
        rate.
        """
        if self.nominal is None:
            return None
        return check_rate(
            self.nominal, [(group.decisions, group.escalated) for group in self.by_question]
        )


THIS_RUN = "this run"
"""The name of the report's own run in tables and charts that also show other runs."""


@dataclass(frozen=True, slots=True)
class FrontierPoint:
    """A point with a cost and an accuracy: a complete run, or its vote with fewer rollouts or fewer
    turns.
    """

    label: str
    kind: Literal["samples", "turns", "run"]
    cost: float  # number of target tokens per problem
    tokens: float  # number of all tokens per problem
    accuracy: Estimate


@dataclass(frozen=True, slots=True)
class StageSeconds:
    """The seconds of one stage of calls, summed over the calls."""

    name: str
    nodes: int
    compute: float
    queue: float
    wait: float


@dataclass(frozen=True, slots=True)
class EngineLanes:
    """The activity of an engine over time: its numbers of running and waiting calls per time slice,
    and its first lanes.

    A segment of a lane is (lane, stage, start, end), with times in seconds since the run began;
    calls within one pixel share a segment.
    """

    engine: str
    peak: int
    busy_share: float  # share of the run's time in which the engine had at least one call in flight
    mean_in_flight: float
    longest_bubble: float
    in_flight: tuple[float, ...]
    waiting: tuple[float, ...]
    lanes: int
    segments: tuple[tuple[int, str, float, float], ...]


@dataclass(frozen=True, slots=True)
class TimeBreakdown:
    """The time of a run by stage, computed from its task graph."""

    seconds: float
    nodes: int  # number of calls whose times were analysed; in a large run, only the first calls
    calls: int
    stages: tuple[StageSeconds, ...]
    engines: tuple[EngineLanes, ...]
    critical_path: float
    intensity: float
    arithmetic_seconds: float
    memory_seconds: float
    sibling_seconds: float
    sibling_edges: int


_THINGS = re.compile(
    r"((?:engine )?(?:answer|call|decision|problem|rollout|score|session|turn))s\b"
)
"""A pattern that matches a plural noun at the beginning of a caveat's text, such as "rollouts", and
captures its singular.
"""


@dataclass(frozen=True, slots=True)
class Caveat:
    """A caveat about the numbers of a report, with examples of the affected problems."""

    code: str
    standing: Standing
    count: int
    text: str
    examples: tuple[tuple[str, int | None], ...] = ()

    @property
    def sentence(self) -> str:
        """Return the text with its count, unless the text already begins with the count.

        >>> Caveat("no answer", "care", 1, "rollouts ended without an answer").sentence
        '1 rollout ended without an answer'
        """
        things = _THINGS.match(self.text)
        if things:
            return counted(self.count, things[1]) + self.text[things.end() :]
        count = f"{self.count:,}"
        if self.text.startswith("of "):
            return f"{count} {self.text}"
        is_said = self.count == 1 or self.text.startswith(f"{count} of ")
        return self.text if is_said else f"{self.text} ({count} times)"


@dataclass(frozen=True, slots=True)
class ProblemRow:
    """The main facts about one finished problem."""

    id: str
    status: str
    answer: str | None
    reference: str | None
    verdict: str | None
    level: int | None
    subject: str
    samples: int
    right: int
    graded: int
    agreement: float
    decisions: int
    escalated: int
    draft_tokens: int
    target_tokens: int
    seconds: float | None
    flags: tuple[str, ...]
    why: str
    question: str  # the beginning of the problem's text
    # True if the HTML page lists the problem; in a large run, it lists only some problems
    is_shown: bool = True


@dataclass(frozen=True, slots=True)
class RunReport:
    """The contents of a report on a run."""

    run: RunFacts
    headline: Headline
    verdict: RunVerdict
    accuracy: tuple[NamedRate, ...]
    coverage: str
    spend: Spend
    speculated: Speculated | None
    combined: CombineSummary | None
    baselines: tuple[Baseline, ...]
    calibration: RateControl | None
    frontier: tuple[FrontierPoint, ...]
    timing: TimeBreakdown | None
    caveats: tuple[Caveat, ...]
    problems: tuple[ProblemRow, ...]


@dataclass(frozen=True, slots=True)
class GateWords:
    """The texts on a gate that has no calibrator: its guarantee, and the conditions that void this
    guarantee.
    """

    guarantee: str
    voided_by: str


@dataclass(frozen=True, slots=True)
class CaveatWords:
    """The rating and the text of a caveat."""

    standing: Standing
    text: str


@dataclass(frozen=True, slots=True)
class ReportWords:
    """The texts of words.toml; each attribute is a table of the file."""

    gates: dict[str, GateWords]
    flags: dict[str, CaveatWords]
    problems: dict[str, CaveatWords]
    metrics: dict[str, str]
    rates: dict[str, str]


WORDS = msgspec.toml.decode(
    (files("atts.analysis.reports") / "words.toml").read_bytes(), type=ReportWords
)
