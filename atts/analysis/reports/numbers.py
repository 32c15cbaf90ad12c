"""The numbers of a report, as frozen values."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from importlib.resources import files
from typing import Literal

import msgspec

from atts.calibration import RateCheck, check_rate
from atts.core import Usage
from atts.engine import Speculated
from atts.evaluators import Estimate
from atts.pipelines import CombineSummary

Standing = Literal["good", "care", "bad"]
"""Nothing to hold against it; read with care; do not rely on it."""


Point = tuple[Standing, str]
"""Something that speaks for or against the numbers."""


def worst_of(points: Iterable[Point]) -> Standing:
    """Return the worst standing of some points."""
    standings = {standing for standing, _ in points}
    return "bad" if "bad" in standings else "care" if "care" in standings else "good"


@dataclass(frozen=True, slots=True)
class RunVerdict:
    """The report in one line, and the points it rests on."""

    standing: Standing
    line: str
    points: tuple[Point, ...]


@dataclass(frozen=True, slots=True)
class ShownNumber:
    """A number of the first screen: as people read it, what it is of, and what stands behind it."""

    value: str
    what: str
    note: str


@dataclass(frozen=True, slots=True)
class Headline:
    """The result in one sentence, and the few numbers behind it."""

    sentence: str
    numbers: tuple[ShownNumber, ...]


@dataclass(frozen=True, slots=True)
class RunFacts:
    """Facts that identify the run."""

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
    what: str  # method, dataset and models in one line
    configuration: tuple[tuple[str, str, str], ...]  # name, value, origin
    versions: Mapping[str, str]


@dataclass(frozen=True, slots=True)
class NamedRate:
    """One named rate with its interval, and what it means."""

    name: str
    estimate: Estimate
    meaning: str


@dataclass(frozen=True, slots=True)
class Spend:
    """Cost of the run; the per-problem numbers are means over finished problems."""

    usage: Usage
    target_share: float
    tokens_per_problem: float
    target_tokens_per_problem: float
    tokens_per_right: float
    seconds: float
    tokens_per_second: float
    dollars: float | None  # None: a model has no price
    dollars_per_right: float | None


@dataclass(frozen=True, slots=True)
class Baseline:
    """This run compared with another one, on the problems that both have; ratios are this run over
    the other.
    """

    name: str
    method: str
    problems: int
    own: Estimate
    other: Estimate
    difference: Estimate  # this run - the other
    p_value: float  # corrected by Holm's method where there are several others
    problems_needed: int | None
    token_ratio: float
    target_token_ratio: float
    second_ratio: float
    target_tokens_per_problem: float
    seconds: float


@dataclass(frozen=True, slots=True)
class GroupRate:
    """Decisions of one turn or question; `low` and `high` are where a fair coin of the nominal rate
    would stay.
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
        """Return whether the realised rate is in the band."""
        return self.low <= self.share <= self.high


@dataclass(frozen=True, slots=True)
class RatePoint:
    """The rate after so many decisions, of all and of the latest window, with the coin's band for
    each.
    """

    decisions: int
    share: float
    low: float
    high: float
    rolling: float | None


@dataclass(frozen=True, slots=True)
class Uniformity:
    """Distance of p-values from uniformity, and the simultaneous band that `effective` draws allow."""

    n: int
    effective: float
    distance: float
    band: float
    counts: tuple[int, ...]  # in equal bins of [0, 1]
    curve: tuple[tuple[float, float], ...]  # p, share of p-values at or below it

    @property
    def inside(self) -> bool:
        """Return whether the whole curve stays in the band."""
        return self.distance <= self.band


@dataclass(frozen=True, slots=True)
class DriftTest:
    """A martingale betting that later questions score otherwise than earlier ones; values are log10
    of its capital.
    """

    questions: int
    path: tuple[float, ...]
    peak: float
    alarm: float  # log10 of 1 / level


