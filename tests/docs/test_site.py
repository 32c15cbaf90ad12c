"""Tests of the docs site: every page has a place in the menu, and every link leads somewhere."""

from __future__ import annotations

import re
import tomllib
from collections.abc import Iterator
from pathlib import Path

import pytest

from scripts.studies.docs import (
    Line,
    dead_links,
    drawn,
    fenced,
    gather,
    generated_pages,
    missing_words,
    repository,
    site_text,
    sources,
)

pytestmark = pytest.mark.checkout
ROOT = Path(__file__).resolve().parents[2]
LONGEST = 45_000
"""Limit on the number of words of all pages that people write."""
NOT_WRITTEN = {"docs/cli.md", "docs/gpus.md", "docs/grading_policies.md"}
"""Pages whose content comes from the code or from tested tables."""


def menu(entries: list[object]) -> Iterator[str]:
    """Yield the pages of a menu, including pages of nested menus."""
    for entry in entries:
        assert isinstance(entry, dict)
        for value in entry.values():
            if isinstance(value, list):
                yield from menu(value)
            else:
                yield str(value)


def written_pages() -> dict[str, str]:
    """Return the text of every hand-written page of the site, without the pages of studies."""
    return {
        name: (ROOT / name).read_text()
        for name in sources()
        if name.endswith(".md")
        and name not in NOT_WRITTEN
        and not name.startswith("docs/benchmarks/")
    }


def test_every_page_has_one_place_in_the_menu() -> None:
    """The menu lists each page once, and lists nothing else."""
    project = tomllib.loads((ROOT / "zensical.toml").read_text())["project"]
    listed = list(menu(project["nav"]))
    pages = [name for name in sources().values() if name.endswith(".md")]
    assert len(pages) > 30
    assert sorted(listed) == sorted([*pages, *generated_pages()])


def test_links_follow_pages_to_the_site() -> None:
    """On the site, a link to a page leads to the page's copy, and a link to any other file leads to
    the repository.
    """
    text = (
        "[a](docs/report.md#size) [b](BENCHMARKS.md) [c](scripts/demo) [d](https://x.y/z) [e](#f)"
    )
    code = "```console\n$ echo [a](docs/report.md)\n```\n"
    assert site_text("README.md", f"{text}\n{code}") == (
        f"[a](report.md#size) [b](benchmarks/index.md) [c]({repository()}/blob/main/scripts/demo) "
        f"[d](https://x.y/z) [e](#f)\n{code}"
    )
    assert site_text("docs/benchmarks/soak.md", "[a](../../BENCHMARKS.md)") == "[a](index.md)"
    modules = site_text("CONTRIBUTING.md", "[map](docs/modules.md)")
    assert modules == f"[map]({repository()}/blob/main/docs/modules.md)"


def test_gathering_writes_every_page_and_picture(tmp_path: Path) -> None:
    """Gathering the site writes exactly its pages, pictures and generated pages, and removes
    earlier files of the folder.
    """
    folder = tmp_path / "pages"
    folder.mkdir()
    (folder / "old.md").write_text("gone")
    gather(folder)
    written = {path.relative_to(folder).as_posix() for path in folder.rglob("*") if path.is_file()}
    assert written == {*sources().values(), *generated_pages()}
    assert "## atts eval" in (folder / "cli.md").read_text()
    assert "| `rate` |" not in (folder / "cli.md").read_text()
    assert "| `rate` |" in (folder / "configuration.md").read_text()


def test_dead_links_and_headings_are_reported(tmp_path: Path) -> None:
    """A link to an existing page or heading passes; any other link within the site is reported by
    name.
    """
    (tmp_path / "a").mkdir()
    (tmp_path / "a" / "index.html").write_text('<h2 id="here">x</h2><a href="../b/">b</a>')
    (tmp_path / "index.html").write_text(
        '<a href="a/#here"><a href="a/#there"><a href="https://x.y/"><img src="none.svg">'
    )
    assert list(dead_links(tmp_path)) == [
        "a/index.html: no page at ../b/",
        "index.html: no heading at a/#there",
        "index.html: no page at none.svg",
    ]


def test_a_word_that_the_search_lacks_is_reported(tmp_path: Path) -> None:
    """`missing_words` reports each of four words that the site's search index lacks; this index
    contains only "rate", so three are reported.
    """
    (tmp_path / "search.json").write_text('{"items": [{"text": "The rate"}]}')
    assert len(list(missing_words(tmp_path))) == 3


