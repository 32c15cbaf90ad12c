"""Tests of edited, damaged or cut journals: faults are named, and the undamaged part can be saved."""

from __future__ import annotations

import json
import os
import random
import shutil
import zlib
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from atts.cli.app import run as command
from atts.errors import JournalError
from atts.journal import JOURNAL, LOCK, MANIFEST, RunState, check_journal, locked, open_run, salvage

KINDS = ("finished", "rounds", "coin", "merged", "killed")
READERS = (
    "journal check",
    "report --format json --out -",
    "replay --json",
    "plan --json",
    "calibration check",
)
Harm = Callable[[Path], object]
VALUES: tuple[Any, ...] = (
    None,
    True,
    -1,
    0,
    7,
    10**20,
    0.5,
    -2.5,
    1e308,
    "",
    "x",
    "nan",
    "null",
    ["f4", "AAAA"],
    {"kind": "observed"},
    [],
    [1],
    {},
    {"a": 1},
)


def places(value: Any, path: tuple[Any, ...] = ()) -> list[tuple[Any, ...]]:
    """Return the path, a tuple of keys and indices, of every value inside a JSON value."""
    rows = (
        value.items()
        if isinstance(value, dict)
        else enumerate(value)
        if isinstance(value, list)
        else ()
    )
    found = [place for name, part in rows for place in places(part, (*path, name))]
    return [*found, path] if path else found


def edited(rows: list[dict[str, Any]], draws: random.Random) -> list[dict[str, Any]]:
    """Make one edit: change, leave out or swap a value, or leave out, double or move a line."""
    rows = json.loads(json.dumps(rows))
    kind = draws.choice(("value", "value", "value", "sibling", "missing", "drop", "double", "swap"))
    at = draws.randrange(1, len(rows))
    if kind == "drop":
        del rows[at]
    elif kind == "double":
        rows.insert(at, json.loads(json.dumps(rows[at])))
    elif kind == "swap":
        to = draws.randrange(1, len(rows))
        rows[at], rows[to] = rows[to], rows[at]
    else:
        *way, last = draws.choice(
            [place for place in places(rows[at]) if place[0] not in ("n", "crc")]
        )
        holder: Any = rows[at]
        for name in way:
            holder = holder[name]
        if kind == "missing":
            del holder[last]
        elif kind == "value":
            holder[last] = draws.choice(VALUES)
        else:
            other = draws.choice(rows)
            holder[last] = (
                other.get(last, draws.choice(list(other.values()))) if isinstance(last, str) else 3
            )
    return rows


def read_rows(path: Path) -> list[dict[str, Any]]:
    """Read the lines of a journal as JSON."""
    lines = path.read_bytes().splitlines(keepends=True)
    return [json.loads(line) for line in lines if line.endswith(b"\n")]


def write_rows(path: Path, rows: list[dict[str, Any]], crc: int = 0) -> None:
    """Write lines with the numbers and checksums that a reader expects."""
    lines = b""
    for number, row in enumerate(rows):
        told = {
            "n": number,
            **{name: part for name, part in row.items() if name not in ("n", "crc")},
        }
        body = json.dumps(told, separators=(",", ":")).encode()[:-1]
        crc = zlib.crc32(body, crc)
        lines += body + b',"crc":"%08x"}\n' % crc
    path.write_bytes(lines)


@pytest.fixture
def run(tmp_path: Path, runs: Path) -> Path:
    """Copy a finished run."""
    return shutil.copytree(runs / "finished", tmp_path / "run")


def fuzz(runs: Path, folder: Path, count: int, seed: int, readers: tuple[str, ...]) -> set[int]:
    """Edit recorded runs many times, read each, and return the exit codes; a traceback raises an
    error.
    """
    draws = random.Random(seed)
    codes = set[int]()
    rows = {kind: read_rows(runs / kind / JOURNAL) for kind in KINDS}
    for number in range(count):
        kind = draws.choice(KINDS)
        where = shutil.copytree(runs / kind, folder / str(number))
        write_rows(where / JOURNAL, edited(rows[kind], draws))
        for reader in readers:
            name, *options = reader.split()
            verb = [name, options.pop(0)] if name in ("journal", "calibration") else [name]
            codes.add(command([*verb, str(where), *options]))
        shutil.rmtree(where)
    return codes


