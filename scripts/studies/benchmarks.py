"""Fills BENCHMARKS.md from what studies wrote: between its marks no number is written by hand."""

from __future__ import annotations

import argparse
import json
import re
import sys
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, get_args

from scripts.studies.charts import draw
from scripts.studies.harness import Effort, Table, picture_name
from scripts.studies.machine import pair_mark
from scripts.studies.summary import summary

ROOT = Path(__file__).resolve().parents[2]
PAGE = ROOT / "BENCHMARKS.md"
PICTURES = Path("docs") / "benchmarks"
MARK = re.compile(
    r"(<!-- (?P<what>table|machine|summary)(?: (?P<study>[\w-]+))?(?:: (?P<title>.+?))? -->\n).*?(<!-- end -->)",
    re.DOTALL,
)

_WANTED = {"study", "tables", "effort"}
_ON_THE_PAIR = {"pipelines", "against", "frontier", "ablations", "models", "local", "scale"}
_NOT_RUN = "*Not run yet.*"


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


def read(folder: Path) -> dict[str, Record]:
    """Every study below a folder; parts of one (`pipelines-claim`) come together under its name.

    Of two tables of one title counts that of the greater effort, then the newer.
    """
    found: dict[str, Record] = {}
    written = [(path, json.loads(path.read_text())) for path in folder.rglob("*.json")]
    studies = [(path, fields) for path, fields in written if isinstance(fields, dict) and _WANTED <= fields.keys()]
    efforts = get_args(Effort)
    for _, fields in sorted(studies, key=lambda one: (efforts.index(one[1]["effort"]), one[0].stat().st_mtime)):
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
            held = found.group(0)[len(found.group(1)) : -len(found.group(5))].strip()
            return f"{found.group(1)}{held or _NOT_RUN}\n{found.group(5)}"
        return f"{found.group(1)}{body}\n{found.group(5)}"

    return MARK.sub(part, page), missing


def _part(found: re.Match[str], records: Mapping[str, Record], pictures: Path | None) -> str:
    if found["what"] == "summary":
        return summary({name: record.tables for name, record in records.items()}).markdown().split("\n", 2)[2].strip()
    study = found["study"]
    if study not in records:
        raise KeyError(f"no study {study} was run")
    record = records[study]
    if found["what"] == "machine":
        return _words(record)
    one = record.find(found["title"])
    table = one.table
    body = table.markdown().split("\n", 2)[2].strip()
    if table.chart is None:
        return f"**{table.title}**\n\n{body}"
    if pictures is not None:
        pictures.mkdir(parents=True, exist_ok=True)
        (pictures / one.picture).write_text(draw(table.title, table.chart, table.columns, table.rows))
    return f"**{table.title}**\n\n{body}\n\n![{table.title}]({PICTURES.as_posix()}/{one.picture})"


def _words(record: Record) -> str:
    m = record.machine
    return (
        f"Effort `{record.effort}` on {m['processor']}, {m['cores']} cores, load {m['load']:.1f} at the start; limits "
        f"of one core: copy {m['copy_gib_per_second']:.1f} GiB/s, matrices {m['matrix_gflops']:.0f} GFLOP/s, "
        f"{m['operation_microseconds']:.1f} us per torch operation."
        + (f" It took {record.spent['processor']:.0f} s of processors." if record.spent else "")
        + (" The embedded pair was an earlier one, or is not recorded." if _is_of_another_pair(record) else "")
    )


def _is_of_another_pair(record: Record) -> bool:
    return record.study in _ON_THE_PAIR and record.machine.get("pair") != pair_mark()


def marks(page: str) -> Iterator[tuple[str, str, str]]:
    """What the page wants: kind, study, beginning of the title."""
    for found in MARK.finditer(page):
        yield found["what"], found["study"] or "", found["title"] or ""


def shapes(page: str) -> dict[tuple[str, str, str], tuple[tuple[str, ...], ...]]:
    """What each marked part consists of, whatever its numbers: the head of every table, the names of pictures."""
    found: dict[tuple[str, str, str], tuple[tuple[str, ...], ...]] = {}
    for part in MARK.finditer(page):
        lines = part.group(0).splitlines()[1:-1]
        heads = [line for line, below in zip(lines, lines[1:], strict=False) if set(below) == set("| -")]
        cells = [tuple(cell.strip() for cell in head.strip("|").split("|")) for head in heads]
        pictures = [("picture",) for line in lines if line.startswith("![")]
        found[part["what"], part["study"] or "", part["title"] or ""] = (*cells, *pictures)
    return found


def main() -> None:
    """Fill the page from a folder of studies; says what no study has filled."""
    parser = argparse.ArgumentParser(prog="benchmarks", description=main.__doc__)
    parser.add_argument("--runs", type=Path, default=ROOT / "runs" / "bench")
    asked = parser.parse_args()
    text, missing = fill(PAGE.read_text(), read(asked.runs), ROOT / PICTURES)
    PAGE.write_text(text)
    for picture in (ROOT / PICTURES).glob("*.svg"):
        if picture.name not in text:  # of a table that is shown no more
            picture.unlink()
    for words in missing:
        print(f"benchmarks: left as it was: {words}", file=sys.stderr)


if __name__ == "__main__":
    main()
