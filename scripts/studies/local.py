"""The local engine beside transformers and beside what the machine can do, measured in turn in one run."""

from __future__ import annotations

import gc
import tempfile
import time
from collections.abc import Callable, Generator
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any, Literal

import anyio
import torch
from anyio.from_thread import BlockingPortal, start_blocking_portal

from atts.core import SampleRequest, Sampling, ScoreRequest, TokenIds
from atts.local import LocalEngine, LocalOptions
from atts.local.shape import read_shape
from atts.seeds import Seed
from scripts.studies.harness import Options, Spread, Table, interleaved, ratio, say, wall_seconds

MODELS = Path(__file__).resolve().parents[2] / "atts" / "models"
PROMPT = 64
Kernel = Literal["native", "torch"]


@dataclass(frozen=True, slots=True)
class Subject:
    """A model in a folder, opened by both sides."""

    name: str
    folder: Path
    theirs: Any
    vocabulary: int

    def prompts(self, count: int, length: int, seed: int = 0) -> list[TokenIds]:
        """Random ids, no two prompts alike."""
        generator = torch.Generator().manual_seed(seed)
        rows = torch.randint(10, self.vocabulary - 10, (count, length), generator=generator)
        return [tuple(row) for row in rows.tolist()]


def study(options: Options) -> list[Table]:
    """Decoding, continuous batching, scoring, memory, and two engines at once."""
    torch.set_num_threads(1)  # both sides: on a busy machine a second thread mostly waits
    tables: list[Table] = []
    with tempfile.TemporaryDirectory() as place, start_blocking_portal() as portal:
        subjects = _subjects(options, Path(place))
        tables.append(_decoding(subjects, options, portal))
        tables.append(_continuous(subjects[:2], options, portal))
        tables.append(_scoring(subjects, options, portal))
        tables.append(_warm_prefix(subjects[0], options, portal))
        tables.append(_overlap(subjects[0], options, portal))
    return tables


def _subjects(options: Options, place: Path) -> list[Subject]:
    names = ["target", "draft"] if (MODELS / "target" / "model.safetensors").is_file() else []
    found = [_open(name, MODELS / name) for name in names]
    for name, size in options.pick(
        {}, {"20M": (384, 8, 1024)}, {"20M": (384, 8, 1024), "200M": (1024, 14, 2816)}
    ).items():
        found.append(_open(f"random {name}", _random(place / name, *size)))
    return found


def _open(name: str, folder: Path) -> Subject:
    from transformers import AutoModelForCausalLM

    model: Any = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32).eval()
    return Subject(name, folder, model, read_shape(folder, name).vocabulary)


def _random(folder: Path, width: int, layers: int, inner: int) -> Path:
    from transformers import AutoModelForCausalLM, AutoTokenizer, LlamaConfig

    config = LlamaConfig(
        vocab_size=4096,
        hidden_size=width,
        intermediate_size=inner,
        num_hidden_layers=layers,
        num_attention_heads=width // 64,
        num_key_value_heads=width // 128,
        head_dim=64,
        max_position_embeddings=2048,
        tie_word_embeddings=True,
        eos_token_id=None,
        bos_token_id=None,
    )
    AutoModelForCausalLM.from_config(config).save_pretrained(folder)
    AutoTokenizer.from_pretrained(MODELS / "target").save_pretrained(folder)
    return folder


@contextmanager
def _engine(portal: BlockingPortal, folder: Path, **changes: Any) -> Generator[LocalEngine]:
    with portal.wrap_async_context_manager(LocalEngine(folder, options=LocalOptions(**changes))) as engine:
        yield engine


async def _all(engine: LocalEngine, requests: list[SampleRequest] | list[ScoreRequest]) -> int:
    """Send all at once; the number of tokens that came of it."""
    done: list[int] = []

    async def one(request: SampleRequest | ScoreRequest) -> None:
        if isinstance(request, SampleRequest):
            done.append(len((await engine.sample(request)).ids))
        else:
            done.append(len((await engine.score(request)).logprobs))

    async with anyio.create_task_group() as group:
        for request in requests:
            group.start_soon(one, request)
    return sum(done)


