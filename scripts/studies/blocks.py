"""A zoo's one loop beside an engine for each of four tenants: the same requests on one core, in its
processor time.

Requests arrive by a Poisson process; the clock is the processor time of the steps, so that a busy
machine changes nothing but the noise. The four engines take turns on the core, step by step, as
processes of equal rights do. The tenants are the embedded target, two adapters of its last layers,
and one whose last layers are tuned; their new numbers are random, for what a step takes does not
depend on them. Prompts are each request's own, or common to four requests that follow each other,
of whichever tenants.
"""

# pyright: reportPrivateUsage=false

from __future__ import annotations

import json
import random
import shutil
import statistics
import tempfile
import time
from collections.abc import Iterable, Sequence
from contextlib import AsyncExitStack
from functools import partial
from pathlib import Path
from typing import Any, Literal, NamedTuple, get_args

import anyio
import torch
from safetensors.torch import load_file, save_file

from atts.blocks import Zoo
from atts.concurrency import collect
from atts.core import SampleRequest, Sampling
from atts.local import LocalEngine, LocalOptions, check_model
from atts.local.build import build_loop
from atts.local.chains import ChainModel
from atts.local.loop import StepLoop
from atts.local.messages import AddChain, LoopReport, SampleReply, Submit, WorkerConfig
from atts.local.native_model import NativeModel
from atts.models import path
from atts.sampling import Seed
from scripts.studies.harness import Options, Row, Table, children, say

TENANTS = ("base", "adapter-1", "adapter-2", "tuned")
PROMPT = 80
LENGTH = 40  # tokens
LOADS = (0.3, 0.7, 0.9)
OWN = (1, 3)  # last layers that are the tenants' own, of six
ALIKE = 4  # requests with a common prompt
Prompts = Literal["own", "common"]
_LAYERS = 6
RELATIVES = ("draft", "wordings", "operations", "tuned")
FAMILIES: dict[str, tuple[str, ...]] = {
    "the target alone": ("base",),
    "the target and a draft on its trunk": ("base", "draft"),
    "four tenants": ("base", "wordings", "operations", "tuned"),
}
_REQUESTS = 16
_TOKENS = 200
_PROCESS = LocalOptions(device="cpu", threads=1)
_OPTIONS = LocalOptions(device="cpu", kernel="native", kv_tokens=8192, max_batch=64, threads=1)


class Arrival(NamedTuple):
    """A request: when it comes, its number, and whose it is."""

    at: float
    number: int
    tenant: int
    prompt: int


class Served(NamedTuple):
    """What became of some requests: the core's time in all, and of each from its arrival to its
    end.
    """

    seconds: float
    tokens: int  # written
    waits: tuple[float, ...]
    weight_bytes: int
    kv_tokens: int  # most that were cached at once, summed over the loops
    block_rows: int  # tokens, summed over the blocks that each passed

    @property
    def tokens_per_second(self) -> float:
        """Written tokens by the core's time, idle time included."""
        return self.tokens / self.seconds


class Arm:
    """Loops on one core that take turns, step by step: one for all tenants, or one for each."""

    def __init__(self, zoo: Zoo, *, shares: bool) -> None:
        self._finished = list[int]()
        self._tokens = 0
        self._shares = shares
        configs = [_config(zoo, name, shares=shares) for name in TENANTS]
        self._loops: list[StepLoop] = [
            build_loop(c, self._hear)[0] for c in (configs[:1] if shares else configs)
        ]
        if shares:
            self._loops[0]._handle([AddChain(config) for config in configs[1:]])

    def serve(self, arrivals: Sequence[Arrival]) -> Served:
        """Run all requests to their end."""
        waiting = sorted(arrivals, reverse=True)
        now = 0.0
        turn = 0
        ends = dict[int, float]()
        self._finished.clear()
        self._tokens, before = 0, self._block_rows()
        while waiting or self._busy():
            while waiting and waiting[-1].at <= now:
                self._submit(waiting.pop())
            if not (busy := self._busy()):
                now = waiting[-1].at
                continue
            turn = next((at for at in busy if at > turn), busy[0])
            now += self._step(self._loops[turn])
            ends |= {number: now for number in self._finished if number not in ends}
        waits = tuple(ends[arrival.number] - arrival.at for arrival in arrivals)
        held = sum(loop.stats().kv_peak for loop in self._loops)
        rows = self._block_rows() - before
        return Served(now, self._tokens, waits, sum(map(_weights_of, self._loops)), held, rows)

    def _block_rows(self) -> int:
        """Counted by the zoo's loop; in an engine for one model each token that is fed passes all
        blocks.
        """
        model: Any = self._loops[0]._model
        if isinstance(model, ChainModel):
            return model.unit_rows
        stats = [loop.stats() for loop in self._loops]
        return (2 * _LAYERS + 2) * sum(one.prefilled_tokens + one.sampled_tokens for one in stats)

    def _busy(self) -> list[int]:
        return [at for at, loop in enumerate(self._loops) if loop._scheduler.num_unfinished]

    def _step(self, loop: StepLoop) -> float:
        began = time.process_time()
        loop.step()
        if loop._replies:
            loop._report()
        return time.process_time() - began

    def _submit(self, arrival: Arrival) -> None:
        rng = random.Random(arrival.prompt)
        request = _request([rng.randrange(3, 200) for _ in range(PROMPT)], LENGTH, arrival.number)
        chain, loop = (arrival.tenant, 0) if self._shares else (0, arrival.tenant)
        self._loops[loop]._handle([Submit(arrival.number, request, chain)])

    def _hear(self, report: LoopReport) -> None:
        for reply in report.replies:
            assert isinstance(reply, SampleReply), "every request is sampled to its end"
            self._finished.append(reply.request_id)
            self._tokens += len(reply.ids)


