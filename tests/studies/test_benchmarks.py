"""The page of benchmarks is made from what studies write, table by table."""

import re
import xml.etree.ElementTree as tree
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

against = pytest.importorskip("scripts.studies.against", reason="needs a checkout")
bench = pytest.importorskip("scripts.studies.bench", reason="needs a checkout")
charts = pytest.importorskip("scripts.studies.charts", reason="needs a checkout")
harness = pytest.importorskip("scripts.studies.harness", reason="needs a checkout")
machine = pytest.importorskip("scripts.studies.machine", reason="needs a checkout")
pages = pytest.importorskip("scripts.studies.benchmarks", reason="needs a checkout")
scale = pytest.importorskip("scripts.studies.scale", reason="needs a checkout")
cells = pytest.importorskip("scripts.studies.scale_cells", reason="needs a checkout")
soak = pytest.importorskip("scripts.studies.soak", reason="needs a checkout")
words = pytest.importorskip("scripts.studies.summary", reason="needs a checkout")

MARKS = "<!-- table toy: Growth -->\nold\n<!-- end -->\ntext\n<!-- table toy: Missing -->\nkept\n<!-- end -->\n"


def _emit(
    folder: Path,
    rows: Any = ((1, 2.0, "a"), (2, 4.0, "a")),
    effort: str = "quick",
    title: str = "Growth of things",
) -> None:
    chart = charts.Chart("n", "seconds", "who", "log")
    found = harness.Table(title, ("n", "seconds", "who"), rows, ("A note.",), chart)
    here = machine.Machine("a processor", 2, 4.0, 0.5, 8.0, 90.0, 1.0, 5.0, "Python")
    harness.emit("toy", [found], harness.Options(effort, 0, folder), here)


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


def test_more_effort_counts_more_than_news(tmp_path: Path) -> None:
    """A quick look at the end of the day does not replace what a long run found, whatever its title counts."""
    _emit(tmp_path / "long", ((1, 9.0, "b"),), "full", "Growth of 9 things")
    _emit(tmp_path / "quick", ((1, 2.0, "b"),), "quick", "Growth of 2 things")
    found = pages.read(tmp_path)["toy"]
    assert found.find("Growth").table.rows == ((1, 9.0, "b"),)
    assert found.tables[0].title == "Growth of 9 things"
    assert found.effort == "full"


def test_numbers_of_another_embedded_pair_are_called_so(tmp_path: Path) -> None:
    """Weights that were replaced since do not pass for those of today."""
    here, page = machine.look(1), "<!-- machine against -->\n<!-- end -->\n"
    table = harness.Table("Any", ("n",), ((1,),))
    for pair, is_told in ((here.pair, False), ("draft 00000000, target 00000000", True), ("", True)):
        harness.emit("against", [table], harness.Options("quick", 0, tmp_path), replace(here, pair=pair))
        text, _ = pages.fill(page, pages.read(tmp_path))
        assert ("earlier one" in text) is is_told


def test_large_numbers_are_written_as_people_write_them() -> None:
    """With the digits that count and no powers of ten, also where rounding adds a digit."""
    assert [harness.figure(value) for value in (0.123456, 11_151.7, 9999.7, 1e-6)] == [
        "0.1235", "11,150", "10,000", "1e-06"
    ]  # fmt: skip
    assert str(harness.Spread.of([2710.2, 2400.0, 3345.1])) == "2,710 [2,400, 3,350] n=3"


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


@pytest.fixture(scope="module")
def small(law: Any, tally: Any, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Small studies of several kinds, written as `bench` writes them."""
    folder = tmp_path_factory.mktemp("bench")
    options, here = harness.Options("quick", 0, folder), machine.look(1)
    results = cells.Results(law, None)
    made = [make(options, law, results) for make in scale.MAKERS]
    flat = [table for one in made for table in (one if isinstance(one, list) else [one])]
    harness.emit("scale", flat, options, here)
    harness.emit("soak", soak.tables(tally), options, here)
    harness.emit("against", [against.guarantees()], options, here)
    return folder


def test_a_page_made_anew_has_the_structure_of_the_one_that_is_kept(small: Path, checkout: Path) -> None:
    """Every part that these studies fill has the same tables, columns and pictures; numbers are nobody's business."""
    text = (checkout / "BENCHMARKS.md").read_text()
    empty = pages.MARK.sub(lambda part: f"{part.group(1)}{part.group(5)}", text)
    kept, made = pages.shapes(text), pages.shapes(pages.fill(empty, pages.read(small))[0])
    assert kept.keys() == made.keys()
    filled = {mark: shape for mark, shape in made.items() if shape}
    assert {study for _, study, _ in filled} == {"scale", "soak", "against", ""}
    assert len(filled) > 12
    for mark, shape in filled.items():
        assert shape == kept[mark], f"{mark} is not what the study writes: run scripts.studies.benchmarks"


def test_another_column_or_a_lost_picture_is_another_structure(small: Path) -> None:
    """So that the comparison can fail."""
    page = "<!-- table soak: Soak: what the process holds -->\n<!-- end -->\n"
    page += "<!-- table soak: Soak: memory over time -->\n<!-- end -->\n"
    filled, missing = pages.fill(page, pages.read(small))
    assert missing == []
    shape = pages.shapes(filled)
    assert pages.shapes(filled.replace("| verdict |", "| word |")) != shape
    assert pages.shapes(re.sub(r"!\[.*", "", filled)) != shape
    assert pages.shapes(re.sub(r"\d", "7", filled)) == shape


def test_the_one_minute_table_answers_what_was_measured_and_says_what_was_not(small: Path) -> None:
    """No number is made up for a study that was not run, nor for a column that is gone."""
    found = {name: record.tables for name, record in pages.read(small).items()}
    answers = {row[0]: str(row[1]) for row in words.summary(found).rows}
    assert len(answers) == len(words.CLAIMS)
    unknown = {question for question, answer in answers.items() if answer.startswith("not measured")}
    assert any("saturate" in question for question in answers.keys() - unknown)
    assert any("for ever" in question for question in answers.keys() - unknown)
    assert any("How much faster" in question for question in unknown)
    renamed = [replace(one, columns=tuple(c.replace("verdict", "word") for c in one.columns)) for one in found["soak"]]
    again = {row[0]: str(row[1]) for row in words.summary({**found, "soak": renamed}).rows}
    assert again["Does it run for ever?"] == "not measured: verdict"