def _rate(work: Callable[[], int]) -> float:
    """Tokens a second of one call."""
    start = time.perf_counter()
    return work() / (time.perf_counter() - start)


class _Fresh:
    """Requests whose prompts were never seen, so that no cache helps; ends are suppressed on the other side too."""

    def __init__(self, subject: Subject, batch: int, tokens: int) -> None:
        self._subject, self._batch, self._tokens, self._round = subject, batch, tokens, 0

    def requests(self) -> list[SampleRequest]:
        """A new batch."""
        self._round += 1
        prompts = self._subject.prompts(self._batch, PROMPT, self._round)
        law = Sampling(temperature=0.7)
        return [SampleRequest(p, self._tokens, law, Seed(sample=n)) for n, p in enumerate(prompts)]

    def ours(self, portal: BlockingPortal, engine: LocalEngine) -> int:
        """Tokens of one batch through the engine."""
        return portal.call(_all, engine, self.requests())

    def theirs(self) -> int:
        """Tokens of one batch through `transformers.generate`, the same number for each sequence."""
        ids = torch.tensor(self._subject.prompts(self._batch, PROMPT, self._round))
        with torch.inference_mode():
            out = self._subject.theirs.generate(
                ids,
                attention_mask=torch.ones_like(ids),
                max_new_tokens=self._tokens,
                min_new_tokens=self._tokens,
                do_sample=True,
                temperature=0.7,
                top_k=0,
                pad_token_id=0,
            )
        return int(out.shape[0] * (out.shape[1] - PROMPT))


def _decoding(subjects: list[Subject], options: Options, portal: BlockingPortal) -> Table:
    rows: list[tuple[str | int | float, ...]] = []
    tokens = options.pick(64, 128, 192)
    for subject in subjects:
        for batch in (1, 16, 64):
            if "200M" in subject.name and batch > 16:
                continue
            say(f"decoding {subject.name} at {batch}")
            fresh = _Fresh(subject, batch, tokens)
            with (
                _unending(subject) as folder,
                _engine(portal, folder, kernel="native") as native,
                _engine(portal, folder, kernel="torch") as plain,
            ):
                arms: dict[str, Callable[[], float]] = {
                    "native": partial(_rate, partial(fresh.ours, portal, native)),
                    "torch": partial(_rate, partial(fresh.ours, portal, plain)),
                    "transformers": partial(_rate, fresh.theirs),
                }
                seen = interleaved(arms, options.pick(2, 3, 5))
            matrix = _matrix_seconds(subject, batch)
            step = batch / Spread.of(seen["native"]).median
            rows.append(
                (
                    subject.name,
                    batch,
                    Spread.of(seen["native"]).median,
                    str(ratio(seen, "native", "transformers")),
                    str(ratio(seen, "torch", "transformers")),
                    1e3 * step,
                    matrix / step,
                )
            )
    title = f"Decoding: {PROMPT} prompt tokens, then {tokens} sampled, tokens a second of the whole"
    columns = ("model", "batch", "tokens/s", "ratio to generate", "torch kernel's ratio", "ms a step", "torch.mm share")
    notes = (
        "One thread on each side, float32. `torch.mm share`: one step's bare matrix products with torch.mm, over "
        "our whole step, prefill included; above 1, we are faster than torch's matrix products alone.",
    )
    return Table(title, columns, tuple(rows), notes)


