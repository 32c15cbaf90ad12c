"""Tests of hostile paths and data files: devices, pipes, sockets, links, compression bombs, false
headers.
"""

from __future__ import annotations

import gzip
import io
import json
import os
import socket
import stat
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from atts.calibration import StoredScores, read_scores
from atts.cli.app import run
from atts.errors import ATTSError, CalibrationInputError, DatasetError, StorageError
from atts.evaluators import load_dataset
from atts.files import write_out
from atts.journal import JOURNAL, MANIFEST
from atts.journal.directory import LOCK

Said = pytest.CaptureFixture[str]
Patch = pytest.MonkeyPatch
SCRIPTED = ("--draft", "scripted", "--target", "scripted", "--report", "none", "--samples", "2")


@pytest.fixture(scope="module")
def recorded(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Record a small run, and write a file of scores into the same folder."""
    place = tmp_path_factory.mktemp("recorded")
    assert run(("eval", "arithmetic[:1]", *SCRIPTED, "--out", str(place / "run"))) == 0
    (place / "scores.jsonl").write_text(
        "\n".join(json.dumps({"score": 1.5 + number / 8}) for number in range(9))
    )
    return place


WRITERS: dict[str, tuple[str, ...]] = {
    "report": ("report", "{}/run"),
    "trace": ("trace", "{}/run"),
    "import": ("calibration", "import", "{}/scores.jsonl"),
    "fit": ("calibration", "fit", "{}/scores.jsonl"),
}


def writes(name: str, recorded: Path, out: str) -> int:
    """Return a command line that writes the given file."""
    return run([*(word.replace("{}", str(recorded)) for word in WRITERS[name]), "--out", out])


def make_socket(path: Path) -> None:
    """Create a socket in the file system."""
    with socket.socket(socket.AF_UNIX) as made:
        made.bind(os.path.relpath(path))


PLACES: dict[str, Callable[[Path], object]] = {
    "pipe": os.mkfifo,
    "socket": make_socket,
    "directory": os.mkdir,
    "link to a device": lambda path: path.symlink_to(os.devnull),
    "link to a directory": lambda path: path.symlink_to(path.parent),
    "link in a circle": lambda path: path.symlink_to(path),
}


@pytest.mark.parametrize("name", WRITERS)
@pytest.mark.parametrize("place", PLACES)
def test_output_never_replaces_a_special_file(
    name: str,
    place: str,
    recorded: Path,
    tmp_path: Path,
    capsys: Said,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """A device, pipe or socket is refused as an output file with a line that names it and the exit
    code of a storage error. Nothing is replaced.
    """
    monkeypatch.chdir(tmp_path)
    PLACES[place](tmp_path / "out")
    before = os.lstat("out")
    for out in ("out", str(tmp_path / "out")):
        assert writes(name, recorded, out) == 4
        said = capsys.readouterr().err
        assert len(said.splitlines()) == 1
        assert "out" in said
    after = os.lstat("out")
    assert (after.st_ino, after.st_mode) == (before.st_ino, before.st_mode)
    assert sorted(os.listdir()) == ["out"]


@pytest.mark.parametrize("name", WRITERS)
def test_an_empty_path_and_a_dot_are_refused_as_output(
    name: str, recorded: Path, tmp_path: Path, capsys: Said, monkeypatch: Patch
) -> None:
    """An empty path and "." are refused with a message, and /dev/null stays a device."""
    monkeypatch.chdir(tmp_path)
    for out in (".", "", "..", "/dev/null", "/dev/full"):
        assert writes(name, recorded, out) == 4
        assert "not a file" in capsys.readouterr().err
    assert stat.S_ISCHR(os.stat("/dev/null").st_mode)
    assert stat.S_ISCHR(os.stat("/dev/full").st_mode)


@pytest.mark.parametrize("name", WRITERS)
def test_output_through_a_link_writes_the_target(name: str, recorded: Path, tmp_path: Path) -> None:
    """Output to a link writes the link's target and keeps the link, also through several links or
    if the target does not exist yet.
    """
    (tmp_path / "first").symlink_to("second")
    (tmp_path / "second").symlink_to(tmp_path / "inner" / "file")
    (tmp_path / "inner").mkdir()
    for _ in range(2):
        assert writes(name, recorded, str(tmp_path / "first")) == 0
        assert (tmp_path / "first").is_symlink()
        assert (tmp_path / "second").is_symlink()
        assert (tmp_path / "inner" / "file").stat().st_size > 20
        assert os.listdir(tmp_path / "inner") == ["file"]


@pytest.mark.parametrize("name", WRITERS)
def test_a_dash_is_standard_output(
    name: str, recorded: Path, tmp_path: Path, capsys: Said, monkeypatch: Patch
) -> None:
    """With `-` as output, standard output receives the bytes of the file and nothing else."""
    monkeypatch.chdir(tmp_path)
    assert writes(name, recorded, "file") == 0
    capsys.readouterr()
    assert writes(name, recorded, "-") == 0
    assert capsys.readouterr().out == Path("file").read_text(encoding="utf-8")
    assert os.listdir() == ["file"]


def test_a_run_needs_a_directory(
    recorded: Path, tmp_path: Path, capsys: Said, monkeypatch: Patch
) -> None:
    """Standard output and an empty path are refused as the directory of a run."""
    monkeypatch.chdir(tmp_path)
    for out in ("-", ""):
        assert run(["eval", "arithmetic[:1]", *SCRIPTED, "--out", out]) == 2
        assert "is not a directory" in capsys.readouterr().err
    assert run(["merge", str(recorded / "run"), "--out", "-"]) == 2
    assert not os.listdir()


def test_a_link_in_a_run_directory_is_not_followed(recorded: Path, tmp_path: Path) -> None:
    """If a run directory contains a link in place of a file, the link's target is not written.
    Another person may have made the directory.
    """
    precious = tmp_path / "precious"
    precious.write_text("mine")
    for name in ("report.html", "trace.json"):
        (recorded / "run" / name).unlink(missing_ok=True)
        (recorded / "run" / name).symlink_to(precious)
    assert run(["report", str(recorded / "run")]) == 0
    assert run(["trace", str(recorded / "run")]) == 0
    assert precious.read_text() == "mine"


def test_rewriting_a_users_file_keeps_its_permissions(tmp_path: Path) -> None:
    """The user's file is rewritten as a whole, and its permissions do not change."""
    (tmp_path / "f").write_text("old")
    (tmp_path / "f").chmod(0o600)
    write_out(tmp_path / "f", b"new")
    assert (tmp_path / "f").stat().st_mode & 0o777 == 0o600
    with pytest.raises(StorageError, match="not a file"):
        write_out(tmp_path, b"new")


READERS: dict[str, tuple[int, tuple[str, ...]]] = {
    "dataset": (2, ("datasets", "show", "{}/in.jsonl")),
    "graded": (2, ("grade", "{}/in.jsonl")),
    "results": (2, ("compare", "{}/in.jsonl", "{}/in.jsonl")),
    "scores": (2, ("calibration", "report", "{}/in.json")),
    "array": (2, ("calibration", "report", "{}/in.npy")),
    "records": (2, ("calibration", "replay", "{}/in.jsonl", "--rate", "0.3")),
    "configuration": (2, ("eval", "--config", "{}/in.toml")),
    "journal": (4, ("report", "{}")),
    "manifest": (4, ("report", "{}/half")),
}


@pytest.mark.parametrize("name", READERS)
def test_a_pipe_is_not_waited_for(name: str, tmp_path: Path, recorded: Path, capsys: Said) -> None:
    """A pipe in place of an input file is refused at once with its name, because reading it could
    wait forever.
    """
    manifest = (recorded / "run" / "manifest.json").read_bytes()
    (tmp_path / "manifest.json").write_bytes(manifest)
    (tmp_path / "half").mkdir()
    (tmp_path / "half" / "journal.jsonl").write_bytes(
        (recorded / "run" / "journal.jsonl").read_bytes()
    )
    for pipe in ("in.jsonl", "in.json", "in.npy", "in.toml", "journal.jsonl", "half/manifest.json"):
        os.mkfifo(tmp_path / pipe)
    code, words = READERS[name]
    assert run([word.replace("{}", str(tmp_path)) for word in words]) == code
    said = capsys.readouterr().err
    assert "Traceback" not in said
    assert str(tmp_path) in said


@pytest.mark.parametrize("name", [JOURNAL, MANIFEST, LOCK])
def test_a_run_directory_with_a_pipe_in_it_is_refused_before_models_load(
    name: str, tmp_path: Path, capsys: Said
) -> None:
    """A pipe in place of journal, manifest or lock is refused before a model is loaded, because
    reading a pipe could wait forever.
    """
    os.mkfifo(tmp_path / name)
    assert run(("eval", "arithmetic[:1]", *SCRIPTED, "--out", str(tmp_path))) == 4
    said = capsys.readouterr().err
    assert name in said
    assert "not a file" in said
    assert "loading" not in said


LIES = (
    "[" * 100_000, '{"score": NaN}', '{"score": true}', '{"score": "1.5"}', '{"score": -1}', '{"score": [[2]]}',
    '{"score": null}', '{"score": 1e999, "turn": true}', '{"score": 2, "turn": 1e400}', '{"score": 2, "turn": -1}',
    '{"score": 2, "question": "\\ud800"}', "9" * 5000, '{"score": ' + "9" * 5000 + "}", '{"a": ["2"]}', '{"a": [true]}',
    '{"a": {"b": [2]}}', "\x00", "{}" * 3, '{"kind": "atts scores"}', '{"kind": "atts scores", "digest": 1}',
    '{"kind": "atts calibrator", "digest": []}',
)  # fmt: skip


@pytest.mark.parametrize("suffix", [".json", ".jsonl"])
def test_values_that_are_not_scores_are_refused(suffix: str, tmp_path: Path) -> None:
    """A file of scores is refused if any value has the wrong type, is NaN, or is not a score."""
    for lie in LIES:
        (tmp_path / f"in{suffix}").write_text(lie)
        with pytest.raises(CalibrationInputError):
            read_scores(tmp_path / f"in{suffix}")


def test_a_saved_calibrator_with_wrong_types_is_refused(tmp_path: Path) -> None:
    """The state of saved scores is refused if any of its fields is missing or has a wrong type."""
    state = StoredScores.of([1.5, 2.0], 2).state()
    assert StoredScores.restore(state).scores == (1.5, 2.0)
    for name in ("scale", "fingerprint", "scores", "questions", "turns"):
        for wrong in (
            None,
            True,
            3,
            "x",
            [True, True],
            ["1.5", "2"],
            [[1], [2]],
            {"a": 1},
            [-1, 2],
            [1.5],
        ):
            if (name, type(wrong)) in (("fingerprint", dict), ("questions", list)) and wrong != [
                1.5
            ]:
                continue
            with pytest.raises(CalibrationInputError):
                StoredScores.restore({**state, name: wrong})
        with pytest.raises(CalibrationInputError):
            StoredScores.restore({key: value for key, value in state.items() if key != name})


def header(text: str, data: bytes = b"") -> bytes:
    """Make an .npy file with `text` as its header, followed by the data."""
    padded = text.encode("latin-1") + b"\n"
    return b"\x93NUMPY\x01\x00" + len(padded).to_bytes(2, "little") + padded + data


ARRAYS = (
    b"", b"\x93NUMPY", b"PK\x03\x04", b"\x80\x04N.", header("{"), header("(" * 4000), header("[" * 9000),
    header("{'descr': '<f8', 'fortran_order': False, 'shape': (1000000000000,), }"),
    header("{'descr': '<f8', 'fortran_order': False, 'shape': (-1,), }", bytes(8)),
    header("{'descr': '<f8', 'fortran_order': False, 'shape': (18446744073709551617,), }", bytes(8)),
    header("{'descr': '|O', 'fortran_order': False, 'shape': (1,), }", bytes(8)),
    header("{'descr': '<c16', 'fortran_order': False, 'shape': (1,), }", bytes(16)),
    header("{'descr': '<U2', 'fortran_order': False, 'shape': (1,), }", bytes(8)),
    header("{'descr': '|b1', 'fortran_order': False, 'shape': (1,), }", b"\x01"),
    header("{'descr': '<f8', 'fortran_order': False, 'shape': (), }", bytes(8)),
    header("{'descr': [('a', '<f8')], 'fortran_order': False, 'shape': (1,), }", bytes(8)),
    header("{'descr': '<f8', 'fortran_order': 3, 'shape': 'x', }", bytes(8)),
)  # fmt: skip


def test_arrays_with_false_headers_are_refused_unallocated(tmp_path: Path) -> None:
    """An .npy file is refused if its header declares more data than the file has, or data that are
    not numbers. A file with a correct header is read.
    """
    for data in ARRAYS:
        (tmp_path / "in.npy").write_bytes(data)
        with pytest.raises(CalibrationInputError):
            read_scores(tmp_path / "in.npy")
    honest = io.BytesIO()
    np.save(honest, np.array([1.5, 2.0]))
    (tmp_path / "in.npy").write_bytes(honest.getvalue())
    assert read_scores(tmp_path / "in.npy").scores == (1.5, 2.0)


def test_a_compression_bomb_is_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A small gzip file that would decompress to more than the limit is refused, and so is a
    damaged gzip file.
    """
    monkeypatch.setattr("atts.evaluators.datasets.tables._MOST_BYTES", 1 << 20)
    (tmp_path / "in.jsonl.gz").write_bytes(gzip.compress(b" " * (4 << 20)))
    with pytest.raises(DatasetError, match="more than 1 MiB"):
        load_dataset(str(tmp_path / "in.jsonl.gz"))
    whole = gzip.compress(b'{"problem": "1 + 1?", "answer": "2"}')
    for damaged in (whole[:-9], whole[:12] + b"\xff" * 8 + whole[20:], b"x" + whole):
        (tmp_path / "in.jsonl.gz").write_bytes(damaged)
        with pytest.raises(DatasetError):
            load_dataset(str(tmp_path / "in.jsonl.gz"))


def test_a_parquet_bomb_is_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A Parquet file of a few kilobytes is refused if its contents exceed the size limit, as with a
    value repeated in many rows.
    """
    pyarrow: Any = pytest.importorskip("pyarrow")
    parquet: Any = pytest.importorskip("pyarrow.parquet")
    monkeypatch.setattr("atts.evaluators.datasets.tables._MOST_BYTES", 1 << 20)
    path = tmp_path / "in.parquet"
    for text, rows in (
        ("x" * 4_000, 4_000),
        ("y" * (4 << 20), 1),
        ("1", 100_000),
        ("z" * (1 << 19), 64),
    ):
        columns = {
            "problem": pyarrow.array([text] * rows).dictionary_encode(),
            "answer": ["1"] * rows,
        }
        parquet.write_table(pyarrow.table(columns), path, compression="zstd")
        assert path.stat().st_size < 100_000
        pool = pyarrow.default_memory_pool()
        before = pool.bytes_allocated()
        with pytest.raises(DatasetError, match="more than 1 MiB"):
            load_dataset(str(path))
        assert pool.bytes_allocated() - before < 16 << 20
    parquet.write_table(
        pyarrow.table({"problem": ["1 + 1?"] * 3, "id": ["a", "b", "c"], "answer": ["2"] * 3}), path
    )
    assert [problem.answer for problem in load_dataset(str(path)).problems] == ["2"] * 3


@pytest.mark.parametrize(
    "text",
    [
        "[" * 100_000,
        '{"problem": NaN}',
        '{"problem": "\\ud800", "answer": "1"}',
        "9" * 5000,
        "\x00",
        "true",
    ],
)
def test_impossible_rows_are_refused(text: str, tmp_path: Path) -> None:
    """A file is refused with an error if its rows are nested too deeply, contain half of a
    surrogate pair, or are not objects.
    """
    for suffix in (".json", ".jsonl", ".csv", ".parquet"):
        (tmp_path / f"in{suffix}").write_text(text)
        with pytest.raises(ATTSError):
            load_dataset(str(tmp_path / f"in{suffix}"))


NAMES = ("a\x00b", "\ud800", "n" * 5000)
"""Names that no file can have."""


@pytest.mark.parametrize("name", NAMES, ids=["nothing in it", "half a character", "too long"])
def test_impossible_file_names_are_refused(
    name: str, recorded: Path, tmp_path: Path, capsys: Said
) -> None:
    """Impossible file names in the configuration and on the command line give a message and a
    documented exit code.
    """
    (tmp_path / "c.toml").write_text(f"out = {json.dumps(name)}") if name != "\ud800" else None
    scripted = ["--draft", "scripted", "--target", "scripted", "--report", "none"]
    configured = ["eval", "arithmetic[:1]", *scripted, "--config", str(tmp_path / "c.toml")]
    for words in (
        *([configured] if name != "\ud800" else []),
        ["eval", "arithmetic[:1]", *scripted, "--out", name],
        ["eval", name, *scripted, "--dry-run"],
        ["eval", "arithmetic[:1]", *scripted, "--scores", name, "--dry-run"],
        *(
            ["report", name],
            ["trace", name],
            ["replay", name],
            ["plan", name],
            ["journal", "check", name],
        ),
        *(["compare", str(recorded), name], ["grade", name], ["datasets", "show", name]),
        *(
            ["report", str(recorded), "--out", name],
            ["calibration", "fit", str(recorded), "--out", name],
        ),
    ):
        assert run(words) in (2, 4), words
        said = capsys.readouterr()
        assert "report it" not in said.err, words
        assert said.err


def test_slice_ends_with_thousands_of_digits_are_refused(capsys: Said) -> None:
    """A slice bound with thousands of digits, as in `arithmetic[999...:]`, is refused as a usage
    error and not as an internal error.
    """
    for name in ("arithmetic[" + "9" * 5000 + ":]", "arithmetic[:" + "9" * 5000 + "]"):
        assert run(["eval", name, "--draft", "scripted", "--target", "scripted", "--dry-run"]) in (
            2,
            4,
        )
        assert "report it" not in capsys.readouterr().err


CONFIGURATIONS = (
    'rate = "0.2"', "rate = true", "samples = 1.5", f"samples = {10**30}", 'samples = "8"', "rate = nan",
    "samples = [1]", "rate = 2020-01-01", "draft = 3", "a = " + "[" * 9000, "\x00",
)  # fmt: skip


@pytest.mark.parametrize("text", CONFIGURATIONS)
def test_a_configuration_with_wrong_types_is_refused(
    text: str, tmp_path: Path, capsys: Said
) -> None:
    """A setting of a wrong type is refused, such as a number instead of a string or a boolean
    instead of a number. The error names the file and the key.
    """
    (tmp_path / "c.toml").write_text(text)
    assert run(["config", "show", "--config", str(tmp_path / "c.toml")]) == 2
    assert "c.toml" in capsys.readouterr().err
