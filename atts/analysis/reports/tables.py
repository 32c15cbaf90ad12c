"""The tables of a report, as texts and sortable values."""

from __future__ import annotations

import json
import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Literal

from atts.analysis.reports.numbers import (
    WORDS,
    Caveat,
    ProblemRow,
    RateControl,
    RunReport,
    TimeBreakdown,
)
from atts.calibration import Health
from atts.engine import Speculated
from atts.errors import counted
from atts.evaluators import Estimate
from atts.pipelines import score_words

TableKind = Literal["rows", "facts"]


@dataclass(frozen=True, slots=True)
class Cell:
    """A cell of a table, with its text, a value for sorting, and links. A link has a name, and may
    have a target on the page.
    """

    text: str
    value: float | None = None
    tone: str = ""
    links: tuple[tuple[str, str], ...] = ()

    @property
    def classes(self) -> str:
        """Return the names of the cell's style classes, which align numbers and set colours."""
        return " ".join(filter(None, ("" if self.value is None else "n", self.tone)))


@dataclass(frozen=True, slots=True)
class ReportTable:
    """A table with a title, named columns and rows. In a table of "facts", each row is a name and a
    value; such a table cannot be sorted.
    """

    title: str
    columns: tuple[str, ...]
    rows: tuple[tuple[Cell, ...], ...]
    kind: TableKind = "rows"

    @classmethod
    def of(
        cls,
        title: str,
        columns: Sequence[str],
        rows: Iterable[Sequence[object]],
        kind: TableKind = "rows",
    ) -> ReportTable:
        """Make a table from rows of values, which may have any type."""
        return cls(
            title, tuple(columns), tuple(tuple(cell(value) for value in row) for row in rows), kind
        )


_PROBLEMS = 60  # largest number of rows in the table of problems of a Markdown report


def cell(value: object, style: str = "") -> Cell:
    """Return a cell that shows a value as readable text.

    >>> cell(0.25).text, cell(1234567).text, cell(None).text, cell(float("nan")).text
    ('0.250', '1,234,567', '', 'undefined')
    """
    if isinstance(value, Cell):
        return value
    if value is None:
        return Cell("")
    if isinstance(value, Estimate):
        return Cell(value.brief(), None if math.isnan(value.value) else value.value)
    if isinstance(value, bool) or not isinstance(value, int | float):
        return Cell(str(value))
    return Cell(_number(value, style), None if math.isnan(value) else float(value))


def _number(value: float, style: str) -> str:
    if math.isnan(value):
        return "undefined"
    if math.isinf(value):
        return "∞" if value > 0 else "-∞"
    if style == "%":
        return f"{100 * value:.1f} %"
    if style:
        return format(value, style)
    if isinstance(value, int):
        return f"{value:,}"
    return f"{value:.3f}" if abs(value) < 100 else f"{value:,.0f}"


def accuracy_table(report: RunReport) -> ReportTable:
    """Return the table of accuracies, each with its interval and its meaning."""
    rows = [
        (rate.name, rate.estimate, rate.estimate.n_problems, rate.estimate.n_samples,
         rate.meaning + "".join(f" ({more})" for more in (rate.estimate.note, rate.estimate.doubt) if more))
        for rate in report.accuracy
    ]  # fmt: skip
    return ReportTable.of(
        "Accuracy",
        ("rate", "value [95 % interval]", "problems", "samples", "meaning"),
        rows,
    )