@dataclass(frozen=True, slots=True)
class DriftAlarm:
    """A drift alarm of the run itself."""

    kind: str
    scores: int
    p: float
    acted: str
    text: str


@dataclass(frozen=True, slots=True)
class StatedGuarantee:
    """A promise, what voids it, and how that was found out."""

    mode: str
    guarantee: str
    voided_by: str
    audit: str


@dataclass(frozen=True, slots=True)
class RateControl:
    """Realised rate compared with the nominal one; `nominal` is None if the gate promises no rate."""

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
    effective: str  # in words
    effective_n: float
    promise: StatedGuarantee
    metrics: Mapping[str, float]

    def check(self) -> RateCheck | None:
        """Judge the realised rate by its bands; None if no rate was promised."""
        if self.nominal is None:
            return None
        return check_rate(
            self.nominal, [(group.decisions, group.escalated) for group in self.by_question]
        )


THIS_RUN = "this run"
"""Its label among those it is compared with."""


@dataclass(frozen=True, slots=True)
class FrontierPoint:
    """One place of the cost-accuracy plane: fewer rollouts, fewer turns, or a whole run."""

    label: str
    kind: Literal["samples", "turns", "run"]
    cost: float  # target tokens per problem
    tokens: float  # all tokens per problem
    accuracy: Estimate


@dataclass(frozen=True, slots=True)
class StageSeconds:
    """Seconds of one stage, summed over its nodes."""

    name: str
    nodes: int
    compute: float
    queue: float
    wait: float


@dataclass(frozen=True, slots=True)
class EngineLanes:
    """One engine over the run: calls in flight and waiting per slice of time, and its first lanes
    as segments.

    A segment is (lane, stage, start, end) in seconds since the run began, calls closer than a pixel
    drawn as one.
    """

    engine: str
    peak: int
    busy_share: float  # share of the run with at least one call in flight
    mean_in_flight: float
    longest_bubble: float
    in_flight: tuple[float, ...]
    waiting: tuple[float, ...]
    lanes: int
    segments: tuple[tuple[int, str, float, float], ...]


@dataclass(frozen=True, slots=True)
class TimeBreakdown:
    """Time by stage, from the task graph."""

    seconds: float
    nodes: int  # calls that were measured: the first ones, of more than a report holds
    calls: int
    stages: tuple[StageSeconds, ...]
    engines: tuple[EngineLanes, ...]
    critical_path: float
    intensity: float
    arithmetic_seconds: float
    memory_seconds: float
    sibling_seconds: float
    sibling_edges: int


@dataclass(frozen=True, slots=True)
class Caveat:
    """Something to know before believing the numbers, with where to look."""

    code: str
    standing: Standing
    count: int
    text: str
    examples: tuple[tuple[str, int | None], ...] = ()

    @property
    def sentence(self) -> str:
        """Return the count and the text; some texts begin with the count already."""
        count = f"{self.count:,}"
        return self.text if self.text.startswith(f"{count} of ") else f"{count} {self.text}"


@dataclass(frozen=True, slots=True)
class ProblemRow:
    """One finished problem in brief."""

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
    question: str  # its first words
    is_shown: bool = True  # on a page, which may have room for some problems only


@dataclass(frozen=True, slots=True)
class RunReport:
    """A run as its report tells it."""

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
    """Promise of a gate without a calibrator, and what voids it."""

    guarantee: str
    voided_by: str


@dataclass(frozen=True, slots=True)
class CaveatWords:
    """Weight and text of a caveat."""

    standing: Standing
    text: str


@dataclass(frozen=True, slots=True)
class ReportWords:
    """The tables of the file, by name."""

    gates: dict[str, GateWords]
    flags: dict[str, CaveatWords]
    problems: dict[str, CaveatWords]
    metrics: dict[str, str]
    rates: dict[str, str]


WORDS = msgspec.toml.decode(
    (files("atts.analysis.reports") / "words.toml").read_bytes(), type=ReportWords
)
