"""Tests of reports in a real browser: they load nothing, run no foreign script, sort, search and
stay readable.
"""

from __future__ import annotations

import shutil
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from msgspec import structs

import atts
from atts.analysis import save_calibration
from atts.api import calibration_report
from atts.journal import (
    JOURNAL,
    JournalOptions,
    OutcomeReached,
    ProblemStarted,
    RolloutFinished,
    TurnFinished,
    load_manifest,
    open_journal,
    read_entries,
)

HOSTILE = "</script><script>window.owned=1</script><img src=x onerror='window.owned=2'><!-- ${1} \u2028 \\\x1b[2J\u202e"
CONTRAST = """
(() => {
  const parse = (text) => (text.match(/[\\d.]+/g) || []).map(Number);
  const light = (rgb) => {
    const [r, g, b] = rgb.slice(0, 3).map((v) => (v /= 255) <= 0.03928 ? v / 12.92 : ((v + 0.055) / 1.055) ** 2.4);
    return 0.2126 * r + 0.7152 * g + 0.0722 * b;
  };
  const behind = (node) => {
    for (let at = node; at; at = at.parentElement) {
      const found = parse(getComputedStyle(at).backgroundColor);
      if (found.length === 3 || found[3] === 1) return found;
    }
    return [255, 255, 255];
  };
  const bad = [], walker = document.createTreeWalker(document.body, NodeFilter.SHOW_TEXT);
  for (let node; (node = walker.nextNode()); ) {
    const owner = node.parentElement;
    if (!node.textContent.trim() || owner.closest("script,style,noscript,title")) continue;
    if (!owner.getClientRects().length) continue;
    const style = getComputedStyle(owner);
    const [a, b] = [light(parse(owner.closest("svg") ? style.fill : style.color)), light(behind(owner))];
    const ratio = (Math.max(a, b) + 0.05) / (Math.min(a, b) + 0.05);
    const what = `${owner.tagName}.${owner.getAttribute("class")}: ${node.textContent.slice(0, 30)}`;
    if (ratio < 4.5) bad.push(`${ratio.toFixed(2)} ${what}`);
  }
  return bad;
})()
"""
WIDER = """
[...document.querySelectorAll("section table.narrow")].filter((node) => !node.closest("details"))
  .filter((node) => node.offsetWidth > node.parentElement.offsetWidth).map((node) => node.caption.textContent)
"""  # JavaScript that lists narrow tables which still need horizontal scrolling
CLIPPED = """
[...document.querySelectorAll("section table")].filter((node) => !node.closest("details"))
  .filter((node) => node.offsetWidth > node.parentElement.clientWidth)
  .map((node) => `${node.caption.textContent}: ${node.offsetWidth} of ${node.parentElement.clientWidth}`)
"""  # JavaScript that lists tables of which a part is visible only after horizontal scrolling
OVERPRINTED = """
[...document.querySelectorAll("section td")].filter((node) => node.offsetWidth)
  .filter((node) => node.scrollWidth > node.clientWidth).map((node) => node.textContent)
"""  # JavaScript that lists cells whose text covers the next cell
NAMES = """
(() => {
  const bad = [];
  const named = (node) => node.getAttribute("aria-label") || node.labels?.length || node.textContent.trim();
  for (const node of document.querySelectorAll("a,button,input,select,summary,[role=img],[role=region]"))
    if (!named(node)) bad.push(node.outerHTML.slice(0, 90));
  for (const node of document.querySelectorAll("table")) {
    if (!node.tHead) bad.push("a table without a head");
    if (!node.caption || !node.caption.textContent.trim()) bad.push("a table without a name");
    for (const head of node.querySelectorAll("th")) if (head.scope !== "col") bad.push(head.outerHTML);
  }
  const levels = [...document.querySelectorAll("h1,h2,h3")].map((node) => Number(node.tagName[1]));
  levels.forEach((level, n) => { if (level > (levels[n - 1] || 0) + 1) bad.push(`heading ${n} jumps to h${level}`); });
  const captions = [...document.querySelectorAll("#main caption, header caption")].map((node) => node.textContent);
  captions.forEach((name, n) => { if (captions.indexOf(name) !== n) bad.push(`two tables are called ${name}`); });
  const seen = new Set();
  for (const node of document.querySelectorAll("[id]"))
    if (seen.has(node.id)) bad.push(`two of #${node.id}`); else seen.add(node.id);
  for (const link of document.querySelectorAll('a[href^="#"]'))
    if (!/^#problem-\\d/.test(link.hash) && !seen.has(link.hash.slice(1))) bad.push(`${link.hash} leads nowhere`);
  if (!document.documentElement.lang) bad.push("no language");
  if (document.querySelectorAll("h1").length !== 1) bad.push("not one h1");
  return bad;
})()
"""