@contextmanager
def _unending(subject: Subject) -> Generator[Path]:
    """The same model without an end token, so that every sequence has the same length on both sides."""
    import json

    with tempfile.TemporaryDirectory() as place:
        folder = Path(place) / subject.folder.name
        folder.mkdir()
        for path in subject.folder.iterdir():
            if path.is_file() and path.name not in ("config.json", "generation_config.json"):
                (folder / path.name).symlink_to(path)
        config = json.loads((subject.folder / "config.json").read_text())
        (folder / "config.json").write_text(json.dumps({**config, "eos_token_id": None}))
        yield folder


def _matrix_seconds(subject: Subject, rows: int) -> float:
    """The least time torch.mm takes for all matrix products of `rows` tokens, weights in their best layout."""
    shape = read_shape(subject.folder, subject.name)
    across = shape.heads * shape.head_dim
    sizes = [
        (shape.width, across + 2 * shape.kv_heads * shape.head_dim),
        (across, shape.width),
        (shape.width, 2 * shape.inner),
        (shape.inner, shape.width),
    ] * shape.layers + [(shape.width, shape.vocabulary)]
    weights = [torch.randn(size) for size in sizes]
    inputs = {deep: torch.randn(rows, deep) for deep, _ in sizes}

    def work() -> None:
        for weight in weights:
            torch.mm(inputs[weight.shape[0]], weight)

    return min(wall_seconds(work) for _ in range(12))


def _continuous(subjects: list[Subject], options: Options, portal: BlockingPortal) -> Table:
    """Against transformers' own continuous batching, requests of mixed lengths."""
    rows: list[tuple[str | int | float, ...]] = []
    for subject in subjects:
        count, tokens = options.pick(16, 32, 64), options.pick(24, 48, 96)
        say(f"continuous batching {subject.name}")
        fresh = _Fresh(subject, count, tokens)
        with _unending(subject) as folder, _engine(portal, folder) as engine:
            arms: dict[str, Callable[[], float]] = {
                "ours": partial(_rate, partial(fresh.ours, portal, engine)),
                "theirs": partial(_rate, partial(_their_batching, subject, count, tokens)),
            }
            try:
                seen = interleaved(arms, options.pick(1, 3, 3))
            except (RuntimeError, NotImplementedError, ValueError, TypeError, AttributeError) as error:
                rows.append((subject.name, count, str(error)[:80], "-"))
                continue
        rows.append((subject.name, count, Spread.of(seen["ours"]).median, str(ratio(seen, "ours", "theirs"))))
    title = "Continuous batching beside transformers' own (`generate_batch`)"
    return Table(title, ("model", "requests", "tokens/s", "ratio"), tuple(rows))


def _their_batching(subject: Subject, count: int, tokens: int) -> int:
    from transformers import GenerationConfig

    config = GenerationConfig(max_new_tokens=tokens, do_sample=False, eos_token_id=-1, pad_token_id=0)
    prompts = [list(prompt) for prompt in subject.prompts(count, PROMPT)]
    replies = subject.theirs.generate_batch(prompts, generation_config=config, progress_bar=False)
    return sum(len(reply.generated_tokens) for reply in replies.values())


def _scoring(subjects: list[Subject], options: Options, portal: BlockingPortal) -> Table:
    """New chunks on warm rollouts: share of the matrix rate, and tokens a second beside decoding's."""
    rows: list[tuple[str | int | float, ...]] = []
    chunk, prefix = 32, 128
    for subject in subjects:
        for batch in (1, 16, 64):
            if "200M" in subject.name and batch > 1:
                continue
            say(f"scoring {subject.name} at {batch}")
            with _engine(portal, subject.folder) as engine:
                seen = [_scored(portal, engine, subject, batch, chunk, prefix, n) for n in range(options.pick(3, 5, 9))]
            least = min(seen)
            bare = _matrix_seconds(subject, batch * chunk)
            shape = read_shape(subject.folder, subject.name)
            flops = 2.0 * shape.matrix_weights * batch * chunk
            mixing = 4.0 * batch * chunk * (prefix + chunk / 2) * shape.layers * shape.heads * shape.head_dim
            rate, limit = (flops + mixing) / least / 1e9, flops / bare / 1e9
            rows.append((subject.name, batch, batch * chunk / least, rate, limit, rate / limit))
    title = f"Scoring {chunk} new tokens on rollouts of {prefix} warm ones"
    columns = ("model", "rollouts", "tokens/s", "GFLOP/s", "torch.mm GFLOP/s", "share of the matrix rate")
    notes = ("Best of several rounds, whole calls through the engine; torch.mm at the same shapes, its best round.",)
    return Table(title, columns, tuple(rows), notes)


