"""Measure the local engine on a GPU: exactness, speed, and the gain of a draft."""

# The study needs no installation. It needs a Python that has torch and transformers, and this
# checkout on its path; `scripts/bench gpu` arranges both. Every finished cell is saved at once, and
# the same command resumes after an interruption.

from __future__ import annotations

import argparse
import faulthandler
import gc
import json
import math
import os
import statistics
import sys
import tempfile
import time
from collections.abc import AsyncGenerator, Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import asynccontextmanager
from dataclasses import asdict, dataclass, replace
from functools import partial
from itertools import chain
from pathlib import Path
from statistics import fmean
from typing import Any, Literal, NamedTuple, Self

# The folder of replacements for missing packages comes last on the path, so installed packages are
# used first. Child processes get the same path.
sys.path.append(str(Path(__file__).with_name("bare")))

import anyio
import torch

from atts.accel import accelerated, options_of
from atts.accel.build import build_accelerated
from atts.accel.options import LoopPlan
from atts.calibration import HOLD, Calibrator, StoredScores, Tuning
from atts.concurrency import collect
from atts.core import (
    Completion,
    Outcome,
    Problem,
    Role,
    SampleRequest,
    Sampling,
    ScoreRequest,
    Scores,
    TokenIds,
)
from atts.engine import Engine, EngineStats
from atts.evaluators import compare_runs, extract, mean_estimate
from atts.evaluators.datasets.arithmetic import problems
from atts.graph import Caller, Graph
from atts.local import LocalEngine, RunDemand
from atts.local.batch import TokenTable
from atts.local.builder import MakeModel
from atts.local.cache import PrefixTree
from atts.local.cuda.model import cuda_model, disagreement, paged_attention
from atts.local.loop import StepLoop
from atts.local.messages import Close, Command, FailureReply, LoopReport, Submit, WorkerConfig
from atts.local.model import GatheredAttention, TorchModel
from atts.local.model_config import ModelConfig, read_model_config, rope_rows
from atts.local.options import Graphs
from atts.local.scheduler import Scheduler, SchedulerConfig
from atts.local.seams import Model
from atts.methods import GateInputs, preset
from atts.models import path, scores_path
from atts.models.tokenizers import ModelTokenizer
from atts.pipelines import (
    SMALL,
    Answers,
    Context,
    Gate,
    Policy,
    RoundGate,
    needed_logprobs,
    prompt_of,
    solve,
)
from atts.sampling import Seed
from scripts.studies.harness import Options, Parts, Row, Table, figure, look, points
from scripts.studies.local import (
    generated,
    padded_folder,
    random_model,
    random_weights,
    read_size,
    shape_of_size,
)

_COPIED = 1 << 32
# number of copied bytes, and number of rows of a square matrix; copy and matrix are larger than a
# device's caches
_MATRIX = 8192


class OutOfTime(Exception):
    """The error raised when the time limit is reached. The same command continues the study later."""


@dataclass(frozen=True, slots=True)
class Sizes:
    """The sizes of the models, the batches and the requests in this study."""

    shapes: tuple[str, ...] = ("8B", "1.5B", "32B")  # models with random weights
    pairs: tuple[tuple[str, str], ...] = (("0.6B", "8B"), ("1.5B", "32B"))
    vocabulary: int = 151_936
    batches: tuple[int, ...] = (16, 1, 64, 256, 4, 128, 32, 8, 2)
    generate: tuple[int, ...] = (16, 1, 64, 256)
    tokens: int = 64  # tokens written by each sequence
    prompt: int = 64
    prefix: int = 128  # known tokens before a scored chunk
    chunk: int = 32
    requests: int = 32  # number of requests that are also computed on a CPU for comparison
    samples: tuple[int, ...] = (16, 64, 8)
    questions: int = 24
    # numbers of simultaneous rollouts in the rows of the speculation tables
    rollouts: tuple[int, ...] = (1, 16, 4, 64)
    cache: int = 20_000  # number of tokens that the cache of a pair's engine holds


TINY = Sizes(
    shapes=("8M",), pairs=(("", "8M"),), vocabulary=512, batches=(2,), generate=(2,), tokens=8, prompt=8, prefix=16,
    chunk=6, requests=3, samples=(2,), questions=1, rollouts=(2,), cache=4096,
)  # fmt: skip
"""Small sizes for a run that only checks that the code of the study works."""


