"""Fuzz tests with fixed seeds: any input ends with a message and a documented exit code.

`ATTS_FUZZ=n` makes n cases of each kind; a case can be repeated from its number alone.
"""

from __future__ import annotations

import json
import os
import random
import re
import shutil
import sys
import zlib
from collections import Counter
from collections.abc import Iterator
from hashlib import blake2b
from pathlib import Path
from typing import Any

import pytest
from typer.testing import CliRunner

from atts.api.keys import keys_of
from atts.api.setup import Setup
from atts.calibration import MODES, Calibrator
from atts.cli.app import COMMANDS, EXIT_CODES, build, run
from atts.errors import CalibrationInputError, EngineError
from atts.journal import JOURNAL
from atts.local.model_config import read_model_config
from atts.models import path as model_path
from atts.models.tokenizers import ModelTokenizer

pytestmark = pytest.mark.slow
COUNT = int(os.environ.get("ATTS_FUZZ", "60"))
SCRIPTED = ("--draft", "scripted", "--target", "scripted", "--report", "none")
OURS = "please report it"
VALUES: tuple[Any, ...] = (
    None, True, False, 0, 1, -1, 7, 0.5, -0.0, 1e308, -1e308, 5e-324, 1e16, 2**31, 2**53 + 1, 2**63, 2**64, 10**30,
    -(10**30), "", " ", "x", "nan", "inf", "1", "0x10", "-", "--", "@x", "u4:AAAA", "f8:AAAAAAAA", "\x00", "\x1b[2J",
    "\u202e", "é" * 300, "\ud800", "../../x", "/", ".", "~", "a/b", "{x}", "%s", "[]", "a\nb", "9" * 5000, [], {}, [[]],
    [1], [None], ["x"], {"a": 1}, {"": None}, [[1, 2], [3]], [1, "x", None], "scripted", "embedded", "hf:",
    "vllm:http://[::1", "sk-" + "a" * 40,
)  # fmt: skip
Said = pytest.CaptureFixture[str]


def cases() -> Iterator[tuple[int, random.Random]]:
    """Yield the numbers of the cases, each with its own random generator."""
    return ((number, random.Random(f"case {number}")) for number in range(COUNT))


def places(value: Any, path: tuple[Any, ...] = ()) -> Iterator[tuple[Any, ...]]:
    """Yield the path of every part of a JSON value."""
    if path:
        yield path
    rows: Any = (
        value.items()
        if isinstance(value, dict)
        else enumerate(value)
        if isinstance(value, list)
        else ()
    )
    for name, part in rows:
        yield from places(part, (*path, name))


def mutated(value: Any, draws: random.Random) -> Any:
    """Return a copy with some parts replaced, left out, doubled, renamed or exchanged."""
    value = json.loads(json.dumps(value))
    for _ in range(draws.choice((1, 1, 1, 2, 4))):
        ways = list(places(value))
        if not ways:
            break
        *way, last = draws.choice(ways)
        holder: Any = value
        for name in way:
            holder = holder[name]
        kind = draws.choice(("value", "value", "value", "missing", "other", "extra", "deep"))
        if kind == "missing":
            del holder[last]
        elif kind == "extra" and isinstance(holder, dict):
            holder[str(draws.choice(VALUES))] = draws.choice(VALUES)
        elif kind == "deep":
            holder[last] = json.loads("[" * 60 + "]" * 60)
        elif kind == "other":
            *way, other = draws.choice(ways)
            found: Any = value
            try:
                for name in (*way, other):
                    found = found[name]
            except (LookupError, TypeError):
                continue
            holder[last] = json.loads(json.dumps(found))
        else:
            holder[last] = draws.choice(VALUES)
    return value


def checked(words: list[str], case: object, capsys: Said, counts: Counter[int]) -> int:
    """Run one command line, and check that its exit code is documented and is not an internal
    error.
    """
    capsys.readouterr()
    code = run(words)
    said = capsys.readouterr()
    assert code in EXIT_CODES, (case, words, code)
    assert OURS not in said.err, (case, words, said.err)
    assert "Traceback" not in said.err + said.out, (case, words, said.err)
    if code:
        assert said.err.strip() or said.out.strip(), (case, words, code)
    counts[code] += 1
    return code


