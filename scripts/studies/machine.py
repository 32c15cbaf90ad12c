"""Says what a study ran on: the processor, what else kept it busy, and the limits nothing on it can
pass.
"""

from __future__ import annotations

import json
import os
import platform
import time
from collections.abc import Callable
from dataclasses import asdict, dataclass
from hashlib import blake2b
from importlib.metadata import version
from pathlib import Path
from typing import Any, Literal

_COPIED = 1 << 26  # bytes: larger than any cache of a small machine
_MATRIX = 512
_OPERATIONS = 1000


@dataclass(frozen=True, slots=True)
class Machine:
    """What was found, and measured, at the start of a study; rates are the best of several short
    rounds.
    """

    processor: str
    cores: int
    memory_gib: float
    load: float  # mean number of running processes over the last minute: ours and all others
    copy_gib_per_second: float  # read and write counted once, one core
    matrix_gflops: float  # float32 torch.mm of 512 x 512, one core
    # one tiny torch operation: what a step pays per operation whatever its size
    operation_microseconds: float
    loop_microseconds: float  # one pass of an event loop: what a call pays before any work
    software: str
    # marks of the embedded models' weights: numbers made with others are another pair's
    pair: str = ""

    def words(self) -> tuple[str, ...]:
        """The facts as lines."""
        return (
            f"{self.processor}, {self.cores} cores, {self.memory_gib:.0f} GiB; load "
            f"{self.load:.1f} at the start",
            f"limits: copy {self.copy_gib_per_second:.1f} GiB/s and matrices "
            f"{self.matrix_gflops:.0f} GFLOP/s on one "
            f"core, {self.operation_microseconds:.1f} us per torch operation, "
            f"{self.loop_microseconds:.1f} us per pass "
            "of the event loop",
            self.software,
        )

    def fields(self) -> dict[str, str | int | float]:
        """Plain fields, for JSON."""
        return asdict(self)


def look(rounds: int = 15) -> Machine:
    """Measure; under a second on an idle machine. One thread, as everything else here is measured
    per core.
    """
    import torch

    threads = torch.get_num_threads()
    small = torch.zeros(8)
    source = torch.zeros(_COPIED // 4)
    left = torch.randn(_MATRIX, _MATRIX)
    right = torch.randn(_MATRIX, _MATRIX)
    copied = torch.empty_like(source)
    out = torch.zeros(8)

    def operations() -> None:
        for _ in range(_OPERATIONS):
            torch.add(small, small, out=out)

    torch.set_num_threads(1)
    try:
        copy = _best(lambda: copied.copy_(source), rounds)
        matrix = _best(lambda: torch.mm(left, right), rounds)
        operation = _best(operations, rounds) / _OPERATIONS
    finally:
        torch.set_num_threads(threads)
    versions = [f"{name} {version(name)}" for name in ("torch", "transformers", "numpy", "anyio")]
    return Machine(
        processor=_processor(),
        cores=os.cpu_count() or 1,
        memory_gib=os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES") / 2**30,
        load=os.getloadavg()[0],
        copy_gib_per_second=_COPIED / copy / 2**30,
        matrix_gflops=2 * _MATRIX**3 / matrix / 1e9,
        operation_microseconds=1e6 * operation,
        loop_microseconds=1e6 * _loop_seconds(),
        software=", ".join([f"Python {platform.python_version()}", *versions]),
        pair=pair_mark(),
    )


def shared_data() -> Path | None:
    """The folder of benchmarks and recorded traces, named by ATTS_SHARED_DATA or beside the
    checkout; None: absent.
    """
    named = os.environ.get("ATTS_SHARED_DATA")
    found = Path(named) if named else Path(__file__).resolve().parents[3] / "shared" / "data"
    return found if found.is_dir() else None


def rows_of(name: str) -> list[dict[str, Any]]:
    """The lines of a file of shared data; none where it is not at hand."""
    base = shared_data()
    if base is None or not (base / name).is_file():
        return []
    return [
        json.loads(line) for line in (base / name).read_text(encoding="utf-8").split("\n") if line
    ]


def pair_mark() -> str:
    """Four bytes of each embedded model's weights, hashed: who they are."""
    from atts.models import EMBEDDED, path

    def mark(role: Literal["draft", "target"]) -> str:
        return blake2b((path(role) / "model.safetensors").read_bytes(), digest_size=4).hexdigest()

    return ", ".join(f"{role} {mark(role)}" for role in EMBEDDED)


def pair_name() -> str:
    """The same for the name of a file: what was measured with another pair is another file."""
    return pair_mark().replace(", ", "-").replace(" ", "-")


def _processor() -> str:
    lines = Path("/proc/cpuinfo").read_text().splitlines() if Path("/proc/cpuinfo").exists() else []
    found = [line.split(":", 1)[1].strip() for line in lines if line.startswith("model name")]
    return found[0] if found else platform.processor() or platform.machine()


def _best(work: Callable[[], object], rounds: int) -> float:
    times: list[float] = []
    for _ in range(rounds):
        began = time.perf_counter()
        work()
        times.append(time.perf_counter() - began)
    return min(times)


def _loop_seconds(count: int = 2000) -> float:
    import anyio
    from anyio.lowlevel import checkpoint

    async def passes() -> float:
        began = time.perf_counter()
        for _ in range(count):
            await checkpoint()
        return (time.perf_counter() - began) / count

    return min(anyio.run(passes) for _ in range(3))