def _request(ids: Iterable[int], tokens: int, number: int) -> SampleRequest:
    return SampleRequest(tuple(ids), tokens, Sampling(1.0), Seed(number, "p", 0, 0, "target", 0))


def _weights_of(loop: StepLoop) -> int:
    """Bytes of packed weights."""
    model: Any = loop._model
    assert isinstance(model, ChainModel | NativeModel)
    return model.num_bytes if isinstance(model, ChainModel) else model.packing.num_bytes


def _config(zoo: Zoo, name: str, *, shares: bool) -> WorkerConfig:
    folder = zoo.folder(name)
    config, tokenizer = check_model(folder, name)
    return WorkerConfig(name, folder, config, tokenizer.pieces, _OPTIONS, shares=shares)


def make_family(folder: Path, own: int) -> Zoo:
    """A zoo of four tenants: the embedded target, two adapters of rank 8, and one tuned, of so many
    last layers.
    """
    base = path("target")
    zoo = Zoo(folder / "zoo")
    tuned = folder / "tuned"
    weights = load_file(base / "model.safetensors")
    last = tuple(f"model.layers.{at}." for at in range(_LAYERS - own, _LAYERS))
    shutil.copytree(base, tuned)
    torch.manual_seed(0)
    changed = {
        k: (w * (1 + 0.02 * torch.randn_like(w.float()))).to(w.dtype) for k, w in weights.items()
    }
    tensors = {k: changed[k] if k.startswith(last) else w for k, w in weights.items()}
    save_file(tensors, tuned / "model.safetensors", metadata={"format": "pt"})
    zoo.add("base", base)
    zoo.add("tuned", tuned)
    adapted = {
        name: w
        for name, w in weights.items()
        if name.startswith(last) and ("q_proj" in name or "v_proj" in name)
    }
    for number in (1, 2):
        zoo.add(f"adapter-{number}", _adapter(folder / f"adapter-{number}", adapted), "base")
    return zoo


def _adapter(folder: Path, weights: dict[str, torch.Tensor]) -> Path:
    folder.mkdir()
    tensors = dict[str, torch.Tensor]()
    for name, weight in weights.items():
        inner = f"base_model.model.{name.removesuffix('.weight')}"
        tensors[f"{inner}.lora_A.weight"] = 0.02 * torch.randn(8, weight.shape[1])
        tensors[f"{inner}.lora_B.weight"] = 0.02 * torch.randn(weight.shape[0], 8)
    save_file(tensors, folder / "adapter_model.safetensors")
    settings = {"peft_type": "LORA", "r": 8, "lora_alpha": 16, "base_model_name_or_path": "base"}
    (folder / "adapter_config.json").write_text(json.dumps(settings))
    return folder


