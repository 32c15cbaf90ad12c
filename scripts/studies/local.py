"""Compare the local engine with transformers and with the limits of the machine, in interleaved
measurements."""

from __future__ import annotations

import gc
import json
import math
import re
import shutil
import tempfile
import time
from collections.abc import Callable, Generator, Iterable, Sequence
from concurrent.futures import Future
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, fields, replace
from functools import cache, partial
from pathlib import Path
from statistics import fmean
from tempfile import mkdtemp
from typing import Any, Literal, overload

import numpy as np
import torch
from anyio.from_thread import BlockingPortal, start_blocking_portal
from safetensors.torch import load_file, save_file
from torch import Tensor

from atts.accel import accelerated, options_of
from atts.concurrency import collect
from atts.core import Message, SampleRequest, Sampling, ScoreRequest, TokenIds
from atts.evaluators.datasets.arithmetic import problems
from atts.local import LocalEngine, LocalOptions
from atts.local.loader import LayerWeights, Rope, Weights
from atts.local.model_config import ModelConfig, read_model_config
from atts.models import EMBEDDED, path
from atts.sampling import Seed
from scripts.studies.harness import (
    Machine,
    Options,
    Row,
    Spent,
    Spread,
    Table,
    cpu_seconds,
    interleaved,
    look,
    ratio,
    say,
    wall_seconds,
)


def opened(folder: Path) -> Any:
    """Open a saved model."""
    from transformers import AutoModelForCausalLM

    return AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32).eval()


def random_model(dtype: torch.dtype, **sizes: Any) -> Any:
    """Make a Llama with random weights and no end token, so that it never ends a text.

    The names of `sizes` are those of LlamaConfig.
    """
    from transformers import AutoModelForCausalLM, LlamaConfig

    own: dict[str, Any] = {
        "eos_token_id": None,
        "bos_token_id": None,
        "pad_token_id": 0,
        "tie_word_embeddings": True,
    }
    return AutoModelForCausalLM.from_config(LlamaConfig(**sizes, **own), dtype=dtype).eval()


def generated(model: Any, ids: Tensor, count: int, **settings: Any) -> Tensor:
    """Return the prompts [batch, seq] with `count` more tokens, at temperature 0.7."""
    law: dict[str, Any] = {"do_sample": True, "temperature": 0.7, "top_k": 0, "pad_token_id": 0}
    counts = {
        "max_new_tokens": count,
        "min_new_tokens": count,
        "attention_mask": torch.ones_like(ids),
    }
    with torch.inference_mode():
        found: Tensor = model.generate(ids, **{**law, **counts, **settings})
    return found


PROMPT = 64
"""Number of tokens of a prompt in every decoding table."""
_RANDOM = {"random 20M": (384, 8, 1024), "random 200M": (1024, 14, 2816)}
"""Width, number of layers and feed-forward width of the random models."""


@dataclass(frozen=True, slots=True)
class Subject:
    """A model in a folder that atts and transformers both open."""

    name: str
    folder: Path
    theirs: Any
    config: ModelConfig
    # True: the weights are stored as bfloat16, and the native kernels keep this type
    is_halves: bool
    batches: tuple[int, ...]
    tokens: int  # number of tokens that each sequence writes
    # largest number of rounds of a measurement; smaller for large models, whose rounds are long and
    # vary less
    most_rounds: int = 99

    def prompts(self, count: int, length: int, seed: int = 0) -> list[TokenIds]:
        """Return random ids; all prompts differ."""
        generator = torch.Generator().manual_seed(seed)
        rows = torch.randint(10, self.config.vocabulary - 10, (count, length), generator=generator)
        return [tuple(row) for row in rows.tolist()]

    @property
    def attention(self) -> int:
        """Return the number of features in a token's queries, summed over all layers.

        The cost of attention is proportional to this number.
        """
        return self.config.num_layers * self.config.num_heads * self.config.head_dim


def subjects(options: Options, place: Path) -> list[Subject]:
    """Return the embedded pair and random models: 20M by default, 200M too with full effort."""
    tokens = options.pick(48, 128, 128)
    found = [_open(name, path(name), (1, 16, 64), tokens) for name in reversed(EMBEDDED)]
    for name in tuple(_RANDOM)[: options.pick(0, 1, 2)]:
        is_large = name == "random 200M"
        batches = (1, 16) if is_large else (1, 16, 64)
        one = _open(
            name, _random(place / name, *_RANDOM[name]), batches, 32 if is_large else tokens // 2
        )
        found.append(replace(one, most_rounds=2 if is_large else 3))
    return found


def _open(name: str, folder: Path, batches: tuple[int, ...], tokens: int) -> Subject:
    config = read_model_config(folder, name)
    halves = json.loads((folder / "config.json").read_text()).get("dtype")
    return Subject(
        name, folder, opened(folder), config, halves == "bfloat16", batches=batches, tokens=tokens
    )