def test_examples_of_docstrings_become_code() -> None:
    """In a docstring, the lines from `>>>` to the next blank line become a block of code."""
    text = "Add.\n\n>>> 1 + 1\n2\n\n:raises X: never."
    assert fenced(text) == "Add.\n\n```pycon\n>>> 1 + 1\n2\n```\n\n:raises X: never."


NOT_MEASURED = (
    r"\b(?:not|nothing|none|until)\b[^.]{0,60}\b(?:measured|run|executed|seen)\b[^.]{0,30}\bGPU"
    r"|nothing on a GPU yet"
)
"""A pattern of the statement that nothing on a page was measured or run on a GPU."""


def test_pages_that_speak_of_gpus_say_that_none_was_measured() -> None:
    """Pages with GPU commands or options say that no GPU was measured, as long as no result of a
    GPU is published.
    """
    assert "has not been run yet" in (ROOT / "docs" / "benchmarks" / "gpu.md").read_text()
    texts = {name: (ROOT / name).read_text() for name in (*written_pages(), "README.md")}
    about = {
        name: text
        for name, text in texts.items()
        if re.search(r"\bcuda\b|CUDA|not run: needs (?:a|two)? ?GPU|--local\b", text)
        and name != "CHANGELOG.md"
    }
    assert len(about) >= 8
    missing = [
        name for name, text in about.items() if not re.search(NOT_MEASURED, text, flags=re.I)
    ]
    assert not missing


def test_pages_admit_what_is_slower_or_missing() -> None:
    """In the table of docs/acceleration.md, the entry for EasySpec says that atts is slower on a
    CPU. docs/blocks.md lists the parts of BlockLLM that atts lacks.
    """
    study = (ROOT / "docs" / "benchmarks" / "overlap.md").read_text()
    (speeds,) = re.findall(
        r"With EasySpec, decoding is ([\d.]+) times as fast as plain decoding; "
        r"without EasySpec, the same draft makes it ([\d.]+) times as fast",
        " ".join(study.split()),
    )
    grouped, serial = speeds
    page = (ROOT / "docs" / "acceleration.md").read_text()
    (row,) = re.findall(r"^\| EasySpec \|.*$", page, flags=re.M)
    assert f"on a CPU {grouped}x, but `draft` has {serial}x" in row
    blocks = (ROOT / "docs" / "blocks.md").read_text()
    _, _, lacking = blocks.partition("BlockLLM describes these parts, which atts does not have:")
    for mechanism in (
        "equivalent block while a request runs",
        "queue and a batch size",
        "stitching",
    ):
        assert mechanism in " ".join(lacking.split())


def test_the_pages_have_at_most_45000_words() -> None:
    """All hand-written pages together have at most 45,000 words, without the output of commands."""
    texts = [
        re.sub(r"^```.*?^```$", "", text, flags=re.M | re.S) for text in written_pages().values()
    ]
    assert sum(len(text.split()) for text in texts) <= LONGEST


# An installed package has no pages, but pytest still imports this file.
@pytest.mark.parametrize("name", sorted(written_pages()) if (ROOT / "docs").exists() else [])
def test_a_page_says_for_whom_it_is_and_begins_with_a_command(name: str) -> None:
    """The opening of each page names the page's readers and has a command or a program."""
    opening = "\n".join(written_pages()[name].splitlines()[:30])
    assert re.search(
        r"\bfor (people|everyone|the people|whom)|people (who|whose|with)|Who it is for", opening
    ), name
    assert re.search(r"^```|^    |`(?:\./)?(?:atts|scripts|pip|python)\b[^`]*`", opening, re.M), (
        name
    )


def test_a_recorded_terminal_is_drawn_line_by_line() -> None:
    """In the drawing of a recorded terminal each line appears at its second, XML's reserved
    characters are escaped, and long lines are cut.
    """
    picture = drawn([Line("$ a < b", 0.0, is_typed=True), Line("x" * 150, 2.5)])
    assert '<text class="line typed" style="animation-delay:0s"' in picture
    assert "$ a &lt; b" in picture
    assert "animation-delay:2.5s" in picture
    assert f"{'x' * 99}…" in picture
    assert "x" * 100 not in picture