class Lab:
    """A device with its description and the finished cells, each written to disk immediately."""

    def __init__(self, device: str, sizes: Sizes, parts: Parts, until: float) -> None:
        self.device = torch.device(device)
        self.sizes = sizes
        self.parts = parts
        # `time.time`, because its values stay comparable if another process replaces this one
        self._own_until = until
        self._until = until

    @property
    def is_cuda(self) -> bool:
        """Return whether the study's device is a GPU."""
        return self.device.type == "cuda"

    @property
    def half(self) -> torch.dtype:
        """Return the data type of the weights on the device.

        A CPU computes in float32, because its speed in bfloat16 is not comparable.
        """
        return torch.bfloat16 if self.is_cuda else torch.float32

    @property
    def left(self) -> float:
        """Return the seconds that are left for the current part of the study."""
        return self._own_until - time.time()

    def begin(self, share: float) -> None:
        """Set a time limit for the next part of the study: this share of the remaining time."""
        self._own_until = time.time() + share * (self._until - time.time())

    def missing(self, names: Iterable[str], seconds: float) -> list[str]:
        """Return the names of cells without a measurement.

        `seconds` is the approximate time until the first of these cells is measured.

        :raises OutOfTime: a cell has no measurement, and too little time is left.
        """
        found = [name for name in names if name not in self.parts]
        if found and self.left < seconds:
            raise OutOfTime
        return found

    def cell(self, name: str, measure: Callable[[], Any], seconds: float = 0.0) -> Any:
        """Return the value of a cell; measure it first if it has no value.

        `seconds` is the approximate duration of the measurement.

        :raises OutOfTime: too little time is left.
        """
        if self.missing([name], seconds):
            self.parts.keep(name, measure())
            print(f"gpu: {name}: {str(self.parts[name])[:160]}", file=sys.stderr, flush=True)
        return self.parts[name]

    def synchronize(self) -> None:
        """Wait until the device has finished its work."""
        if self.is_cuda:
            torch.cuda.synchronize(self.device)

    def seconds(self, work: Callable[[], object]) -> float:
        """Return the duration of one call in seconds, including the work that it started on the
        device.
        """
        self.synchronize()
        began = time.perf_counter()
        work()
        self.synchronize()
        return time.perf_counter() - began

    def clear(self) -> None:
        """Free device memory that is no longer referenced."""
        if self.is_cuda:
            gc.collect()
            torch.cuda.empty_cache()

    def look(self) -> dict[str, Any]:
        """Describe the device, and measure how fast it copies memory and multiplies matrices.

        Both speeds are upper limits for an engine.
        """
        size, rows = (_COPIED, _MATRIX) if self.is_cuda else (1 << 24, 256)
        source = torch.randn(size // 4, device=self.device)
        copied = torch.empty_like(source)
        left = torch.randn(rows, rows, device=self.device).to(self.half)
        copying = min(self.seconds(lambda: copied.copy_(source)) for _ in range(6))
        product = min(self.seconds(lambda: left @ left) for _ in range(6))
        small = torch.zeros(8, device=self.device)
        launches = min(self.seconds(lambda: [small.add_(1) for _ in range(1000)]) for _ in range(3))
        return {
            "name": torch.cuda.get_device_name(self.device) if self.is_cuda else "CPU",
            "memory": torch.cuda.mem_get_info(self.device)[1] if self.is_cuda else 0,
            "torch": torch.__version__,
            "bytes": 2 * size / copying,  # bytes per second, read and written
            "flops": 2 * rows**3 / product,
            "launch": launches / 1000,
        }


_STEP_TOKENS = 2048  # largest number of prompt and chunk tokens in one step


class Script:
    """An inbox of a step loop. It returns all requests at once, and records the time at which each
    step begins.
    """

    def __init__(self, orders: Sequence[SampleRequest | ScoreRequest], first: int) -> None:
        self._orders: list[Command] = [
            Submit(first + place, order) for place, order in enumerate(orders)
        ]
        self.times: list[float] = []

    def take(self, *, wait: bool) -> list[Command]:
        """Return all requests. Once they are complete, return the command to close the loop."""
        self.times.append(time.perf_counter())
        orders = self._orders
        self._orders = []
        return orders or ([Close()] if wait else [])


def shape_of(lab: Lab, size: str) -> ModelConfig:
    """Return the configuration of a model of a published size."""
    return shape_of_size(
        read_model_config(path("draft"), "draft"), read_size(size), lab.sizes.vocabulary
    )


class RandomModel:
    """A model with random weights in the sizes of a published model, with a cache for some
    sequences.
    """

    def __init__(self, lab: Lab, size: str, graphs: Graphs) -> None:
        sizes = lab.sizes
        config = shape_of(lab, size)
        self.config = config
        weights = random_weights(config, lab.half, lab.device)
        # The output matrix is random too. With zeros, all tokens would be equally likely, and a
        # device needs less power to multiply zeros.
        weights = replace(weights, head=weights.embedding * config.hidden_size**-0.5)
        per_sequence = max(sizes.prompt + sizes.tokens, sizes.prefix + 3 * sizes.chunk) + 32
        room = torch.cuda.mem_get_info(lab.device)[0] * 0.8 if lab.is_cuda else 1 << 28
        weights_room = (
            weights_bytes(config, lab.half)
            + 2 * config.vocabulary * config.hidden_size * lab.half.itemsize
        )
        per_token = config.kv_floats_per_token * lab.half.itemsize
        self.slots = int(
            min(max(sizes.batches) * per_sequence, max(0, room - weights_room) // per_token)
        )
        self.most_sequences = self.slots // per_sequence
        shape = config.num_layers, 2, self.slots + 2, config.num_kv_heads, config.head_dim
        cache = torch.zeros(shape, dtype=lab.half, device=lab.device)
        self.trouble = ""
        self.model: Model
        if lab.is_cuda:
            self.model, self.trouble = cuda_model(config, weights, cache, graphs=graphs)
        else:
            self.model = TorchModel(config, weights, cache)
        self._request_id = 0

    def drive(self, *rounds: Sequence[SampleRequest | ScoreRequest]) -> list[list[float]]:
        """Serve several rounds of requests one after the other in one loop.

        Return for each round the times at which its steps began, and the time at which its last
        step ended.
        """
        rows = rope_rows(self.config, self.slots + 2)
        limits = SchedulerConfig(
            self.slots, 256, _STEP_TOKENS, self.config.context_length, None, rows
        )
        scheduler = Scheduler(limits, PrefixTree(1))
        table = TokenTable((), frozenset())
        found: list[list[float]] = []
        for orders in rounds:
            script = Script(orders, self._request_id + 1)
            self._request_id += len(orders)
            loop = StepLoop(self.model, scheduler, table, _ignore)
            loop.run(script)
            found.append(script.times)
        return found


def _ignore(report: LoopReport) -> None:
    """Ignore the replies of the loop, because the study needs only the loop's times."""


def weights_bytes(config: ModelConfig, dtype: torch.dtype) -> int:
    """Return the number of bytes of the weight matrices that every step reads."""
    return config.matrix_weights * dtype.itemsize


def prompts(count: int, length: int, seed: int) -> list[TokenIds]:
    """Return prompts of random token ids, all different."""
    generator = torch.Generator().manual_seed(seed)
    return [
        tuple(row) for row in torch.randint(10, 500, (count, length), generator=generator).tolist()
    ]


def decoding(lab: Lab, model: RandomModel, batch: int) -> dict[str, Any]:
    """Return the median seconds of a decoding step late in the run, when all sequences write and
    all CUDA graphs are captured.
    """
    sizes = lab.sizes
    law = Sampling(temperature=0.7)
    orders = [
        SampleRequest(ids, sizes.tokens, law, Seed(sample=place))
        for place, ids in enumerate(prompts(batch, sizes.prompt, batch))
    ]
    (times,) = model.drive(orders)
    steps = [b - a for a, b in zip(times[:-1], times[1:], strict=True)][
        -max(1, sizes.tokens // 2) :
    ]
    return {
        "step": statistics.median(steps),
        "slow": max(steps),
        "rate": batch / statistics.median(steps),
    }


def scoring(lab: Lab, model: RandomModel, batch: int) -> dict[str, Any]:
    """Measure the seconds to score one chunk after each of several known prefixes."""
    sizes = lab.sizes
    prefixes = prompts(batch, sizes.prefix, 1000 + batch)
    rounds = [
        [
            ScoreRequest(p, s)
            for p, s in zip(prefixes, prompts(batch, sizes.chunk, seed), strict=True)
        ]
        for seed in (2000, 3000, 4000)
    ]
    _, *warm = model.drive(*rounds)
    seconds = min(times[-1] - times[0] for times in warm)
    return {"seconds": seconds, "rate": batch * sizes.chunk / seconds}


def least_step(lab: Lab, config: ModelConfig, batch: int, limits: dict[str, Any]) -> float:
    """Return the least possible seconds of a step, from the limits of memory copies and matrix
    products.
    """
    context = lab.sizes.prompt + 3 * lab.sizes.tokens / 4
    cache = batch * context * config.kv_floats_per_token * lab.half.itemsize
    moved = (weights_bytes(config, lab.half) + cache) / limits["bytes"]
    return float(max(moved, 2.0 * config.matrix_weights * batch / limits["flops"]))


class TheirModel:
    """A transformers model with random weights and the sizes of an atts model."""

    def __init__(self, lab: Lab, size: str) -> None:
        own = shape_of(lab, size)
        sizes = {
            "hidden_size": own.hidden_size,
            "intermediate_size": own.intermediate_size,
            "head_dim": own.head_dim,
        }
        heads = {"num_attention_heads": own.num_heads, "num_key_value_heads": own.num_kv_heads}
        room = {"vocab_size": own.vocabulary, "max_position_embeddings": own.context_length}
        with torch.device(lab.device):
            self._model = random_model(
                lab.half, **sizes, **heads, **room, num_hidden_layers=own.num_layers
            )

    def decoding(self, lab: Lab, batch: int) -> dict[str, Any]:
        """Measure the time of all tokens except the first, whose time includes reading the
        prompt.
        """
        sizes = lab.sizes
        ids = torch.tensor(prompts(batch, sizes.prompt, batch), device=lab.device)
        counts = (max(2, sizes.tokens // 2), 1)
        generated(self._model, ids, 2)
        whole, first = (
            lab.seconds(partial(generated, self._model, ids, count)) for count in counts
        )
        step = (whole - first) / (counts[0] - 1)
        return {"step": step, "rate": batch / step}


LAWS = (Sampling(0.0), Sampling(0.7), Sampling(1.0, top_p=0.9), Sampling(0.9, top_k=20, min_p=0.02))
_ARMS: Mapping[str, dict[str, Any]] = {
    "float32": {},
    "float32, without graphs": {"graphs": "off"},
    "float32, gathered slots": {"graphs": "off", "kernel": "torch"},
    "float32, speculating": {"speculate": "draft", "k": 4},
    "bfloat16": {"dtype": "bfloat16"},
}


def kernel(lab: Lab) -> list[dict[str, Any]]:
    """Measure the error of the attention kernel for every shape and type, compared with float32
    attention on gathered slots.

    If the kernel cannot be used, record the reason.
    """
    found: list[dict[str, Any]] = []
    base = read_model_config(path("target"), "target")
    shapes = {
        "embedded target": base,
        **{s: shape_of_size(base, read_size(s)) for s in lab.sizes.shapes},
    }
    for name, config in shapes.items():
        # A kernel is compiled for each data type, width and window. To save time, only one data
        # type is measured for large models.
        is_own = config is base
        for dtype in (torch.float32, torch.bfloat16) if is_own else (torch.bfloat16,):
            cache = torch.zeros(
                1, 2, 4, config.num_kv_heads, config.head_dim, dtype=dtype, device=lab.device
            )
            words = "used"
            off = float("nan")
            try:
                attention, _ = (
                    paged_attention(config, cache) if lab.is_cuda else (GatheredAttention, 0)
                )
                off = max(
                    disagreement(config, attention, cache, window)
                    for window in ((0, 100) if is_own else (0,))
                )
            except Exception as error:  # noqa: BLE001  the table reports any failure
                words = f"{type(error).__name__}: {str(error)[:160]}"
            found.append(
                {
                    "shape": name,
                    "type": str(dtype).removeprefix("torch."),
                    "off": off,
                    "words": words,
                }
            )
    return found


class Texts(NamedTuple):
    """Texts that a model wrote, and its scores of some texts."""

    ids: list[TokenIds]
    scores: list[tuple[float, ...]]


def orders(lab: Lab) -> list[SampleRequest]:
    """Return requests to answer questions of the embedded pair, under four sampling settings."""
    tokenizer = ModelTokenizer(path("target"), "target")
    asked = [
        tokenizer.render(prompt_of(problem, Policy()))
        for problem in problems("test", lab.sizes.requests)
    ]
    return [
        SampleRequest(ids, lab.sizes.tokens, LAWS[n % 4], Seed(1, sample=n))
        for n, ids in enumerate(asked)
    ]


def texts_on(lab: Lab, device: str, scored: list[TokenIds] | None = None, **changes: Any) -> Texts:
    """Run the embedded target on a device: write texts, then score the texts in `scored`; if
    `scored` is None, score the written texts.
    """
    gathered = changes.pop("kernel", "") == "torch" and device != "cpu"
    plan, config = _config(device, **changes)
    asked = orders(lab)
    make: MakeModel | None = (
        (lambda own, weights, cache: TorchModel(own.model, weights, cache)) if gathered else None
    )

    def served(requests: Sequence[SampleRequest | ScoreRequest]) -> list[Any]:
        replies = dict[int, Any]()

        def tell(report: LoopReport) -> None:
            for reply in report.replies:
                if isinstance(reply, FailureReply):
                    raise reply.error("the model")
                replies[reply.request_id] = reply

        build_accelerated(plan, config, tell, make)[0].run(Script(requests, 0))
        return [replies[number] for number in range(len(requests))]

    ids = [reply.ids for reply in served(asked)]
    chunks = [ScoreRequest(own.ids, text) for own, text in zip(asked, scored or ids, strict=True)]
    return Texts(ids, [reply.logprobs for reply in served(chunks)])


def _config(device: str, **changes: Any) -> tuple[LoopPlan, WorkerConfig]:
    folder = path("target")
    small = path("draft")
    tokenizer = ModelTokenizer(folder, "target")
    settings = {"device": device, "kernel": "torch", "kv_tokens": 20_000, "worker": "thread"}
    drafter = {"drafter": str(small)} if changes.get("speculate") else {}
    own_options, speculation, stages = options_of(**{**settings, **changes, **drafter})
    model = read_model_config(folder, "target")
    config = WorkerConfig("target", folder, model, tokenizer.pieces, own_options)
    plan = LoopPlan(speculation, stages)
    if drafter:
        own = replace(
            config, name="drafter", folder=small, model=read_model_config(small, "drafter")
        )
        plan = replace(plan, drafter=own)
        config = replace(config, more_kv_floats=own.kv_floats_per_token)
    return plan, config


def compare(lab: Lab, arm: str, reference: Texts) -> dict[str, Any]:
    """Compare one way to compute on the device with computing in float32 on a CPU."""
    found = texts_on(lab, lab.device.type, reference.ids, **_ARMS[arm])
    pairs = list(zip(found.ids, reference.ids, strict=True))
    ours, theirs = (chain.from_iterable(texts.scores) for texts in (found, reference))
    offs = [abs(a - b) for a, b in zip(ours, theirs, strict=True)]
    return {
        "texts": len(pairs),
        "equal": sum(one == other for one, other in pairs),
        # for each text, the number of tokens before the first difference
        "tokens": sum(_shared(one, other) for one, other in pairs),
        "of": sum(map(len, reference.ids)),
        "off_mean": fmean(offs),
        "off_most": max(offs),
    }


def _shared(one: TokenIds, other: TokenIds) -> int:
    return next(
        (n for n, (a, b) in enumerate(zip(one, other, strict=False)) if a != b),
        min(len(one), len(other)),
    )


def exactness(lab: Lab) -> None:
    """Compare every way to compute on the device with computing in float32 on a CPU."""
    names = {f"exactness | {arm}": arm for arm in _ARMS}
    if lab.missing(names, 5.0):
        reference = texts_on(lab, "cpu")
        for name, arm in names.items():
            lab.cell(name, partial(compare, lab, arm, reference), 5.0)


ARMS = ("target-only", "atts", "exact", "draft-only")
RATE = 0.2
# number of consecutive questions that are measured before the number of rollouts changes
_BLOCK = 6


def folder_of(model: Literal["draft", "target"], pad: str) -> Path:
    """Return the embedded model's folder, or a copy padded to the size `pad`."""
    folder = Path(path(model))
    return padded_folder(folder, pad) if pad else folder


def options(lab: Lab, **changes: Any) -> dict[str, Any]:
    """Return the options of an engine on the device. On a GPU, the engine runs in its own process."""
    settings: dict[str, Any] = {"device": lab.device.type, "kv_tokens": lab.sizes.cache}
    settings |= {"worker": "process" if lab.is_cuda else "thread", "chunk_tokens": 2048}
    settings |= {"kernel": "torch", "dtype": str(lab.half).removeprefix("torch.")}
    return options_of(**{**settings, **changes})._asdict()


class _Calls:
    """A wrapper that passes the calls of one rollout to an engine, and records nothing.

    The class in `atts.run` records calls, but needs msgspec, which a bare machine lacks.
    """

    has_recorded_calls = False

    def __init__(self, engine: Engine, role: Role, scope: Caller, timeout_seconds: float) -> None:
        self.spec = engine.spec
        self.tokenizer = engine.tokenizer
        self._engine = engine
        self._role: Role = role
        self._scope = scope

    async def sample(self, request: SampleRequest) -> Completion:
        """Continue the ids once the engine has room."""
        tokens = len(request.ids) + request.max_tokens
        return await self._scope.call(
            self._role,
            self._engine.sample,
            request,
            engine=self._role,
            turn=request.seed.turn,
            tokens=tokens,
        )

    async def score(self, request: ScoreRequest) -> Scores:
        """Score the suffix once the engine has room."""
        tokens = len(request.prefix) + len(request.suffix)
        return await self._scope.call(
            "score",
            self._engine.score,
            request,
            engine=self._role,
            turn=request.turn,
            tokens=tokens,
        )

    def stats(self) -> EngineStats:
        """Return the engine's statistics."""
        return self._engine.stats()

    async def __aenter__(self) -> Self:
        """Return this object; the pair of engines opens and closes the engine."""
        return self

    async def __aexit__(self, *error: object) -> None:
        """Close nothing, because the pair of engines owns the engine."""

    def recorded_length(self, request: SampleRequest) -> int:
        """Return 0: no call was recorded."""
        return 0

    def recorded_scores(self, request: ScoreRequest) -> Scores | None:
        """Return None: no call was recorded."""
        return None


class Pair:
    """The open engines of a pair."""

    def __init__(self, draft: LocalEngine, target: LocalEngine) -> None:
        self._draft = draft
        self._target = target
        # one gate for all questions, because a gate learns from one question to the next
        self._gates: dict[tuple[str, int], Gate | RoundGate] = {}

    async def answer(self, arm: str, problem: Problem, samples: int, seed: int) -> dict[str, Any]:
        """Solve one question with parallel rollouts. Return its results, with the seconds until the
        vote was known.
        """
        chosen = preset(arm)
        policy = chosen.policy(Policy(samples=samples)).filled(SMALL)
        gate = self._gates.setdefault((arm, samples), chosen.gate(GateInputs(_calibrator(samples))))
        answers = Answers(
            partial(extract, kind="math", fallback="none"), _by_spelling, extract_finished=extract
        )
        needed = needed_logprobs(policy, gate, self._draft.spec, self._target.spec)
        context = Context(
            self._draft,
            self._target,
            gate,
            answers=answers,
            bind=_Calls,
            seed=seed,
            logprobs=needed,
        )
        began = anyio.current_time()
        (result,) = await Graph(rollouts=samples).run(
            [problem], lambda one, scope: solve(one, policy, context, scope)
        )
        if result.error is not None:
            raise result.error
        assert result.value is not None, "no error, so an outcome"
        return {"seconds": anyio.current_time() - began, **_figures(result.value)}


def _figures(outcome: Outcome) -> dict[str, float]:
    usage = outcome.usage
    answer = outcome.problem.answer
    ended = [line for line in outcome.rollouts if line.finish not in ("settled", "cancelled")]
    return {
        "right": float(outcome.answer == answer),
        "share": sum(line.answer == answer for line in ended) / max(1, len(ended)),
        "draft": usage.draft_tokens,
        "scored": usage.scored_tokens,
        "target": usage.target_tokens,
        "drawn": usage.drawn_tokens,
    }


def _calibrator(samples: int) -> Calibrator:
    tuning = Tuning.for_rollouts(samples)
    return Calibrator(RATE, "aci", stored=_stored(), hold=max(HOLD, samples), tuning=tuning)


def _by_spelling(answers: Sequence[str]) -> list[int]:
    """Group answers that are spelled alike.

    The embedded models answer with whole numbers, so equal answers have the same spelling.
    """
    known: dict[str, int] = {}
    return [known.setdefault(answer.strip(), len(known)) for answer in answers]


def _stored() -> StoredScores:
    """Return the scores that the package ships for the pair.

    The check of the scores' conditions is skipped, because padding and data types differ here.
    """
    state: dict[str, Any] = json.loads(scores_path().read_text(encoding="utf-8"))
    scores, questions, turns, lengths = (
        tuple(state[name]) for name in ("scores", "questions", "turns", "lengths")
    )
    return StoredScores(scores, questions, turns, lengths=lengths)


_PROBLEM_TOKENS = 2048
"""Number of cache tokens reserved for each problem."""


@asynccontextmanager
async def opened(lab: Lab, draft: str, target: str) -> AsyncGenerator[Pair]:
    """Open the pair padded to these sizes.

    As in a run, the draft opens first and leaves room for the target. On a GPU the caches take the
    memory that both models leave. On a CPU their size is fixed.
    """
    settings = options(lab, **({"kv_tokens": None} if lab.is_cuda else {}))
    large_folder = folder_of("target", target)
    rollouts = max(lab.sizes.samples)
    tokens = SMALL.max_tokens + _PROBLEM_TOKENS
    demands = [
        RunDemand(
            rollouts, tokens, card=1, other=str(large_folder), other_options=settings["options"]
        ),
        RunDemand(rollouts, tokens),
    ]
    small = accelerated(folder_of("draft", draft), name="draft", demand=demands[0], **settings)
    large = accelerated(large_folder, name="target", demand=demands[1], **settings)
    async with small, large:
        yield Pair(small, large)


def pair_cells(lab: Lab, draft: str, target: str) -> None:
    """Measure all arms, question after question, for every number of rollouts.

    Finished cells are not measured again.

    :raises OutOfTime: too little time is left for another question.
    """
    cells = {
        f"pair | {draft} | {target} | {samples} | {number} | {arm}": (samples, number, arm)
        for block in range(0, lab.sizes.questions, _BLOCK)
        for samples in lab.sizes.samples
        for number in range(block, min(block + _BLOCK, lab.sizes.questions))
        for arm in (*ARMS[number % len(ARMS) :], *ARMS[: number % len(ARMS)])
    }
    if missing := lab.missing(cells, 40.0):
        anyio.run(_answer_all, lab, draft, target, {name: cells[name] for name in missing})


async def _answer_all(
    lab: Lab, draft: str, target: str, cells: Mapping[str, tuple[int, int, str]]
) -> None:
    asked = problems("test", 2 + lab.sizes.questions)
    warmed = set[int]()
    async with opened(lab, draft, target) as pair:
        for name, (samples, number, arm) in cells.items():
            # the first questions are not measured, because they capture graphs and compile kernels
            if samples not in warmed:
                for each in ARMS:
                    await pair.answer(each, asked[-1], samples, 7)
                warmed.add(samples)
            found = await pair.answer(arm, asked[number], samples, 11 + number)
            lab.cell(name, partial(dict, found))
            if lab.left < 3 * found["seconds"]:
                raise OutOfTime


_WAYS: Mapping[str, dict[str, Any]] = {
    "off": {},
    "auto": {"speculate": "auto"},
    "k=3": {"speculate": "draft", "k": 3},
    "k=6": {"speculate": "draft", "k": 6},
    "suffix": {"speculate": "suffix"},
}


def speculation_cells(lab: Lab, draft: str, target: str) -> None:
    """Measure how fast the target alone writes, without speculation and with each kind of
    speculation, at several numbers of rollouts.
    """
    for way, changes in _WAYS.items():
        cells = {
            f"speculation | {draft} | {target} | {way} | {count}": count
            for count in lab.sizes.rollouts
        }
        missing = lab.missing(cells, 30.0)
        if not missing:
            continue
        settings = dict(changes)
        # plain decoding (no changes) and proposals from earlier texts ("suffix") need no draft
        # model
        if changes and way != "suffix":
            settings["drafter"] = str(folder_of("draft", draft))
        todo = {name: cells[name] for name in missing}
        anyio.run(_write_all, lab, folder_of("target", target), options(lab, **settings), todo)


async def _write_all(
    lab: Lab, folder: Path, options: Mapping[str, Any], cells: Mapping[str, int]
) -> None:
    async with accelerated(folder, name="target", **options) as engine:
        prompts = [
            engine.tokenizer.render(prompt_of(problem, Policy())) for problem in problems("test", 8)
        ]
        for name, count in cells.items():
            done = [
                await _round(engine, prompts[seed], count, seed, 2 * lab.sizes.tokens)
                for seed in range(5)
            ][2:]
            stats = engine.loop_stats().speculation
            found = {"tokens": sum(n for n, _ in done), "seconds": sum(s for _, s in done)}
            found |= {"proposed": stats.proposed, "accepted": stats.accepted} if stats else {}
            lab.cell(name, partial(dict, found))
            if lab.left < 10.0:
                raise OutOfTime


async def _round(
    engine: LocalEngine, prompt: TokenIds, count: int, seed: int, tokens: int
) -> tuple[int, float]:
    """Return the number of tokens that several rollouts of one question wrote, and the seconds they
    took.
    """
    seeds = [Seed(seed, sample=n) for n in range(count)]
    requests = [
        SampleRequest(prompt, tokens, Sampling(0.7), one, rollout=str(one.sample)) for one in seeds
    ]
    began = anyio.current_time()
    replies = await collect([partial(engine.sample, request) for request in requests])
    return sum(len(reply.ids) for reply in replies), anyio.current_time() - began


def tables(lab: Lab) -> list[Table]:
    """Return all tables that have rows."""
    made = [_device(lab), _kernel(lab), _exactness(lab), _decoding(lab), _scoring(lab), _pairs(lab)]
    return [table for table in (*made, _speculation(lab), _troubles(lab)) if table.rows]


def _found(lab: Lab, kind: str) -> Iterator[tuple[list[str], dict[str, Any]]]:
    """Yield every finished cell of one kind: the other parts of its name, and its value."""
    for name, value in lab.parts.items():
        first, *rest = name.split(" | ")
        if first == kind and value:
            yield rest, value


def _device(lab: Lab) -> Table:
    rows: list[Row] = [
        (
            one["name"],
            one["memory"] / 1e9,
            one["bytes"] / 1e9,
            one["flops"] / 1e12,
            1e6 * one["launch"],
        )
        for _, one in _found(lab, "device")
    ]
    header = "device | GB | GB/s read and written by a copy | TFLOP/s of a matrix product | us to launch an operation"
    return Table.of("The device and its limits", header, rows)


def _kernel(lab: Lab) -> Table:
    names = ("shape", "type", "off", "words")
    rows: list[Row] = [tuple(one[name] for name in names) for one in lab.parts.get("kernel", [])]
    return Table.of(
        "The attention kernel compared with gathered slots in float32",
        "model | type | largest difference | kernel",
        rows,
        "Keys are random and lie in scattered cache slots. Blocks have 1 to 16 rows, and "
        "contexts have up to 616 tokens. The embedded target is also tested with an attention "
        "window of 100 tokens.",
    )


def _exactness(lab: Lab) -> Table:
    rows: list[Row] = [
        (
            arm,
            one["texts"],
            one["equal"],
            f"{one['tokens']} of {one['of']}",
            one["off_mean"],
            one["off_most"],
        )
        for (arm,), one in _found(lab, "exactness")
    ]
    return Table.of(
        "The embedded target on the device compared with float32 on a CPU",
        "computed as | texts | equal texts | tokens before the first difference | error "
        "of log-probs, mean | largest",
        rows,
        "The texts use four sampling settings (greedy, temperature 0.7, top-p, top-k with "
        "min-p) and the same random numbers. Log-probabilities are compared on the CPU's "
        "texts. After the first different token, the rest of the text also differs.",
    )


def _decoding(lab: Lab) -> Table:
    sizes = list(dict.fromkeys(size for (size, *_), _ in _found(lab, "decode")))
    rows = [row for size in sizes for row in _rows_of(lab, size)]
    return Table.of(
        "Writing: models of random weights",
        "shape | rollouts | tokens/s | ms per step | least ms | share of the limit | "
        "without graphs, ms | transformers.generate, tokens/s | ratio",
        rows,
        f"Each prompt has {lab.sizes.prompt} tokens, and each rollout writes {lab.sizes.tokens} "
        "tokens at temperature 0.7. Times include the whole step loop; *ms per step* is the "
        "median of the second half. *Least ms* is the time to read weights and cache at the "
        "speed of a copy, or to multiply at the speed of a large matrix product. The rate of "
        "generate leaves out its first token.",
    )


def _rows_of(lab: Lab, size: str) -> Iterator[Row]:
    parts = lab.parts
    limits = lab.parts["device"]
    for batch in sorted(lab.sizes.batches):
        ours, eager = (
            parts.get(f"decode | {size} | {graphs} | {batch}") for graphs in ("auto", "off")
        )
        if not ours:
            continue
        theirs = parts.get(f"generate | {size} | {batch}") or {}
        least = least_step(lab, shape_of(lab, size), batch, limits)
        step = ours["step"]
        rate = ours["rate"]
        their_rate = theirs.get("rate")
        yield (
            size, batch, rate, 1e3 * step, 1e3 * least, least / step, 1e3 * eager["step"] if eager else None,
            their_rate, rate / their_rate if their_rate else None,
        )  # fmt: skip


def _scoring(lab: Lab) -> Table:
    rows: list[Row] = []
    for (size, graphs, batch), one in _found(lab, "score"):
        written = lab.parts.get(f"decode | {size} | {graphs} | {batch}")
        rows.append(
            (size, int(batch), one["rate"], one["rate"] / written["rate"] if written else None)
        )
    return Table.of(
        f"Scoring {lab.sizes.chunk} new tokens on each of several rollouts of "
        f"{lab.sizes.prefix} cached tokens",
        "shape | rollouts | scored tokens/s | relative to written tokens/s",
        sorted(rows, key=lambda row: (str(row[0]), row[1])),
        "All chunks are scored at once. Times include the whole step loop, and are those of "
        "the faster of two rounds.",
    )


def _pairs(lab: Lab) -> Table:
    cells: dict[tuple[str, str, int], dict[str, dict[int, dict[str, float]]]] = {}
    for (draft, target, samples, number, arm), one in _found(lab, "pair"):
        cells.setdefault((draft, target, int(samples)), {}).setdefault(arm, {})[int(number)] = one
    rows = list[Row]()
    for key in sorted(cells):
        for arm in ARMS:
            row = _arm(key, arm, cells[key])
            if row is not None:
                rows.append(row)
    return Table.of(
        "Padded pairs: one question at a time, its rollouts in parallel",
        "draft/target | rollouts | method | questions | s per question | speed-up over "
        "target-only | accuracy | minus target-only's, points | pass@1 | tokens per "
        "question: draft, scored, target",
        rows,
        "Padded models write the texts of the embedded models, but compute as much as models "
        "of the named size. All methods run in turn on each question, with temperature 0.7, "
        f"rate {RATE} and early stop. The embedded draft agrees with its target on 0.98 of the "
        "tokens, so `exact` and speculation look better than with real pairs. Each method is "
        "compared with target-only on the questions that both finished, with 95 % intervals "
        "over questions.",
    )


def _arm(
    key: tuple[str, str, int], arm: str, cells: Mapping[str, Mapping[int, Mapping[str, float]]]
) -> Row | None:
    own = cells.get(arm, {})
    base = cells.get("target-only", {})
    both = sorted(own.keys() & base.keys())
    if not own:
        return None
    right, share = ([one[what] for one in own.values()] for what in ("right", "share"))
    kinds = [
        sum(one[kind] for one in own.values()) / len(own) for kind in ("draft", "scored", "target")
    ]
    seconds = sum(one["seconds"] for one in own.values()) / len(own)
    times = _times([base[n]["seconds"] for n in both], [own[n]["seconds"] for n in both])
    apart = "-"
    if arm != "target-only" and len(both) > 1:
        apart = points(
            compare_runs(
                [base[n]["right"] for n in both], [own[n]["right"] for n in both]
            ).difference,
            1,
        )
    return (
        f"{key[0] or 'embedded'}/{key[1] or 'embedded'}", key[2], arm, len(own), seconds, times, _rate(right),
        apart, _rate(share), ", ".join(figure(kind, 3) for kind in kinds),
    )  # fmt: skip


def _times(base: Sequence[float], own: Sequence[float]) -> str:
    """Return the ratio of the total seconds in `base` to those in `own`, with its 95 % interval.

    The interval is that of a ratio of means (Fieller's method, to first order).
    """
    if not own:
        return "-"
    ratio = sum(base) / sum(own)
    count = len(own)
    if count < 2:
        return f"{ratio:.2f} (n=1)"
    mean = sum(own) / count
    squares = sum((before - ratio * after) ** 2 for before, after in zip(base, own, strict=True))
    spread = math.sqrt(squares / (count - 1) / count) / mean
    return f"{ratio:.2f} [{ratio - 1.96 * spread:.2f}, {ratio + 1.96 * spread:.2f}]"


def _rate(values: Sequence[float]) -> str:
    found = mean_estimate(list(values), len(values))
    return f"{found.value:.2f} [{found.low:.2f}, {found.high:.2f}]"


def _speculation(lab: Lab) -> Table:
    cells = {tuple(rest): one for rest, one in _found(lab, "speculation")}
    rows: list[Row] = []
    for (draft, target, way, count), one in cells.items():
        plain = cells.get((draft, target, "off", count))
        rate = one["tokens"] / one["seconds"]
        kept = one["accepted"] / one["proposed"] if one.get("proposed") else None
        ratio = rate * plain["seconds"] / plain["tokens"] if plain else None
        rows.append(
            (f"{draft or 'embedded'}/{target or 'embedded'}", int(count), way, rate, ratio, kept)
        )
    return Table.of(
        "The target alone, with and without speculation",
        "drafter/target | rollouts | proposals | tokens/s | relative to none | accepted "
        "share of proposed tokens",
        sorted(rows, key=lambda row: (str(row[0]), int(str(row[1])))),
        "Padded models write at temperature 0.7. Each measurement has two uncounted rounds and "
        "then three counted rounds of one question's rollouts. `auto` takes proposed tokens "
        "from earlier texts and from the drafter, and proposes as many as save time. The "
        "embedded drafter agrees with its target on 0.98 of the tokens, more than real "
        "drafters.",
    )


def _troubles(lab: Lab) -> Table:
    failed: list[Row] = [(part, str(words)) for (part,), words in _found(lab, "trouble")]
    failed += [
        (f"kernel, {size}", shape["trouble"])
        for (size,), shape in _found(lab, "shape")
        if shape["trouble"]
    ]
    return Table.of("Failed parts", "part | reason", failed)


Job = Callable[[Lab], None]


def rates(lab: Lab, size: str) -> None:
    """Measure how fast a model with random weights writes and scores, with and without CUDA graphs."""
    _rates(lab, size, "auto", {"decode": decoding, "score": scoring})
    lab.clear()
    _rates(lab, size, "off", {"decode": decoding})


def _rates(
    lab: Lab, size: str, graphs: Graphs, works: Mapping[str, Callable[[Lab, RandomModel, int], Any]]
) -> None:
    cells = [
        (f"{work} | {size} | {graphs} | {batch}", work, batch)
        for batch in lab.sizes.batches
        for work in works
    ]
    if lab.missing((name for name, *_ in cells), 20.0):
        model = RandomModel(lab, size, graphs)
        lab.cell(
            f"shape | {size}", partial(dict, kernel=model.model.device_name, trouble=model.trouble)
        )
        for name, work, batch in cells:
            fits = batch <= model.most_sequences
            lab.cell(
                name, partial(works[work], lab, model, batch) if fits else lambda: None, 4.0 * fits
            )


def their_rates(lab: Lab, size: str) -> None:
    """Measure `transformers.generate` with models of the same sizes."""
    names = {f"generate | {size} | {batch}": batch for batch in lab.sizes.generate}
    if lab.missing(names, 25.0):
        model = TheirModel(lab, size)
        for name, batch in names.items():
            lab.cell(name, partial(model.decoding, lab, batch), 8.0)


def jobs(sizes: Sizes) -> dict[str, Job]:
    """Return the jobs of the study, the most informative jobs first."""
    found: dict[str, Job] = {
        "device": lambda lab: lab.cell("device", lab.look),
        "kernel": lambda lab: lab.cell("kernel", partial(kernel, lab)),
        "exactness": exactness,
        f"rates {sizes.shapes[0]}": partial(rates, size=sizes.shapes[0]),
    }
    for draft, target in sizes.pairs:
        found[f"pair {draft}/{target}"] = partial(pair_cells, draft=draft, target=target)
        found[f"speculation {draft}/{target}"] = partial(
            speculation_cells, draft=draft, target=target
        )
    found |= {f"rates {size}": partial(rates, size=size) for size in sizes.shapes[1:]}
    return found | {f"generate {size}": partial(their_rates, size=size) for size in sizes.shapes}


def run(
    lab: Lab, work: Mapping[str, Job], skipped: list[str], publish: Callable[[], object]
) -> tuple[str, list[str]]:
    """Run the jobs in order; return the job that broke the device, and the jobs that ran out of
    time.

    In the first pass a job may take a third of the remaining time, so that many tables get rows. A
    second pass completes the tables. If a job fails, its reason is recorded and the other jobs
    continue. The same command tries a failed job again.
    """
    left = list[str]()
    for share in (1 / 3, 1.0):
        left = []
        for name, job in work.items():
            if name in skipped:
                continue
            lab.begin(share)
            try:
                job(lab)
            except OutOfTime:
                left.append(name)
            except Exception as error:  # noqa: BLE001  other jobs continue after any failure
                _told(lab, name, f"{type(error).__name__}: {str(error)[:500]}")
                skipped.append(name)
                if _is_broken(lab):
                    return name, left
            else:
                _told(lab, name, "")
            lab.clear()
            publish()
    return "", left


def _told(lab: Lab, name: str, trouble: str) -> None:
    """Record why a job failed, or "" if the job works. Print the reason unless it is already
    recorded.
    """
    if lab.parts.get(f"trouble | {name}", "") != trouble:
        lab.parts.keep(f"trouble | {name}", trouble)
        print(
            f"gpu: {name} failed: {trouble}" if trouble else f"gpu: {name} works",
            file=sys.stderr,
            flush=True,
        )


def _is_broken(lab: Lab) -> bool:
    """Return whether the device no longer answers.

    After some errors only a new process can use the device.
    """
    try:
        lab.synchronize()
    except Exception:  # noqa: BLE001  any failure means that the device is broken
        return True
    return False


def publish(lab: Lab, out: Path) -> str:
    """Write the finished cells as JSON and as a page, and return the page."""
    device: dict[str, Any] = lab.parts.get("device") or {}
    words = f"{device.get('name', lab.device)}, {device.get('memory', 0) / 1e9:.0f} GB"
    machine = replace(look(1), software=f"{words}; torch {device.get('torch', '')}")
    made = tables(lab)
    record: dict[str, Any] = {
        "study": "gpu",
        "effort": "full" if lab.is_cuda else "quick",
        "seed": 0,
    }
    record |= {
        "machine": machine.fields(),
        "spent": None,
        "tables": [asdict(table) for table in made],
    }
    (out / "gpu.json").write_text(json.dumps(record, indent=1) + "\n")
    page = f"# The local engine on {words}\n\n" + "\n".join(table.markdown() for table in made)
    (out / "gpu.md").write_text(page)
    return page


def study(options: Options) -> list[Table]:
    """Measure on this machine's GPU, or a tiny run on its CPU at quick effort, and return the
    tables.
    """
    tiny = options.effort == "quick"
    with tempfile.TemporaryDirectory() as folder:
        out = options.out or Path(folder)
        main(["--out", str(out), *(["--device", "cpu", "--tiny"] if tiny else [])])
        record = json.loads((out / "gpu.json").read_text())
    return [Table.read(fields) for fields in record["tables"]]


def main(arguments: list[str] | None = None) -> None:
    """Measure the missing cells, and print the page."""
    asked = _parse(arguments)
    asked.out.mkdir(parents=True, exist_ok=True)
    until = asked.until or time.time() + 60 * asked.minutes
    sizes = TINY if asked.tiny else Sizes()
    kind = f"{asked.device}{'-tiny' if asked.tiny else ''}"
    lab = Lab(asked.device, sizes, Parts(asked.out / f"gpu-{kind}.jsonl"), until)
    if lab.is_cuda:  # a kernel that never ends stops only if the process ends
        faulthandler.dump_traceback_later(lab.left + 90, exit=True)
    work = jobs(sizes)
    broken, left = run(lab, work, asked.skip, partial(publish, lab, asked.out))
    if broken:
        again = [
            sys.executable,
            "-m",
            "scripts.studies.gpu",
            "--until",
            str(until),
            "--out",
            str(asked.out),
        ]
        again += ["--device", asked.device, *["--tiny"] * asked.tiny]
        os.execv(
            sys.executable, [*again, *(word for name in asked.skip for word in ("--skip", name))]
        )
    print(publish(lab, asked.out))
    failed = [name for name in work if lab.parts.get(f"trouble | {name}")]
    remarks = (
        [f"no time left for: {', '.join(left)}; the same command resumes the study"] if left else []
    )
    remarks += (
        [f"failed: {', '.join(failed)}; the same command tries the failed parts again"]
        if failed
        else []
    )
    print(f"gpu: {'; '.join(remarks) or 'all is done'}", file=sys.stderr)
    if failed:
        sys.exit(1)


def _parse(arguments: list[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(prog="bench gpu", description=__doc__)
    parser.add_argument(
        "--minutes",
        type=float,
        default=9.0,
        help="time limit in minutes; no measurement starts that would end later",
    )
    parser.add_argument(
        "--out", type=Path, required=True, help="folder for finished cells, gpu.json and gpu.md"
    )
    parser.add_argument("--device", default="cuda", choices=["cuda", "cpu"])
    parser.add_argument(
        "--tiny",
        action="store_true",
        help="use tiny models and few requests, only to check that the code runs; the printed "
        "rates have no meaning",
    )
    parser.add_argument("--until", type=float, default=0.0, help=argparse.SUPPRESS)
    parser.add_argument("--skip", action="append", default=[], help=argparse.SUPPRESS)
    asked = parser.parse_args(arguments)
    if asked.device == "cuda":
        import torch

        if not torch.cuda.is_available():
            parser.error(
                "torch finds no CUDA device; --device cpu --tiny runs the code without one"
            )
    return asked


if __name__ == "__main__":
    main()
