"""Tests that the page of benchmarks is made from the records of studies, table by table."""

import re
import xml.etree.ElementTree as tree
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest

bench = pytest.importorskip("scripts.studies.bench", reason="needs a checkout")
harness = pytest.importorskip("scripts.studies.harness", reason="needs a checkout")
machine = pytest.importorskip("scripts.studies.harness", reason="needs a checkout")
pages = pytest.importorskip("scripts.studies.result_pages", reason="needs a checkout")
scale = pytest.importorskip("scripts.studies.scale", reason="needs a checkout")
soak = pytest.importorskip("scripts.studies.graph", reason="needs a checkout")

LIMITS = {
    "copy_gib_per_second": 8.0,
    "matrix_gflops": 90.0,
    "operation_microseconds": 1.0,
    "loop_microseconds": 5.0,
}
MARKS = "<!-- table toy: Growth -->\nold\n<!-- end -->\ntext\n<!-- table toy: Missing -->\nkept\n<!-- end -->\n"


def _emit(
    folder: Path,
    rows: Any = ((1, 2.0, "a"), (2, 4.0, "a")),
    effort: str = "quick",
    title: str = "Growth of things",
) -> None:
    chart = harness.Chart("n", "seconds", "who", "log")
    found = harness.Table(title, ("n", "seconds", "who"), rows, ("A note.",), chart)
    here = machine.Machine("a processor", 2, 4.0, 0.5, **LIMITS, software="Python")
    harness.emit("toy", [found], harness.Options(effort, 0, folder), here)


def test_a_page_is_filled_from_records_and_says_what_is_missing(tmp_path: Path) -> None:
    """The page gets new content for marked parts that have a record, with their chart; all other
    text stays.
    """
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
    """If a study was run again, its newer record replaces its tables on the page."""
    _emit(tmp_path / "first")
    _emit(tmp_path / "second", ((1, 9.0, "b"),))
    assert pages.read(tmp_path)["toy"].tables[0].rows == ((1, 9.0, "b"),)


def test_more_effort_counts_more_than_news(tmp_path: Path) -> None:
    """A later quick run does not replace the record of a long run, even if the number in its title
    is larger.
    """
    _emit(tmp_path / "long", ((1, 9.0, "b"),), "full", "Growth of 9 things")
    _emit(tmp_path / "quick", ((1, 2.0, "b"),), "quick", "Growth of 2 things")
    found = pages.read(tmp_path)["toy"]
    assert found.find("Growth").table.rows == ((1, 9.0, "b"),)
    assert found.tables[0].title == "Growth of 9 things"
    assert found.effort == "full"


def test_numbers_of_another_embedded_pair_are_called_so(tmp_path: Path) -> None:
    """Records made with other weights of the embedded pair are marked as results of another
    pair.
    """
    here = machine.look(1)
    page = "<!-- machine against -->\n<!-- end -->\n"
    table = harness.Table("Any", ("n",), ((1,),))
    for pair, is_told in (
        (here.pair, False),
        ("draft 00000000, target 00000000", True),
        ("", True),
    ):
        harness.emit(
            "against", [table], harness.Options("quick", 0, tmp_path), replace(here, pair=pair)
        )
        text, _ = pages.fill(page, pages.read(tmp_path))
        assert ("earlier embedded pair" in text) is is_told


def test_large_numbers_are_written_as_people_write_them() -> None:
    """Large numbers are written with their significant digits and without powers of ten, also where
    rounding adds a digit.
    """
    assert [harness.figure(value) for value in (0.123456, 11_151.7, 9999.7, 1e-6)] == [
        "0.1235", "11,150", "10,000", "1e-06"
    ]  # fmt: skip
    assert str(harness.Spread.of([2710.2, 2400.0, 3345.1])) == "2,710 [2,400, 3,350] n=3"