def _random(folder: Path, width: int, layers: int, inner: int) -> Path:
    from transformers import AutoTokenizer

    sizes = {
        "hidden_size": width,
        "intermediate_size": inner,
        "num_hidden_layers": layers,
        "head_dim": 64,
    }
    heads = {"num_attention_heads": width // 64, "num_key_value_heads": width // 128}
    random_model(
        torch.float32, **sizes, **heads, max_position_embeddings=2048, vocab_size=4096
    ).save_pretrained(folder)
    AutoTokenizer.from_pretrained(path("target")).save_pretrained(folder)
    return folder


@dataclass(frozen=True, slots=True)
class Lab:
    """The effort of a study, and a portal to the event loop of its engines.

    The calling thread measures, and sends requests through the portal."""

    options: Options
    portal: BlockingPortal

    @contextmanager
    def engine(self, folder: Path, **changes: Any) -> Generator[LocalEngine]:
        """Open an engine whose worker is a thread of this process."""
        settings = options_of(**{"worker": "thread", "threads": 1, **changes})
        opened = accelerated(folder, **settings._asdict())
        with self.portal.wrap_async_context_manager(opened) as engine:
            yield engine

    def send(
        self, engine: LocalEngine, requests: Sequence[SampleRequest] | Sequence[ScoreRequest]
    ) -> int:
        """Send all requests at once, wait, and return the number of tokens written."""
        return self.portal.call(send_all, engine, requests)


async def send_all(
    engine: LocalEngine, requests: Sequence[SampleRequest] | Sequence[ScoreRequest]
) -> int:
    """Send all requests at once, and return the number of tokens written."""

    async def one(request: SampleRequest | ScoreRequest) -> int:
        if isinstance(request, SampleRequest):
            return len((await engine.sample(request)).ids)
        return len((await engine.score(request)).logprobs)

    return sum(await collect([partial(one, request) for request in requests]))


async def texts(engine: LocalEngine, requests: Sequence[SampleRequest]) -> list[TokenIds]:
    """Send all requests at once, and return the text of each reply."""
    return [
        done.ids
        for done in await collect([partial(engine.sample, request) for request in requests])
    ]


def asked(engine: LocalEngine, texts: Iterable[str], tokens: int, seed: int) -> list[SampleRequest]:
    """Return a request per question at temperature 0.7, each with its own random numbers."""
    law = Sampling(0.7)
    prompts = (engine.tokenizer.render([Message("user", text)]) for text in texts)
    return [
        SampleRequest(ids, tokens, law, Seed(seed, sample=number))
        for number, ids in enumerate(prompts)
    ]


_ONE_THREAD = LocalOptions(worker="thread", threads=1)


async def written(
    folder: Path,
    questions: Iterable[str],
    tokens: int,
    seed: int,
    options: LocalOptions = _ONE_THREAD,
) -> list[tuple[SampleRequest, TokenIds]]:
    """Return a request for each question, with the tokens that one model writes in reply.

    No other engine is open at the same time.
    """
    async with LocalEngine(folder, options=options) as engine:
        requests = asked(engine, questions, tokens, seed)
        return list(zip(requests, await texts(engine, requests), strict=True))


class Fresh:
    """Requests with new prompts, which no cache contains; atts and transformers write the same
    number of tokens.
    """

    def __init__(
        self,
        subject: Subject,
        batch: int,
        seed: int = 0,
        clock: Callable[[Callable[[], object]], float] = cpu_seconds,
    ) -> None:
        """Prepare atts and transformers.

        `clock` is CPU seconds if atts and transformers each compute in one thread, so that other
        work on the machine does not lengthen the times.
        """
        self._subject = subject
        self._batch = batch
        self._round = 1000 * seed
        self._clock = clock

    def requests(self, tokens: int) -> list[SampleRequest]:
        """Return a new batch."""
        self._round += 1
        prompts = self._subject.prompts(self._batch, PROMPT, self._round)
        sampling = Sampling(temperature=0.7)
        return [SampleRequest(p, tokens, sampling, Seed(sample=n)) for n, p in enumerate(prompts)]

    def ours(self, lab: Lab, engine: LocalEngine, tokens: int) -> float:
        """Return the seconds of one batch through the engine."""
        requests = self.requests(tokens)
        return self._clock(lambda: lab.send(engine, requests))

    def theirs(self, tokens: int) -> float:
        """Return the seconds of one batch through `transformers.generate`."""
        ids = torch.tensor([list(request.ids) for request in self.requests(tokens)])
        return self._clock(lambda: generated(self._subject.theirs, ids, tokens))


@contextmanager
def unending(subject: Subject) -> Generator[Path]:
    """Copy the model without its end token, so that atts and transformers write sequences of the
    same length.
    """
    with tempfile.TemporaryDirectory() as place:
        folder = Path(place) / subject.folder.name
        folder.mkdir()
        for file in subject.folder.iterdir():
            if file.is_file() and file.name not in ("config.json", "generation_config.json"):
                (folder / file.name).symlink_to(file)
        config = json.loads((subject.folder / "config.json").read_text())
        (folder / "config.json").write_text(json.dumps({**config, "eos_token_id": None}))
        yield folder


def matrix_seconds(subject: Subject, rows: int, rounds: int = 12) -> float:
    """Measure the least time that torch.mm takes for the matrix products of `rows` tokens."""
    config = subject.config
    across = config.num_heads * config.head_dim
    width = config.hidden_size
    sizes = [
        (width, across + 2 * config.num_kv_heads * config.head_dim),
        (across, width),
        (width, 2 * config.intermediate_size),
        (config.intermediate_size, width),
    ] * config.num_layers + [(width, config.vocabulary)]
    weights = [torch.randn(size) for size in sizes]
    inputs = {deep: torch.randn(rows, deep) for deep, _ in sizes}

    def work() -> None:
        for weight in weights:
            torch.mm(inputs[weight.shape[0]], weight)

    return min(cpu_seconds(work) for _ in range(rounds))


CHUNK = 32
PREFIX = 128
Rates = dict[tuple[str, int], float]
"""Decoded tokens per second by model and batch."""


def decoding(lab: Lab, subjects: Sequence[Subject]) -> tuple[Table, Rates]:
    """Compare the decoding of every model at every batch size with `generate` and with the least
    time of a step.
    """
    rows = list[Row]()
    rates = Rates()
    spent = Spent()
    traffic = _memory_traffic()
    for subject in subjects:
        for batch in subject.batches:
            say(f"decoding {subject.name} at {batch}")
            seen = _race(lab, subject, batch)
            step = Spread.of(seen["native decode"]).median / (subject.tokens - 1)
            rates[subject.name, batch] = batch / step
            matrix = matrix_seconds(subject, batch)
            memory = _memory_bytes(subject, batch) / traffic
            pairs = (
                ("generate decode", "native decode"),
                ("generate", "native"),
                ("generate", "torch"),
            )
            ratios = [str(ratio(seen, theirs, ours)) for theirs, ours in pairs]
            limits = (1e3 * step, 1e3 * matrix, 1e3 * memory, max(matrix, memory) / step)
            rows.append((subject.name, batch, subject.tokens, batch / step, *ratios, *limits))
    shown = next(row for row in rows if row[0] == "target" and row[1] == 16)
    table = Table.of(
        "Decoding compared with `transformers.generate`",
        "model | batch | tokens each | decoded tokens/s | decoding, ratio to generate | prompt and "
        "decoding, ratio | "
        "torch kernel, ratio | ms a step | limit by torch.mm, ms | limit by memory, ms | limit over step",
        rows,
        f"Each prompt has {PROMPT} tokens, none of them in a cache. atts and transformers use "
        "one thread, float32 and temperature 0.7. The time of decoding is the time for all "
        "tokens minus the time for one token. A step has two limits: the time of torch.mm for "
        "the same matrix products, and the time to read weights and cache from memory at "
        f"{traffic / 1e9:.1f} GB/s. A step can be faster than the second limit if the data is in "
        "the processor's caches.",
        spent.disturbance(),
        headline=f"the embedded target writes {rates['target', 16]:,.0f} tokens/s on one core at "
        f"batch 16, {shown[4]} "
        "times `transformers.generate`",
    )
    return table, rates


def _race(lab: Lab, subject: Subject, batch: int) -> dict[str, list[float]]:
    """Measure the seconds of every arm, one after another in each round.

    "decode" is the time of all tokens except the first.
    """
    fresh = Fresh(subject, batch, lab.options.seed)
    tokens = subject.tokens
    with (
        unending(subject) as folder,
        lab.engine(folder, kernel="native") as native,
        lab.engine(folder, kernel="torch") as plain,
    ):
        arms: dict[str, Callable[[], float]] = {
            "native": partial(fresh.ours, lab, native, tokens),
            "native first": partial(fresh.ours, lab, native, 1),
            "generate": partial(fresh.theirs, tokens),
            "generate first": partial(fresh.theirs, 1),
            "torch": partial(fresh.ours, lab, plain, tokens),
        }
        seen = interleaved(arms, min(subject.most_rounds, lab.options.pick(2, 3, 5)))
    for side in ("native", "generate"):
        seen[f"{side} decode"] = [
            all_ - first for all_, first in zip(seen[side], seen[f"{side} first"], strict=True)
        ]
    return seen


def _memory_bytes(subject: Subject, batch: int) -> float:
    """Return the bytes that a decoding step must read: every weight once, and each sequence's
    cached keys and values.
    """
    config = subject.config
    context = PROMPT + subject.tokens / 2
    return (
        config.matrix_weights * (2 if subject.is_halves else 4)
        + 4 * config.kv_floats_per_token * context * batch
    )


def _memory_traffic(size: int = 1 << 26) -> float:
    """Return how fast one core copies data that does not fit in its caches, in bytes read and
    written per second.

    The fastest of several copies counts.
    """
    source = torch.zeros(size // 4)
    copied = torch.empty_like(source)
    return 2 * size / min(cpu_seconds(lambda: copied.copy_(source)) for _ in range(15))


def overheads(subjects: Sequence[Subject], rates: Rates, machine: Machine) -> Table:
    """Compare the decoding steps of transformers and atts at batch 1, where the number of
    operations matters.
    """
    rows: list[Row] = []
    for subject in subjects:
        count = _operations(subject)
        step = 1e3 / rates[subject.name, 1]
        floor = count * machine.operation_microseconds / 1e3
        rows.append((subject.name, count, floor, step, floor / step))
    return Table.of(
        f"One token at a time: {machine.operation_microseconds:.2f} us per torch operation",
        "model | operations of a step in transformers | least cost of these operations, ms | "
        "step of atts, ms | ratio",
        rows,
    )


def _operations(subject: Subject) -> int:
    """Count the torch operations of one step of transformers. An operation that another operation
    calls does not count.
    """
    ids = torch.tensor(subject.prompts(1, PROMPT))
    with torch.inference_mode():
        cache = subject.theirs(ids, use_cache=True).past_key_values
        with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CPU]) as seen:
            subject.theirs(ids[:, :1], past_key_values=cache, use_cache=True)
    events: Any = seen.events()
    return sum(event.name.startswith("aten::") and event.cpu_parent is None for event in events)


