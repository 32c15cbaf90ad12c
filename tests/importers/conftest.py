"""Small hand-made files of each import format, and a function that imports one."""

from __future__ import annotations

import json
import struct
import zipfile
import zlib
from collections.abc import Callable, Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

import anyio
import pytest

from atts.importers import FORMATS, Imported, ImportOptions, import_rollouts

Import = Callable[..., Imported]


def write_lines(path: Path, rows: Iterable[Mapping[str, Any]]) -> Path:
    """Write JSON Lines, and the folders above them."""
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return path


def write_eval(path: Path, samples: Sequence[Mapping[str, Any]]) -> Path:
    """Write an .eval archive as inspect_ai does: a header, and an entry per sample and epoch."""
    with zipfile.ZipFile(path, "w", zipfile.ZIP_DEFLATED) as archive:
        archive.writestr("_journal/start.json", json.dumps({"version": 2}))
        for sample in samples:
            name = f"samples/{sample['id']}_epoch_{sample['epoch']}.json"
            archive.writestr(name, json.dumps(sample))
        archive.writestr("summaries.json", "[]")
        archive.writestr("header.json", json.dumps({"version": 2, "status": "success"}))
    return path


def pack_again(path: Path) -> Path:
    """Pack the entries of an archive with Zstandard, each in two frames, as inspect_ai does."""
    arrow = pytest.importorskip("pyarrow", reason="pyarrow is not installed: it packs the archive")
    with zipfile.ZipFile(path) as archive:
        entries = [(entry.filename, archive.read(entry)) for entry in archive.infolist()]
    # Before Python 3.14, zipfile cannot pack with Zstandard, so this code stores the packed bytes
    # and changes the headers.
    packed = [
        b"".join(arrow.compress(part, "zstd", asbytes=True) for part in (data[:9], data[9:]))
        for _, data in entries
    ]
    with zipfile.ZipFile(path, "w") as archive:
        for (name, _), data in zip(entries, packed, strict=True):
            archive.writestr(name, data)
    whole = bytearray(path.read_bytes())
    with zipfile.ZipFile(path) as archive:
        starts = [entry.header_offset for entry in archive.infolist()]
        central = archive.start_dir
    for start, (name, data) in zip(starts, entries, strict=True):
        facts = struct.pack("<L", zlib.crc32(data))
        size = struct.pack("<L", len(data))
        for header, offset in ((start, 8), (central, 10)):
            whole[header + offset : header + offset + 2] = struct.pack("<H", 93)
            whole[header + offset + 6 : header + offset + 10] = facts
            whole[header + offset + 14 : header + offset + 18] = size
        central += 46 + len(name)
    path.write_bytes(whole)
    return path


def inspect_sample(name: int, epoch: int, answer: str, grade: str, **more: Any) -> dict[str, Any]:
    """Return one sample of an inspect_ai log on the question "What is {name} + 1?"."""
    return {
        "id": name,
        "epoch": epoch,
        "input": [{"role": "system", "content": "Be brief."},
                  {"role": "user", "content": f"What is {name} + 1?"}],
        "target": str(name + 1),
        "messages": [],
        "output": {
            "model": "gpt-x",
            "choices": [
                {
                    "message": {
                        "role": "assistant",
                        "content": [
                            {"type": "reasoning", "reasoning": "adding"},
                            {"type": "text", "text": f"ANSWER: {answer}"},
                        ],
                    },
                    "stop_reason": "stop",
                }
            ],
        },
        "scores": {"match": {"value": grade, "answer": answer}, "length": {"value": 3.5}},
        "model_usage": {
            "openai/gpt-x": {
                "input_tokens": 20, "input_tokens_cache_read": 5, "output_tokens": 7 + epoch,
                "total_cost": 0.001,
            }
        },
        "total_time": 1.5 * epoch,
        **more,
    }  # fmt: skip


@pytest.fixture
def run_import(tmp_path: Path) -> Import:
    """Return a function that imports a path into the folder `run`."""

    def call(format: str, path: Path, out: Path | None = None, **options: Any) -> Imported:
        async def main() -> Imported:
            return await import_rollouts(
                FORMATS[format], path, out or tmp_path / "run", ImportOptions(**options)
            )

        return anyio.run(main)

    return call