def test_a_chart_is_an_svg_with_a_line_per_name(tmp_path: Path) -> None:
    """The picture is well-formed and named, and has every series once with all its points."""
    _emit(
        tmp_path,
        ((1, 2.0, "a"), (2, 4.0, "a"), (1, 3.0, "b <&>"), (4, None, "b <&>"), (0, 1.0, "a")),
    )
    found = pages.read(tmp_path)["toy"].find("Growth")
    svg = tree.fromstring(pages.draw(found.table))
    assert svg.tag == "{http://www.w3.org/2000/svg}svg"
    assert svg.get("aria-label") == "Growth of things"
    texts = {element.text for element in svg.iter("{http://www.w3.org/2000/svg}text")}
    assert {"a", "b <&>", "n", "seconds"} <= texts
    # cells without a number, and 0 on a logarithmic axis, give no point
    assert len(list(svg.iter("{http://www.w3.org/2000/svg}circle"))) == 3


def _marks(page: str) -> Iterator[tuple[str, str, str]]:
    """Yield kind, study and beginning of the title of each marked part of a page."""
    for found in pages.MARK.finditer(page):
        yield found["what"], found["study"] or "", found["title"] or ""


def _shapes(page: str) -> dict[tuple[str, str, str], tuple[tuple[str, ...], ...]]:
    """Return the headers of the tables and the number of pictures in each marked part, without the
    figures in the tables.
    """
    found: dict[tuple[str, str, str], tuple[tuple[str, ...], ...]] = {}
    for part in pages.MARK.finditer(page):
        lines = part["held"].splitlines()
        heads = [
            line for line, below in zip(lines, lines[1:], strict=False) if set(below) == set("| -")
        ]
        cells = [tuple(cell.strip() for cell in head.strip("|").split("|")) for head in heads]
        pictures = [("picture",) for line in lines if line.startswith("![")]
        found[part["what"], part["study"] or "", part["title"] or ""] = (*cells, *pictures)
    return found


_STUDIES_OF = {
    "frontier": {"frontier", "field"},
    "real-servers": set(),  # its commands and their output; `./scripts/test servers pair` runs them
    "serving": {"serve"},
    # this page also has small runs, and live runs compared with replays
    "statistics": {"statistics", "small", "replay"},
}


def test_every_mark_of_a_page_names_its_study(checkout: Path) -> None:
    """Each marked part of a page names an existing study, and every command on the page exists."""
    for page in pages.pages(checkout):
        text = page.read_text()
        found = list(_marks(text))
        wanted = "" if page.name == "BENCHMARKS.md" else page.stem
        assert {study for _, study, _ in found} == _STUDIES_OF.get(wanted, {wanted})
        assert any(what == "summary" for what, _, _ in found) == (not wanted)
        for names in re.findall(r"\./scripts/bench ([a-z -]+?)(?: --| *`| *$)", text, re.MULTILINE):
            assert set(names.split()) <= {*bench.STUDIES, "all", "quick"}, names


def test_the_front_page_is_short_and_links_every_page(checkout: Path) -> None:
    """The front page can be read in five minutes; it names every page, and each of its links has a
    target.
    """
    front, *others = pages.pages(checkout)
    text = front.read_text()
    assert len(text.split()) < 2_000
    linked = set(re.findall(r"\]\(([^)#]+)\)", text))
    assert {f"docs/benchmarks/{page.name}" for page in others} <= linked
    assert [link for link in linked if not (checkout / link).exists()] == []
    for page in others:
        links = re.findall(r"\]\(([^)#]+)\)", page.read_text())
        assert [link for link in links if not (page.parent / link).exists()] == []