def _scored(
    portal: BlockingPortal, engine: LocalEngine, subject: Subject, batch: int, chunk: int, prefix: int, seed: int
) -> float:
    """Seconds for scoring one new chunk on each of `batch` rollouts whose prefix was scored before."""
    bodies = subject.prompts(batch, prefix + chunk, seed + 1000)
    portal.call(_all, engine, [ScoreRequest(ids[:1], ids[1:prefix]) for ids in bodies])
    requests = [ScoreRequest(ids[:prefix], ids[prefix:]) for ids in bodies]
    gc.collect()
    return wall_seconds(lambda: portal.call(_all, engine, requests))


def _warm_prefix(subject: Subject, options: Options, portal: BlockingPortal) -> Table:
    """Scoring a chunk as the warm prefix grows eightfold, beside the cost of attention alone."""
    shape = read_shape(subject.folder, subject.name)
    rows: list[tuple[str | int | float, ...]] = []
    times: dict[int, float] = {}
    with _engine(portal, subject.folder) as engine:
        for prefix in (128, 256, 512, 1024):
            rounds = options.pick(3, 7, 15)
            times[prefix] = min(_scored(portal, engine, subject, 8, 32, prefix, n) for n in range(rounds))
    for prefix, seconds in times.items():
        cost = [
            shape.matrix_weights + 2 * (p + 16) * shape.layers * shape.heads * shape.head_dim for p in (128, prefix)
        ]
        expected = times[128] * cost[1] / cost[0]
        rows.append((prefix, 1e3 * seconds, 1e3 * expected, seconds / expected))
    title = f"Scoring 8 chunks of 32 tokens as the warm prefix grows ({subject.name})"
    return Table(title, ("prefix", "ms", "ms by the cost model", "ratio"), tuple(rows))


def _overlap(subject: Subject, options: Options, portal: BlockingPortal) -> Table:
    """Two engines at once beside each alone: threads of one process, or a process each."""
    rows: list[tuple[str | int | float, ...]] = []
    tokens = options.pick(48, 96, 128)
    with _unending(subject) as folder:
        for worker in ("thread", "process"):
            say(f"two engines, a {worker} each")
            with _engine(portal, folder, worker=worker) as one, _engine(portal, folder, worker=worker) as two:
                fresh = _Fresh(subject, 16, tokens)
                arms: dict[str, Callable[[], float]] = {
                    "alone": partial(_rate, partial(fresh.ours, portal, one)),
                    "both": partial(_rate, partial(_both, portal, fresh, one, two)),
                }
                seen = interleaved(arms, options.pick(2, 4, 6))
            alone = Spread.of(seen["alone"]).median
            rows.append((worker, alone, Spread.of(seen["both"]).median, str(ratio(seen, "both", "alone"))))
    title = "Two engines at once on this machine's cores (2.0: perfect overlap)"
    return Table(title, ("worker", "one alone, tokens/s", "both, tokens/s", "ratio"), tuple(rows))


def _both(portal: BlockingPortal, fresh: _Fresh, one: LocalEngine, two: LocalEngine) -> int:
    first = portal.start_task_soon(_task, fresh, one)
    second = portal.start_task_soon(_task, fresh, two)
    return first.result() + second.result()


async def _task(fresh: _Fresh, engine: LocalEngine) -> int:
    return await _all(engine, fresh.requests())