@pytest.mark.parametrize(
    ("count", "readers"),
    [(30, READERS[:1]), pytest.param(300, READERS, marks=pytest.mark.slow)],
)
def test_edits_with_valid_checksums_never_give_a_traceback(
    runs: Path, tmp_path: Path, count: int, readers: tuple[str, ...]
) -> None:
    """For edited journals with valid checksums, each reader ends with an answer or a documented
    exit code.
    """
    assert {0, 5} <= fuzz(runs, tmp_path, count, 2, readers) <= {0, 2, 4, 5}


def torn(path: Path) -> None:
    """Cut off the end of the last line."""
    path.write_bytes(path.read_bytes()[:-7])


def bent(path: Path) -> None:
    """Change one byte in the middle."""
    data = bytearray(path.read_bytes())
    data[len(data) // 2] ^= 1
    path.write_bytes(bytes(data))


def gap(path: Path) -> None:
    """Remove a line from the middle."""
    lines = path.read_bytes().splitlines(keepends=True)
    path.write_bytes(b"".join(lines[:40] + lines[41:]))


@pytest.mark.parametrize(("harm", "code"), [(lambda path: None, 0), (torn, 0), (bent, 5), (gap, 5)])
def test_salvage_saves_the_part_before_the_damage(
    run: Path, capsys: pytest.CaptureFixture[str], harm: Harm, code: int
) -> None:
    """Salvage saves the undamaged beginning as a separate run, and does not change the damaged
    run.
    """
    harm(run / JOURNAL)
    before = (run / JOURNAL).read_bytes()
    assert command(["journal", "check", str(run), "--json"]) == code
    found = json.loads(capsys.readouterr().out)
    assert bool(found["damage"]) == (code == 5)
    assert command(["journal", "salvage", str(run), "--out", str(run.parent / "saved")]) == 0
    saved = check_journal(run.parent / "saved")
    assert (saved.lines, saved.lost, saved.damage) == (found["lines"], 0, "")
    assert (run / JOURNAL).read_bytes() == before
    assert before.startswith((run.parent / "saved" / JOURNAL).read_bytes())
    state = RunState()
    for entry in open_run(run.parent / "saved").entries():
        state.apply(entry)
    assert sum(map(state.is_over, state.finished)) == found["complete"]


def piped(run: Path) -> None:
    """Put a pipe in place of the journal."""
    (run / JOURNAL).unlink()
    os.mkfifo(run / JOURNAL)


MISUSES: dict[str, tuple[Harm, str, int, str]] = {
    "no such run": (shutil.rmtree, "check RUN", 4, "no run"),
    "no manifest": (lambda run: (run / MANIFEST).unlink(), "salvage RUN --out OUT", 4, "no run"),
    "a manifest that is none": (
        lambda run: (run / MANIFEST).write_text("{"),
        "salvage RUN --out OUT",
        4,
        "manifest",
    ),
    "nothing whole": (
        lambda run: (run / JOURNAL).write_bytes(b"x\ny\n"),
        "salvage RUN --out OUT",
        4,
        "no line that can be saved",
    ),
    "an empty journal": (
        lambda run: (run / JOURNAL).write_bytes(b""),
        "salvage RUN --out OUT",
        4,
        "no line that can be saved",
    ),
    "a pipe": (piped, "check RUN", 4, "file"),
    "nowhere to save to": (lambda run: None, "salvage RUN", 2, "--out"),
    "saved into itself": (lambda run: None, "salvage RUN --out RUN", 2, "not empty"),
    "an unknown verb": (lambda run: None, "mend RUN", 2, "mend"),
}


@pytest.mark.parametrize("name", MISUSES)
def test_misused_salvage_is_refused(
    run: Path, capsys: pytest.CaptureFixture[str], name: str
) -> None:
    """Misused `atts journal salvage` ends with one message and the documented exit code, and writes
    nothing.
    """
    harm, words, code, said = MISUSES[name]
    harm(run)
    places = {"RUN": str(run), "OUT": str(run.parent / "out")}
    assert command(["journal", *(places.get(word, word) for word in words.split())]) == code
    assert said in capsys.readouterr().err


def test_a_run_that_is_being_written_is_not_salvaged(run: Path, tmp_path: Path) -> None:
    """A run in progress is not salvaged, because its last line may not be complete yet."""
    with locked(run / LOCK, run), pytest.raises(JournalError, match="is writing to this run"):
        salvage(run, tmp_path / "out")
