"""Tests that generated pages are current, and that the README and the pages agree with the code."""

import re
import subprocess
import sys
from importlib import import_module
from pathlib import Path
from typing import get_args

import pytest

ROOT = Path(__file__).resolve().parents[1]
pytestmark = pytest.mark.checkout


def test_generated_pages_are_current() -> None:
    """The generated pages are current: running `scripts/docs` would change no page."""
    command = [sys.executable, "-m", "scripts.studies.docs", "--check"]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr


def test_every_module_says_why_it_exists() -> None:
    """Each module begins with a sentence, so no row of the module map is empty."""
    from scripts.studies.docs import module_page

    rows = [line for line in module_page().splitlines() if line.startswith("| `")]
    assert rows
    assert [row for row in rows if row.endswith("|  |")] == []
    # a sentence that takes two lines in the code is not cut off at the end of the first
    assert [row for row in rows if not row.rstrip("| ").endswith((".", "`", ")", "?"))] == []


def test_the_readme_has_at_most_120_lines() -> None:
    """The README is short enough, and every script that it names exists."""
    text = (ROOT / "README.md").read_text()
    assert len(text.splitlines()) <= 120
    named = {word.rstrip("`,.)") for word in text.split() if word.startswith("./scripts/")}
    assert named
    assert [name for name in named if not (ROOT / name).exists()] == []


def test_every_page_the_readme_links_exists() -> None:
    """Every link of the README works, also a link to a heading within a page."""
    text = (ROOT / "README.md").read_text()
    links = [part.split(")")[0].partition("#") for part in text.split("](")[1:]]
    pages = [(name, heading) for name, _, heading in links if not name.startswith("https://")]
    assert pages
    assert [name for name, _ in pages if not (ROOT / name).exists()] == []
    for name, heading in pages:
        if heading:
            titles = re.findall(r"^#+ (.*)$", (ROOT / name).read_text(), re.MULTILINE)
            anchors = [re.sub(r"[^\w -]", "", title.lower()).replace(" ", "-") for title in titles]
            assert heading in anchors, f"{name} has no heading for #{heading}: {anchors}"


def test_the_glossary_names_existing_code() -> None:
    """Each name in the glossary's last column is a module or a name in one, no term occurs twice,
    and the glossary is short.
    """
    lines = (ROOT / "docs" / "glossary.md").read_text().splitlines()
    rows = [line.strip("| ").split(" | ") for line in lines if line.endswith("` |")]
    words = [word for word, *_ in rows]
    assert len(words) == len(set(words))
    assert 30 < len(words) <= 45
    for *_, name in rows:
        package, _, last = name.strip("`").rpartition(".")
        assert hasattr(import_module(package), last) or import_module(f"{package}.{last}"), name


def test_the_table_of_events_is_complete() -> None:
    """docs/api.md lists each type that a listener may receive exactly once, with the place to
    import it from.
    """
    from atts.run import Notice

    rows = [
        line
        for line in (ROOT / "docs" / "api.md").read_text().splitlines()
        if line.startswith("| `atts.")
    ]
    named = [row.split("`")[1].rpartition(".") for row in rows]
    found = [getattr(import_module(module), name) for module, _, name in named]
    assert len(found) == len(set(found))
    assert set(found) == set(get_args(Notice))


def test_the_mathematics_page_has_the_settings_that_are_run() -> None:
    """The page of mathematics benchmarks has the settings of `scripts/math`, all arms, and the
    published rows of the pairs.
    """
    from atts.api import known_pairs
    from scripts.studies.mathematics import ARMS, PUBLISHED

    text = (ROOT / "docs" / "mathematics.md").read_text()
    words = " ".join(text.split())
    for said in ("{samples} samples", "{turns} turns", "{max_tokens:,} tokens", "rate {rate:g}"):
        assert said.format(**PUBLISHED) in words
    assert [
        arm.name
        for arm in ARMS
        if ("target alone" if arm.name == "target" else arm.name) not in words
    ] == []
    rows = [line for line in text.splitlines() if " %" in line and line.startswith("| ")]
    published = [
        (name, row) for name, pair in known_pairs().items() for row in pair.published.values()
    ]
    assert len(rows) == len(published) > 0
    for line, (name, row) in zip(rows, published, strict=True):
        for value in (
            name,
            f"{100 * row.accuracy:.1f} %",
            f"{row.marginal:.2f}x",
            f"{row.conditional:.2f}x",
        ):
            assert f"| {value} |" in line


def test_every_guarantee_cites_an_existing_test_or_study() -> None:
    """Each row and item of docs/guarantees.md cites at least one test or study, and every cited
    test or study exists.
    """
    from scripts.studies.bench import STUDIES

    text = (ROOT / "docs" / "guarantees.md").read_text()
    promises = re.findall(r"^(?:- |\| `)(?:.|\n(?=  ))*", text, re.MULTILINE)
    assert len(promises) > 25
    assert [
        promise for promise in promises if not re.search(r"`(test_|scripts/bench )", promise)
    ] == []
    code = "".join(path.read_text() for path in sorted((ROOT / "tests").rglob("test_*.py")))
    tests = set(re.findall(r"def (test_\w+)", code))
    assert set(re.findall(r"`(test_\w+)`", text)) - tests == set()
    assert set(re.findall(r"`scripts/bench ([\w-]+)", text)) - set(STUDIES) == set()
    assert len(text.splitlines()) <= 120
