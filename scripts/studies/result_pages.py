"""Fill BENCHMARKS.md and docs/benchmarks/ from what studies wrote."""

from __future__ import annotations

import argparse
import json
import re
import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from scripts.studies.charts import draw
from scripts.studies.harness import EFFORTS, Row, Table, pair_mark

ROOT = Path(__file__).resolve().parents[2]
FOLDER = ROOT / "docs" / "benchmarks"
MARK = re.compile(
    r"(<!-- (?P<what>table|machine|summary)(?: (?P<study>[\w-]+))?(?:: (?P<title>.+?))? -->\n)(?P<held>.*?)"
    r"(<!-- end -->)",
    re.DOTALL,
)
_ON_THE_PAIR = {
    "pipelines",
    "speculation",
    "overlap",
    "against",
    "frontier",
    "ablations",
    "models",
    "local",
    "scale",
}


@dataclass(frozen=True, slots=True)
class Kept:
    """A table, and the name of its chart's file."""

    table: Table
    picture: str


@dataclass(frozen=True, slots=True)
class Record:
    """The results of a study, its parts together: tables by title, the most important first."""

    study: str
    effort: str
    machine: Mapping[str, Any]
    kept: Mapping[str, Kept]
    spent: Mapping[str, float]  # seconds that the last part took; nothing where it does not say

    @property
    def tables(self) -> tuple[Table, ...]:
        """Return the tables without their pictures."""
        return tuple(one.table for one in self.kept.values())

    def find(self, title: str) -> Kept:
        """Return the table whose title begins with these words: titles may differ by the number of
        problems.

        :raises KeyError: there is none.
        """
        for name, one in self.kept.items():
            if name.startswith(title):
                return one
        raise KeyError(f"{self.study} has no table {title!r}; it has {list(self.kept)}")

    def words(self) -> str:
        """Describe what the study ran on."""
        m = self.machine
        is_other = self.study in _ON_THE_PAIR and m.get("pair") != pair_mark()
        return (
            f"Effort `{self.effort}` on {m['processor']}, {m['cores']} cores, load {m['load']:.1f} "
            f"at the start; "
            f"limits of one core: copy {m['copy_gib_per_second']:.1f} GiB/s, matrices "
            f"{m['matrix_gflops']:.0f} "
            f"GFLOP/s, {m['operation_microseconds']:.1f} us per torch operation."
            + (f" It took {self.spent['processor']:.0f} s of processors." if self.spent else "")
            + (" The embedded pair was an earlier one, or is not recorded." if is_other else "")
        )


def read(folder: Path) -> dict[str, Record]:
    """Read every study below a folder.

    Parts of one (`pipelines-claim`) come together under its name.

    Of two tables of one title counts that of the greater effort, then the newer.
    """
    found: dict[str, Record] = {}
    written = [
        (path.stat().st_mtime, json.loads(path.read_text())) for path in folder.rglob("*.json")
    ]
    studies = [
        (EFFORTS.index(fields["effort"]), when, fields)
        for when, fields in written
        if isinstance(fields, dict) and {"study", "tables", "effort"} <= fields.keys()
    ]
    for _, _, fields in sorted(studies, key=lambda one: one[:2]):
        name = str(fields["study"])
        tables = [Table.read(table) for table in fields["tables"]]
        study = name.split("-")[0]
        made = {
            table.title: Kept(table, f"{name}-{number}.svg")
            for number, table in enumerate(tables, 1)
        }
        older = found[study].kept if study in found else {}
        kept = made | {title: one for title, one in older.items() if title not in made}
        found[study] = Record(
            study, str(fields["effort"]), fields.get("machine", {}), kept, fields.get("spent") or {}
        )
    return found


