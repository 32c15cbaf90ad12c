"""Writes the report as Markdown, short enough to be pasted into an issue."""

from __future__ import annotations

from collections.abc import Iterator

from atts.analysis.report.numbers import RunReport
from atts.analysis.report.tables import (
    Cell,
    ReportTable,
    accuracy_table,
    baseline_table,
    calibration_table,
    caveat_table,
    problem_table,
    run_table,
    spend_table,
    stage_table,
    time_table,
)

_PROBLEMS = 60  # in full; of more only those that are not right


def render_markdown(report: RunReport) -> str:
    """The same numbers as the other formats, without pictures or texts of rollouts."""
    return "\n".join(_lines(report)).rstrip() + "\n"


def _lines(report: RunReport) -> Iterator[str]:
    yield f"# atts report: {plain(report.run.directory)}"
    yield ""
    yield f"**{plain(report.verdict.line)}.**"
    yield ""
    yield from (f"- {standing}: {plain(text)}" for standing, text in report.verdict.points)
    yield ""
    yield from _table(caveat_table(report))
    yield from _table(accuracy_table(report))
    yield from (plain(report.coverage), "")
    yield from _table(spend_table(report))
    yield from _table(baseline_table(report))
    if report.calibration is not None:
        held = report.calibration
        yield from (f"Guarantee ({plain(held.promise.mode)}): {plain(held.promise.guarantee)}.", "")
        yield from (f"Voided by: {plain(held.promise.voided_by)}.", "")
        if held.promise.audit:
            yield from (f"Audit: {plain(held.promise.audit)}.", "")
        yield from _table(calibration_table(held))
        rows = [(g.name, g.decisions, g.escalated, g.share, f"[{g.low:.3f}, {g.high:.3f}]") for g in held.turns]
        columns = ("turn", "decisions", "escalated", "rate", "coin's band")
        yield from _table(ReportTable.of("Rate by turn", columns, rows))
    if report.timing is not None:
        yield from _table(time_table(report.timing))
        yield from _table(stage_table(report.timing))
    yield from _problems(report)
    yield from _table(run_table(report))


def _problems(report: RunReport) -> Iterator[str]:
    table, problems = problem_table(report), report.problems
    title = "Problems"
    rows = table.rows
    if len(rows) > _PROBLEMS:
        kept = [row for row, one in zip(rows, problems, strict=True) if one.verdict != "correct"]
        title = f"Problems that are not right: {min(len(kept), _PROBLEMS)} of {len(kept)}, of {len(rows)} in all"
        rows = tuple(kept[:_PROBLEMS])
    yield from _table(ReportTable(title, table.columns, rows))


def _table(table: ReportTable) -> Iterator[str]:
    if not table.rows:
        return
    yield from (f"## {table.title}", "")
    yield "| " + " | ".join(table.columns) + " |"
    yield "|" + "|".join("---:" if value.value is not None else "---" for value in table.rows[0]) + "|"
    yield from ("| " + " | ".join(_cell(value) for value in row) + " |" for row in table.rows)
    yield ""


def _cell(value: Cell) -> str:
    return plain(value.text)


def plain(text: str) -> str:
    """Text that Markdown shows as it is, on one line.

    >>> plain("a|b <script>\\n*c*")
    'a\\\\|b &lt;script&gt; \\\\*c\\\\*'
    """
    for letter in "\\`*_[]|#~$":
        text = text.replace(letter, f"\\{letter}")
    return " ".join(text.replace("&", "&amp;").replace("<", "&lt;").replace(">", "&gt;").split())