@pytest.fixture(scope="module")
def report(run: Path, other_run: Path) -> str:
    """Return the address of a report that has every section."""
    return atts.report(run, compare_to=[other_run]).as_uri()


@pytest.fixture
def page(browser: Any) -> Iterator[Any]:
    """Open a tab; at the test's end, fail the test if the tab's console has a message."""
    tab = browser.page()
    yield tab
    assert tab.problems == []


def test_report_loads_nothing_but_itself(page: Any, report: str) -> None:
    """The report requests nothing but its own file, writes nothing to the console and begins with
    the verdict.
    """
    page.open(report)
    assert page.requests == [report]
    assert page.run("document.querySelector('h1').textContent").startswith(
        "✓ The vote is correct on"
    )
    assert page.run("performance.getEntriesByType('resource').length") == 0


@pytest.mark.parametrize("column", [0, 5, 9])
def test_a_click_on_a_column_sorts_the_table(page: Any, report: str, column: int) -> None:
    """The first click on a column sorts it in ascending order and the second in descending order.
    Numbers sort by value, and screen readers are given the order.
    """
    page.open(report)
    table = "document.getElementById('problem-table')"
    head = f"{table}.tHead.rows[0].cells[{column}]"
    values = (
        f"[...{table}.tBodies[0].rows].map(r => r.cells[{column}])"
        ".map(c => c.dataset.v === undefined ? c.textContent.toLowerCase() : Number(c.dataset.v))"
    )
    page.run(f"{head}.querySelector('button').click()")
    up = page.run(values)
    assert up == sorted(up)
    assert page.run(f"{head}.getAttribute('aria-sort')") == "ascending"
    page.run(f"{head}.querySelector('button').click()")
    assert page.run(values) == sorted(up, reverse=True)
    assert page.run(f"{head}.getAttribute('aria-sort')") == "descending"


def test_the_keyboard_alone_can_sort_a_table(page: Any, report: str) -> None:
    """Tab visits every control in reading order, and Enter on a column sorts by it."""
    page.open(report)
    seen = list[str]()
    for _ in range(14):
        page.press("Tab", 9)
        seen.append(page.run("document.activeElement.textContent.trim().slice(0, 24)"))
    assert seen[0] == "Skip to the report"
    assert seen[1] == "Warnings"
    page.run("document.querySelector('#problem-table th button').focus()")
    page.press("Enter", 13)
    assert (
        page.run("document.querySelector('#problem-table th').getAttribute('aria-sort')")
        == "ascending"
    )


def test_links_lead_to_a_rollout_and_back(page: Any, report: str) -> None:
    """A link leads from the problem table to one problem, its rollouts unfold into chunks, and
    another link leads back.
    """
    page.open(report)
    page.run("document.querySelector('#problem-table a').click()")
    page.wait("document.querySelectorAll('#page .rollout').length > 0")
    assert page.run("document.getElementById('main').hidden") is True
    page.run("document.querySelector('#page .rollout > summary').click()")
    page.wait("document.querySelectorAll('#page .rollout[open] .chunk .text').length > 0")
    assert page.run("document.querySelector('.rollout[open] .turn .facts').textContent").startswith(
        "Turn 0 · "
    )
    page.run(
        "[...document.querySelectorAll('#page button')].find(b => b.textContent.includes('All "
        "problems')).click()"
    )
    page.wait("!document.getElementById('main').hidden && document.getElementById('page').hidden")