def arrive(count: int, rate: float, seed: int, prompts: Prompts) -> list[Arrival]:
    """So many requests, so many a second, each of any tenant."""
    rng = random.Random(seed)
    now = 0.0
    found = list[Arrival]()
    for number in range(1, count + 1):
        now += rng.expovariate(rate)
        prompt = number if prompts == "own" else -(number // ALIKE)
        found.append(
            Arrival(now, number, rng.randrange(len(TENANTS)), 10_000_000 * (seed + 1) + prompt)
        )
    return found


def study(options: Options) -> list[Table]:
    """Memory, throughput with one request of each tenant, and waiting times under Poisson arrivals."""
    torch.set_num_threads(1)
    rounds = options.pick(5, 11, 25)
    count = options.pick(24, 120, 400)
    at_once = list[Row]()
    rows = list[Row]()
    disk_words = list[str]()
    for own in OWN:
        with tempfile.TemporaryDirectory() as folder:
            zoo = make_family(Path(folder), own)
            disk = zoo.show()
            shared = 1 - own / _LAYERS
            one = Arm(zoo, shares=True)
            four = Arm(zoo, shares=False)
            together, capacity = _at_once(one, four, rounds)
            at_once += [(shared, *row) for row in together]
            say(
                f"{shared:.0%} of layers shared: four engines serve {capacity:.1f} requests a "
                f"second of processor time"
            )
            cells = [
                (load, prompts)
                for prompts in get_args(Prompts)
                for load in options.pick(LOADS[1:2], LOADS, LOADS)
            ]
            for number, (load, prompts) in enumerate(cells):
                arrivals = arrive(count, load * capacity, options.seed + number, prompts)
                rows += [(shared, prompts, load, *row) for row in _loaded(one, four, arrivals)]
            disk_words.append(
                f"{disk.stored / 1e6:.1f} MB of disk, the folders apart {disk.apart / 1e6:.1f}"
            )
    title = f"{PROMPT} tokens in, {LENGTH} out, {count} requests, clock: processor time of one core"
    header = "layers shared | prompts | load of four engines | arm | p50 s | p95 s | tokens/s | rows of blocks | in caches"
    once = f"One and four requests of each of four tenants at once, median of {rounds} rounds"
    return [
        Table.of(
            once,
            "layers shared | requests of each | arm | tokens/s | to four engines | weights MB",
            at_once,
        ),
        Table.of(
            f"Poisson arrivals of four tenants: {title}",
            header,
            rows,
            f"The zoos take {'; '.join(disk_words)}.",
        ),
    ]


def _at_once(one: Arm, four: Arm, rounds: int) -> tuple[list[Row], float]:
    """Tokens a second with one and with four requests of each tenant at once, measured in turn;
    weights in memory.
    """
    rows = list[Row]()
    capacity = 0.0
    for each in (1, 4):
        found = dict[str, list[Served]]()
        for number in range(rounds + 1):
            numbers = [1000 * number + at + 1 for at in range(each * len(TENANTS))]
            arrivals = [Arrival(0.0, at, at % len(TENANTS), at) for at in numbers]
            for name, arm in (("zoo", one), ("four engines", four)):
                served = arm.serve(arrivals)
                if number:  # the first round loads weights
                    found.setdefault(name, []).append(served)
        speeds = {
            name: statistics.median(served.tokens_per_second for served in all_)
            for name, all_ in found.items()
        }
        for name, all_ in found.items():
            ratio = speeds[name] / speeds["four engines"]
            weights = all_[0].weight_bytes / 1e6
            rows.append((each, name, speeds[name], ratio, weights))
        capacity = max(
            capacity, statistics.median(len(s.waits) / s.seconds for s in found["four engines"])
        )
    return rows, capacity


def _loaded(one: Arm, four: Arm, arrivals: Sequence[Arrival]) -> list[Row]:
    rows = list[Row]()
    for name, arm in (("zoo", one), ("four engines", four)):
        found = arm.serve(arrivals)
        waits = (
            sorted(found.waits)[min(len(arrivals) - 1, int(share * len(arrivals)))]
            for share in (0.5, 0.95)
        )
        rows.append((name, *waits, found.tokens_per_second, found.block_rows, found.kv_tokens))
    return rows


def memory(options: Options) -> list[Table]:
    """Megabytes of the shipped family, in one loop and apart.

    Read is the proportional share (`Pss`) of the processes that compute, while each engine writes:
    pages that several processes share, of libraries and mapped weights, count once among them.
    """
    rows = list[Row]()
    rounds = options.pick(1, 3, 5)
    with tempfile.TemporaryDirectory() as folder:
        zoo = family(Path(folder))
        for words, names in FAMILIES.items():
            together = max(
                anyio.run(_megabytes, zoo, [(name, 0) for name in names]) for _ in range(rounds)
            )
            alone = max(
                anyio.run(_megabytes, zoo, [(n, at) for at, n in enumerate(names)])
                for _ in range(rounds)
            )
            say(f"{words}: {together:.0f} MB, apart {alone:.0f}")
            rows.append((words, len(names), together, alone, f"{together / alone - 1:+.0%}"))
    title = f"Memory of a family's processes, MB, most of {rounds} rounds; {_REQUESTS} requests of {_TOKENS} tokens to each"
    return [Table.of(title, "models | engines | one loop | a process each | to these", rows)]


def family(folder: Path) -> Zoo:
    """A zoo of the embedded target and its shipped relatives."""
    zoo = Zoo(folder / "zoo")
    shipped = path("target").parent / "family"
    zoo.add("base", path("target"))
    for name in RELATIVES:
        zoo.add(name, shipped / name, "base")
    return zoo


async def _megabytes(zoo: Zoo, engines: Sequence[tuple[str, int]]) -> float:
    """What their processes take at the end of some work; those of one number share one."""
    async with AsyncExitStack() as stack:
        opened = [
            LocalEngine(zoo.folder(name), options=_PROCESS, replica=at) for name, at in engines
        ]
        for engine in opened:
            await stack.enter_async_context(engine)
        await collect(
            [
                partial(engine.sample, _request(range(3 + number, 43 + number), _TOKENS, number))
                for number in range(_REQUESTS)
                for engine in opened
            ]
        )
        return sum(map(resident, children())) / 1e3


def resident(process: Path) -> int:
    """Kilobytes of memory, pages that processes share in parts."""
    lines = (process / "smaps_rollup").read_text().splitlines()
    return next(int(line.split()[1]) for line in lines if line.startswith("Pss:"))
