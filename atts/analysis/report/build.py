"""Builds a report's numbers from run directories, once for all formats."""

from __future__ import annotations

import gc
import json
import math
from collections.abc import Generator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

from atts.analysis.report.accuracy import answered, baseline, method, rates, spend, written
from atts.analysis.report.caveats import caveats
from atts.analysis.report.frontier import frontier
from atts.analysis.report.headline import headline
from atts.analysis.report.numbers import (
    Caveat,
    NamedRate,
    Point,
    ProblemRow,
    RateControl,
    RunFacts,
    RunReport,
    RunVerdict,
    Spend,
    Standing,
    worst_of,
)
from atts.analysis.report.pages import Pages, shorten
from atts.analysis.report.realised_rate import realised_rate
from atts.analysis.report.run_data import ProblemFacts, RunData, read_run_data
from atts.analysis.report.timing import timing
from atts.journal import COMPARED, Json

PAGE_BYTES = 16 * 2**20
"""The most that the pages of all problems take in the file; their texts are shortened to stay below
it.
"""


@dataclass(frozen=True, slots=True)
class BuiltReport:
    """The numbers, and the pages that HTML alone can show."""

    report: RunReport
    pages: Pages


@contextmanager
def _no_garbage_collection() -> Generator[None]:
    """Nothing here holds a cycle, and to look for one among a million values again and again takes
    a tenth of the time.

    What was read is let go inside, so that it is not looked through once more at the end.
    """
    was_on = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if was_on:
            gc.enable()


@_no_garbage_collection()
def build_report(
    directory: Path, against: Sequence[Path] = (), *, page_bytes: int = PAGE_BYTES
) -> BuiltReport:
    """Read a run, finished or not, and the runs to compare it with.

    :raises JournalError: one of them is no run directory, or cannot be read.
    """
    data = read_run_data(directory, page_bytes)
    others = [read_run_data(other, 0) for other in against]
    calibration = realised_rate(data)
    problems = list(data.problems.values())
    accuracy, coverage = rates(problems)
    cost = spend(data)
    warnings = caveats(data, calibration)
    baselines = tuple(row for other in others if (row := baseline(data, other)) is not None)
    report = RunReport(
        _facts(data),
        headline(accuracy, cost, calibration, baselines, len(problems)),
        _verdict(accuracy, cost, calibration, warnings, len(problems)),
        accuracy=(*accuracy, *answered(data)),
        coverage=coverage,
        spend=cost,
        speculated=data.state.speculated,
        baselines=baselines,
        calibration=calibration,
        frontier=frontier(data, others),
        timing=timing(data.nodes),
        caveats=warnings,
        problems=tuple(map(_row, problems)),
    )
    return BuiltReport(report, data.pages)


def _facts(data: RunData) -> RunFacts:
    manifest = data.run.manifest
    ended = data.state.ended
    return RunFacts(
        str(data.run.directory),
        version=manifest.versions.get("atts", "?"),
        created=manifest.created,
        sessions=data.state.sessions,
        ended="killed, or still running"
        if ended is None
        else ended.status + (f" ({ended.why})" if ended.why else ""),
        seconds=data.state.seconds,
        planned=manifest.problems,
        done=len(data.problems),
        seed=manifest.seed,
        dataset=manifest.dataset,
        draft=_model(manifest.engines.get("draft")),
        target=_model(manifest.engines.get("target")),
        configuration=tuple(_settings(data)),
        versions=manifest.versions,
    )


def _model(engine: Mapping[str, Json] | None) -> str:
    if engine is None:  # the method asks the other model alone
        return "not used"
    return f"{engine.get('model', '?')} ({engine.get('engine', '?')})"


def _settings(data: RunData) -> list[tuple[str, str, str]]:
    rows = [("method", method(data), "as run")]
    given = data.run.manifest.settings
    for name, found in data.run.manifest.configuration.items():
        if name in given or (name == "policy" and given):
            continue  # told below, key by key, with who set it
        parts = found.value.items() if isinstance(found.value, Mapping) else [("", found.value)]
        rows += [
            (f"{name}.{part}".rstrip("."), _setting(value), found.origin) for part, value in parts
        ]
    return rows + [
        (name, _setting(found.value), found.origin)
        for name, found in given.items()
        if name != "method"
    ]


def _setting(value: Json) -> str:
    """A value on one line; thousands of stored scores are cut."""
    return shorten(value if isinstance(value, str) else json.dumps(value), 200)


def _verdict(
    accuracy: Sequence[NamedRate],
    cost: Spend,
    calibration: RateControl | None,
    warnings: Sequence[Caveat],
    count: int,
) -> RunVerdict:
    problems = f"{count:,} problem{'s' * (count != 1)}"
    points = list[Point]()
    if accuracy:
        known = accuracy[0].estimate.n_problems
        of = "" if known == count else f"{known:,} of "
        points.append(
            ("good", f"the vote is right on {accuracy[0].estimate.brief()} of {of}{problems}")
        )
    else:
        points.append(("care", f"{problems}, none graded: there is no reference answer"))
    if not math.isnan(cost.target_share):
        points.append(
            ("good", f"the target wrote {cost.target_share:.1%} of {written(cost.usage):,} tokens")
        )
    if calibration is not None:
        points.append(_rate_point(calibration))
    points.extend(("good", caveat.text) for caveat in warnings if caveat.code == COMPARED)
    worst = [caveat for caveat in warnings if caveat.standing == "bad"]
    points.extend((caveat.standing, f"{caveat.count:,} {caveat.text}") for caveat in worst)
    return RunVerdict(worst_of(points), "; ".join(text for _, text in points[:3]), tuple(points))


def _rate_point(control: RateControl) -> Point:
    found = control.check()
    if found is None:
        share = control.escalated / control.decisions
        return (
            "good",
            f"{share:.3f} of {control.decisions:,} chunks were escalated; no rate was promised",
        )
    standings: dict[str, Standing] = {"held": "good", "unclear": "care", "left": "bad"}
    return standings[found.standing], str(found)


def _row(one: ProblemFacts) -> ProblemRow:
    problem = one.problem
    brief = one.brief
    verdicts = [
        sample.verdict
        for sample in brief.samples
        if sample.verdict is not None and sample.answer is not None
    ]
    words = problem.text if len(problem.text) <= 110 else problem.text[:110].rstrip() + " …"
    return ProblemRow(
        problem.id,
        status=brief.status,
        answer=brief.answer,
        reference=problem.answer,
        verdict=brief.verdict,
        level=problem.level,
        subject=problem.subject,
        samples=len(brief.samples),
        right=verdicts.count("correct"),
        graded=len(verdicts),
        agreement=brief.agreement,
        decisions=sum(rollout.decisions for rollout in one.rollouts),
        escalated=sum(rollout.escalated for rollout in one.rollouts),
        draft_tokens=brief.usage.draft_tokens,
        target_tokens=brief.usage.target_tokens,
        seconds=brief.seconds,
        flags=tuple(dict.fromkeys(flag for rollout in one.rollouts for flag in rollout.flags)),
        why=brief.why,
        question=words,
    )
