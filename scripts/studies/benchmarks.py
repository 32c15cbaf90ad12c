"""Fills BENCHMARKS.md and docs/benchmarks/ from what studies wrote: between the marks no number is typed by hand."""

from __future__ import annotations

import argparse
import json
import re
import sys
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from scripts.studies.harness import EFFORTS, Table, drawing, picture_name
from scripts.studies.machine import pair_mark
from scripts.studies.summary import summary

ROOT = Path(__file__).resolve().parents[2]
FOLDER = ROOT / "docs" / "benchmarks"
MARK = re.compile(
    r"(<!-- (?P<what>table|machine|summary)(?: (?P<study>[\w-]+))?(?:: (?P<title>.+?))? -->\n)(?P<held>.*?)"
    r"(<!-- end -->)",
    re.DOTALL,
)

_WANTED = {"study", "tables", "effort"}
_ON_THE_PAIR = {"pipelines", "speculation", "overlap", "against", "frontier", "ablations", "models", "local", "scale"}


@dataclass(frozen=True, slots=True)
class Kept:
    """A table, and the name of its chart's file."""

    table: Table
    picture: str


@dataclass(frozen=True, slots=True)
class Record:
    """What a study wrote, its parts together."""

    study: str
    effort: str
    machine: Mapping[str, Any]
    kept: Mapping[str, Kept]
    spent: Mapping[str, float]  # seconds that the last part took; nothing where it does not say

    @property
    def tables(self) -> tuple[Table, ...]:
        """Those that count most first: titles may differ by the number of problems."""
        return tuple(one.table for one in self.kept.values())

    def find(self, title: str) -> Kept:
        """The table whose title begins so.

        :raises KeyError: there is none.
        """
        for name, one in self.kept.items():
            if name.startswith(title):
                return one
        raise KeyError(f"{self.study} has no table {title!r}; it has {list(self.kept)}")

    def words(self) -> str:
        """What it ran on."""
        m = self.machine
        is_other = self.study in _ON_THE_PAIR and m.get("pair") != pair_mark()
        return (
            f"Effort `{self.effort}` on {m['processor']}, {m['cores']} cores, load {m['load']:.1f} at the start; "
            f"limits of one core: copy {m['copy_gib_per_second']:.1f} GiB/s, matrices {m['matrix_gflops']:.0f} "
            f"GFLOP/s, {m['operation_microseconds']:.1f} us per torch operation."
            + (f" It took {self.spent['processor']:.0f} s of processors." if self.spent else "")
            + (" The embedded pair was an earlier one, or is not recorded." if is_other else "")
        )


def read(folder: Path) -> dict[str, Record]:
    """Every study below a folder; parts of one (`pipelines-claim`) come together under its name.

    Of two tables of one title counts that of the greater effort, then the newer.
    """
    found: dict[str, Record] = {}
    written = [(path, json.loads(path.read_text())) for path in folder.rglob("*.json")]
    studies = [(path, fields) for path, fields in written if isinstance(fields, dict) and _WANTED <= fields.keys()]
    for _, fields in sorted(studies, key=lambda one: (EFFORTS.index(one[1]["effort"]), one[0].stat().st_mtime)):
        name = str(fields["study"])
        study = name.split("-")[0]
        made = {
            table["title"]: Kept(Table.read(table), picture_name(name, number))
            for number, table in enumerate(fields["tables"])
        }
        older = found[study].kept if study in found else {}
        kept = {**made, **{title: one for title, one in older.items() if title not in made}}
        found[study] = Record(study, str(fields["effort"]), fields.get("machine", {}), kept, fields.get("spent") or {})
    return found


def fill(page: str, records: Mapping[str, Record], pictures: Path | None = None) -> tuple[str, list[str]]:
    """The page with every marked part made anew, and the marks that no record fills: these keep what they held.

    One that held nothing says that it was not run.
    """
    missing: list[str] = []

    def part(found: re.Match[str]) -> str:
        try:
            body = _part(found, records, pictures)
        except KeyError as error:
            missing.append(str(error.args[0]))
            body = found["held"].strip() or "*Not run yet.*"
        return f"{found.group(1)}{body}\n{found.group(6)}"

    return MARK.sub(part, page), missing


def _part(found: re.Match[str], records: Mapping[str, Record], pictures: Path | None) -> str:
    if found["what"] == "summary":
        return summary({name: record.tables for name, record in records.items()}, found["held"]).body()
    study = found["study"]
    if study not in records:
        raise KeyError(f"no study {study} was run")
    if found["what"] == "machine":
        return records[study].words()
    one = records[study].find(found["title"])
    text = f"**{one.table.title}**\n\n{one.table.body()}"
    if one.table.chart is None:
        return text
    if pictures is not None:
        pictures.mkdir(parents=True, exist_ok=True)
        (pictures / one.picture).write_text(drawing(one.table))
    return f"{text}\n\n![{one.table.title}]({one.picture})"


def pages(root: Path = ROOT) -> list[Path]:
    """The front page, then a page for every study."""
    return [root / "BENCHMARKS.md", *sorted((root / "docs" / "benchmarks").glob("*.md"))]


def main() -> None:
    """Fill the pages from a folder of studies; says what no study has filled."""
    parser = argparse.ArgumentParser(prog="benchmarks", description=main.__doc__)
    parser.add_argument("--runs", type=Path, default=ROOT / "runs" / "bench")
    records, told = read(parser.parse_args().runs), ""
    for page in pages():
        text, missing = fill(page.read_text(), records, FOLDER)
        page.write_text(text)
        told += text
        for words in missing:
            print(f"benchmarks: {page.name}: left as it was: {words}", file=sys.stderr)
    for picture in FOLDER.glob("*.svg"):
        if picture.name not in told:  # of a table that is shown no more
            picture.unlink()


if __name__ == "__main__":
    main()
