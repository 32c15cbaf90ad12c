"""Models both sides of the local study open, and the work they are given."""

from __future__ import annotations

import json
import tempfile
from collections.abc import Callable, Generator, Iterable, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any

import torch
from anyio.from_thread import BlockingPortal

from atts.concurrency import collect
from atts.core import Message, SampleRequest, Sampling, ScoreRequest, TokenIds
from atts.local import LocalEngine, LocalOptions
from atts.local.model_config import ModelConfig, read_model_config
from atts.models import EMBEDDED, path
from atts.sampling import Seed
from scripts.studies.harness import Options, cpu_seconds
from scripts.studies.theirs import generated, opened, random_model

PROMPT = 64
"""Tokens of a prompt in every decoding table."""
_RANDOM = {"random 20M": (384, 8, 1024), "random 200M": (1024, 14, 2816)}
"""Width, layers and feed-forward width."""


@dataclass(frozen=True, slots=True)
class Subject:
    """A model in a folder, opened by both sides."""

    name: str
    folder: Path
    theirs: Any
    config: ModelConfig
    is_halves: bool  # its weights are bfloat16 numbers, which the native kernels keep as such
    batches: tuple[int, ...]
    tokens: int  # sampled per sequence
    most_rounds: int = 99  # of a measurement; those of large models take long, and vary less

    def prompts(self, count: int, length: int, seed: int = 0) -> list[TokenIds]:
        """Random ids, no two prompts alike."""
        generator = torch.Generator().manual_seed(seed)
        rows = torch.randint(10, self.config.vocabulary - 10, (count, length), generator=generator)
        return [tuple(row) for row in rows.tolist()]

    @property
    def attention(self) -> int:
        """Floats that a token's query or output has over all layers: what mixing with one other
        token costs.
        """
        return self.config.num_layers * self.config.num_heads * self.config.head_dim


def subjects(options: Options, place: Path) -> list[Subject]:
    """The embedded pair, then random models: 20M by default, 200M too with full effort."""
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
    """How hard to try, and the event loop in which engines work: this thread measures and asks
    through the portal.
    """

    options: Options
    portal: BlockingPortal

    @contextmanager
    def engine(self, folder: Path, **changes: Any) -> Generator[LocalEngine]:
        """An open engine; in a thread, beside what it is compared with."""
        options = replace(LocalOptions(worker="thread", threads=1), **changes)
        with self.portal.wrap_async_context_manager(LocalEngine(folder, options=options)) as engine:
            yield engine

    def send(
        self, engine: LocalEngine, requests: Sequence[SampleRequest] | Sequence[ScoreRequest]
    ) -> int:
        """Send all at once and wait; the number of tokens that came of it."""
        return self.portal.call(send_all, engine, requests)


async def send_all(
    engine: LocalEngine, requests: Sequence[SampleRequest] | Sequence[ScoreRequest]
) -> int:
    """Send all at once; the number of tokens that came of it."""

    async def one(request: SampleRequest | ScoreRequest) -> int:
        if isinstance(request, SampleRequest):
            return len((await engine.sample(request)).ids)
        return len((await engine.score(request)).logprobs)

    return sum(await collect([partial(one, request) for request in requests]))


async def texts(engine: LocalEngine, requests: Sequence[SampleRequest]) -> list[TokenIds]:
    """What is written on each, all sent at once."""
    return [
        done.ids
        for done in await collect([partial(engine.sample, request) for request in requests])
    ]


def asked(engine: LocalEngine, texts: Iterable[str], tokens: int, seed: int) -> list[SampleRequest]:
    """A request for each question, at temperature .7, with random numbers of its own."""
    law = Sampling(0.7)
    prompts = (engine.tokenizer.render([Message("user", text)]) for text in texts)
    return [
        SampleRequest(ids, tokens, law, Seed(seed, sample=number))
        for number, ids in enumerate(prompts)
    ]


async def written(
    folder: Path, questions: Iterable[str], tokens: int, seed: int
) -> list[tuple[SampleRequest, TokenIds]]:
    """What a model on its own answers."""
    async with LocalEngine(folder, options=LocalOptions(worker="thread", threads=1)) as engine:
        requests = asked(engine, questions, tokens, seed)
        return list(zip(requests, await texts(engine, requests), strict=True))


class Fresh:
    """Requests whose prompts were never seen, so that no cache helps; both sides write the same
    number of tokens.
    """

    def __init__(
        self,
        subject: Subject,
        batch: int,
        seed: int = 0,
        clock: Callable[[Callable[[], object]], float] = cpu_seconds,
    ) -> None:
        """`clock`: processor seconds where each side computes in one thread, for others do not
        lengthen those.
        """
        self._subject = subject
        self._batch = batch
        self._round = 1000 * seed
        self._clock = clock

    def requests(self, tokens: int) -> list[SampleRequest]:
        """A new batch."""
        self._round += 1
        prompts = self._subject.prompts(self._batch, PROMPT, self._round)
        sampling = Sampling(temperature=0.7)
        return [SampleRequest(p, tokens, sampling, Seed(sample=n)) for n, p in enumerate(prompts)]

    def ours(self, lab: Lab, engine: LocalEngine, tokens: int) -> float:
        """Seconds of one batch through the engine."""
        requests = self.requests(tokens)
        return self._clock(lambda: lab.send(engine, requests))

    def theirs(self, tokens: int) -> float:
        """Seconds of one batch through `transformers.generate`."""
        ids = torch.tensor([list(request.ids) for request in self.requests(tokens)])
        return self._clock(lambda: generated(self._subject.theirs, ids, tokens))


@contextmanager
def unending(subject: Subject) -> Generator[Path]:
    """The same model without an end token, so that every sequence has the same length on both
    sides.
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
    """The least time torch.mm takes for all matrix products of `rows` tokens, weights in their best
    layout.
    """
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