def fill(
    page: str, records: Mapping[str, Record], pictures: Path | None = None
) -> tuple[str, list[str]]:
    """Fill every marked part of a page, and return it with the marks that no record fills: these
    stay as they were.

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
        return summary(
            {name: record.tables for name, record in records.items()}, found["held"]
        ).body()
    if found["study"] not in records:
        raise KeyError(f"no study {found['study']} was run")
    record = records[found["study"]]
    if found["what"] == "machine":
        return record.words()
    one = record.find(found["title"])
    text = f"**{one.table.title}**\n\n{one.table.body()}"
    if one.table.chart is None:
        return text
    if pictures is not None:
        pictures.mkdir(parents=True, exist_ok=True)
        (pictures / one.picture).write_text(draw(one.table))
    return f"{text}\n\n![{one.table.title}]({one.picture})"


def pages(root: Path = ROOT) -> list[Path]:
    """Return the front page, then a page for every study."""
    return [root / "BENCHMARKS.md", *sorted((root / "docs" / "benchmarks").glob("*.md"))]


def main() -> None:
    """Fill the pages from a folder of studies; says what no study has filled."""
    parser = argparse.ArgumentParser(prog="benchmarks", description=main.__doc__)
    parser.add_argument("--runs", type=Path, default=ROOT / "runs" / "bench")
    records = read(parser.parse_args().runs)
    texts = ""
    for page in pages():
        text, missing = fill(page.read_text(), records, FOLDER)
        page.write_text(text)
        texts += text
        for words in missing:
            print(f"benchmarks: {page.name}: left as it was: {words}", file=sys.stderr)
    for picture in FOLDER.glob("*.svg"):
        if picture.name not in texts:  # of a table that is shown no more
            picture.unlink()


@dataclass(frozen=True, slots=True)
class Claim:
    """A reader's question, the study and the titles of the tables that answer it, the command, the
    limits.
    """

    question: str
    study: str
    titles: tuple[str, ...]
    command: str
    limits: str

    def answer(self, tables: Sequence[Table]) -> str:
        """Return the headlines of these tables, or nothing if one is missing.

        Of several with one beginning the first counts.
        """
        found = [
            next(
                (one.headline for one in tables if one.headline and one.title.startswith(title)), ""
            )
            for title in self.titles
        ]
        return "; ".join(found) if all(found) else ""


def summary(studies: Mapping[str, Sequence[Table]], held: str = "") -> Table:
    """Return the headlines of what was run.

    A claim whose study was not run keeps its row of the table, or says so.
    """
    kept = {
        line.split("|")[1].strip(): line.split("|")[2].strip()
        for line in held.splitlines()
        if "](" in line
    }
    rows: list[Row] = []
    for claim in CLAIMS:
        question = f"[{claim.question}](docs/benchmarks/{claim.study}.md)"
        answer = claim.answer(studies.get(claim.study, ())) or kept.get(question, "not measured")
        rows.append((question, answer, f"`{claim.command}`", claim.limits))
    return Table.of("In five minutes", "question | measured | command | limits", rows)


CLAIMS = tuple(
    Claim(*fields)
    for fields in (
        ("How much faster than target-only?", "pipelines", ("Time, throughput", "Time, latency"),
         "./scripts/bench pipelines-time",
         "embedded models on two shared cores; reading is cheap beside writing on a GPU, not here "
         "(next but one)"),
        ("At which accuracy?", "pipelines", ("The claim: ",), "./scripts/bench pipelines --full",
         "embedded models, graded arithmetic"),
        ("And where each engine has GPUs of its own?", "scale", ("What is gained",), "./scripts/scale",
         "virtual time with published costs; all methods write equally much; accuracy is not "
         "simulated"),
        ("How exact is the rate, beside the published rule?", "calibration",
         ("Every mode on the real stream at rate 0.4",), "./scripts/bench calibration",
         "recorded scores of one pair on 100 questions; what other decisions would have led to is "
         "not replayed"),
        ("And in a live run?", "against", ("Methods side by side: embedded pair",), "./scripts/bench against",
         "by question: each has few decisions: coins at the nominal rate would err as well, by "
         "less"),
        ("Would another default be better?", "ablations", ("Which defaults would change",), "./scripts/bench ablations",
         "the embedded pair; narrow wins are not looked for on so few problems"),
        ("What does the scheduler cost?", "graph", ("CPU microseconds per rollout of 12 nodes",),
         "./scripts/bench graph", "asyncio, this machine"),
        ("What does one client send to a server?", "remote", ("Throughput",), "./scripts/bench remote",
         "server and client share the machine's cores"),
        ("How fast is the local engine?", "local", ("Decoding",), "./scripts/bench local --full",
         "this machine, float32, one thread on each side"),
        ("Where does it saturate at cluster scale?", "scale", ("Replicas of both engines", "Work that grows"),
         "./scripts/scale",
         "virtual time; a fixed evaluation is bounded by its longest rollout; no networks, no load "
         "balancers"),
        ("How far off is the simulation?", "scale", ("Predicted and measured",), "./scripts/bench scale",
         "validated on this machine's embedded pair only; GPU costs are published fits"),
        ("Are the paper's 56.7x and 4.14x reachable?", "scale", ("The published headline figures",), "./scripts/scale",
         "the paper does not state its baselines; ours are named"),
        ("How right are verdicts on answers?", "grading", ("model answers",), "./scripts/bench grading",
         "pairs judged by one reader; every checker with its own defaults"),
        ("Does a killed run lose anything?", "crash", ("Runs killed",), "./scripts/bench crash --full",
         "scripted engines, a frozen gate"),
        ("Does it run for ever?", "soak", ("Soak: what the process holds",), "./scripts/bench soak --full",
         "an hour, not a month"),
    )
)  # fmt: skip


if __name__ == "__main__":
    main()
