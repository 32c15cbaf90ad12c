"""Writes the report as one HTML file that needs nothing else: no network, no server, any browser of today."""

from __future__ import annotations

import base64
import hashlib
from collections.abc import Iterator, Sequence
from datetime import UTC, datetime
from html import escape
from importlib.resources import files

from atts.analysis.report.charts import Chart, calibration_charts, timeline_chart
from atts.analysis.report.collect import Collected
from atts.analysis.report.frontier_chart import frontier_chart
from atts.analysis.report.numbers import Report, Standing
from atts.analysis.report.tables import (
    Cell,
    Table,
    accuracy_table,
    baseline_table,
    calibration_table,
    caveat_table,
    cell,
    problem_table,
    run_table,
    settings_table,
    spend_table,
    stage_table,
    time_table,
)

_BADGE = {"good": "✓", "care": "!", "bad": "✗"}
_HEADINGS = ("Warnings", "Problems")  # tables that are all there is in a section of their name
_SAID: dict[Standing, str] = {
    "good": "nothing against it",
    "care": "read with care",
    "bad": "do not rely on it before you know why",
}


def render_html(collected: Collected) -> str:
    """The whole page."""
    report = collected.report
    style, script = _asset("report.css"), _asset("report.js")
    body = "".join(_body(collected))
    title = escape(f"atts report: {report.run.directory}")
    return (
        f'<!doctype html>\n<html lang="en"><head><meta charset="utf-8">'
        f'<meta name="viewport" content="width=device-width, initial-scale=1">'
        f'<meta http-equiv="Content-Security-Policy" content="{_policy(script)}">'
        f'<meta name="color-scheme" content="light dark"><link rel="icon" href="data:,">'
        f"<title>{title}</title><style>{style}</style></head><body>{body}<script>{script}</script></body></html>\n"
    )


def _asset(name: str) -> str:
    return (files("atts.analysis.report") / "assets" / name).read_text(encoding="utf-8")


def _policy(script: str) -> str:
    """Nothing may be loaded from anywhere, and no script may run but the page's own."""
    digest = base64.b64encode(hashlib.sha256(script.encode()).digest()).decode()
    return f"default-src 'none'; img-src data:; style-src 'unsafe-inline'; script-src 'sha256-{digest}'"


def _body(collected: Collected) -> Iterator[str]:
    report = collected.report
    sections = list(_sections(report))
    links = "".join(f'<li><a href="#{name}">{escape(title)}</a></li>' for name, title, _ in sections)
    yield '<a class="skip" href="#main">Skip to the report</a>'
    yield _header(report)
    yield f'<nav aria-label="Sections"><ul>{links}</ul></nav><main id="main" tabindex="-1">'
    for name, title, content in sections:
        yield f'<section id="{name}"><h2>{escape(title)}</h2>{content}</section>'
    yield "</main>"
    yield '<div id="page" hidden></div>'
    yield "<noscript><p>Single problems need JavaScript; all numbers above do not.</p></noscript>"
    yield _footer(collected)
    for place, row in enumerate(report.problems):
        packed = collected.pages[row.id]
        yield f'<script type="text/plain" id="packed-{place}">{packed}</script>'


def _header(report: Report) -> str:
    verdict = report.verdict
    against = [point for point in verdict.points if point[0] != "good" and point[1] not in verdict.line]
    items = "".join(f"<li>{_badge(standing)} {escape(_sentence(text))}</li>" for standing, text in against)
    points = f'<ul class="points">{items}</ul>' if items else ""
    ended = "" if report.run.ended == "finished" else f" · {escape(report.run.ended)}"
    when = datetime.fromtimestamp(report.run.created, UTC).strftime("%Y-%m-%d %H:%M UTC") if report.run.created else ""
    return (
        f'<header class="{verdict.standing}"><p class="over">{escape(report.run.directory)} · {when}{ended}</p>'
        f"<h1>{_badge(verdict.standing)} {escape(_sentence(verdict.line))}</h1>"
        f'<p class="said">Verdict: {_SAID[verdict.standing]}.</p>{points}</header>'
    )


def _sentence(text: str) -> str:
    return f"{text[:1].upper()}{text[1:].rstrip('.')}."


def _badge(standing: Standing) -> str:
    return f'<span class="badge {standing}" role="img" aria-label="{_SAID[standing]}">{_BADGE[standing]}</span>'


def _sections(report: Report) -> Iterator[tuple[str, str, str]]:
    """Name, title and content of every section that has something to say."""
    yield "warnings", "Warnings", _warnings(report)
    yield "accuracy", "Accuracy and cost", _accuracy(report)
    if report.calibration is not None:
        yield "calibration", "Calibration", _calibration(report)
    if report.frontier:
        yield "frontier", "Frontier", _charts([frontier_chart(report.frontier)])
    if report.timing is not None:
        charts = _charts([timeline_chart(report.timing)])
        yield "time", "Time", charts + _table(time_table(report.timing)) + _table(stage_table(report.timing))
    yield "problems", "Problems", _problems(report)
    yield (
        "run",
        "The run",
        _table(run_table(report)) + _folded("Settings, and where each came from", settings_table(report)),
    )


def _warnings(report: Report) -> str:
    if not report.caveats:
        return f"<p>{_badge('good')} Nothing was cut, forced, left ungraded or failed.</p>"
    return _table(
        caveat_table(report), {row: _places(caveat.examples, report) for row, caveat in enumerate(report.caveats)}
    )


