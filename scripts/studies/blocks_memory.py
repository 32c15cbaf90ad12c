"""What the engines of a family take of a machine's memory: in one zoo, and each in a process of its own.

Read is the proportional share (`Pss`) of the processes that compute, while each engine writes: pages that several
processes share, of libraries and mapped weights, count once among them.
"""

from __future__ import annotations

import tempfile
from collections.abc import Sequence
from contextlib import AsyncExitStack
from functools import partial
from pathlib import Path

import anyio

from atts.blocks import Zoo
from atts.core import SampleRequest, Sampling
from atts.local import LocalEngine, LocalOptions
from atts.models import path
from atts.seeds import Seed
from atts.tasks import collect
from scripts.studies.harness import Options, Row, Table, children, say

RELATIVES = ("draft", "wordings", "operations", "tuned")
FAMILIES: dict[str, tuple[str, ...]] = {
    "the target alone": ("base",),
    "the target and a draft on its trunk": ("base", "draft"),
    "four tenants": ("base", "wordings", "operations", "tuned"),
}
_OPTIONS = LocalOptions(device="cpu", threads=1)
_REQUESTS, _TOKENS = 16, 200


def study(options: Options) -> list[Table]:
    """Megabytes of the shipped family, in one loop and apart."""
    rows, rounds = list[Row](), options.pick(1, 3, 5)
    with tempfile.TemporaryDirectory() as folder:
        zoo = family(Path(folder))
        for words, names in FAMILIES.items():
            together = max(anyio.run(_megabytes, zoo, [(name, 0) for name in names]) for _ in range(rounds))
            alone = max(anyio.run(_megabytes, zoo, [(n, at) for at, n in enumerate(names)]) for _ in range(rounds))
            say(f"{words}: {together:.0f} MB, apart {alone:.0f}")
            rows.append((words, len(names), together, alone, f"{together / alone - 1:+.0%}"))
    title = (
        f"Memory of a family's processes, MB, most of {rounds} rounds; {_REQUESTS} requests of {_TOKENS} tokens to each"
    )
    return [Table.of(title, "models | engines | one loop | a process each | to these", rows)]


def family(folder: Path) -> Zoo:
    """A zoo of the embedded target and its shipped relatives."""
    zoo, shipped = Zoo(folder / "zoo"), path("target").parent / "family"
    zoo.add("base", path("target"))
    for name in RELATIVES:
        zoo.add(name, shipped / name, "base")
    return zoo


async def _megabytes(zoo: Zoo, engines: Sequence[tuple[str, int]]) -> float:
    """What their processes take at the end of some work; those of one number share one."""
    async with AsyncExitStack() as stack:
        opened = [LocalEngine(zoo.folder(name), options=_OPTIONS, replica=at) for name, at in engines]
        for engine in opened:
            await stack.enter_async_context(engine)
        await collect([partial(engine.sample, _request(number)) for number in range(_REQUESTS) for engine in opened])
        return sum(map(resident, children())) / 1e3


def _request(number: int) -> SampleRequest:
    ids = tuple(range(3 + number, 43 + number))
    return SampleRequest(ids, _TOKENS, Sampling(1.0), seed=Seed(number, "p", 0, 0, "target", 0))


def resident(process: Path) -> int:
    """Kilobytes of memory, pages that processes share in parts."""
    lines = (process / "smaps_rollup").read_text().splitlines()
    return next(int(line.split()[1]) for line in lines if line.startswith("Pss:"))