def test_the_problems_can_be_searched(page: Any, report: str) -> None:
    """The search hides problems that do not match and shows how many remain."""
    page.open(report)
    everything = page.run("document.querySelectorAll('#problem-table tbody tr').length")
    page.run(
        "{const f = document.getElementById('find'); f.value = 'toy-0'; f.dispatchEvent(new "
        "Event('input'))}"
    )
    page.run(
        "{const f = document.getElementById('find'); f.value = 'no such'; f.dispatchEvent(new "
        "Event('input'))}"
    )
    assert page.run("document.getElementById('shown').textContent") == f"0 of {everything} problems"


@pytest.mark.parametrize("scheme", ["light", "dark"])
@pytest.mark.parametrize("width", [390, 1200])
def test_report_is_readable_at_every_width_and_colour_scheme(
    page: Any, report: str, scheme: str, width: int, tmp_path: Path
) -> None:
    """Contrast is sufficient, nothing is wider than the window, and every control and picture has a
    name.
    """
    page.look(width, 900, scheme)
    for place in ("", "#problem-0/0"):
        page.open("about:blank")
        page.open(report + place)
        page.wait("document.getElementById('main').hidden === (location.hash !== '')")
        page.run("document.querySelectorAll('details').forEach(d => { d.open = true; })")
        assert page.run(CONTRAST) == []
        assert page.run(NAMES) == []
        assert page.run("document.documentElement.scrollWidth") <= width
        assert page.run(OVERPRINTED) == []
    page.picture(tmp_path / "seen.png")
    assert (tmp_path / "seen.png").stat().st_size > 5000


def test_no_table_scrolls_at_1280_pixels(
    page: Any, run: Path, other_run: Path, tmp_path: Path
) -> None:
    """A comparison of three runs with long names fits into 1,280 pixels without scrolling."""
    name = "arithmetic-with-the-settings-of-the-paper-" * 3
    compared = Path(shutil.copytree(run, tmp_path / f"{name}a1b2c3"))
    others = [shutil.copytree(other_run, tmp_path / f"{name}{number}") for number in range(3)]
    page.look(1280, 900, "light")
    page.open(atts.report(compared, compare_to=others).as_uri())
    page.run(
        "document.querySelectorAll('section').forEach(s => { s.style.contentVisibility = 'visible'; })"
    )
    assert page.run(CLIPPED) == []


@pytest.mark.parametrize("scheme", ["light", "dark"])
@pytest.mark.parametrize("width", [390, 1200])
def test_the_calibration_report_is_readable(
    page: Any, run: Path, scheme: str, width: int, tmp_path: Path
) -> None:
    """The calibration report loads no other file, shows its key figures at the top, and is readable
    in both colour schemes.
    """
    written = tmp_path / "calibration.html"
    save_calibration(calibration_report(run), "html", written)
    page.look(width, 900, scheme)
    page.open(written.as_uri())
    assert page.requests == [written.as_uri()]
    heading = page.run("document.querySelector('h1').textContent")
    assert heading.startswith("✓ ")
    assert "chunks escalated" in heading
    assert page.run("document.querySelectorAll('header .numbers li').length") == 5
    page.run("document.querySelectorAll('details').forEach(d => { d.open = true; })")
    assert page.run(CONTRAST) == []
    assert page.run(NAMES) == []
    assert page.run("document.documentElement.scrollWidth") <= width
    assert page.run(WIDER) == []
    assert page.run(OVERPRINTED) == []
    page.press("Tab", 9)
    assert page.run("document.activeElement.textContent") == "Skip to the report"
    page.run("document.querySelector('#rate th button').focus()")
    page.press("Enter", 13)
    assert (
        page.run("document.querySelector('#rate th[aria-sort]').getAttribute('aria-sort')")
        == "ascending"
    )