def continuous(lab: Lab, subjects: Sequence[Subject]) -> Table:
    """Compare the continuous batching of atts and of transformers on simultaneous requests."""
    rows: list[Row] = []
    count = lab.options.pick(16, 32, 32)
    tokens = count
    for subject in subjects:
        say(f"continuous batching {subject.name}")
        fresh = Fresh(subject, count, lab.options.seed + 7, wall_seconds)
        with unending(subject) as folder, lab.engine(folder) as engine:
            arms: dict[str, Callable[[], float]] = {
                "ours": partial(fresh.ours, lab, engine, tokens),
                "theirs": partial(_their_batching, subject, count, tokens),
            }
            try:
                seen = interleaved(arms, lab.options.pick(1, 2, 3))
            finally:
                subject.theirs.destroy_cached_continuous_batching_manager()
        rate = count * tokens / Spread.of(seen["ours"]).median
        rows.append((subject.name, count, tokens, rate, str(ratio(seen, "theirs", "ours"))))
    title = "Continuous batching compared with transformers' own (`generate_batch`)"
    return Table.of(title, "model | requests | tokens each | tokens/s | ratio", rows)


def _their_batching(subject: Subject, count: int, tokens: int) -> float:
    from transformers import ContinuousBatchingConfig, GenerationConfig

    config = GenerationConfig(
        max_new_tokens=tokens, do_sample=False, eos_token_id=-1, pad_token_id=0
    )
    prompts = [list(prompt) for prompt in subject.prompts(count, PROMPT)]
    # Without limits, transformers takes most of the memory. The manager is kept between rounds, so
    # that its start is not measured.
    room = ContinuousBatchingConfig(
        num_blocks=2 * count * (PROMPT + tokens) // 32, max_batch_tokens=1024
    )
    settings: dict[str, Any] = {
        "continuous_batching_config": room,
        "persistent_manager": True,
        "progress_bar": False,
    }
    replies: dict[str, Any] = {}
    seconds = wall_seconds(
        lambda: replies.update(subject.theirs.generate_batch(prompts, config, **settings))
    )
    written = sum(len(reply.generated_tokens) for reply in replies.values())
    assert written == count * tokens, "transformers wrote a different number of tokens"
    return seconds


