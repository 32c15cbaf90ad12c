"""Makes the numbers of a report from run directories, once for all formats."""

from __future__ import annotations

import gc
import json
import math
from collections.abc import Generator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

from atts.analysis.report.accuracy import baseline, method, rates, spend
from atts.analysis.report.caveats import caveats
from atts.analysis.report.frontier import frontier
from atts.analysis.report.gather import Evidence, Solved, gather
from atts.analysis.report.numbers import (
    Calibration,
    Caveat,
    ProblemRow,
    Rate,
    Report,
    RunFacts,
    Spend,
    Standing,
    Verdict,
)
from atts.analysis.report.pages import Pages, short
from atts.analysis.report.rates import calibration
from atts.analysis.report.timing import timing
from atts.calibration.verdict import judge_rate
from atts.evaluators import Estimate
from atts.journal import Json

PAGE_BYTES = 16 * 2**20
"""The most that the pages of all problems take in the file; their texts are shortened to stay below it."""


@dataclass(frozen=True, slots=True)
class Collected:
    """The numbers, and the pages that HTML alone can show."""

    report: Report
    pages: Pages


def collect(directory: Path, against: Sequence[Path] = (), *, page_bytes: int = PAGE_BYTES) -> Collected:
    """Read a run, finished or not, and the runs to compare it with.

    :raises JournalError: one of them is no run directory, or cannot be read.
    """
    with _no_collection():
        return _collected(directory, against, page_bytes)


@contextmanager
def _no_collection() -> Generator[None]:
    """Nothing here holds a cycle, and to look for one among a million values again and again takes a tenth of the time.

    What was read is let go inside, so that it is not looked through once more at the end.
    """
    was_on = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if was_on:
            gc.enable()


def _collected(directory: Path, against: Sequence[Path], page_bytes: int) -> Collected:
    evidence = gather(directory, page_bytes)
    others = [gather(other, 0) for other in against]
    held = calibration(evidence)
    accuracy, coverage = rates(list(evidence.solved.values()))
    cost, found = spend(evidence), caveats(evidence, held)
    report = Report(
        _facts(evidence),
        _verdict(evidence, accuracy, cost, held, found),
        accuracy,
        coverage,
        cost,
        tuple(row for row in (baseline(evidence, other) for other in others) if row is not None),
        held,
        frontier(evidence, others),
        timing(evidence.nodes),
        found,
        tuple(_row(one) for one in evidence.solved.values()),
    )
    return Collected(report, evidence.pages)


def _facts(evidence: Evidence) -> RunFacts:
    manifest = evidence.manifest
    ended = evidence.ended
    return RunFacts(
        str(evidence.directory),
        manifest.versions.get("atts", "?"),
        manifest.created,
        evidence.sessions,
        "killed, or still running" if ended is None else ended.status + (f" ({ended.why})" if ended.why else ""),
        evidence.seconds,
        manifest.problems,
        len(evidence.solved),
        manifest.seed,
        manifest.dataset,
        _model(manifest.engines.get("draft", {})),
        _model(manifest.engines.get("target", {})),
        tuple(_settings(evidence)),
        manifest.versions,
    )


def _model(engine: Mapping[str, Json]) -> str:
    return f"{engine.get('model', '?')} ({engine.get('engine', '?')})"


def _settings(evidence: Evidence) -> list[tuple[str, str, str]]:
    rows = [("method", method(evidence), "as run")]
    given = evidence.manifest.settings
    for name, found in evidence.manifest.configuration.items():
        if name in given or (name == "policy" and given):
            continue  # told below, key by key, with who set it
        parts = found.value.items() if isinstance(found.value, Mapping) else [("", found.value)]
        rows += [(f"{name}.{part}".rstrip("."), _setting(value), found.origin) for part, value in parts]
    return rows + [(name, _setting(found.value), found.origin) for name, found in given.items() if name != "method"]


def _setting(value: Json) -> str:
    """A value on one line; thousands of stored scores are cut."""
    return short(value if isinstance(value, str) else json.dumps(value), 200)


def _verdict(
    evidence: Evidence, accuracy: Sequence[Rate], cost: Spend, held: Calibration | None, found: Sequence[Caveat]
) -> Verdict:
    points: list[tuple[Standing, str]] = []
    if accuracy:
        points.append(("good", f"the vote is right on {interval(accuracy[0].estimate)} of {_problems(evidence)}"))
    else:
        points.append(("care", f"{_problems(evidence)}, none graded: there is no reference answer"))
    if not math.isnan(cost.target_share):
        points.append(("good", f"the target wrote {cost.target_share:.1%} of {_tokens(cost):,} tokens"))
    if held is not None:
        points.append(_rate_point(held))
    worst = [caveat for caveat in found if caveat.standing == "bad"]
    points.extend((caveat.standing, f"{caveat.count:,} {caveat.text}") for caveat in worst)
    standings = {standing for standing, _ in points}
    standing: Standing = "bad" if "bad" in standings else "care" if "care" in standings else "good"
    return Verdict(standing, "; ".join(text for _, text in points[:3]), tuple(points))


def _problems(evidence: Evidence) -> str:
    count = len(evidence.solved)
    return f"{count:,} problem{'s' * (count != 1)}"


def _rate_point(held: Calibration) -> tuple[Standing, str]:
    share = held.escalated / held.decisions
    if held.nominal is None:
        return "good", f"{share:.3f} of {held.decisions:,} chunks were escalated; no rate was promised"
    found = judge_rate(held.nominal, [(group.decisions, group.escalated) for group in held.by_question])
    standings: dict[str, Standing] = {"held": "good", "unclear": "care", "left": "bad"}
    return standings[found.standing], str(found)


def interval(estimate: Estimate) -> str:
    """A rate with its ends.

    >>> interval(Estimate(0.5, 0.25, 0.75, 8, 8, "wilson"))
    '0.500 [0.250, 0.750]'
    """
    if math.isnan(estimate.value):
        return "an undefined share"
    return f"{estimate.value:.3f} [{estimate.low:.3f}, {estimate.high:.3f}]"


def _tokens(cost: Spend) -> int:
    return cost.usage.draft_tokens + cost.usage.target_tokens


def _first_words(text: str, limit: int = 110) -> str:
    return text if len(text) <= limit else text[:limit].rstrip() + " …"


def _row(one: Solved) -> ProblemRow:
    verdicts = [line.verdict for line in one.samples if line.verdict is not None and line.answer is not None]
    return ProblemRow(
        one.problem.id,
        one.status,
        one.answer,
        one.problem.answer,
        one.verdict,
        one.problem.level,
        one.problem.subject,
        len(one.samples),
        sum(verdict == "correct" for verdict in verdicts),
        len(verdicts),
        one.agreement,
        sum(line.decisions for line in one.samples),
        sum(line.escalated for line in one.samples),
        one.usage.draft_tokens,
        one.usage.target_tokens,
        one.seconds,
        tuple(dict.fromkeys(flag for line in one.samples for flag in line.flags)),
        one.why,
        _first_words(one.problem.text),
    )