def spend_table(report: RunReport) -> ReportTable:
    """Tabulate the tokens and the seconds of a run."""
    spend = report.spend
    usage = report.spend.usage
    rows = [
        ("tokens written by the draft", cell(usage.draft_tokens)),
        ("tokens written by the target", cell(usage.target_tokens)),
        ("target's share of written tokens", cell(spend.target_share, "%")),
        ("tokens scored by the target", cell(usage.scored_tokens)),
        (
            "prompt tokens read (draft / target)",
            f"{usage.draft_prefill_tokens:,} / {usage.target_prefill_tokens:,}",
        ),
        ("tokens discarded", cell(usage.wasted_tokens)),
        ("engine calls", cell(usage.calls)),
        ("tokens written per problem", cell(spend.tokens_per_problem)),
        ("tokens written per correct answer", cell(spend.tokens_per_right)),
        ("seconds over all sessions", cell(spend.seconds) if spend.seconds else cell("unknown")),
        ("tokens written per second", cell(spend.tokens_per_second)),
    ]
    if spend.dollars is not None:
        rows.append(("cost in dollars, at the prices of the models", f"${spend.dollars:,.4f}"))
    if spend.dollars_per_right is not None:
        rows.append(("dollars per correct answer", f"${spend.dollars_per_right:,.6f}"))
    return ReportTable.of(
        "Tokens, calls and seconds of the run", ("what", "how much"), rows, "facts"
    )


def combination_table(report: RunReport) -> ReportTable:
    """Tabulate how selection or synthesis decided split votes; return an empty table if votes
    decided all answers.
    """
    combined = report.combined
    rows: list[tuple[object, object]] = []
    if combined is not None:
        rows = [
            (
                "how answers were combined",
                " and ".join(combined.actions) or "the vote on every problem",
            ),
            ("problems with split votes", f"{combined.split:,} of {combined.problems:,}"),
            (
                "threshold at the end of the run: a vote is split if the leading answer has at "
                "most this share of the votes",
                cell(combined.below),
            ),
            (
                "split votes where the target's choice was only a trial, so the answer of the "
                "vote was kept",
                cell(combined.trials),
            ),
            ("answers changed", cell(combined.changed)),
            ("changed from wrong to correct", cell(combined.gained)),
            ("changed from correct to wrong", cell(combined.lost)),
            ("gain in accuracy [95 % interval]", combined.gain.signed()),
            (
                "largest possible gain: the gain of an oracle that picks a correct rollout "
                "wherever one exists",
                cell(combined.ceiling),
            ),
            (
                "pairs of answers whose verdict did not depend on which answer came first",
                f"{combined.consistent:,} of {combined.pairs:,}",
            ),
            (
                "tokens that the target wrote for selection or synthesis",
                cell(combined.usage.target_tokens),
            ),
            (
                "prompt tokens read for selection or synthesis",
                cell(combined.usage.target_prefill_tokens),
            ),
            ("calls for selection or synthesis", cell(combined.usage.calls)),
        ]
    return ReportTable.of(
        "Split votes: selection and synthesis", ("what", "how much"), rows, "facts"
    )


def speculation_table(report: RunReport) -> ReportTable:
    """Tabulate how many speculated tokens of the target were proposed and accepted; empty if none
    were proposed.
    """
    speculated = report.speculated
    drawn = report.spend.usage.drawn_tokens
    rows: list[tuple[object, object]] = (
        [("tokens that the target sampled while scoring", cell(drawn))] if drawn else []
    )
    if speculated is not None:
        rows += [
            ("tokens proposed to the target", cell(speculated.proposed)),
            *(
                [("reason why no token was proposed", speculated.silence)]
                if speculated.silence
                else []
            ),
            (
                "proposed tokens that the target accepted",
                f"{speculated.accepted:,} "
                f"({100 * speculated.accepted / max(1, speculated.proposed):.1f} %)",
            ),
            (
                "share of tokens accepted at each position of a proposal, given that all "
                "earlier tokens were accepted",
                " ".join(f"{x:.2f}" for x in speculated.accepted_share[:16]),
            ),
            (
                "tokens written per step with a proposal",
                1 + speculated.accepted / max(1, speculated.rounds),
            ),
            (
                "mean tokens proposed per sequence and step",
                speculated.chosen / max(1, speculated.choices),
            ),
            ("tokens per second in steps with a proposal (expected, measured)", _rates(speculated)),
            (
                "seconds saved, compared with steps without proposals",
                cell(speculated.saved_seconds),
            ),
        ]
    return ReportTable.of(
        "Speculation: steps that write several tokens", ("what", "how much"), rows, "facts"
    )