def scoring(lab: Lab, subjects: Sequence[Subject], rates: Rates) -> Table:
    """Measure new chunks on warm rollouts: the share of the matrix rate, and tokens per second
    relative to decoding.
    """
    rows: list[Row] = []
    for subject in subjects:
        for batch in subject.batches:
            say(f"scoring {subject.name} at {batch}")
            limits = list[float]()
            times = list[float]()
            count = batch * CHUNK
            with lab.engine(subject.folder) as engine:
                for n in range(min(subject.most_rounds, lab.options.pick(3, 7, 11))):
                    limits.append(matrix_seconds(subject, count, 2))
                    times.append(_score_seconds(lab, engine, subject, batch, n))
            flops = 2.0 * subject.config.matrix_weights * count
            mixing = 4.0 * count * (PREFIX + CHUNK / 2) * subject.attention
            rate = (flops + mixing) / min(times) / 1e9
            limit = flops / min(limits) / 1e9
            tokens = count / min(times)
            decoded = rates.get((subject.name, batch))
            ahead = None if decoded is None else tokens / decoded
            rows.append((subject.name, batch, tokens, ahead, rate, limit, rate / limit))
    return Table.of(
        f"Scoring {CHUNK} new tokens on each of several rollouts with {PREFIX} cached tokens",
        "model | rollouts | scored tokens/s | over decoded tokens/s | GFLOP/s | torch.mm GFLOP/s | "
        "share of the matrix rate",
        rows,
    )


