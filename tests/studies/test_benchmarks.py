"""The page of benchmarks is made from what studies write, table by table."""

import re
import xml.etree.ElementTree as tree
from pathlib import Path
from typing import Any

import pytest

bench = pytest.importorskip("scripts.studies.bench", reason="needs a checkout")
charts = pytest.importorskip("scripts.studies.charts", reason="needs a checkout")
harness = pytest.importorskip("scripts.studies.harness", reason="needs a checkout")
machine = pytest.importorskip("scripts.studies.machine", reason="needs a checkout")
pages = pytest.importorskip("scripts.studies.benchmarks", reason="needs a checkout")
scale = pytest.importorskip("scripts.studies.scale", reason="needs a checkout")
cells = pytest.importorskip("scripts.studies.scale_cells", reason="needs a checkout")

MARKS = "<!-- table toy: Growth -->\nold\n<!-- end -->\ntext\n<!-- table toy: Missing -->\nkept\n<!-- end -->\n"


def _emit(folder: Path, rows: Any = ((1, 2.0, "a"), (2, 4.0, "a"))) -> None:
    chart = charts.Chart("n", "seconds", "who", "log")
    found = harness.Table("Growth of things", ("n", "seconds", "who"), rows, ("A note.",), chart)
    here = machine.Machine("a processor", 2, 4.0, 0.5, 8.0, 90.0, 1.0, 5.0, "Python")
    harness.emit("toy", [found], harness.Options("quick", 0, folder), here)


def test_a_page_is_filled_from_records_and_says_what_is_missing(tmp_path: Path) -> None:
    """Marked parts are made anew, with their chart; the rest stays, a part without a record too."""
    _emit(tmp_path / "runs")
    text, missing = pages.fill(MARKS, pages.read(tmp_path / "runs"), tmp_path / "pictures")
    assert "old" not in text
    assert "| 2 | 4 | a |" in text
    assert "A note." in text
    assert "text\n" in text
    assert "kept" in text
    assert len(missing) == 1
    assert (tmp_path / "pictures" / "toy-1.svg").exists()
    again, _ = pages.fill(text, pages.read(tmp_path / "runs"))
    assert again == text


def test_the_newer_of_two_records_counts(tmp_path: Path) -> None:
    """A study that was run again replaces its tables."""
    _emit(tmp_path / "first")
    _emit(tmp_path / "second", ((1, 9.0, "b"),))
    assert pages.read(tmp_path)["toy"].tables[0].rows == ((1, 9.0, "b"),)


def test_a_chart_is_an_svg_with_a_line_per_name(tmp_path: Path) -> None:
    """Well-formed, named, every series drawn once with all its points."""
    _emit(tmp_path, ((1, 2.0, "a"), (2, 4.0, "a"), (1, 3.0, "b <&>"), (4, None, "b <&>"), (0, 1.0, "a")))
    svg = tree.fromstring((tmp_path / "toy-1.svg").read_text())
    assert svg.tag == "{http://www.w3.org/2000/svg}svg"
    assert svg.get("aria-label") == "Growth of things"
    texts = {element.text for element in svg.iter("{http://www.w3.org/2000/svg}text")}
    assert {"a", "b <&>", "n", "seconds"} <= texts
    assert len(list(svg.iter("{http://www.w3.org/2000/svg}circle"))) == 3  # no point without a number, none at log 0


def test_every_mark_of_the_page_names_a_study_of_bench(checkout: Path) -> None:
    """And every command it shows is one that exists."""
    text = (checkout / "BENCHMARKS.md").read_text()
    found = list(pages.marks(text))
    assert {study for _, study, _ in found} - {""} <= set(bench.STUDIES)
    assert any(what == "summary" for what, _, _ in found)
    for names in re.findall(r"\./scripts/bench ([a-z ]+)", text):
        assert set(names.split()) <= {*bench.STUDIES, "all", "quick"}, names


def test_a_small_scale_study_has_the_structure_that_the_page_shows(law: Any, checkout: Path) -> None:
    """The same columns in the same order; numbers are nobody's business here."""
    text = (checkout / "BENCHMARKS.md").read_text()
    options = harness.Options("quick", 0, None)
    results = cells.Results(law, None)
    shown = _beginnings(text, "scale")
    for make in (scale.costs_table, scale.rates_table):
        table = make(options, law, results)
        title = next(title for title in shown if table.title.startswith(title))
        part = text.split(f"<!-- table scale: {title} -->")[1].split("<!-- end -->")[0]
        assert all(len(row) == len(table.columns) for row in table.rows)
        assert not part.strip() or "| " + " | ".join(table.columns) + " |" in part


def _beginnings(text: str, study: str) -> list[str]:
    return [title for what, name, title in pages.marks(text) if what == "table" and name == study]
