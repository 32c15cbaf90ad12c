"""Where the time of scoring goes: matrices, the rest of the model, planning, and the way to the caller and back."""

from __future__ import annotations

import time
from dataclasses import dataclass, field

from anyio.from_thread import BlockingPortal
from torch import Tensor

from atts.core import ScoreRequest
from atts.decode import SampledTokens, SamplingBatch
from atts.local import LocalOptions
from atts.local.allocator import SlotIds
from atts.local.batch import Model, StepBatch
from atts.local.build import build_loop
from atts.local.compiling import native_library
from atts.local.loader import Weights
from atts.local.messages import Close, Command, Submit, WorkerConfig
from atts.local.native_model import NativeModel
from atts.tokenizing import ModelTokenizer
from scripts.studies.harness import Options, Table, say
from scripts.studies.local_scoring import CHUNK, PREFIX, score_seconds
from scripts.studies.local_subjects import Subject, engine_on, matrix_seconds


@dataclass(slots=True)
class _Timed:
    """A model that notes how long its forwards and its scoring of their rows take."""

    model: Model
    forwards: float = 0.0
    scores: float = 0.0

    @property
    def device_name(self) -> str:
        return self.model.device_name

    def forward(self, batch: StepBatch, table: SlotIds) -> Tensor:
        began = time.process_time()
        hidden = self.model.forward(batch, table)
        self.forwards += time.process_time() - began
        return hidden

    def compute_logits(self, hidden: Tensor) -> Tensor:
        return self.model.compute_logits(hidden)

    def sample(self, logits: Tensor, sampling: SamplingBatch, uniforms: list[float]) -> SampledTokens:
        return self.model.sample(logits, sampling, uniforms)

    def logprobs(self, logits: Tensor, tokens: list[int]) -> list[float]:
        return self.model.logprobs(logits, tokens)

    def score(self, hidden: Tensor, tokens: list[int], kept_rows: list[int]) -> tuple[list[float], Tensor]:
        began = time.process_time()
        found = self.model.score(hidden, tokens, kept_rows)
        self.scores += time.process_time() - began
        return found


@dataclass(slots=True)
class _Rounds:
    """An inbox that hands out a round of orders whenever the last is done, and notes the clocks each time."""

    rounds: list[list[Command]]
    timed: list[_Timed] = field(default_factory=list[_Timed])
    marks: list[tuple[float, float, float]] = field(default_factory=list[tuple[float, float, float]])

    def take(self, *, wait: bool) -> list[Command]:
        if not wait:
            return []
        self.marks.append((time.process_time(), self.timed[0].forwards, self.timed[0].scores))
        return self.rounds.pop(0) if self.rounds else [Close()]


def shares(subjects: list[Subject], options: Options, portal: BlockingPortal) -> Table:
    """Microseconds a scored token takes in every part of its way, at the least busy of several rounds."""
    rows: list[tuple[str | int | float, ...]] = []
    for subject in subjects:
        for batch in subject.batches:
            say(f"where scoring's time goes, {subject.name} at {batch}")
            rounds = options.pick(4, 9, 15)
            bare = matrix_seconds(subject, batch * CHUNK, rounds)
            loop, forward, score = _in_the_loop(subject, batch, rounds)
            with engine_on(portal, subject.folder, threads=1) as engine:
                whole = min(score_seconds(portal, engine, subject, batch, PREFIX, 500 + n) for n in range(rounds))
            parts = (bare, forward, score, loop - forward - score, whole - loop, whole)
            rows.append((subject.name, batch, *(1e6 * part / (batch * CHUNK) for part in parts)))
    columns = (
        "model",
        "rollouts",
        "torch.mm on its matrices",
        "forward",
        "logits and log-probs",
        "planning, cache, bookkeeping",
        "calls, events, tasks",
        "all",
    )
    notes = (
        "The forward holds the layers' matrices, attention over prefix and chunk, norms and rotations; the logits' "
        "matrix goes with the log-probs. The last part is what the caller's own tasks cost as well.",
    )
    return Table("Where a scored token's time goes, in microseconds of processor time", columns, tuple(rows), notes)


def _in_the_loop(subject: Subject, batch: int, rounds: int) -> tuple[float, float, float]:
    """Processor seconds of the whole loop, its forwards and its scoring, of the quickest round."""
    timed: list[_Timed] = []

    def make(config: WorkerConfig, weights: Weights, cache: Tensor) -> Model:
        library = native_library(config.name, config.model)
        timed.append(_Timed(NativeModel(library, config.model, weights, cache, threads=1)))
        return timed[0]

    loop, _ = build_loop(_worker_config(subject), lambda report: None, make)
    inbox = _Rounds(_orders(subject, batch, rounds), timed)
    loop.run(inbox)
    steps = list(zip(inbox.marks[1:-1:2], inbox.marks[2::2], strict=True))  # every second round: the first ones warm up
    seconds = [tuple(after - before for before, after in zip(*pair, strict=True)) for pair in steps]
    whole, forward, score = min(seconds)
    return whole, forward, score


def _orders(subject: Subject, batch: int, rounds: int) -> list[list[Command]]:
    orders: list[list[Command]] = []
    for number in range(rounds):
        bodies = subject.prompts(batch, PREFIX + CHUNK, number + 3000)
        first = 2 * number * batch + 1
        warm = [ScoreRequest(ids[:1], ids[1:PREFIX]) for ids in bodies]
        scored = [ScoreRequest(ids[:PREFIX], ids[PREFIX:]) for ids in bodies]
        orders.append([Submit(first + n, request) for n, request in enumerate(warm)])
        orders.append([Submit(first + batch + n, request) for n, request in enumerate(scored)])
    return orders


def _worker_config(subject: Subject) -> WorkerConfig:
    pieces = ModelTokenizer(subject.folder, subject.name).pieces
    options = LocalOptions(device="cpu", kernel="native", threads=1)
    return WorkerConfig(subject.name, subject.folder, subject.config, pieces, options)
