"""The pages that people write keep to the rules of plain prose that can be checked."""

from __future__ import annotations

import re
from collections.abc import Collection
from pathlib import Path

import pytest

from scripts.studies import result_pages
from scripts.studies.site import sources

pytestmark = pytest.mark.checkout
ROOT = Path(__file__).resolve().parents[2]
NOT_WRITTEN = {"docs/cli.md", "docs/grading_policies.md"}

RULES = {
    r"(?<!stand )\bbeside\b": "compared with, next to, or in addition to",
    r"\banew\b": "again",
    r"\bwhoever\b|\bnobody\b": "name the person",
    r"\bstood\b": "was",
    r"\bow(?:es|ed)\b": "deficit",
    r"\bspare[sd]?\b": "cancel, skip or save",
    r"\bgo(?:es)? on\b|\bwent on\b": "continue or resume",
    r"\btold\b": "reported or passed",
    r"(?<![\w.\]\[*\\/:-])\.\d": "a zero before the point",
    r"\d%": "a space before the percent sign",
    r"(?<![\w.,/-])1 (?:problems|rollouts|samples|chunks|questions|runs|records)\b": "a singular",
    r"(?<!\w)-0 %": "0 %",
}
"""Words and forms that no page has, each with what to write instead."""

EXCEPTIONS: dict[str, set[str]] = {
    "docs/grading.md": {r"\d%", r"(?<![\w.\]\[*\\/:-])\.\d"},  # answers as models write them
}
"""Rules that a page may break, with the reason."""


def prose(text: str) -> str:
    """Return a page without its code, its links' addresses and its comments."""
    text = result_pages.MARK.sub("", text)  # the words of a study, which change when it is run again
    text = re.sub(r"^```.*?^```$|<!--.*?-->", "", text, flags=re.M | re.S)
    text = re.sub(r"^    .*$", "", text, flags=re.M)
    return re.sub(r"`[^`\n]*`|\]\([^)]*\)|https?://\S+", "", text)


def faults(text: str, allowed: Collection[str] = ()) -> list[str]:
    """Return every place where a text breaks a rule, with what to write instead."""
    plain = prose(text)
    return [
        f"{plain[max(0, match.start() - 40) : match.end() + 30]!r}: write {instead}"
        for rule, instead in RULES.items()
        if rule not in allowed
        for match in re.finditer(rule, plain)
    ]


@pytest.mark.parametrize(
    "name",
    sorted(name for name in sources() if name.endswith(".md") and name not in NOT_WRITTEN),
)
def test_a_page_keeps_the_rules(name: str) -> None:
    """The page has no restricted word, and writes decimals, percentages and singulars correctly."""
    found = faults((ROOT / name).read_text(), EXCEPTIONS.get(name, set()))
    assert found == [], "\n".join(found)


def test_a_fault_is_reported_and_code_is_not_read() -> None:
    """Each rule finds its form in prose; code blocks, code words and addresses are left out."""
    assert len(faults("It stood beside 5% of .5, anew.")) == 5
    assert faults("`beside` [x](anew.md)\n\n```\n5% of .5\n```\n") == []
    assert faults("Output:\n\n    5% of .5\n\nThis is read, anew.\n") != []
    assert faults("Output:\n\n    5% of .5\n") == []