def _score_seconds(
    lab: Lab, engine: LocalEngine, subject: Subject, batch: int, seed: int, prefix: int = PREFIX
) -> float:
    """Return the CPU seconds for scoring one new chunk on each of `batch` rollouts whose prefix was
    just scored.
    """
    bodies = subject.prompts(batch, prefix + CHUNK, seed + 1000)
    warm = [ScoreRequest(ids[:1], ids[1:prefix]) for ids in bodies]
    # collect garbage before the prefixes are scored, because a collection replaces the contents of
    # the processor's caches
    gc.collect()
    return lab.portal.call(
        _warm_then_timed, engine, warm, [ScoreRequest(ids[:prefix], ids[prefix:]) for ids in bodies]
    )


async def _warm_then_timed(
    engine: LocalEngine, warm: list[ScoreRequest], requests: list[ScoreRequest]
) -> float:
    """Send the requests in `warm`, then return the CPU seconds of the other requests.

    The time is measured inside the event loop, because passing requests between threads is not the
    engine's work.
    """
    await send_all(engine, warm)
    began = time.process_time()
    await send_all(engine, requests)
    return time.process_time() - began


def warm_prefix(lab: Lab, subject: Subject) -> Table:
    """Measure how long scoring a chunk takes as its cached prefix grows eightfold.

    The times are compared with a cost model in which only attention becomes more expensive.
    """
    prefixes = (128, 256, 512, 1024)
    say("scoring as the prefix grows")
    times: dict[int, list[float]] = {prefix: [] for prefix in prefixes}
    fed: dict[int, int] = {}
    with lab.engine(subject.folder, kv_tokens=100_000) as engine:
        for n in range(lab.options.pick(3, 9, 15)):
            for prefix in prefixes:
                before = engine.stats()
                times[prefix].append(
                    _score_seconds(lab, engine, subject, 8, 100 * prefix + n, prefix)
                )
                after = engine.stats()
                computed = [s.prefilled_tokens + s.scored_tokens for s in (before, after)]
                # number of tokens computed for the chunks alone: the tokens of the eight prefixes
                # are subtracted
                fed[prefix] = computed[1] - computed[0] - 8 * prefix
    costs = {
        p: subject.config.matrix_weights + 2 * (p + CHUNK / 2) * subject.attention for p in prefixes
    }
    rows: list[Row] = []
    for prefix in prefixes:
        expected = min(times[prefixes[0]]) * costs[prefix] / costs[prefixes[0]]
        least = min(times[prefix])
        middle = Spread.of(times[prefix]).median
        rows.append(
            (prefix, fed[prefix], 1e3 * least, 1e3 * middle, 1e3 * expected, least / expected)
        )
    return Table.of(
        f"Scoring 8 new chunks of {CHUNK} tokens as the warm prefix grows ({subject.name})",
        "warm prefix | tokens computed | ms, best | ms, median | ms by the cost model | best over "
        "model",
        rows,
    )


RATES = (0.1, 0.2, 0.4)
_ROUND = 100  # number of problems whose chunks are scored at the same time
_WORKERS: tuple[Literal["thread", "process"], ...] = ("thread", "process")
_OTHERS = ("target scoring", "target decoding")
_ALONE = ("draft decoding", *_OTHERS)
Work = Callable[[], Future[int]]


def study(options: Options) -> list[Table]:
    """Measure decoding, continuous batching, scoring, and two engines at the same time."""
    # one thread for atts and for transformers, because a second thread mostly waits on a busy
    # machine
    torch.set_num_threads(1)
    with tempfile.TemporaryDirectory() as place, start_blocking_portal() as portal:
        lab = Lab(options, portal)
        machine = look()
        found = subjects(options, Path(place))
        target, draft = found[:2]
        decoded, rates = decoding(lab, found)
        return [
            decoded,
            overheads(found, rates, machine),
            continuous(lab, [target, draft]),
            scoring(lab, found, rates),
            warm_prefix(lab, target),
            *overlap(lab, target, draft),
        ]


def study_scores(options: Options) -> list[Table]:
    """Compare scores in bfloat16 with scores in float32, on the same chunks of the embedded draft."""
    torch.set_num_threads(1)
    questions = [
        problem.text
        for problem in problems("test", options.pick(200, 1500, 3000), 7 + options.seed)
    ]
    with start_blocking_portal() as portal:
        lab = Lab(options, portal)
        with lab.engine(path("draft")) as draft:
            requests = asked(draft, questions, 300, 1)
            written = zip(requests, portal.call(texts, draft, requests), strict=True)
            chunks = [_chunks(draft, request.ids, text) for request, text in written]
        with (
            lab.engine(path("target")) as exact,
            lab.engine(path("target"), scores="bfloat16") as rounded,
        ):
            found = (list[float](), list[float]())
            ratios = list[float]()
            for first in range(0, len(chunks), _ROUND):
                say(f"rounded scores: {first} of {len(chunks)} problems")
                turn = [chunk for own in chunks[first : first + _ROUND] for chunk in own]
                seconds = [
                    _scored(lab, arm, turn, into)
                    for arm, into in zip((exact, rounded), found, strict=True)
                ]
                ratios.append(seconds[0] / seconds[1])
    return [_rounded(*found, Spread.of(ratios[1:]))]