def report(kind: str, counts: Counter[int]) -> None:
    """Print the number of cases for each exit code."""
    sys.stderr.write(
        f"fuzz: {counts.total()} {kind}, by exit code {dict(sorted(counts.items()))}\n"
    )


@pytest.fixture(autouse=True)
def _here(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Run the test in an empty folder without ATTS_* variables."""
    (tmp_path / "here").mkdir()
    monkeypatch.chdir(tmp_path / "here")
    for name in [name for name in os.environ if name.startswith("ATTS_")]:
        monkeypatch.delenv(name)


@pytest.fixture(scope="module")
def recorded(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Make a small run of scripted models."""
    out = tmp_path_factory.mktemp("runs") / "run"
    with pytest.MonkeyPatch.context() as patch:
        for name in [name for name in os.environ if name.startswith("ATTS_")]:
            patch.delenv(name)
        assert (
            run(
                (
                    "eval",
                    "arithmetic[:2]",
                    "--samples",
                    "2",
                    "--turns",
                    "3",
                    *SCRIPTED,
                    "--out",
                    str(out),
                )
            )
            == 0
        )
    return out


def toml(value: Any) -> str:
    """Write a value as TOML. Null becomes an empty string, and values that TOML does not have give
    invalid TOML.
    """
    if isinstance(value, dict):
        return (
            "{"
            + ", ".join(f"{json.dumps(str(name))} = {toml(part)}" for name, part in value.items())
            + "}"
        )
    if isinstance(value, list):
        return "[" + ", ".join(map(toml, value)) + "]"
    return '""' if value is None else json.dumps(value, ensure_ascii=True)


KEYS = sorted({key.name for key in keys_of(Setup, Setup())})


def test_random_configurations_end_with_a_message(capsys: Said) -> None:
    """Configuration files, environment variables and `--set` give random values to random keys.
    Showing the settings and a dry run then end with a documented exit code.
    """
    counts = Counter[int]()
    for number, draws in cases():
        keys = draws.sample(KEYS, draws.choice((1, 1, 2, 4)))
        rows = [f"{name} = {toml(draws.choice(VALUES))}" for name in keys]
        if draws.random() < 0.2:
            rows.insert(
                draws.randrange(len(rows) + 1),
                draws.choice(("[", "[x]", "a.b = 1", "=", "\x00", "rate = 1\nrate = 2")),
            )
        Path("c.toml").write_bytes("\n".join(rows).encode("utf-8", "surrogatepass"))
        checked(["config", "show", "--config", "c.toml"], number, capsys, counts)
        dry = ["eval", "arithmetic[:1]", "--config", "c.toml", "--dry-run"]
        if not any("draft" in row or "target" in row for row in rows):
            dry += ["--draft", "scripted", "--target", "scripted"]
        checked(dry, number, capsys, counts)
        given = [word for name in keys for word in ("--set", f"{name}={draws.choice(VALUES)}")]
        checked(["config", "show", *given], number, capsys, counts)
    report("configurations", counts)


def vocabulary(command: str) -> list[str]:
    """Return the options and commands that this command's help lists."""
    text = CliRunner().invoke(build([command]), [command, "--help"], env={"COLUMNS": "200"}).output
    return sorted(set(re.findall(r"--[a-z][a-z-]+", text)) - {"--help"})


NEVER = {"doctor", "probe", "solve"}
"""Commands that are left out here, because they load models or call servers; other tests cover
them.
"""


def test_random_command_lines_end_with_a_message(
    recorded: Path, capsys: Said, tmp_path: Path
) -> None:
    """Random command lines end with a message and a documented exit code. Their options have random
    values and any order, and may be missing or repeated.
    """
    counts = Counter[int]()
    commands = sorted(COMMANDS.keys() - NEVER)
    options = {command: vocabulary(command) for command in commands}
    shutil.copytree(recorded, "run")
    Path("mine.jsonl").write_text('{"problem": "1 + 1?", "answer": "2"}\n')
    Path("scores.jsonl").write_text('{"score": 1.5}\n{"score": 2.5}\n')
    things = [
        "run",
        "mine.jsonl",
        "scores.jsonl",
        "arithmetic[:1]",
        "missing",
        "",
        "-",
        "out",
        "0.5",
        "3",
        "1/2",
        "x=1",
        "rate=0.5",
    ]
    groups = {
        "calibration": ("fit", "check", "import", "report", "replay"),
        "config": ("show",),
        "datasets": ("show", "list"),
        "journal": ("check", "salvage"),
    }
    for number, draws in cases():
        command = draws.choice(commands)
        words = [command, *([draws.choice(groups[command])] if command in groups else [])]
        for _ in range(draws.randrange(5)):
            word = str(draws.choice((*things, *things, *VALUES)))
            is_path_out_of_here = word.startswith(("/", "~", "..")) or "embedded" in word
            words += (
                [draws.choice(options[command])]
                if options[command] and draws.random() < 0.6
                else []
            )
            words += ["x" if is_path_out_of_here else word]
        if command == "eval":
            words += [
                "arithmetic[:1]",
                "--draft",
                "scripted",
                "--target",
                "scripted",
                "--report",
                "none",
                "--limit",
                "1",
                "--dry-run",
            ]
        try:
            [word.encode("utf-8", "surrogateescape") for word in words]
        except UnicodeEncodeError:
            # an operating system cannot pass this argument, so the argument is replaced
            words = [word.encode("utf-8", "replace").decode() for word in words]
        if any("\0" in word for word in words):
            words = [word.replace("\0", "") for word in words]
        checked(words, number, capsys, counts)
    report("command lines", counts)


def chained(rows: list[dict[str, Any]]) -> bytes:
    """Write rows as journal lines with correct numbers and checksums."""
    crc = 0
    lines = list[bytes]()
    for place, row in enumerate(rows):
        body = json.dumps({"n": place, **{name: part for name, part in row.items() if name not in ("n", "crc")}},
                          separators=(",", ":")).encode()[:-1]  # fmt: skip
        crc = zlib.crc32(body, crc)
        lines.append(body + f',"crc":"{crc:08x}"}}\n'.encode())
    return b"".join(lines)


def edited(rows: list[dict[str, Any]], draws: random.Random) -> list[dict[str, Any]]:
    """Change, leave out, double or exchange lines, or cut off the end."""
    rows = [dict(row) for row in rows]
    for _ in range(draws.choice((1, 1, 2, 3))):
        at = draws.randrange(len(rows))
        to = draws.randrange(len(rows))
        match draws.choice(("edit", "edit", "edit", "edit", "drop", "double", "swap", "cut")):
            case "edit":
                rows[at] = mutated(rows[at], draws)
            case "drop":
                del rows[at]
            case "double":
                rows.insert(to, dict(rows[at]))
            case "swap":
                rows[at], rows[to] = rows[to], rows[at]
            case _:
                del rows[max(1, at) :]
        if not rows:
            break
    return rows


READERS = (
    "journal check", "report --format json --out -", "report --format md --out -", "replay --json", "plan --json",
    "trace --out -", "calibration check", "calibration fit --out made.json",
)  # fmt: skip


def test_edited_journals_end_with_a_message(recorded: Path, capsys: Said) -> None:
    """Each reader and a resumed run end with a message for a journal that was edited and given
    valid checksums.
    """
    counts = Counter[int]()
    resumed = Counter[int]()
    rows = list(map(json.loads, (recorded / JOURNAL).read_text().splitlines()))
    for number, draws in cases():
        folder = Path(f"run {number}")
        shutil.copytree(recorded, folder)
        (folder / JOURNAL).write_bytes(chained(edited(rows, draws)))
        for reader in draws.sample(READERS, 2):
            command, *rest = reader.split(" --", 1)
            checked(
                [*command.split(), str(folder), *(f"--{rest[0]}".split() if rest else [])],
                number,
                capsys,
                counts,
            )
        words = [
            "eval",
            "arithmetic[:2]",
            "--samples",
            "2",
            "--turns",
            "3",
            *SCRIPTED,
            "--out",
            str(folder),
        ]
        if checked(words, number, capsys, resumed) == 0:
            assert checked(["journal", "check", str(folder)], number, capsys, counts) == 0, number
        shutil.rmtree(folder)
    report("readings of edited journals", counts)
    report("runs that go on with edited journals", resumed)


def test_edited_manifests_end_with_a_message(recorded: Path, capsys: Said) -> None:
    """Each reader and a resumed run end with a message for a manifest that was edited and given a
    valid checksum.
    """
    counts = Counter[int]()
    whole = json.loads((recorded / "manifest.json").read_text())
    whole.pop("checksum")
    for number, draws in cases():
        folder = Path(f"run {number}")
        shutil.copytree(recorded, folder)
        data = mutated(whole, draws)
        mark = blake2b(json.dumps(data, sort_keys=True).encode(), digest_size=16).hexdigest()
        data = {**data, "checksum": mark} if isinstance(data, dict) else data
        (folder / "manifest.json").write_text(json.dumps(data))
        for reader in draws.sample(READERS, 2):
            command, *rest = reader.split(" --", 1)
            checked(
                [*command.split(), str(folder), *(f"--{rest[0]}".split() if rest else [])],
                number,
                capsys,
                counts,
            )
        words = [
            "eval",
            "arithmetic[:2]",
            "--samples",
            "2",
            "--turns",
            "3",
            *SCRIPTED,
            "--out",
            str(folder),
        ]
        checked(words, number, capsys, counts)
        shutil.rmtree(folder)
    report("uses of edited manifests", counts)


def test_edited_calibrators_are_restored_or_refused(tmp_path: Path) -> None:
    """A calibrator's state that was edited and given a valid digest is either refused, or restored
    so that the calibrator can make decisions.
    """
    ended = Counter[str]()
    for _, draws in cases():
        calibrator = Calibrator(0.3, draws.choice(MODES), stored=[1.1, 1.2, 1.7, 2.0])
        for place in range(30):
            calibrator.observe(
                calibrator.decide(1 + draws.random(), f"q{place % 3}", place % 2, 0, place ^ 1)
            )
        calibrator.save(tmp_path / "state.json")
        state = json.loads((tmp_path / "state.json").read_text())
        state.pop("digest")
        try:
            again = Calibrator.restored(mutated(state, draws))
        except CalibrationInputError:
            ended["refused"] += 1
            continue
        for place in range(10):
            again.observe(again.decide(1 + draws.random(), "q1", place % 2, 0, 30 + place))
        ended["restored"] += 1
    sys.stderr.write(f"fuzz: {ended.total()} calibrator states: {dict(ended)}\n")


def test_edited_model_folders_are_read_or_refused(tmp_path: Path) -> None:
    """Edited configurations and tokenizers are read, or refused with the name of the folder."""
    ended = Counter[str]()
    files = ("config.json", "tokenizer_config.json", "tokenizer.json", "generation_config.json")
    here = [name for name in files if (model_path("draft") / name).is_file()]
    wholes = {name: json.loads((model_path("draft") / name).read_text()) for name in here}
    shutil.copytree(model_path("draft"), tmp_path / "model")
    for _, draws in cases():
        name = draws.choice(("config.json", *here))
        (tmp_path / "model" / name).write_text(json.dumps(mutated(wholes[name], draws)))
        try:
            read_model_config(tmp_path / "model", "mine")
            ModelTokenizer(tmp_path / "model", "mine")
            ended["read"] += 1
        except EngineError:
            ended["refused"] += 1
        (tmp_path / "model" / name).write_text(json.dumps(wholes[name]))
    sys.stderr.write(f"fuzz: {ended.total()} model folders: {dict(ended)}\n")