def _rates(found: Speculated) -> str:
    expected = (
        found.expected_tokens / found.expected_seconds if found.expected_seconds else math.nan
    )
    came = found.came_tokens / found.came_seconds if found.came_seconds else math.nan
    return f"{_number(expected, ',.0f')}, {_number(came, ',.0f')}"


def baseline_table(report: RunReport) -> ReportTable:
    """Tabulate the comparisons of this run with other runs, paired by problem."""
    count = len(report.baselines)
    p_value = "p-value" if count < 2 else f"p-value (Holm, {count} comparisons)"
    columns = (
        "other run", "method of the other run", "problems", "accuracy of the other run", "accuracy of this run",
        "difference", p_value, "problems needed",
        "tokens, this / other", "target tokens, this / other", "run seconds per problem, this / other",
    )  # fmt: skip
    rows = [
        (b.name, b.method, b.problems, b.other, b.own, _signed(b.difference), _p(b.p_value),
         "–" if b.problems_needed is None else b.problems_needed, b.token_ratio, b.target_token_ratio, b.second_ratio)
        for b in report.baselines
    ]  # fmt: skip
    return ReportTable.of(
        "This run compared with other runs, on the problems they have in common", columns, rows
    )


def _signed(found: Estimate) -> Cell:
    if math.isnan(found.value):
        return cell(found)
    return Cell(found.signed(), found.value)


def _p(value: float) -> Cell:
    return Cell("< 0.001", value) if value < 0.001 else cell(value)


def calibration_table(control: RateControl) -> ReportTable:
    """Return the table of nominal and realised rate, with the numbers that explain them."""
    rows: list[tuple[object, object]] = [
        ("nominal rate", "none" if control.nominal is None else cell(control.nominal, "g")),
        ("realised rate", Cell(control.rate.counted(), control.rate.value)),
        ("decisions", control.decisions),
        (
            "questions",
            control.questions
            if control.questions < control.decisions
            else "unknown, or one per chunk",
        ),
        ("decisions without a score", control.forced),
        ("effective sample size", control.effective),
        ("rate scope", control.promise.mode),
        (
            "root mean square distance between each question's rate and the nominal rate",
            control.question_rms,
        ),
        (
            "the same distance if every decision were a coin toss at the nominal rate",
            control.coin_rms,
        ),
    ]
    if control.p_values is not None:
        p_values = control.p_values
        rows.append(
            (
                "p-values: largest distance from the uniform distribution",
                f"{p_values.distance:.3f}, band ±{p_values.band:.3f}",
            )
        )
    known = {name: value for name, value in control.metrics.items() if not math.isnan(value)}
    rows += [(words, known[name]) for name, words in WORDS.metrics.items() if name in known]
    return ReportTable.of(
        "Escalated chunks: nominal and realised", ("what", "value"), rows, "facts"
    )


def turn_table(control: RateControl) -> ReportTable:
    """Return the table of realised rates by turn."""
    rows = [
        (g.name, g.decisions, g.escalated, g.share, f"[{g.low:.3f}, {g.high:.3f}]")
        for g in control.turns
    ]
    return ReportTable.of(
        "Escalated chunks, by turn",
        ("turn", "decisions", "escalated", "rate", "95 % band for coin tosses"),
        rows,
    )


