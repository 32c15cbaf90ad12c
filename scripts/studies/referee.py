"""Compare rival stopping rules on recorded rollouts of a real pair, without a model."""

from __future__ import annotations

import gzip
import json
from collections.abc import Iterator, Mapping
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import anyio

from atts.analysis import Referee, RefereeOptions, RuleRow, referee_run
from atts.evaluators import Estimate
from atts.importers import FORMATS, ImportOptions, import_rollouts
from atts.journal import open_run
from scripts.studies.harness import Options, Row, Table, traces

FILE = "draft_target.jsonl.gz"
RUN = "ct0"
TITLE = "Rival rules on recorded rollouts"


def rollouts(path: Path) -> Iterator[Mapping[str, Any]]:
    """Yield the recorded rollouts of the run; those without an answer abstain."""
    with gzip.open(path, "rt", encoding="utf-8") as file:
        for line in file:
            record = json.loads(line)
            if record["run"] != RUN:
                continue
            answer = (record["answer_balanced"] or "").strip()
            yield {
                "id": str(record["question_id"]),
                "answer": "" if answer == "invalid" else answer,
                "reference": record["gold"],
                "sample": record["problem_index"] % 16,
                "seconds": record["duration_seconds"],
            }


def play(path: Path, orders: int, seed: int) -> Referee:
    """Import the rollouts, and let all rules play on them."""

    async def main(folder: Path) -> None:
        columns = {"answer": "answer"}
        await import_rollouts(
            FORMATS["jsonl"], folder / "rollouts.jsonl", folder / "run", ImportOptions(columns)
        )

    with TemporaryDirectory() as name:
        folder = Path(name)
        lines = "".join(json.dumps(row) + "\n" for row in rollouts(path))
        (folder / "rollouts.jsonl").write_text(lines, encoding="utf-8")
        anyio.run(main, folder)
        return referee_run(open_run(folder / "run"), RefereeOptions(orders=orders, seed=seed))


def row(played: RuleRow) -> Row:
    """Return one rule as a row of the table."""
    fixed = played.against_fixed
    need = played.problems_for_a_point
    return (
        played.rule,
        played.whose,
        _number(played.samples),
        round(played.seconds),
        f"{100 * played.changed.value:.2f} %",
        _share(played.accuracy),
        "" if fixed is None else _share(fixed.difference, "+"),
        "" if need is None else need,
    )


def _number(found: Estimate) -> str:
    if not found.low < found.high:
        return f"{found.value:.1f}"
    return f"{found.value:.1f} [{found.low:.1f}, {found.high:.1f}]"


def _share(found: Estimate, sign: str = "") -> str:
    return f"{found.value:{sign}.3f} [{found.low:{sign}.3f}, {found.high:{sign}.3f}]"


def study(options: Options) -> list[Table]:
    """Play every rule on the recorded rollouts, if they are at hand."""
    folder = traces()
    if folder is None:
        return []
    found = play(folder / FILE, options.pick(20, 200, 1_000), options.seed)
    by_rule = {played.rule: played for played in found.rows}
    beta = by_rule["beta"]
    headline = (
        f"of {found.most} samples, exact stops after **{by_rule['exact'].samples.value:.1f}** and "
        f"changes no vote; Beta after **{beta.samples.value:.1f}** and changes "
        f"{100 * beta.changed.value:.2f} %; doubling after "
        f"**{by_rule['doubling'].samples.value:.1f}** and changes "
        f"{100 * by_rule['doubling'].changed.value:.2f} %"
    )
    return [
        Table.of(
            TITLE,
            "rule | whose | samples | seconds | votes changed | accuracy | "
            "gain over a fixed number | problems for 1 point",
            map(row, found.rows),
            f"{found.problems} problems, {found.most} rollouts each, {found.orders} random orders "
            f"(seed {found.seed}). Brackets are 95 % intervals over problems.",
            *(f"- {played.rule}: {played.about}." for played in found.rows),
            headline=headline,
        )
    ]