@pytest.fixture(scope="module")
def small(law: Any, tally: Any, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Write records of several small studies as `bench` writes them."""
    folder = tmp_path_factory.mktemp("bench")
    options = harness.Options("quick", 0, folder)
    here = machine.look(1)
    harness.emit("scale", scale.tables(options, law, scale.Results(law, None)), options, here)
    harness.emit("soak", soak.tables(tally), options, here)
    return folder


def test_pages_made_anew_have_the_structure_of_those_that_are_kept(
    small: Path, checkout: Path
) -> None:
    """Every part that these studies fill has the same tables, columns and pictures as the committed
    page, whatever the numbers.
    """
    text = "".join(page.read_text() for page in pages.pages(checkout))
    empty = pages.MARK.sub(lambda part: f"{part.group(1)}{part.group(6)}", text)
    kept = _shapes(text)
    made = _shapes(pages.fill(empty, pages.read(small))[0])
    assert kept.keys() == made.keys()
    filled = {mark: shape for mark, shape in made.items() if shape}
    assert {study for _, study, _ in filled} == {"scale", "soak", ""}
    assert len(filled) > 11
    for mark, shape in filled.items():
        assert shape == kept[mark], (
            f"{mark} is not what the study writes: run scripts.studies.result_pages"
        )


def test_another_column_or_a_lost_picture_is_another_structure(small: Path) -> None:
    """The comparison fails if a column differs or a picture is missing."""
    page = "<!-- table soak: Soak: what the process holds -->\n<!-- end -->\n"
    page += "<!-- table soak: Soak: memory over time -->\n<!-- end -->\n"
    filled, missing = pages.fill(page, pages.read(small))
    assert missing == []
    shape = _shapes(filled)
    assert _shapes(filled.replace("| verdict |", "| word |")) != shape
    assert _shapes(re.sub(r"!\[.*", "", filled)) != shape
    assert _shapes(re.sub(r"\d", "7", filled)) == shape


def test_the_one_minute_table_answers_what_was_measured_and_says_what_was_not(small: Path) -> None:
    """For a study without a record, the table shows no new number and keeps its earlier content."""
    found = {name: record.tables for name, record in pages.read(small).items()}
    answers = {row[0]: str(row[1]) for row in pages.summary(found).rows}
    assert len(answers) == len(pages.CLAIMS)
    unknown = {
        question for question, answer in answers.items() if answer.startswith("not measured")
    }
    held = pages.summary(found).body().replace("not measured", "4 days")
    kept = {row[0]: str(row[1]) for row in pages.summary(found, held).rows}
    assert {question for question, answer in kept.items() if answer.startswith("4 days")} == unknown
    assert any("saturate" in question for question in answers.keys() - unknown)
    assert any("for ever" in question for question in answers.keys() - unknown)
    assert any("How much faster" in question for question in unknown)


def test_the_best_of_arms_that_are_alike_is_as_good_as_another() -> None:
    """The best arm is chosen and compared in different rounds, because in the same rounds luck
    would favour it.
    """
    random = np.random.default_rng(0)
    found = list[float]()
    seen_best = list[float]()
    for _ in range(400):
        values = {
            name: random.lognormal(0, 0.06, 6).tolist()
            for name in ("a", "b", "c", "d", "e", "chosen")
        }
        found.append(harness.beside_best(values, "abcde", "chosen")[1].median)
        seen_best.append(min(harness.ratio(values, name, "chosen").median for name in "abcde"))
    assert np.mean(found) == pytest.approx(1, abs=0.01)
    assert np.mean(seen_best) < 0.97


def test_the_best_arm_is_named() -> None:
    """If the two halves of the rounds disagree about the best arm, both arms are named."""
    values = {"a": [1.0, 1.0, 1.0, 1.0], "b": [2.0, 2.0, 2.0, 2.0], "chosen": [1.0, 1.0, 1.0, 2.0]}
    names, spread = harness.beside_best(values, ["a", "b"], "chosen")
    assert names == ["a"]
    assert (spread.low, spread.high, spread.n) == (0.5, 1.0, 4)
    assert harness.beside_best(values | {"b": [2.0, 0.5, 2.0, 0.5]}, ["a", "b"], "chosen")[0] == [
        "b",
        "a",
    ]