def _places(examples: Sequence[tuple[str, int | None]], report: Report) -> str:
    """Links to where a warning can be looked at."""
    where = {row.id: place for place, row in enumerate(report.problems)}
    found = list[str]()
    for problem, sample in examples:
        name = escape(problem if sample is None else f"{problem} / {sample}")
        inside = "" if sample is None else f"/{sample}"
        found.append(f'<a href="#problem-{where[problem]}{inside}">{name}</a>' if problem in where else name)
    return ", ".join(found)


def _accuracy(report: Report) -> str:
    rates = f"{_table(accuracy_table(report))}<p class='note'>{escape(_sentence(report.coverage))}</p>"
    parts = [f'<div class="pair"><div>{rates}</div><div>{_table(spend_table(report))}</div></div>']
    if report.baselines:
        words = (
            "Differences and ratios are this run against the other, problem by problem. Problems needed: how many like "
            "these would show such a difference four times in five."
        )
        parts.append(f"{_table(baseline_table(report))}<p class='note'>{words}</p>")
    else:
        parts.append(
            '<p class="note">No other run to compare with: <code>atts report RUN --against OTHER</code> adds paired '
            "differences, cost ratios and points on the frontier.</p>"
        )
    return "".join(parts)


def _calibration(report: Report) -> str:
    held = report.calibration
    assert held is not None, "asked for only where there is one"
    promise = held.promise
    words = [("Guarantee", promise.guarantee), ("Voided by", promise.voided_by), ("Audit", promise.audit)]
    said = "".join(f"<dt>{name}</dt><dd>{escape(_sentence(text))}</dd>" for name, text in words if text)
    alarms = "".join(f"<li>{_badge('bad')} {escape(alarm.text or alarm.kind)}</li>" for alarm in held.alarms)
    shown = f"<ul>{alarms}</ul>" if alarms else ""
    return f"<dl class='promise'>{said}</dl>{shown}{_table(calibration_table(held))}{_charts(calibration_charts(held))}"


def _problems(report: Report) -> str:
    links = {row: f'<a href="#problem-{row}">{escape(problem.id)}</a>' for row, problem in enumerate(report.problems)}
    controls = (
        '<div class="controls"><label>Find <input type="search" id="find" placeholder="id, text or flag"></label>'
        '<label>Show <select id="show"><option value="">all</option><option value="correct">right</option>'
        '<option value="wrong">not right</option><option value="flagged">with a flag</option></select></label>'
        '<output id="shown" aria-live="polite"></output></div>'
    )
    return controls + _table(problem_table(report), links, first=True, identity="problem-table")


def _charts(charts: Sequence[Chart]) -> str:
    return f'<div class="charts">{"".join(map(_figure, charts))}</div>'


def _figure(chart: Chart) -> str:
    data = _table(Table("", chart.columns, tuple(tuple(cell(value) for value in row) for row in chart.rows)))
    wide = ' class="wide"' if chart.wide else ""
    keys = "".join(f'<li><i class="{kind}"></i>{escape(name)}</li>' for kind, name in chart.legend)
    picture = chart.picture + "</div>" + (f'<ul class="legend" aria-label="Colours">{keys}</ul>' if keys else "")
    return (
        f"<figure{wide}><figcaption><b>{escape(chart.title)}</b> {escape(chart.caption)}</figcaption>"
        f'<div class="scroll" tabindex="0" role="region" aria-label="{escape(chart.title)}">{picture}'
        f"<details><summary>Data of {escape(chart.title.lower())}</summary>{data}</details></figure>"
    )


def _folded(title: str, table: Table) -> str:
    return f"<details><summary>{escape(title)}</summary>{_table(table)}</details>"


def _table(table: Table, markup: dict[int, str] | None = None, *, first: bool = False, identity: str = "") -> str:
    """A table whose columns sort; `markup` replaces the last (or the first) cell of a row by trusted markup."""
    if not table.rows:
        return ""
    names = map(escape, table.columns)
    if table.kind == "facts":
        head = "".join(f'<th scope="col">{name}</th>' for name in names)
    else:
        head = "".join(f'<th scope="col"><button type="button">{name}</button></th>' for name in names)
    where = 0 if first else len(table.columns) - 1
    rows = "".join(_row(row, (markup or {}).get(place), where) for place, row in enumerate(table.rows))
    kind = ' class="unseen"' if table.title in _HEADINGS else ""
    caption = f"<caption{kind}>{escape(table.title)}</caption>" if table.title else ""
    named = f' id="{identity}" class="{table.kind}"' if identity else f' class="{table.kind}"'
    label = escape(table.title or "table")
    return (
        f'<div class="scroll" tabindex="0" role="region" aria-label="{label}"><table{named}>{caption}'
        f"<thead><tr>{head}</tr></thead><tbody>{rows}</tbody></table></div>"
    )


def _row(row: Sequence[Cell], markup: str | None, where: int) -> str:
    found = list[str]()
    for place, value in enumerate(row):
        content = markup if markup is not None and place == where else escape(value.text)
        kinds = " ".join(part for part in ("n" if value.value is not None else "", value.tone) if part)
        attributes = (f' class="{kinds}"' if kinds else "") + (
            f' data-v="{value.value:g}"' if value.value is not None else ""
        )
        found.append(f"<td{attributes}>{content}</td>")
    return f"<tr>{''.join(found)}</tr>"


def _footer(collected: Collected) -> str:
    run, pages = collected.report.run, collected.pages
    cut = (
        f" Texts of {pages.shortened:,} problems are shortened, down to {pages.limit} characters a chunk, to keep "
        "the file small; the journal has them whole."
        if pages.shortened
        else ""
    )
    return (
        f"<footer><p>Written by atts {escape(run.version)} from the run's journal. Intervals are 95 % over problems "
        f"unless they say otherwise.{cut}</p></footer>"
    )