def health_table(health: Health) -> ReportTable:
    """Tabulate the quality of the stored scores and the threshold that is computed from them."""
    rows: list[tuple[object, object]] = [
        ("scores", health.scores),
        ("questions", health.clusters.clusters if health.repeats.clustered else "not known"),
        ("correlation within a question (intraclass correlation)", health.clusters.icc),
        ("effective sample size", cell(health.clusters.effective, ",.0f")),
        (
            "scores that are the same as another score of the same question",
            cell(health.repeats.within, "%"),
        ),
        ("scores that also occur in another question", cell(health.repeats.across, "%")),
        ("infinite scores", health.infinite),
        ("threshold: escalate if worse than", shown_score(health, health.threshold)),
        (
            "long-run rate with this threshold, if scores were independent (90 % interval)",
            _range(health.long_run),
        ),
        (
            "long-run rate with this threshold, at the effective sample size (90 % interval)",
            _range(health.long_run_clustered),
        ),
        (
            "standard deviation of the rate on one half of the questions when the threshold "
            "comes from the other half",
            health.half_split,
        ),
    ]
    return ReportTable.of(f"The scores at rate {health.rate:g}", ("what", "value"), rows, "facts")


def _range(ends: tuple[float, float]) -> str:
    return f"{ends[0]:.3f} to {ends[1]:.3f}"


def threshold_table(health: Health) -> ReportTable:
    """Tabulate the scores of each turn, and the threshold that is computed from these scores."""
    rows = [
        (
            cell(one.turn),
            one.scores,
            shown_score(health, one.median),
            shown_score(health, one.threshold),
        )
        for one in health.turns
    ]
    return ReportTable.of(
        "Scores of each turn", ("turn", "scores", "median", "escalate if worse than"), rows
    )


def shown_score(health: Health, score: float) -> str:
    """Return a threshold as a string; "none" if there are too few scores for a threshold."""
    if health.measure == "log":
        return score_words(score, health.score_kind)
    return "none" if math.isinf(score) else f"{score:.4g}"


def conditions_table(conditions: Mapping[str, object]) -> ReportTable:
    """Return the table of the conditions under which the scores were made."""
    rows = [
        (name, value if isinstance(value, str) else json.dumps(value))
        for name, value in conditions.items()
    ]
    return ReportTable.of(
        "Conditions under which the scores were made", ("condition", "value"), rows, "facts"
    )


def caveat_table(report: RunReport) -> ReportTable:
    """Tabulate the caveats of a report, the worst first."""
    words = {"good": "note", "care": "read with care", "bad": "serious"}
    places = {row.id: place for place, row in shown_problems(report)}
    rows = [
        (Cell(words[c.standing], None, c.standing), c.code, c.count, c.text, _examples(c, places))
        for c in report.caveats
    ]
    return ReportTable.of("Warnings", ("weight", "code", "count", "what", "examples"), rows)


def _examples(caveat: Caveat, places: Mapping[str, int]) -> Cell:
    links = list[tuple[str, str]]()
    for problem, sample in caveat.examples:
        name, inside = (problem, "") if sample is None else (f"{problem} / {sample}", f"/{sample}")
        links.append((name, f"problem-{places[problem]}{inside}" if problem in places else ""))
    return Cell(", ".join(name for name, _ in links), links=tuple(links))


def time_table(found: TimeBreakdown) -> ReportTable:
    """Return the table of the run's time, computed from its task graph."""
    rows: list[tuple[object, object, object]] = [
        ("run time", found.seconds, "from the first call to the end of the last call"),
        (
            "critical path",
            found.critical_path,
            "lower bound on the run's time under any schedule and any number of slots",
        ),
        ("Tc, arithmetic", found.arithmetic_seconds, "scoring, summed over calls"),
        ("Tm, memory", found.memory_seconds, "decoding, summed over calls"),
        (
            "Ts, waiting for siblings",
            found.sibling_seconds,
            "time that rollouts wait for their round to end, or for the score of an identical "
            "chunk",
        ),
        (
            "edges between siblings",
            found.sibling_edges,
            "number of times that a rollout waits for another rollout of the same problem, or for "
            "the score of an identical chunk",
        ),
        ("r = Tc / (Tm + Ts)", found.intensity, "asynchronous arithmetic intensity"),
    ]
    if found.calls > found.nodes:
        meaning = f"this table counts only the first {found.nodes:,} of {found.calls:,} calls"
        rows.append(("calls", found.nodes, meaning))
    rows += [
        (f"{engine.engine}: share of the time it is busy", engine.busy_share,
         f"{engine.mean_in_flight:.1f} calls in flight on average, at most {engine.peak}; longest "
         f"idle time {engine.longest_bubble:.2f} s")
        for engine in found.engines
    ]  # fmt: skip
    return ReportTable.of(
        "Where the run's time went, according to its task graph",
        ("what", "seconds or share", "meaning"),
        rows,
        "facts",
    )


