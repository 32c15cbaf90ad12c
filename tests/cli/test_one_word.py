"""Tests that printed text has one word for each concept, one form of percentages, and singulars
where needed.
"""

from __future__ import annotations

import html
import io
import re
from contextlib import redirect_stderr, redirect_stdout

import pytest

from atts.cli.app import run as atts
from scripts.studies.docs import cli_page

pytestmark = pytest.mark.checkout

RIVALS = {
    r"\b(?:large|big|small) model\b": "target or draft",
    r"\bhand(?:s|ed|ing)? (?:over|to the)\b": "escalate",
    r"\b(?:take|takes|took|taken) over\b": "escalate",
    r"\bsteps? (?:was|were|would)\b": "chunk",
    r"\bof (?:new|these|the|\d+) steps\b": "chunk",
    r"\bright\b": "correct",
    r"\bspare[sd]?\b": "cancelled",
    r"\bstands?\b|\bstood\b": "is",
    r"\bheld\b": "on target",
    r"\bstake\b|\bbet\b": "drift statistic",
    r"\b(?:is|are) worth\b": "effective sample size",
    r"\basked for\b": "nominal rate",
    r"\brejected chunks?\b|\brejection\b": "escalate",
    r"\bshare was promised\b": "rate",
    r"\bbeside\b|\banew\b|\bowe[sd]?\b|\bwhoever\b": "a plain word",
    r"\bgoes? on\b|\bwent on\b": "continue",
    r"\b(?:in|the) mode\b": "rate scope",
    r"\d%": "a space before the sign",
    r"(?<![\d.,/-])1 (?:problems|rollouts|records|samples|questions|chunks|runs|sessions|scores)\b": "a singular",
    r"(?<![\w\d.])-0(?:\.0*)? %": "0 %",
}
"""Words and forms that no printed text may contain, each with its replacement."""

ALLOWED = ("Answer with the letter of the right choice.",)
"""Phrases in which a rival word is allowed, because atts did not choose the words, as in a prompt
for models.
"""


def rivals(text: str) -> list[str]:
    """Return every rival word in a text, with the text around it."""
    for words in ALLOWED:
        text = text.replace(words, "")
    return [
        f"{text[max(0, match.start() - 40) : match.end() + 30]!r}: say {instead}"
        for pattern, instead in RIVALS.items()
        for match in re.finditer(pattern, text)
    ]


def shown(page: str) -> str:
    """Return the visible text of an HTML page, without styles, scripts and the texts of models."""
    page = re.sub(r"<(style|script)\b.*?</\1>", " ", page, flags=re.DOTALL)
    return html.unescape(re.sub(r"<[^>]+>", " ", page))


@pytest.fixture(scope="module")
def surfaces(tmp_path_factory: pytest.TempPathFactory) -> dict[str, str]:
    """Return the output of each command on small runs of toy models, and the pages that it writes."""
    folder = tmp_path_factory.mktemp("surfaces")
    patch = pytest.MonkeyPatch()
    patch.chdir(folder)
    for name, value in {"COLUMNS": "300", "NO_COLOR": "1", "TERM": "dumb"}.items():
        patch.setenv(name, value)
    pair = "--draft scripted --target scripted"
    commands = [
        f"eval arithmetic --limit 6 --samples 4 {pair} --out first --dry-run",
        f"eval arithmetic --limit 6 --samples 4 {pair} --out first",
        f"eval arithmetic --limit 6 --samples 4 {pair} --method target-only --out target",
        f"eval arithmetic --limit 6 --samples 4 {pair} --method coin --out coin",
        f"eval arithmetic --limit 1 --samples 1 {pair} --out one",
        "eval arithmetic --limit 4 --samples 2 --draft embedded:draft?worker=thread "
        "--target embedded:target?worker=thread --out embedded",
        "compare target first",
        "compare one one",
        "plan first --target-tokens 300",
        "replay first --rate 0.4",
        "replay first --samples 2",
        f"sweep arithmetic[:2] {pair} --over samples=1,2 --out swept",
        f"doctor {pair}",
        "runs .",
        "report first --compare-to coin --compare-to target",
        "report first --compare-to target --format md --out first.md",
        "report one --format md --out one.md",
        "calibration check first",
        "calibration report first",
        "calibration report first --out calibration.html",
        "calibration report first --format md --out calibration.md",
        "trace first",
        "journal check first",
        "config show",
        "pairs",
        "pairs qwen-7b/qwq-32b --card h100",
        "datasets list",
    ]
    texts = dict[str, str]()
    try:
        for words in commands:
            texts[f"atts {words}"] = _output(words)
    finally:
        patch.undo()
    for path in sorted(folder.glob("*.md")):
        texts[path.name] = path.read_text()
    for path in sorted([*folder.glob("*.html"), *folder.glob("*/*.html")]):
        texts[str(path.relative_to(folder))] = shown(path.read_text())
    return texts


def _output(words: str) -> str:
    """Run a command and return what it prints on stdout and stderr."""
    printed = io.StringIO()
    with redirect_stdout(printed), redirect_stderr(printed):
        code = atts(words.split())
    assert code in (0, 5), f"atts {words} ended with {code}:\n{printed.getvalue()}"
    return printed.getvalue()


def test_no_surface_has_a_rival_word(surfaces: dict[str, str]) -> None:
    """Commands, tables and reports use the glossary's words, such as chunks that are escalated to
    the target.
    """
    assert len(surfaces) > 30
    faults = [f"{name}: {fault}" for name, text in surfaces.items() for fault in rivals(text)]
    assert faults == [], "\n".join(faults)


def test_no_help_has_a_rival_word() -> None:
    """The help of each command and the tables of exit codes and keys use the words of the glossary."""
    faults = rivals(cli_page())
    assert faults == [], "\n".join(faults)


def test_the_first_screen_names_dataset_models_and_method(surfaces: dict[str, str]) -> None:
    """The names of dataset, models and method come before anything else in HTML and in Markdown."""
    for name in ("first/report.html", "first.md"):
        opening = " ".join(surfaces[name].split())[:700]
        assert "atts on arithmetic" in opening, opening
        assert "draft toy" in opening, opening
        assert "target toy" in opening, opening


def test_the_check_reports_a_rival_word() -> None:
    """The check of printed text quotes a rival word in its context and names the word to use
    instead.
    """
    assert rivals("6.2% of the steps were handed over to the large model") != []
    assert rivals("6.2 % of the chunks were escalated") == []