def _rounded(exact: Sequence[float], rounded: Sequence[float], faster: Spread) -> Table:
    one = np.array(exact)
    other = np.array(rounded)
    apart = abs(one - other)
    bounds = [np.quantile(one, 1 - rate) for rate in RATES]
    others = [int(((one > bound) != (other > bound)).sum()) for bound in bounds]
    header = "chunks | speed-up | mean difference, nats a token | largest difference"
    return Table.of(
        "Scores of rows rounded to bfloat16",
        " | ".join([header, *(f"changed decisions at rate {rate}" for rate in RATES)]),
        [(len(one), str(faster), float(apart.mean()), float(apart.max()), *others)],
        "The engine scores all tokens after the prompt, in batches of 100 problems. The "
        "speed-up compares processor times, which include the tasks of the caller. A decision "
        "changes if a chunk is above the threshold with one kind of number, but not with the "
        "other.",
    )


def _chunks(engine: LocalEngine, prompt: TokenIds, text: TokenIds) -> list[ScoreRequest]:
    """Return each line of a text, together with the text before that line."""
    ends = [
        at
        for at in range(1, len(text))
        if engine.tokenizer.decode(text[at - 1 : at]).endswith("\n")
    ]
    pieces = zip([0, *ends], [*ends, len(text)], strict=True)
    return [
        ScoreRequest(prompt + text[:start], text[start:stop])
        for start, stop in pieces
        if stop > start
    ]


def _scored(
    lab: Lab, engine: LocalEngine, chunks: Sequence[ScoreRequest], into: list[float]
) -> float:
    """Score the chunks, and return the CPU seconds.

    Each chunk's mean negative log-probability is appended to `into`.
    """
    began = time.process_time()
    scores = lab.portal.call(collect, [partial(engine.score, chunk) for chunk in chunks])
    seconds = time.process_time() - began
    into.extend(-fmean(score.logprobs) for score in scores)
    return seconds


def overlap(lab: Lab, target: Subject, draft: Subject) -> list[Table]:
    """Measure how fast draft and target work at the same time, and how fast each works while its
    caller runs Python code.
    """
    say("two engines at once, in threads and in processes")
    arms: dict[str, Callable[[], float]] = {}
    with ExitStack() as stack:
        folders = [stack.enter_context(unending(subject)) for subject in (target, draft)]
        for worker in _WORKERS:
            engines = [stack.enter_context(lab.engine(folder, worker=worker)) for folder in folders]
            works = _works(lab, (target, draft), engines)
            for name in _ALONE:
                arms[f"{worker}: {name}"] = partial(_together, [works[name]])
                arms[f"{worker}: {name} next to Python"] = partial(
                    _together, [works[name]], caller="busy"
                )
            for other in _OTHERS:
                arms[f"{worker}: {other} and draft"] = partial(
                    _together, [works["draft decoding"], works[other]]
                )
        spent = Spent()
        seen = interleaved(arms, lab.options.pick(2, 5, 7))
    pairs = list[Row]()
    beside = list[Row]()
    median = {name: Spread.of(values).median for name, values in seen.items()}
    for worker in _WORKERS:
        for other in _OTHERS:
            names = [
                f"{worker}: {name}" for name in ("draft decoding", other, f"{other} and draft")
            ]
            rounds = zip(*(seen[name] for name in names), strict=True)
            gain = Spread.of([(first + second) / together for first, second, together in rounds])
            first, second, together = (median[name] for name in names)
            # on two independent cores, both pieces of work together take as long as the slower
            # piece
            most = (first + second) / max(first, second)
            pairs.append((worker, other, first, second, together, str(gain), most))
        for name in _ALONE:
            alone = f"{worker}: {name}"
            busy = f"{worker}: {name} next to Python"
            beside.append(
                (worker, name, median[alone], median[busy], str(ratio(seen, busy, alone)))
            )
    return [
        Table.of(
            "Two engines at once on this machine's cores",
            "worker | draft decoding meanwhile | draft alone, s | target alone, s | both, s | overlap "
            "| at best",
            pairs,
            spent.disturbance(),
        ),
        Table.of(
            "One engine while its caller computes in Python",
            "worker | work | alone, s | next to a caller busy in Python, s | ratio",
            beside,
            spent.disturbance(),
        ),
    ]


def _works(
    lab: Lab, subjects: tuple[Subject, Subject], engines: Sequence[LocalEngine]
) -> dict[str, Work]:
    """Return three pieces of work for the engines. Each takes about the same time."""
    seed = lab.options.seed
    tokens = lab.options.pick(48, 96, 96)
    targets = Fresh(subjects[0], 16, seed + 2)
    drafts = Fresh(subjects[1], 64, seed + 1)
    start = lab.portal.start_task_soon

    def score() -> Future[int]:
        fresh = [request.ids for _ in range(3) for request in targets.requests(1)]
        return start(
            send_all, engines[0], [ScoreRequest(ids[:1], (ids + ids[::-1])[1:]) for ids in fresh]
        )

    return {
        "draft decoding": lambda: start(send_all, engines[1], drafts.requests(2 * tokens)),
        "target scoring": score,
        "target decoding": lambda: start(send_all, engines[0], targets.requests(tokens)),
    }