def stage_table(found: TimeBreakdown) -> ReportTable:
    """Tabulate the seconds of each stage, summed over its calls."""
    rows = [
        (stage.name, stage.nodes, stage.compute, stage.queue, stage.wait) for stage in found.stages
    ]
    columns = (
        "stage",
        "calls",
        "in the call (s)",
        "waiting for a slot (s)",
        "waiting for siblings (s)",
    )
    return ReportTable.of("Seconds of each stage, summed over calls", columns, rows)


def shown_problems(report: RunReport) -> list[tuple[int, ProblemRow]]:
    """Return the problems that a page shows, with their indices among all problems."""
    return [(place, row) for place, row in enumerate(report.problems) if row.is_shown]


def problem_table(report: RunReport) -> ReportTable:
    """Return the table of problems, with one row for each problem that is shown."""
    columns = (
        "problem", "question", "verdict", "answer", "reference", "correct rollouts", "agree", "chunks judged",
        "escalated", "draft tokens", "target tokens", "seconds", "flags",
    )  # fmt: skip
    return ReportTable(
        "One row per problem", columns, tuple(_problem(*row) for row in shown_problems(report))
    )


def problem_digest(report: RunReport) -> ReportTable:
    """Return a table of all problems; if there are many problems, list only problems that are not
    correct.
    """
    table = problem_table(report)
    count = len(report.problems)
    if count <= _PROBLEMS:
        return table
    kept = [(place, row) for place, row in enumerate(report.problems) if row.verdict != "correct"]
    shown = tuple(_problem(*row) for row in kept[:_PROBLEMS])
    title = (
        f"Problems that are not correct: {len(shown)} of {len(kept)} are shown (the run has "
        f"{count} problems)"
    )
    return ReportTable(title, table.columns, shown)


def _problem(place: int, row: ProblemRow) -> tuple[Cell, ...]:
    tone = {"correct": "good", "wrong": "bad", "unscored": "care"}.get(row.verdict or "", "")
    said = row.status if row.verdict is None else row.verdict
    return (
        Cell(row.id, links=((row.id, f"problem-{place}"),)),
        Cell(row.question),
        Cell(str(said), None, tone),
        Cell(row.answer or "none"),
        Cell(row.reference or ""),
        Cell(f"{row.right} of {row.graded}", row.right / row.graded if row.graded else 0.0),
        cell(row.agreement, "%"),
        cell(row.decisions),
        cell(row.escalated),
        cell(row.draft_tokens),
        cell(row.target_tokens),
        cell(row.seconds),
        Cell(", ".join(row.flags), None, "care" if row.flags else ""),
    )


def run_table(report: RunReport) -> ReportTable:
    """Return the table of facts that identify the run."""
    run = report.run
    rows: list[tuple[object, object]] = [
        ("directory", run.directory),
        ("ended", f"{run.ended}, {counted(run.sessions, 'session')}"),
        ("problems", f"{run.done:,}" + (f" of {run.planned:,}" if run.planned is not None else "")),
        ("draft", run.draft),
        ("target", run.target),
        ("seed", str(run.seed)),
        ("dataset digest", run.dataset),
        *sorted(run.versions.items()),
    ]
    return ReportTable.of("What was run", ("what", "value"), rows, "facts")


def settings_table(report: RunReport) -> ReportTable:
    """Return the table of all settings, each with its origin."""
    return ReportTable.of(
        "Settings and their origins",
        ("setting", "value", "origin"),
        report.run.configuration,
    )