def _plant(source: Path, target: Path, change: Callable[[Any], Any]) -> None:
    """Copy a run and change its events."""
    import anyio

    manifest = load_manifest(source / "manifest.json")
    assert manifest is not None
    entries = [entry.event for entry in read_entries(source / JOURNAL)]

    async def write() -> None:
        async with open_journal(target, manifest, JournalOptions(), lambda entry: None) as journal:
            for event in entries:
                changed = change(event)
                if changed is not None:
                    journal.record(changed)
            await journal.saved()

    anyio.run(write)


def _hostile(event: Any) -> Any:
    """Replace each text that a model or a dataset can choose by a text that tries to inject markup."""
    kind = type(event).__name__
    if isinstance(event, ProblemStarted):
        return structs.replace(
            event,
            problem=replace(event.problem, text=HOSTILE + event.problem.text, subject=HOSTILE),
        )
    if isinstance(event, TurnFinished):
        chunks, discarded = (
            tuple(replace(chunk, text=HOSTILE + chunk.text) for chunk in held)
            for held in (event.turn.chunks, event.turn.discarded)
        )
        return structs.replace(
            event, turn=replace(event.turn, chunks=chunks, discarded=discarded, note=HOSTILE)
        )
    if isinstance(event, RolloutFinished):
        return structs.replace(event, answer=HOSTILE, error=HOSTILE)
    if isinstance(event, OutcomeReached):
        return structs.replace(event, answer=HOSTILE, votes={HOSTILE: 3.0}, why=HOSTILE)
    return None if kind in ("SessionOpened", "SessionClosed") else event


def test_scripts_in_model_output_never_run(page: Any, run: Path, tmp_path: Path) -> None:
    """A script that a model wrote is shown as text, in kept and in discarded chunks; terminal codes
    are shown as text as well.
    """
    _plant(run, tmp_path / "planted", _hostile)
    written = atts.report(tmp_path / "planted")
    assert written.read_text().count("</script>") == _scripts(written)
    page.open(written.as_uri() + "#problem-0/0")
    page.wait("document.querySelectorAll('#page .rollout[open] .chunk .text').length > 0")
    page.run("document.querySelectorAll('.rollout').forEach(each => { each.open = true; })")
    page.wait("document.querySelectorAll('.rollout[open] .chunk.discarded .text').length > 0")
    for kind in ("kept", "discarded"):
        found = f"document.querySelectorAll('.rollout[open] .chunk.{kind} .text')"
        texts = page.run(f"Array.from({found}, each => each.textContent)")
        assert texts
        assert all(text.startswith("</script><script>") and "␛[2J\\u202e" in text for text in texts)
    assert page.run("typeof window.owned") == "undefined"
    assert page.run("document.images.length") == 0
    assert (
        page.run("document.querySelector('#problem-table tbody td:nth-child(4)').textContent")
        == HOSTILE
    )


def _scripts(written: Path) -> int:
    """Count the scripts that the page itself contains."""
    text = written.read_text()
    return text.count('<script type="text/plain"') + text.count('<script>"use strict"')


def test_the_content_security_policy_blocks_a_planted_script(page: Any, report: str) -> None:
    """Even if escaping failed, the page's content security policy would refuse every script but the
    page's own.
    """
    page.open(report)
    page.run(
        "document.body.append(Object.assign(document.createElement('script'), {textContent: "
        "'window.owned = 1'}))"
    )
    assert page.run("typeof window.owned") == "undefined"
    assert any("Content Security Policy" in said for said in page.problems)
    page.problems.clear()