def _together(works: list[Work], caller: Literal["waits", "busy"] = "waits") -> float:
    """Start all work at once, and return the seconds until it is done.

    With a busy caller, this thread runs Python code meanwhile.
    """

    def run() -> None:
        started = [work() for work in works]
        while caller == "busy" and not all(future.done() for future in started):
            sum(range(2000))
        for future in started:
            future.result()

    return wall_seconds(run)


# (largest number of weights, (hidden size, layers, heads, key-value heads, dimension of a head))
_SHAPES = (
    (10_000_000, (256, 4, 4, 2, 64)),
    (40_000_000, (512, 6, 8, 4, 64)),
    (400_000_000, (1024, 16, 16, 4, 64)),
    (1_000_000_000, (1024, 28, 16, 8, 128)),
    (3_000_000_000, (1536, 28, 12, 2, 128)),
    (6_000_000_000, (2560, 36, 32, 8, 128)),
    (11_000_000_000, (4096, 36, 32, 8, 128)),
    (20_000_000_000, (5120, 40, 40, 8, 128)),
    (50_000_000_000, (5120, 64, 64, 8, 128)),
    (1_000_000_000_000, (8192, 80, 64, 8, 128)),
)
"""Shapes of published models; the feed-forward width is chosen to reach the wanted size."""
_STEP = 32  # the width of feed-forward blocks is a multiple of this number
_SCALES = {"": 1, "K": 10**3, "M": 10**6, "B": 10**9}
# number of random numbers; all matrices are filled by repeating these numbers
_POOL = (1 << 20) + 7


def read_size(words: str) -> int:
    """Parse a number of weights such as 1.5B or 512.

    >>> read_size("1.5B"), read_size("512")
    (1500000000, 512)
    """
    found = re.fullmatch(r"(\d{1,6}(?:\.\d{1,6})?)([KMB]?)", words.strip().upper())
    assert found is not None, f"{words!r} is not a size such as 20M or 1.5B"
    return round(float(found[1]) * _SCALES[found[2]])


def _shape(size: int) -> tuple[int, int, int, int, int]:
    return next((shape for most, shape in _SHAPES if size <= most), _SHAPES[-1][1])


def shape_of_size(model: ModelConfig, size: int, vocabulary: int = 0) -> ModelConfig:
    """Return the shape of a model of `size` weights. Its output matrix has at least as many tokens
    as that of `model`.
    """
    hidden, layers, heads, kv_heads, head = _shape(size)
    stack = replace(
        model,
        family="llama",
        num_layers=layers,
        hidden_size=hidden,
        num_heads=heads,
        num_kv_heads=kv_heads,
        head_dim=head,
        intermediate_size=0,
        vocabulary=max(vocabulary, model.vocabulary),
        rotary_dim=head,
        ropes=("",) * layers,
        windows=(0,) * layers,
        query_scale=head**-0.5,
        attention_cap=0.0,
        logit_cap=0.0,
    )
    missing = size - stack.matrix_weights
    width = max(1, round(missing / (3 * hidden * layers * _STEP))) * _STEP
    return replace(stack, intermediate_size=width)


@cache
def noisy(folder: Path, noise: float) -> Path:
    """Copy the draft's folder with noise in its weights.

    The noise is in units of the standard deviation of each matrix, and is the same in every call.
    """
    shutil.copytree(path("draft"), folder, dirs_exist_ok=True)
    generator = torch.Generator().manual_seed(0)
    weights = load_file(folder / "model.safetensors")
    for name, weight in sorted(weights.items()):
        scale = noise * weight.float().std() if weight.ndim == 2 else 0.0
        weights[name] = (
            weight.float() + scale * torch.randn(weight.shape, generator=generator)
        ).to(weight.dtype)
    save_file(weights, folder / "model.safetensors", {"format": "pt"})
    return folder


