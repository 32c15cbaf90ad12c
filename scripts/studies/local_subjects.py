"""Models both sides of the local study open, and the work they are given."""

from __future__ import annotations

import json
import os
import tempfile
from collections.abc import Callable, Generator
from contextlib import contextmanager
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import anyio
import torch
from anyio.from_thread import BlockingPortal

from atts.core import SampleRequest, Sampling, ScoreRequest, TokenIds
from atts.local import LocalEngine, LocalOptions
from atts.local.model_config import ModelConfig, read_model_config
from atts.seeds import Seed
from scripts.studies.harness import Calm, Options, cpu_seconds

Clock = Callable[[Callable[[], object]], float]
"""Processor seconds where each side computes in one thread, for others do not lengthen those; else the wall's."""
MODELS = Path(__file__).resolve().parents[2] / "atts" / "models"
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


def subjects(options: Options, place: Path) -> list[Subject]:
    """The embedded pair, then random models: 20M by default, 200M too with full effort."""
    tokens = options.pick(48, 128, 128)
    embedded = [n for n in ("target", "draft") if (MODELS / n / "model.safetensors").is_file()]
    found = [_open(name, MODELS / name, (1, 16, 64), tokens) for name in embedded]
    for name in tuple(_RANDOM)[: options.pick(0, 1, 2)]:
        is_large = name == "random 200M"
        batches = (1, 16) if is_large else (1, 16, 64)
        one = _open(name, _random(place / name, *_RANDOM[name]), batches, 32 if is_large else tokens // 2)
        found.append(replace(one, most_rounds=2 if is_large else 3))
    return found


def _open(name: str, folder: Path, batches: tuple[int, ...], tokens: int) -> Subject:
    from transformers import AutoModelForCausalLM

    model: Any = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32).eval()
    is_halves = json.loads((folder / "config.json").read_text()).get("dtype") == "bfloat16"
    return Subject(name, folder, model, read_model_config(folder, name), is_halves, batches, tokens)


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
def engine_on(portal: BlockingPortal, folder: Path, **changes: Any) -> Generator[LocalEngine]:
    """An open engine, used from this thread through the portal; in a thread, beside what it is compared with."""
    options = replace(LocalOptions(worker="thread"), **changes)
    with portal.wrap_async_context_manager(LocalEngine(folder, options=options)) as engine:
        yield engine


async def send_all(engine: LocalEngine, requests: list[SampleRequest] | list[ScoreRequest]) -> int:
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


class Fresh:
    """Requests whose prompts were never seen, so that no cache helps; both sides write the same number of tokens."""

    def __init__(self, subject: Subject, batch: int, seed: int = 0, clock: Clock = cpu_seconds) -> None:
        self._subject, self._batch, self._round, self._clock = subject, batch, 1000 * seed, clock

    def requests(self, tokens: int) -> list[SampleRequest]:
        """A new batch."""
        self._round += 1
        prompts = self._subject.prompts(self._batch, PROMPT, self._round)
        law = Sampling(temperature=0.7)
        return [SampleRequest(p, tokens, law, Seed(sample=n)) for n, p in enumerate(prompts)]

    def ours(self, portal: BlockingPortal, engine: LocalEngine, tokens: int) -> float:
        """Seconds of one batch through the engine."""
        requests = self.requests(tokens)
        return self._clock(lambda: portal.call(send_all, engine, requests))

    def theirs(self, tokens: int) -> float:
        """Seconds of one batch through `transformers.generate`."""
        self._round += 1
        ids = torch.tensor(self._subject.prompts(self._batch, PROMPT, self._round))
        with torch.inference_mode():
            return self._clock(
                lambda: self._subject.theirs.generate(
                    ids,
                    attention_mask=torch.ones_like(ids),
                    max_new_tokens=tokens,
                    min_new_tokens=tokens,
                    do_sample=True,
                    temperature=0.7,
                    top_k=0,
                    pad_token_id=0,
                )
            )


@contextmanager
def unending(subject: Subject) -> Generator[Path]:
    """The same model without an end token, so that every sequence has the same length on both sides."""
    with tempfile.TemporaryDirectory() as place:
        folder = Path(place) / subject.folder.name
        folder.mkdir()
        for path in subject.folder.iterdir():
            if path.is_file() and path.name not in ("config.json", "generation_config.json"):
                (folder / path.name).symlink_to(path)
        config = json.loads((subject.folder / "config.json").read_text())
        (folder / "config.json").write_text(json.dumps({**config, "eos_token_id": None}))
        yield folder


def matrix_seconds(subject: Subject, rows: int, rounds: int = 12) -> float:
    """The least time torch.mm takes for all matrix products of `rows` tokens, weights in their best layout."""
    config = subject.config
    across = config.num_heads * config.head_dim
    sizes = [
        (config.hidden_size, across + 2 * config.num_kv_heads * config.head_dim),
        (across, config.hidden_size),
        (config.hidden_size, 2 * config.intermediate_size),
        (config.intermediate_size, config.hidden_size),
    ] * config.num_layers + [(config.hidden_size, config.vocabulary)]
    weights = [torch.randn(size) for size in sizes]
    inputs = {deep: torch.randn(rows, deep) for deep, _ in sizes}

    def work() -> None:
        for weight in weights:
            torch.mm(inputs[weight.shape[0]], weight)

    return min(cpu_seconds(work) for _ in range(rounds))


def memory_traffic(size: int = 1 << 26) -> float:
    """Bytes a second that one core reads and writes while it copies more than its caches hold, at best."""
    source = torch.zeros(size // 4)
    copied = torch.empty_like(source)
    return 2 * size / min(cpu_seconds(lambda: copied.copy_(source)) for _ in range(15))


def disturbed(calm: Calm) -> str:
    """How busy others kept the machine meanwhile, as a note under a table."""
    return f"Meanwhile others used {calm.disturbance:.1f} of this machine's {os.cpu_count()} processors."