def padded_folder(folder: Path, words: str) -> Path:
    """Return a copy of the model in `folder`, padded with zeros to the size in `words`, such as
    20M.

    The model must be of the Llama family, with its weights in one file.
    """
    size = read_size(words)
    config: dict[str, Any] = json.loads((folder / "config.json").read_text(encoding="utf-8"))
    weights = load_file(folder / "model.safetensors")
    width = config["hidden_size"]
    head = config["head_dim"]
    hidden, layers, *_ = _shape(size)
    assert hidden >= width, "the padded size is smaller than the model"
    layers = max(layers, config["num_hidden_layers"])
    # Each head keeps its dimension, because rotary embeddings depend on it. The ratio of query
    # heads to key-value heads stays the same.
    group = config["num_attention_heads"] // config["num_key_value_heads"]
    kv_heads = max(config["num_key_value_heads"], hidden // head // group)
    heads = kv_heads * group
    attention = layers * 2 * hidden * head * (heads + kv_heads)
    left = size - attention - config["vocab_size"] * hidden
    inner = max(config["intermediate_size"], round(left / (3 * hidden * layers * _STEP)) * _STEP)
    sizes = {
        "q_proj": (heads * head, hidden),
        "k_proj": (kv_heads * head, hidden),
        "v_proj": (kv_heads * head, hidden),
        "o_proj": (hidden, heads * head),
        "gate_proj": (inner, hidden),
        "up_proj": (inner, hidden),
        "down_proj": (hidden, inner),
        "embed_tokens": (config["vocab_size"], hidden),
        "lm_head": (config["vocab_size"], hidden),
    }
    # the added zeros lower the norm's mean of squares, so the norm's weights are scaled
    scale = math.sqrt(width / hidden)
    grown = dict[str, Tensor]()
    for name, tensor in weights.items():
        if tensor.ndim == 1:
            grown[name] = torch.zeros(hidden)
            grown[name][:width] = tensor.float() * scale
        else:
            grown[name] = tensor.new_zeros(sizes[name.split(".")[-2]])
            grown[name][: tensor.shape[0], : tensor.shape[1]] = tensor
    first = {name: tensor for name, tensor in grown.items() if ".layers.0." in name}
    for at in range(config["num_hidden_layers"], layers):
        for name, tensor in first.items():  # a layer of zeros does not change the output
            grown[name.replace(".layers.0.", f".layers.{at}.")] = torch.zeros_like(tensor)
    config |= {
        "hidden_size": hidden,
        "num_hidden_layers": layers,
        "num_attention_heads": heads,
        "num_key_value_heads": kv_heads,
        "intermediate_size": inner,
        "rms_norm_eps": config["rms_norm_eps"] * width / hidden,
    }
    made = Path(mkdtemp(prefix="atts-padded-")) / f"{folder.name}-{words}"
    made.mkdir()
    for file in folder.iterdir():
        if file.is_file() and file.suffix == ".json":
            shutil.copy(file, made)
    save_file(grown, made / "model.safetensors")
    (made / "config.json").write_text(json.dumps(config), encoding="utf-8")
    return made


def random_weights(config: ModelConfig, dtype: torch.dtype, device: torch.device) -> Weights:
    """Return random weights, the same in every call, with an output matrix of zeros.

    Each layer is generated when it is read.
    """
    generator = torch.Generator(device).manual_seed(config.matrix_weights)
    pool = torch.randn(_POOL, generator=generator, device=device).bfloat16().to(dtype)
    exponent = torch.arange(0, config.head_dim, 2, dtype=torch.float32) / config.head_dim
    turns = (10000.0**-exponent).expand(1 if config.long_after is None else 2, -1)
    return Weights(
        embedding=_filled(pool, config.vocabulary, config.hidden_size, 0)
        * math.sqrt(config.hidden_size),
        layers=_Layers(config, pool),
        norm=torch.ones(config.hidden_size, dtype=dtype, device=device),
        head=torch.zeros(config.vocabulary, config.hidden_size, dtype=dtype, device=device),
        ropes={"": Rope(turns, torch.ones(config.head_dim // 2))},
    )


def _filled(pool: Tensor, rows: int, columns: int, start: int) -> Tensor:
    """Return a new matrix of numbers near 1 / sqrt(columns) that bfloat16 represents exactly."""
    numbers = pool.roll(start) * 2.0 ** -round(math.log2(columns) / 2)
    matrix = pool.new_empty(rows * columns)
    for part in torch.split(matrix, len(pool)):
        part.copy_(numbers[: len(part)])
    return matrix.view(rows, columns)


class _Layers(Sequence[LayerWeights]):
    """Random layers, all different. A layer is generated again whenever it is read."""

    def __init__(self, config: ModelConfig, pool: Tensor) -> None:
        self._config = config
        self._pool = pool

    def __len__(self) -> int:
        return self._config.num_layers

    @overload
    def __getitem__(self, index: int) -> LayerWeights: ...
    @overload
    def __getitem__(self, index: slice) -> Sequence[LayerWeights]: ...
    def __getitem__(self, index: int | slice) -> LayerWeights | Sequence[LayerWeights]:
        if isinstance(index, slice):
            return [self[at] for at in range(*index.indices(len(self)))]
        if not 0 <= index < len(self):
            raise IndexError(index)
        config = self._config
        first = 1 + 4 * index
        across = config.num_heads * config.head_dim
        width = config.hidden_size
        inner = config.intermediate_size
        norm = self._pool.new_ones(width)
        sizes = [(across + 2 * config.num_kv_heads * config.head_dim, width), (width, across)]
        sizes += [(2 * inner, width), (width, inner)]
        qkv, out, gate_up, down = (
            _filled(self._pool, *size, first + at) for at, size in enumerate(sizes)
        )
        parts: dict[str, Any] = dict.fromkeys(field.name for field in fields(LayerWeights))
        parts |= {
            "norm": norm,
            "qkv": qkv,
            "out": out,
            "mlp_norm": norm,
            "gate_up": gate_up,
            "down": down,
        }
        return LayerWeights(**parts)
