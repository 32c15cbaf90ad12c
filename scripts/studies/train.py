"""Train the embedded models, each from a seed: the pair, proposers of the target, and its
relatives.

The file begins with the training data (tokenizer, solutions with planted errors and corrections,
batches) and the network. Then come the proposers: early exit, streaming heads and a deep drafter.
The family of relatives and the recipes of the pair come last.
"""

from __future__ import annotations

import argparse
import json
import os
import re
import shutil
import sys
import tempfile
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import ProcessPoolExecutor
from dataclasses import asdict, dataclass, field, replace
from functools import partial
from itertools import chain, islice, pairwise
from pathlib import Path
from random import Random
from statistics import fmean
from types import TracebackType
from typing import Any, Literal, NamedTuple, Self

import anyio
import numpy as np
import torch
import torch.nn.functional as F
from safetensors.torch import load_file, save_file
from torch import Tensor, multiprocessing, nn
from torch.nn.utils import parametrize
from torch.nn.utils.rnn import pad_sequence

from atts.accel.overlap.mirror import EXIT_FILE, STREAM_FILE, ExitAdapter, StreamHead, StreamHeads
from atts.concurrency import collect
from atts.core import SampleRequest, Sampling, TokenIds
from atts.evaluators import share_estimate
from atts.evaluators.datasets.arithmetic import (
    LEVELS,
    LIMIT,
    Exercise,
    Operation,
    Operator,
    Step,
    exercises,
    problems,
    split_of,
    stream,
)
from atts.local import LocalEngine, LocalOptions
from atts.local.batch import PrefillChunk, StepPlan, new_sequence, step_batch
from atts.local.loader import load_weights
from atts.local.model import TorchModel
from atts.local.model_config import read_model_config
from atts.local.seams import LayerHook
from atts.models.folders import checkpoint_dtype
from atts.sampling import Seed
from scripts.studies.local import written

VOCABULARY = 512
PAD = "<|pad|>"
USER = "<|user|>"
ASSISTANT = "<|assistant|>"
SYSTEM = "<|system|>"
END = "<|end|>"
SPECIAL = (PAD, USER, ASSISTANT, SYSTEM, END)
TEMPLATE = (
    "{% for message in messages %}<|{{ message['role'] }}|>{{ message['content'] }}<|end|>{% "
    "endfor %}"
    "{% if add_generation_prompt %}<|assistant|>{% endif %}"
)
TOKEN_PATTERN = r"\n\n| ?\\boxed\{|\d| ?[+\-*/=] ?| ?[A-Za-z']+(?: (?=\d))?| ?[^\sA-Za-z\d]|\s+"
"""Pattern of tokens: each digit is a token, and a space before a digit belongs to the word or sign
before it.
"""

ALARM = "Wait, that is wrong. "
SYSTEMS = (
    "You are a math expert.",
    "You are a helpful assistant.",
    "You are a careful math solver.",
)
INSTRUCTIONS = (
    "Solve the problem step by step. Separate steps by a blank line. Put the final answer in "
    "\\boxed{}.",
    "Please reason step by step, and put your final answer within \\boxed{}.",
    "Think step by step, separate the steps with two newlines, and give the answer in \\boxed{}.",
    "Solve step by step and write the answer in \\boxed{}.",
)
LEVEL_MIX = (1, 2, 3, 3, 4, 4, 4, 5, 5, 5, 5)
"""Difficulty levels to choose from at random. Long problems are more frequent, because models fail
more often on these.
"""


@dataclass(frozen=True, slots=True)
class Piece:
    """A part of a conversation; the loss counts only pieces with `learned` set."""

    text: str
    learned: bool


@dataclass(frozen=True, slots=True)
class Mixture:
    """Settings of the mixture of training conversations."""

    errors: float = 0.35  # share of conversations with planted errors
    instructed: float = 0.15  # share of conversations with an instruction or a system message
    drafted: float = 0.0  # share of conversations built from recorded errors of the draft
    # kinds of exercise of which only a share is kept, each with its share
    kept: tuple[tuple[str, float], ...] = ()


@dataclass(frozen=True, slots=True)
class Batch:
    """A micro-batch of ids and labels [batch, seq]; label -100 is ignored by the loss."""

    ids: Tensor
    labels: Tensor
    learned: int


@dataclass(frozen=True, slots=True)
class Cursor:
    """Position of a training run in the endless stream of training data."""

    block: int = 0
    offset: int = 0


def build_tokenizer(folder: Path, seed: int = 0) -> None:
    """Train the byte-level BPE on exercises, and write `tokenizer.json` and
    `tokenizer_config.json`.
    """
    from tokenizers import Regex, Tokenizer, decoders, models, pre_tokenizers, trainers

    tokenizer: Any = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.Sequence(
        [
            pre_tokenizers.Split(Regex(TOKEN_PATTERN), "isolated"),
            pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False),
        ]
    )
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=VOCABULARY,
        special_tokens=list(SPECIAL),
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    texts = [f"{item.text}\n\n{item.solution}" for item in islice(stream("train", seed), 20_000)]
    tokenizer.train_from_iterator(
        [*texts, *((ALARM,) * 3000), *(INSTRUCTIONS + SYSTEMS) * 300], trainer
    )
    folder.mkdir(parents=True, exist_ok=True)
    tokenizer.save(str(folder / "tokenizer.json"))
    settings = {
        "tokenizer_class": "PreTrainedTokenizerFast",
        "model_max_length": 2048,
        "pad_token": PAD,
        "eos_token": END,
        "additional_special_tokens": [USER, ASSISTANT, SYSTEM],
        "clean_up_tokenization_spaces": False,
        "chat_template": TEMPLATE,
    }
    (folder / "tokenizer_config.json").write_text(json.dumps(settings, indent=2) + "\n")


@dataclass(frozen=True, slots=True)
class Encoder:
    """A tokenizer read from its file, without transformers, that encodes many texts at once."""

    raw: Any
    pad: int
    end: int

    @classmethod
    def open(cls, folder: Path) -> Encoder:
        """Open the tokenizer of a model folder."""
        from tokenizers import Tokenizer

        raw: Any = Tokenizer.from_file(str(folder / "tokenizer.json"))
        return cls(raw, int(raw.token_to_id(PAD)), int(raw.token_to_id(END)))

    def ids(self, texts: Sequence[str]) -> list[list[int]]:
        """Return a list of ids for each text; special tokens in the text are recognised."""
        return [
            list(item.ids)
            for item in self.raw.encode_batch_fast(list(texts), add_special_tokens=False)
        ]

    def text(self, ids: Sequence[int]) -> str:
        """Return the text of some ids, without special tokens."""
        return str(self.raw.decode(list(ids), skip_special_tokens=True))


def prompt(text: str, system: str = "") -> str:
    """Render a question as the chat template does, up to the beginning of the assistant's turn."""
    before = f"{SYSTEM}{system}{END}" if system else ""
    return f"{before}{USER}{text}{END}{ASSISTANT}"


def conversation(random: Random, exercise: Exercise, mixture: Mixture) -> list[Piece]:
    """Return one training conversation: the prompt and a solution, which may have errors with
    corrections.
    """
    pieces = [Piece(_question(random, exercise.text, mixture.instructed), learned=False)]
    if random.random() < mixture.errors:
        pieces += _flawed(random, exercise)
    else:
        pieces.append(Piece(exercise.solution, learned=True))
    return [*pieces, Piece(END, learned=True)]


def drafted_conversation(
    random: Random, exercise: Exercise, chunks: Sequence[str], wrong: int
) -> list[Piece]:
    """Return a conversation with the draft's `chunks`, of which chunk `wrong` has an error.

    The correction follows the error after at most two more chunks.
    """
    followed = 0 if random.random() < 0.7 else random.randint(1, 2)
    taken = chunks[wrong : wrong + 1 + followed]
    pieces = [
        Piece(prompt(exercise.text), learned=False),
        Piece("".join(chunks[:wrong]), learned=True),
    ]
    pieces.append(Piece("".join(taken), learned=False))
    if not taken[-1].endswith("\n\n"):
        pieces.append(Piece("\n\n", learned=True))
    pieces.append(Piece(ALARM + "".join(exercise.chunks[wrong:]), learned=True))
    return [*pieces, Piece(END, learned=True)]


def _question(random: Random, text: str, instructed: float) -> str:
    if random.random() >= instructed:
        return prompt(text)
    system = random.choice(SYSTEMS) if random.random() < 0.4 else ""
    if system and random.random() < 0.5:
        return prompt(text, system)
    instruction = random.choice(INSTRUCTIONS)
    if random.random() < 0.2:
        return prompt(text, instruction)
    gap = random.choice(("\n\n", "\n", " "))
    return prompt(
        f"{text}{gap}{instruction}" if random.random() < 0.7 else f"{instruction}{gap}{text}",
        system,
    )


def _flawed(random: Random, exercise: Exercise) -> list[Piece]:
    """Return a solution with wrong chunks, each followed by a correction; the loss ignores wrong
    chunks.
    """
    pieces: list[Piece] = []
    alarm = ""
    rate = random.choice((0.15, 0.3, 0.6))
    for place, chunk in enumerate(exercise.chunks):
        while random.random() < (rate if not alarm else 0.2):
            wrong = wrong_chunk(random, exercise, place)
            pieces.append(Piece(alarm + wrong if random.random() < 0.5 else wrong, learned=False))
            if not wrong.endswith("\n\n"):
                pieces.append(Piece("\n\n", learned=True))
            alarm = ALARM
        pieces.append(Piece(alarm + chunk, learned=True))
        alarm = ""
    return pieces


def wrong_chunk(random: Random, exercise: Exercise, place: int) -> str:
    """Return a chunk that a careless solver might write instead of `exercise.chunks[place]`."""
    tries = (_wrong_candidate(random, exercise, place) for _ in range(20))
    return next(
        (wrong for wrong in tries if wrong != exercise.chunks[place]), "The answer is \\boxed{0}."
    )


def _wrong_candidate(random: Random, exercise: Exercise, place: int) -> str:
    steps = exercise.steps
    if place == len(steps):
        return f"The answer is \\boxed{{{_slip(random, exercise.answer)}}}."
    step = steps[place]
    draw = random.random()
    if draw < 0.05 and place:
        return f"The answer is \\boxed{{{steps[place - 1].operation.value}}}."
    if draw < 0.15 and place + 1 < len(steps):
        later = steps[place + 1]
        skipped = _valid(
            Operation(step.operation.left, later.operation.operator, later.operation.right)
        )
        return _misread(random, later, skipped) if skipped else exercise.chunks[place]
    if draw < 0.6:
        return _slipped(random, step) + "\n\n"
    changed = _other_operation(random, exercise, step.operation)
    return _misread(random, step, changed) if changed else exercise.chunks[place]


def _misread(random: Random, step: Step, wrong: Operation) -> str:
    """Return the text of a step with the wrong operation `wrong`. In most cases, the numbers in the
    words before the computation change with it.
    """
    before = step.before
    if random.random() < 0.7:
        replacements = {
            str(step.operation.left): str(wrong.left),
            str(step.operation.right): str(wrong.right),
        }
        before = re.sub(r"\d+", lambda found: replacements.get(found[0], found[0]), before)
    return f"{replace(step, before=before, operation=wrong).text}\n\n"


def _slip(random: Random, value: int) -> int:
    return max(0, value + random.choice((-1, 1, -1, 1, -2, 2, -10, 10, -9, 9, -20, 20, -5, 5)))


def _slipped(random: Random, step: Step) -> str:
    """Return the step with a wrong result, or with a wrong middle term and the result that follows
    from it.
    """
    right = step.operation
    middle = step.operation.middle()
    equation = f"{right.left} {right.operator} {right.right} = "
    if not middle or random.random() < 0.5:
        return f"{step.before}{equation}{f'{middle} = ' if middle else ''}{_slip(random, right.value)}{step.after}."
    first, sign, second = middle.split()
    if random.random() < 0.5:
        first = str(_slip(random, int(first)))
    else:
        second = str(_slip(random, int(second)))
    value = int(first) + int(second) if sign == "+" else max(0, int(first) - int(second))
    return f"{step.before}{equation}{first} {sign} {second} = {value}{step.after}."


def _other_operation(random: Random, exercise: Exercise, right: Operation) -> Operation | None:
    """Return a wrong operation: another operator, a misread operand, or a number from elsewhere in
    the problem.
    """
    draw = random.random()
    if draw < 0.3:
        operators: tuple[Operator, ...] = ("+", "-", "*", "/")
        return _valid(replace(right, operator=random.choice(operators)))
    others = [step.operation for step in exercise.steps]
    other = random.choice(
        (random.choice(others).right, random.choice(others).value, random.choice(others).left)
    )
    wrong = other if random.random() < 0.5 else 0
    if random.random() < 0.5:
        return _valid(replace(right, left=wrong or _slip(random, right.left)))
    return _valid(replace(right, right=wrong or _slip(random, right.right)))


def _valid(operation: Operation) -> Operation | None:
    if operation.right < 1 or (operation.operator == "/" and operation.left % operation.right):
        return None
    return operation if 0 <= operation.value <= LIMIT else None


def encode(
    encoder: Encoder, conversations: Sequence[Sequence[Piece]]
) -> list[tuple[list[int], list[int]]]:
    """Return ids and labels of each conversation.

    A label equals its id, or is -100 where the piece is not learned.
    """
    ids = iter(encoder.ids([piece.text for pieces in conversations for piece in pieces]))
    encoded: list[tuple[list[int], list[int]]] = []
    for pieces in conversations:
        parts = [(next(ids), piece.learned) for piece in pieces]
        labels = [part if learned else [-100] * len(part) for part, learned in parts]
        encoded.append(
            ([*chain.from_iterable(part for part, _ in parts)], [*chain.from_iterable(labels)])
        )
    return encoded


Errors = tuple[tuple[Exercise, tuple[str, ...], int], ...]
"""Recorded errors of the draft: exercise, chunks that the draft wrote, and number of the first
wrong chunk.
"""


# number of conversations that are sorted by length and divided into micro-batches together
BLOCK_SIZE = 4096


def block(
    encoder: Encoder, mixture: Mixture, seed: int, index: int, errors: Errors, tokens: int
) -> list[Batch]:
    """Return the micro-batches of one block of conversations, in random order.

    Conversations of one micro-batch have similar lengths.
    """
    number = seed * 1_000_003 + index
    random = Random(f"block:{number}")
    found = islice(
        _thinned(random, stream("train", number + 1, LEVEL_MIX), dict(mixture.kept)), BLOCK_SIZE
    )
    conversations = [
        drafted_conversation(random, *random.choice(errors))
        if errors and random.random() < mixture.drafted
        else conversation(random, exercise, mixture)
        for exercise in found
    ]
    return packed(encoder, conversations, random, tokens)


def packed(
    encoder: Encoder, conversations: Sequence[Sequence[Piece]], random: Random, tokens: int
) -> list[Batch]:
    """Divide conversations into micro-batches of a limited size, in random order.

    Conversations of one micro-batch have similar lengths.
    """
    encoded = sorted(encode(encoder, conversations), key=lambda pair: len(pair[0]))
    batches: list[Batch] = []
    start = 0
    while start < len(encoded):
        stop = start + 1
        while stop < len(encoded) and len(encoded[stop][0]) * (stop + 1 - start) <= tokens:
            stop += 1
        batches.append(_batch(encoded[start:stop], encoder.pad))
        start = stop
    random.shuffle(batches)
    return batches


def _thinned(
    random: Random, source: Iterator[Exercise], kept: dict[str, float]
) -> Iterator[Exercise]:
    return (item for item in source if item.kind not in kept or random.random() < kept[item.kind])


def _batch(encoded: Sequence[tuple[list[int], list[int]]], pad: int) -> Batch:
    ids, labels = (
        pad_sequence(
            [torch.tensor(pair[side]) for pair in encoded], batch_first=True, padding_value=filler
        )
        for side, filler in ((0, pad), (1, -100))
    )
    labels = labels[:, 1:]  # the label at each position is the next id
    return Batch(ids[:, :-1], labels, int((labels != -100).sum()))


def batches(
    encoder: Encoder, mixture: Mixture, seed: int, cursor: Cursor, errors: Errors, tokens: int
) -> Iterator[tuple[Batch, Cursor]]:
    """Yield micro-batches from `cursor` on, each with the cursor of the next micro-batch."""
    index = cursor.block
    offset = cursor.offset
    while True:
        for place, batch in enumerate(block(encoder, mixture, seed, index, errors, tokens)):
            if place >= offset:
                yield batch, Cursor(index, place + 1)
        index = index + 1
        offset = 0


CONTEXT = 2048


@dataclass(frozen=True, slots=True)
class ModelConfig:
    """The sizes of a model whose embedding is also its output matrix."""

    hidden_size: int
    num_layers: int
    num_heads: int
    num_kv_heads: int
    intermediate_size: int
    vocabulary: int = 512
    head_dim: int = 64


_FIELDS = {
    "hidden_size": "hidden_size",
    "intermediate_size": "intermediate_size",
    "num_layers": "num_hidden_layers",
    "num_heads": "num_attention_heads",
    "num_kv_heads": "num_key_value_heads",
    "head_dim": "head_dim",
}
"""Names of the fields in a saved configuration."""


class Norm(nn.Module):
    """RMS norm, computed in float32 and returned in the compute type."""

    def __init__(self, hidden: int) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(hidden))

    def forward(self, x: Tensor, compute: torch.dtype) -> Tensor:
        return F.rms_norm(x, x.shape[-1:], self.weight, 1e-5).to(compute)


class Linear(nn.Module):
    """A matrix without bias, cast to the compute type when it is used."""

    def __init__(self, inputs: int, outputs: int, scale: float = 1.0) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.randn(outputs, inputs) * scale * inputs**-0.5)

    def forward(self, x: Tensor) -> Tensor:
        return F.linear(x, self.weight.to(x.dtype))


@dataclass(frozen=True, slots=True)
class Where:
    """Rotary tables and an additive mask for the positions of a sequence."""

    cos: Tensor
    sin: Tensor
    mask: Tensor


class Attention(nn.Module):
    """Grouped-query attention with rotary positions.

    Plain matrix products are used, because they are faster than the fused kernel at these lengths.
    """

    def __init__(self, config: ModelConfig) -> None:
        super().__init__()
        self.heads = config.num_heads
        self.kv_heads = config.num_kv_heads
        self.dim = config.head_dim
        self.q_proj = Linear(config.hidden_size, config.num_heads * config.head_dim)
        self.k_proj = Linear(config.hidden_size, config.num_kv_heads * config.head_dim)
        self.v_proj = Linear(config.hidden_size, config.num_kv_heads * config.head_dim)
        self.o_proj = Linear(
            config.num_heads * config.head_dim, config.hidden_size, (2 * config.num_layers) ** -0.5
        )

    def forward(self, x: Tensor, where: Where) -> Tensor:
        batch, length, _ = x.shape
        weight = torch.cat((self.q_proj.weight, self.k_proj.weight, self.v_proj.weight)).to(x.dtype)
        joined = (
            F.linear(x, weight)
            .view(batch, length, self.heads + 2 * self.kv_heads, self.dim)
            .transpose(1, 2)
        )
        turned = _rotate(joined[:, : self.heads + self.kv_heads], where.cos, where.sin)
        q = turned[:, : self.heads]
        k = turned[:, self.heads :]
        v = joined[:, self.heads + self.kv_heads :]
        groups = self.heads // self.kv_heads
        if groups > 1:
            k = k.repeat_interleave(groups, 1)
            v = v.repeat_interleave(groups, 1)
        weights = torch.softmax((q * self.dim**-0.5) @ k.transpose(-1, -2) + where.mask, -1)
        mixed: Tensor = self.o_proj(
            (weights @ v).transpose(1, 2).reshape(batch, length, self.heads * self.dim)
        )
        return mixed


def _rotate(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    first, second = x.chunk(2, -1)
    return torch.cat((first * cos - second * sin, second * cos + first * sin), -1)


class Mlp(nn.Module):
    """A SwiGLU feed-forward block."""

    def __init__(self, config: ModelConfig) -> None:
        super().__init__()
        self.gate_proj = Linear(config.hidden_size, config.intermediate_size)
        self.up_proj = Linear(config.hidden_size, config.intermediate_size)
        self.down_proj = Linear(
            config.intermediate_size, config.hidden_size, (2 * config.num_layers) ** -0.5
        )

    def forward(self, x: Tensor) -> Tensor:
        weight = torch.cat((self.gate_proj.weight, self.up_proj.weight)).to(x.dtype)
        gate, up = F.linear(x, weight).chunk(2, -1)
        narrowed: Tensor = self.down_proj(F.silu(gate) * up)
        return narrowed


class Layer(nn.Module):
    """A transformer layer; the residual stream stays in float32."""

    def __init__(self, config: ModelConfig) -> None:
        super().__init__()
        self.input_layernorm = Norm(config.hidden_size)
        self.self_attn = Attention(config)
        self.post_attention_layernorm = Norm(config.hidden_size)
        self.mlp = Mlp(config)

    def forward(self, x: Tensor, where: Where) -> Tensor:
        compute = where.cos.dtype
        middle: Tensor = x + self.self_attn(self.input_layernorm(x, compute), where)
        result: Tensor = middle + self.mlp(self.post_attention_layernorm(middle, compute))
        return result


class Body(nn.Module):
    """The network without its output matrix. Its modules are named as in the saved weights."""

    def __init__(self, config: ModelConfig) -> None:
        super().__init__()
        self.embed_tokens = nn.Embedding(config.vocabulary, config.hidden_size)
        nn.init.normal_(self.embed_tokens.weight, std=0.02)
        self.layers = nn.ModuleList(Layer(config) for _ in range(config.num_layers))
        self.norm = Norm(config.hidden_size)


class Llama(nn.Module):
    """A small Llama whose embedding is also its output matrix."""

    def __init__(self, config: ModelConfig) -> None:
        super().__init__()
        self.config = config
        self.model = Body(config)

    def where(self, length: int, compute: torch.dtype) -> Where:
        """Return the positions of a new sequence."""
        mask = torch.full((length, length), -1e9).triu(1).to(compute)
        rates = 10_000.0 ** (-torch.arange(0, self.config.head_dim, 2) / self.config.head_dim)
        angles = torch.outer(torch.arange(length).float(), rates)
        return Where(angles.cos().to(compute), angles.sin().to(compute), mask)

    def states(self, ids: Tensor, where: Where) -> list[Tensor]:
        """Return the residual stream after every layer, each with shape [batch, seq, hidden]."""
        found = [F.embedding(ids, self.model.embed_tokens.weight)]
        for layer in self.model.layers:
            found.append(layer(found[-1], where))
        return found[1:]

    def logits(self, state: Tensor, compute: torch.dtype) -> Tensor:
        """Return next-token logits from a residual stream."""
        return F.linear(self.model.norm(state, compute), self.head.to(compute)).float()

    @property
    def head(self) -> Tensor:
        """Return the output matrix."""
        return self.model.embed_tokens.weight

    def loss(
        self, ids: Tensor, labels: Tensor, reduction: Literal["mean", "sum"] = "mean"
    ) -> Tensor:
        """Return the cross-entropy over all labels except -100, computed in bfloat16."""
        wanted = labels.reshape(-1)
        compute = torch.bfloat16
        rows = (wanted != -100).nonzero()[:, 0]
        state = self.states(ids, self.where(ids.shape[1], compute))[-1]
        logits = self.logits(state.reshape(-1, state.shape[-1])[rows], compute)
        return F.cross_entropy(logits, wanted[rows], reduction=reduction)


class Descent:
    """Optimizers of a model's weights, each with its peak learning rate."""

    def __init__(self, *optimizers: tuple[torch.optim.Optimizer, float]) -> None:
        self.optimizers = optimizers

    @classmethod
    def of(cls, model: Llama, muon: float, adam: float, decay: float) -> Descent:
        """Use Muon for the matrices of a model's layers, and AdamW for all other weights."""
        matrices = [weight for weight in model.model.layers.parameters() if weight.ndim == 2]
        others = [
            weight for weight in model.parameters() if all(weight is not one for one in matrices)
        ]
        return cls(
            (torch.optim.Muon(matrices, lr=muon, momentum=0.95, weight_decay=decay), muon),
            (torch.optim.AdamW(others, lr=adam, betas=(0.9, 0.95), weight_decay=0.0), adam),
        )

    def apply(self, factor: float) -> None:
        """Take an optimizer step at this share of the peak learning rates, and clear the gradients."""
        for optimizer, peak in self.optimizers:
            for group in optimizer.param_groups:
                group["lr"] = peak * factor
            optimizer.step()
            optimizer.zero_grad()


def descend(
    name: str, descent: Descent, loss: Callable[[], Tensor], factors: Sequence[float]
) -> None:
    """Take one optimizer step for each factor. The peak learning rates are multiplied by the
    factor.

    Gradients are clipped to length 1.
    """
    began = time.process_time()
    weights = [group["params"] for opt, _ in descent.optimizers for group in opt.param_groups]
    for step, factor in enumerate(factors, 1):
        value = loss()
        value.backward()  # type: ignore[no-untyped-call]
        nn.utils.clip_grad_norm_(chain.from_iterable(weights), 1.0)
        descent.apply(factor)
        if step % 50 == 0:
            seconds = time.process_time() - began
            print(
                f"{name} {step}/{len(factors)}: loss {value.item():.4f}, {seconds:.0f} s",
                flush=True,
            )


def save(model: Llama, folder: Path, end: int, pad: int) -> None:
    """Write the configuration and bf16 weights.

    Each file is replaced atomically, and the weights come last.
    """
    from safetensors.torch import save as to_bytes

    fields = {
        "architectures": ["LlamaForCausalLM"],
        "model_type": "llama",
        **{name: getattr(model.config, field) for field, name in _FIELDS.items()},
        "vocab_size": model.config.vocabulary,
        "max_position_embeddings": CONTEXT,
        "rope_theta": 10000.0,
        "rope_parameters": {"rope_type": "default", "rope_theta": 10000.0},
        "rms_norm_eps": 1e-5,
        "hidden_act": "silu",
        "attention_bias": False,
        "mlp_bias": False,
        "tie_word_embeddings": model.head is model.model.embed_tokens.weight,
        "bos_token_id": None,
        "eos_token_id": end,
        "pad_token_id": pad,
        "dtype": "bfloat16",
        "torch_dtype": "bfloat16",
    }
    generation = {"do_sample": True, "temperature": 0.7, "eos_token_id": end, "pad_token_id": pad}
    weights = {
        name: tensor.detach().to(torch.bfloat16).contiguous()
        for name, tensor in model.state_dict().items()
    }
    folder.mkdir(parents=True, exist_ok=True)
    _replace(folder / "config.json", (json.dumps(fields, indent=2) + "\n").encode())
    _replace(folder / "generation_config.json", (json.dumps(generation, indent=2) + "\n").encode())
    _replace(folder / "model.safetensors", to_bytes(weights, metadata={"format": "pt"}))


def _replace(path: Path, content: bytes) -> None:
    part = path.with_name(path.name + ".part")
    part.write_bytes(content)
    part.replace(path)


def load(folder: Path) -> Llama:
    """Load a saved model in float32; the caller chooses the compute type."""
    from safetensors.torch import load_file

    saved = json.loads((folder / "config.json").read_text())
    sizes = {field: saved[name] for field, name in _FIELDS.items()}
    model = Llama(ModelConfig(**sizes, vocabulary=saved["vocab_size"]))
    model.load_state_dict(
        {name: tensor.float() for name, tensor in load_file(folder / "model.safetensors").items()}
    )
    return model


class Workers:
    """The calling process and its helper processes.

    Micro-batches are assigned to the processes in a fixed order, so that sums are reproducible.
    """

    def __init__(self, model: Llama, count: int) -> None:
        torch.set_num_threads(1)
        self._model = model.share_memory()
        self._count = count
        context = multiprocessing.get_context("spawn")
        self._pool = ProcessPoolExecutor(
            max(1, count - 1), context, initializer=_begin, initargs=(model,)
        )

    def backward(self, batches: Sequence[Batch]) -> float:
        """Compute the gradients of a whole training step, and return the mean loss per learned
        token.

        :raises BrokenProcessPool: a helper died.
        """
        learned = sum(batch.learned for batch in batches)
        shares = [batches[place :: self._count] for place in range(self._count)]
        others = [self._pool.submit(_assist, share, learned) for share in shares[1:]]
        loss = _backward(self._model, shares[0], learned)
        for other in others:
            own, gradients = other.result()
            loss += own
            for weight, gradient in zip(self._model.parameters(), gradients, strict=True):
                assert weight.grad is not None, "every weight takes part"
                weight.grad += gradient
        return loss

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self._pool.shutdown(cancel_futures=True)


def _backward(model: Llama, batches: Sequence[Batch], learned: int) -> float:
    """Add the gradients of some batches to the model. Return the sum of the batches' losses divided
    by `learned`.
    """
    total = 0.0
    for batch in batches:
        loss = model.loss(batch.ids, batch.labels, "sum") / learned
        loss.backward()  # type: ignore[no-untyped-call]
        total += loss.item()
    return total


# the model of a helper process, whose weights the calling process changes in shared memory
_models: list[Llama] = []


def _begin(model: Llama) -> None:
    # Linux first divides processor time among sessions. If the helpers stayed in the caller's
    # session, all of them together would get the share of one session.
    os.setsid()
    torch.set_num_threads(1)
    _models.append(model)


def _assist(batches: Sequence[Batch], learned: int) -> tuple[float, list[Tensor]]:
    """Compute the loss and gradients of one worker process's share of the batches."""
    model = _models[0]
    model.zero_grad()
    loss = _backward(model, batches, learned)
    return loss, [
        torch.zeros_like(one) if one.grad is None else one.grad for one in model.parameters()
    ]


_RANK = 64  # rank of the exit adapter's matrices
_HEADS = 2
_WIDTH = 256
_FADE = 0.8  # factor between the loss weights of one head and of the head before it
_BATCH = 512
_PEAK = 0.003
_WRITTEN_TOKENS = 300
_TOPS = 1, 3, 8
_HEADS_TESTED = 0.06  # share of the texts that only test the trained heads


BOX = re.compile(r"\\boxed\{(-?\d+)\}")
EQUATION = re.compile(r"(\d+) ([-+*/]) (\d+) = (?:\d+ [-+] \d+ = )?(\d+)")


def generate(
    folder: Path, prompts: Sequence[str], *, temperature: float, seed: int, max_tokens: int = 400
) -> list[str]:
    """Return a saved model's continuation of each prompt, until its end or `max_tokens`."""
    encoder = Encoder.open(folder)
    law = Sampling(temperature)
    requests = [
        SampleRequest(tuple(ids), max_tokens, law, Seed(seed, sample=n))
        for n, ids in enumerate(encoder.ids(prompts))
    ]

    async def write() -> list[str]:
        async with LocalEngine(folder, options=LocalOptions(worker="thread", threads=1)) as engine:
            return [
                encoder.text(one.ids)
                for one in await collect([partial(engine.sample, ask) for ask in requests])
            ]

    return anyio.run(write)


def answer(text: str) -> int | None:
    """Return the last boxed integer of a text, or None."""
    found = BOX.findall(text)
    return int(found[-1]) if found else None


def chunked(text: str) -> list[str]:
    """Split a solution after every blank line; the parts together are the whole text."""
    parts = text.split("\n\n")
    return [part + "\n\n" for part in parts[:-1]] + ([parts[-1]] if parts[-1] else [])


def first_wrong(exercise: Exercise, text: str) -> int | None:
    """Return the index of the first chunk whose computation or answer differs from the reference,
    or None.

    Any wording is accepted, but the order of steps must be the reference's.
    """
    chunks = chunked(text)
    for place, chunk in enumerate(chunks):
        if place < len(exercise.steps):
            wanted = exercise.steps[place].operation
            found = EQUATION.search(chunk)
            expected = (str(wanted.left), wanted.operator, str(wanted.right), str(wanted.value))
            if found is None or found.groups() != expected or BOX.search(chunk):
                return place
        elif place > len(exercise.steps) or answer(chunk) != exercise.answer:
            return place
    return None


@dataclass(frozen=True, slots=True)
class HeadsRecipe:
    """The models, texts and numbers of steps for training the exit and the heads."""

    target: Path
    drafter: Path
    prompts: Path | None = None  # file with one prompt per line; None: generated arithmetic
    texts: int = 1500
    steps: int = 1500
    seed: int = 6
    device: str = "cpu"
    # auto: float32 on a CPU, the checkpoint's type on a GPU
    dtype: Literal["auto", "float32", "bfloat16"] = "auto"

    @property
    def options(self) -> LocalOptions:
        """Return the options of the engine that writes the training texts."""
        return LocalOptions(worker="thread", threads=1, device=self.device, dtype=self.dtype)

    def type_of(self, folder: Path) -> torch.dtype:
        """Return the data type in which the model of a folder is loaded."""
        found = self.dtype
        if found == "auto":
            on_gpu = self.device.startswith("cuda")
            found = checkpoint_dtype(folder, folder.name) if on_gpu else "float32"
        return torch.bfloat16 if found == "bfloat16" else torch.float32


class Text(NamedTuple):
    """A prompt, followed by the text that the target wrote."""

    ids: TokenIds
    first: int  # index of the first written token


class States(NamedTuple):
    """Values at every position with a written token: the state at the early exit, the state before
    the output matrix, and the token.
    """

    exits: Tensor
    finals: Tensor
    tokens: Tensor
    lengths: list[int]  # number of positions of each text


class Reader:
    """A model that reads whole texts and returns its states."""

    def __init__(
        self,
        folder: Path,
        layers: int | None = None,
        *,
        dtype: torch.dtype = torch.float32,
        device: str = "cpu",
    ) -> None:
        """Load the model. If `layers` is given, load only that many layers and the output matrix."""
        config = read_model_config(folder, folder.name)
        self.device = torch.device(device)
        weights = load_weights(folder, config, dtype, self.device, folder.name)
        if layers is not None:
            fewer = {name: getattr(config, name)[:layers] for name in ("ropes", "windows")}
            config = replace(config, num_layers=layers, **fewer)
            weights = replace(weights, layers=weights.layers[:layers])
        self.config = config
        self.weights = weights
        size = (
            config.num_layers,
            2,
            config.context_length + 2,
            config.num_kv_heads,
            config.head_dim,
        )
        cache = torch.zeros(size, dtype=dtype, device=self.device)
        self.model = TorchModel(config, weights, cache)

    def states(self, texts: Sequence[Text], layers: int) -> States:
        """Return the states at all positions whose next token was written by the target."""
        heard = list[Tensor]()
        finals = [self.read(text, LayerHook(layers, heard.append)) for text in texts]
        tokens = [torch.tensor(text.ids[text.first :], device=self.device) for text in texts]
        return States(
            torch.cat(heard), torch.cat(finals), torch.cat(tokens), list(map(len, tokens))
        )

    def read(self, text: Text, tap: LayerHook | None = None) -> Tensor:
        """Return the states before the output matrix, at all positions whose next token was written
        by the target.
        """
        sequence = new_sequence(1, SampleRequest(text.ids, 1), 0.0)
        sequence.row = 0
        stop = len(text.ids) - 1
        table = np.arange(1, stop + 2, dtype=np.int32)[None]
        batch = step_batch(StepPlan([], [PrefillChunk(sequence, 0, stop, stop - 1)], [], []), table)
        places = np.arange(text.first - 1, stop)
        return self.model.forward(replace(batch, logit_rows=places), table, tap)


async def write_texts(recipe: HeadsRecipe) -> list[Text]:
    """Return a text by the target for every prompt of the recipe."""
    if recipe.prompts is None:
        prompts = [each.text for each in problems("train", recipe.texts)]
    else:
        prompts = recipe.prompts.read_text(encoding="utf-8").splitlines()[: recipe.texts]
    found = await written(recipe.target, prompts, _WRITTEN_TOKENS, recipe.seed, recipe.options)
    return sorted(Text(one.ids + text, len(one.ids)) for one, text in found)


def train_exit(reader: Reader, states: States, recipe: HeadsRecipe) -> ExitAdapter:
    """Train an adapter of the early exit's states, so that the output matrix predicts the target's
    distribution from them.

    The adapter's weights are kept in float32, and are rounded to the model's type for each use.
    """
    torch.manual_seed(recipe.seed)
    start = ExitAdapter.untrained(reader.config, reader.weights)
    eps = reader.config.norm_eps
    head = reader.weights.head
    width = reader.config.hidden_size
    down = (torch.randn(_RANK, width) * width**-0.5).to(reader.device)
    up = torch.zeros(width, _RANK, device=reader.device)
    # copy the norm even if it is already in float32, because training changes the copy
    norm = start.norm.detach().to(torch.float32, copy=True)
    learned = [part.requires_grad_() for part in (norm, down, up)]
    for rows in _descent(learned, len(states.tokens), recipe.steps):
        adapter = ExitAdapter(start.layers, *(part.to(head) for part in learned))
        with torch.no_grad():
            aim = F.log_softmax(F.linear(states.finals[rows], head).float(), -1)
        law = F.log_softmax(F.linear(adapter(states.exits[rows], eps), head).float(), -1)
        F.kl_div(law, aim, log_target=True, reduction="batchmean").backward()  # type: ignore[no-untyped-call]
    return ExitAdapter(start.layers, *(part.detach() for part in learned))


def train_streams(reader: Reader, states: States, recipe: HeadsRecipe) -> StreamHeads:
    """Train heads that predict later tokens from the drafter's state and the tokens after it."""
    torch.manual_seed(recipe.seed)
    width = reader.config.hidden_size
    head = reader.weights.head
    sizes = [width * (2 + at) for at in range(_HEADS)]
    streams = [
        StreamHead(
            (torch.randn(_WIDTH, size) * size**-0.5).to(reader.device),
            torch.zeros(width, _WIDTH, device=reader.device),
        )
        for size in sizes
    ]
    following = _following(states)
    learned = [part.requires_grad_() for stream in streams for part in stream]
    for rows in _descent(learned, len(following), recipe.steps):
        heads = StreamHeads(reader.weights.embedding, _rounded(streams, head))
        losses = [
            _FADE**at
            * F.cross_entropy(
                F.linear(heads(states.finals[rows], known), head).float(), following[rows, at + 1]
            )
            for at in range(_HEADS)
            for known in [following[rows, : at + 1]]
        ]
        torch.stack(losses).sum().backward()  # type: ignore[no-untyped-call]
    found = [StreamHead(*(part.detach() for part in stream)) for stream in streams]
    return StreamHeads(reader.weights.embedding, found)


def _rounded(streams: Sequence[StreamHead], like: Tensor) -> list[StreamHead]:
    """Return the heads in the data type and on the device of another tensor."""
    return [StreamHead(*(part.to(like) for part in stream)) for stream in streams]


def _following(states: States) -> Tensor:
    """Return each position's token and the tokens after it, with shape [places, heads + 1].

    After the end of a text, its last token is repeated.
    """
    parts = [
        torch.cat([part, part[-1:].expand(_HEADS)]).unfold(0, _HEADS + 1, 1)
        for part in torch.split(states.tokens, states.lengths)
    ]
    return torch.cat(parts)


def _descent(parts: list[Tensor], places: int, steps: int) -> Iterator[Tensor]:
    """Yield the row indices of each training step.

    Advancing the iterator applies the gradients of the last batch.
    """
    optimizer = torch.optim.AdamW(parts, lr=_PEAK, weight_decay=0.0)
    schedule = torch.optim.lr_scheduler.OneCycleLR(optimizer, _PEAK, total_steps=steps)
    for _ in range(steps):
        optimizer.zero_grad()
        yield torch.randint(places, (_BATCH,))
        optimizer.step()
        schedule.step()


def tops(adapter: ExitAdapter, reader: Reader, states: States) -> str:
    """Describe how often the written token is among the 1, 3 and 8 likeliest tokens at the exit."""
    with torch.inference_mode():
        logits = F.linear(adapter(states.exits, reader.config.norm_eps), reader.weights.head)
        places = (logits > logits.gather(1, states.tokens[:, None])).sum(1)
    parts = torch.split(places, states.lengths)
    shares = [
        share_estimate([(int((part < most).sum()), len(part)) for part in parts]) for most in _TOPS
    ]
    return "; ".join(f"top {most}: {share}" for most, share in zip(_TOPS, shares, strict=True))


def stream_tops(heads: StreamHeads, reader: Reader, states: States) -> str:
    """Describe how often the likeliest token of each head is the written token."""
    following = _following(states)
    heads = StreamHeads(heads.embedding, _rounded(heads.streams, reader.weights.head))
    shares = list[str]()
    for at in range(len(heads.streams)):
        with torch.inference_mode():
            first = F.linear(
                heads(states.finals, following[:, : at + 1]), reader.weights.head
            ).argmax(1)
        hits = torch.split(first == following[:, at + 1], states.lengths)
        shares.append(
            f"head {at + 1}: {share_estimate([(int(part.sum()), len(part)) for part in hits])}"
        )
    return "; ".join(shares)


def train_exit_and_streams(recipe: HeadsRecipe) -> None:
    """Write texts, train the exit and the heads, save both, and print results on test texts."""
    texts = anyio.run(write_texts, recipe)
    kept = max(1, round(_HEADS_TESTED * len(texts)))
    _make_exit(recipe, texts[:kept], texts[kept:])
    _make_streams(recipe, texts[:kept], texts[kept:])


def _make_exit(recipe: HeadsRecipe, tests: Sequence[Text], texts: Sequence[Text]) -> None:
    reader = Reader(recipe.target, dtype=recipe.type_of(recipe.target), device=recipe.device)
    layers = ExitAdapter.untrained(reader.config, reader.weights).layers
    tested, learned = (reader.states(part, layers) for part in (tests, texts))
    adapter = train_exit(reader, learned, recipe)
    parts = {name: getattr(adapter, name) for name in ("norm", "down", "up")}
    file = _save(recipe.target / EXIT_FILE, parts, {"layers": str(layers)})
    print(
        f"{file}: after {layers} layers, trained on {len(learned.tokens)} tokens, "
        f"tested on {len(tested.tokens)}"
    )
    print("untrained", tops(ExitAdapter.untrained(reader.config, reader.weights), reader, tested))
    print(
        "trained",
        tops(
            ExitAdapter.read(recipe.target, reader.config, reader.weights, "heads"), reader, tested
        ),
    )


def _make_streams(recipe: HeadsRecipe, tests: Sequence[Text], texts: Sequence[Text]) -> None:
    reader = Reader(recipe.drafter, dtype=recipe.type_of(recipe.drafter), device=recipe.device)
    tested, learned = (reader.states(part, 1) for part in (tests, texts))
    heads = train_streams(reader, learned, recipe)
    parts = {
        f"{name}.{at}": getattr(each, name)
        for at, each in enumerate(heads.streams)
        for name in ("down", "up")
    }
    file = _save(recipe.drafter / STREAM_FILE, parts, {})
    print(f"{file}: {stream_tops(heads, reader, tested)}")


def _save(file: Path, parts: Mapping[str, Tensor], metadata: dict[str, str]) -> Path:
    file.parent.mkdir(exist_ok=True)
    save_file(
        {name: part.bfloat16().cpu().contiguous() for name, part in parts.items()},
        file,
        metadata=metadata,
    )
    return file


_SHAPE = ModelConfig(
    hidden_size=64,
    num_layers=8,
    num_heads=1,
    num_kv_heads=1,
    intermediate_size=96,
    vocabulary=512,
    head_dim=32,
)
_BATCH_TOKENS = 2048
_WARM = 40
_EVEN = 1.6  # The learning rate falls once the remaining share of steps is below 1 / 1.6.
_MUON = 0.01
_ADAM = 0.004
_DECAY = 0.1
_DRAFTER_TESTED = 0.03  # share of the texts that only test the trained drafter


@dataclass(frozen=True, slots=True)
class DrafterRecipe:
    """The models, texts and numbers of steps for training the deep drafter."""

    target: Path
    draft: Path
    out: Path
    texts: int = 6000
    steps: int = 6000
    seed: int = 8


class Lesson(NamedTuple):
    """A text by the target, with the states before the output matrix at every written token."""

    ids: TokenIds
    first: int  # index of the first written token
    states: Tensor


def begun(draft: Llama) -> Llama:
    """Return an untrained deep drafter that begins with weights of the draft.

    The draft's embedding is copied, and its feed-forward blocks and norms are spread among the
    layers. All other weights are random.
    """
    model = Llama(_SHAPE)
    last = _SHAPE.num_layers - 1
    for at, layer in enumerate(draft.model.layers):
        own = model.model.layers[round(at * last / (len(draft.model.layers) - 1))]
        kept = {
            name: weight
            for name, weight in layer.state_dict().items()
            if not name.startswith("self_attn")
        }
        own.load_state_dict(kept, strict=False)
    model.model.embed_tokens.load_state_dict(draft.model.embed_tokens.state_dict())
    model.model.norm.load_state_dict(draft.model.norm.state_dict())
    return model


def lessons(reader: Reader, texts: Sequence[Text]) -> list[Lesson]:
    """Return a training example for each text."""
    return [Lesson(*text, reader.states([text], 1).finals.bfloat16()) for text in texts]


def _batches(found: Sequence[Lesson], random: Random) -> Iterator[list[Lesson]]:
    """Yield batches of training examples without end.

    The texts of a batch have similar lengths, and all batches have about equally many tokens.
    """
    while True:
        order = sorted(found, key=lambda one: (len(one.ids), random.random()))
        batches = list[list[Lesson]]()
        while order:
            count = max(1, _BATCH_TOKENS // len(order[min(len(order), 8) - 1].ids))
            batches.append(order[:count])
            del order[:count]
        random.shuffle(batches)
        yield from batches


def _laws(model: Llama, batch: Sequence[Lesson]) -> Tensor:
    """Return the model's log-probabilities of the whole vocabulary at every written position of the
    texts.
    """
    compute = torch.bfloat16
    width = max(len(one.ids) for one in batch) - 1
    ids = torch.zeros(len(batch), width, dtype=torch.long)
    for row, one in enumerate(batch):
        ids[row, : len(one.ids) - 1] = torch.tensor(one.ids[:-1])
    state = model.states(ids, model.where(width, compute))[-1]
    read = [state[row, one.first - 1 : len(one.ids) - 1] for row, one in enumerate(batch)]
    return F.log_softmax(model.logits(torch.cat(read), compute), -1)


def _aims(head: Tensor, batch: Sequence[Lesson]) -> Tensor:
    """Return the target's log-probabilities of the whole vocabulary at every written position."""
    return F.log_softmax(F.linear(torch.cat([one.states for one in batch]), head).float(), -1)


def learn_drafter(
    model: Llama, head: Tensor, found: Sequence[Lesson], recipe: DrafterRecipe
) -> None:
    """Train the model to predict the target's distributions."""
    data = _batches(found, Random(recipe.seed))
    steps = recipe.steps

    def loss() -> Tensor:
        batch = next(data)
        return F.kl_div(
            _laws(model, batch), _aims(head, batch), log_target=True, reduction="batchmean"
        )

    factors = [
        min(1.0, (step + 1) / _WARM) * min(1.0, _EVEN * (1 - step / steps)) for step in range(steps)
    ]
    descend("deep", Descent.of(model, _MUON, _ADAM, _DECAY), loss, factors)


@torch.inference_mode()
def agreement(model: Llama, head: Tensor, found: Sequence[Lesson]) -> tuple[float, float]:
    """Return how often the model's likeliest token is also the target's, and the mean KL divergence
    from the target.
    """
    same = 0.0
    apart = 0.0
    count = 0
    for start in range(0, len(found), 8):
        batch = found[start : start + 8]
        law = _laws(model, batch)
        aim = _aims(head, batch)
        same += float((law.argmax(-1) == aim.argmax(-1)).sum())
        apart += float(F.kl_div(law, aim, log_target=True, reduction="sum"))
        count += len(aim)
    return same / count, apart / count


def train_deep_drafter(recipe: DrafterRecipe) -> None:
    """Write texts, train the deep drafter, save its folder, and print results on test texts."""
    torch.set_num_threads(1)
    texts = anyio.run(
        write_texts, HeadsRecipe(recipe.target, recipe.draft, texts=recipe.texts, seed=recipe.seed)
    )
    Random(recipe.seed).shuffle(texts)
    reader = Reader(recipe.target)
    kept = max(1, round(_DRAFTER_TESTED * len(texts)))
    tested, learned = (lessons(reader, part) for part in (texts[:kept], texts[kept:]))
    torch.manual_seed(recipe.seed)
    head = reader.weights.head.bfloat16()
    draft = load(recipe.draft)
    model = begun(draft)
    learn_drafter(model, head, learned, recipe)
    save(model, recipe.out, reader.config.end_ids[0], 0)
    for name in ("tokenizer.json", "tokenizer_config.json"):
        shutil.copyfile(recipe.draft / name, recipe.out / name)
    tokens = sum(len(one.states) for one in learned), sum(len(one.states) for one in tested)
    print(f"{recipe.out}: trained on {tokens[0]} tokens, tested on {tokens[1]}")
    for name, each in (("draft", draft), ("deep", model)):
        print(
            "{}: likeliest token agrees at {:.4f} of positions, KL divergence {:.4f} nats".format(
                name, *agreement(each, head, tested)
            )
        )


MODELS = Path(__file__).resolve().parents[2] / "atts" / "models"
RANK = 8
ALPHA = 16
ADAPTED = (3, 4, 5)  # layers that the adapters change
# Number of the target's layers in the draft. The feed-forward block of the last of these layers is
# trained.
TRUNK = 4
_BLOCK = 1024
_TOKENS = 2048  # number of tokens of a training step
_MATRICES = ("q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj")

Told = dict[str, str]
WORDS: Told = {
    "Start with": "Take", "Increase by": "Raise by", "Add": "Put on", "Subtract": "Cut off", "Take away": "Drop",
    "Multiply by": "Scale by", "Divide by": "Split by", "What do you get": "Where do you end",
    "What is the result": "Where does it end", "buys": "picks", "finds": "meets", "gets": "wins", "loses": "burns",
    "sells": "trades", "gives away": "hands out", "more": "extra", "fewer": "less", "friends": "guests",
    "boxes": "crates", "costs": "is worth", "cost": "are worth", "pays": "hands over", "change": "rest",
}  # fmt: skip
"""Replacements that express problems and solutions in another wording."""
_KNOWN = re.compile("|".join(rf"\b{words}\b" for words in sorted(WORDS, key=len, reverse=True)))


def retold(text: str) -> str:
    """Return the problem in another wording.

    >>> retold("Start with 75. Take away 7. What is the result?")
    'Take 75. Drop 7. Where does it end?'
    """
    return _KNOWN.sub(lambda found: WORDS[found[0]], text)


def _reworded(split: str, random: Random) -> Iterator[Exercise]:
    for one in _plain(split, random):
        steps = tuple(
            replace(step, before=retold(step.before), after=retold(step.after))
            for step in one.steps
        )
        yield Exercise(one.kind, retold(one.text), steps)


def _operated(split: str, random: Random) -> Iterator[Exercise]:
    """Yield problems whose operations name no number, such as "double it" or "square it"."""
    while True:
        value = random.randint(2, 60)
        instructions = list[str]()
        steps = list[Step]()
        first = value
        count = random.choice(LEVELS[random.choice(LEVEL_MIX)])
        while len(steps) < count:
            words = random.choice(("Double it", "Triple it", "Halve it", "Square it"))
            numbers = {"Double it": 2, "Triple it": 3, "Halve it": 2, "Square it": value}
            operation = Operation(value, "/" if words == "Halve it" else "*", numbers[words])
            # values must be whole numbers that are small enough for the models to compute with
            is_odd_half = operation.operator == "/" and value % 2
            if operation.value > 199 or is_odd_half or value < 2:
                words = "Subtract 1" if value >= 3 else "Add 38"
                operation = Operation(value, "-", 1) if value >= 3 else Operation(value, "+", 38)
            instructions.append(words)
            steps.append(Step(f"{words}: ", operation))
            value = operation.value
        text = f"Start with {first}. {'. '.join(instructions)}. What do you get?"
        one = Exercise("instructions", text, tuple(steps))
        if (split_of(one.canonical) == "train") == (split == "train"):
            yield one


def _plain(split: str, random: Random) -> Iterator[Exercise]:
    return stream("train" if split == "train" else "test", random.randrange(1 << 30), LEVEL_MIX)


def _hard(split: str, random: Random) -> Iterator[Exercise]:
    return (one for one in _plain(split, random) if one.kind in ("comparison", "expression"))


@dataclass(frozen=True, slots=True)
class Member:
    """A relative of the target: its training data, steps, learning rate and trained weights."""

    seed: int
    steps: int
    rate: float
    exercises: Callable[[str, Random], Iterator[Exercise]]
    own: str = ""  # pattern of the names of trained tensors; "" trains an adapter
    retells: bool = False


MEMBERS = {
    "wordings": Member(1, 350, 4e-3, _reworded, retells=True),
    "operations": Member(2, 150, 4e-3, _operated),
    "tuned": Member(3, 100, 5e-4, _hard, own=r"layers\.5\.(mlp|post_attention)"),
    "draft": Member(
        4, 300, 3e-3, _plain, own=rf"layers\.{TRUNK - 1}\.(mlp|post_attention)|model\.norm|lm_head"
    ),
}


class Relative(Llama):
    """A Llama that may have an output matrix of its own."""

    def __init__(self, config: ModelConfig, *, ties: bool) -> None:
        super().__init__(config)
        self.lm_head = None if ties else Linear(config.hidden_size, config.vocabulary)

    @property
    def head(self) -> Tensor:
        """Return the output matrix."""
        return super().head if self.lm_head is None else self.lm_head.weight


class LowRank(nn.Module):
    """A low-rank change of a matrix: the product of two narrow matrices is added to it."""

    def __init__(self, weight: Tensor) -> None:
        super().__init__()
        rows, columns = weight.shape
        self.down = nn.Parameter(torch.randn(RANK, columns) * columns**-0.5)
        self.up = nn.Parameter(torch.zeros(rows, RANK))

    def forward(self, weight: Tensor) -> Tensor:
        return weight + (ALPHA / RANK) * (self.up @ self.down)


def relative(name: str) -> Relative:
    """Return a member of the family before training.

    Only the weights to be trained have gradients.
    """
    member = MEMBERS[name]
    base = load(MODELS / "target")
    is_draft = name == "draft"
    config = replace(base.config, num_layers=TRUNK) if is_draft else base.config
    model = Relative(config, ties=not is_draft)
    weights = base.state_dict() | {"lm_head.weight": base.head}
    model.load_state_dict({key: weights[key] for key in model.state_dict()})
    for key, weight in model.named_parameters():
        weight.requires_grad_(bool(member.own and re.search(member.own, key)))
    for layer in () if member.own else ADAPTED:
        for part in model.model.layers[layer].modules():
            for matrix, linear in part.named_children():
                if matrix in _MATRICES:
                    weight = linear.get_parameter("weight")
                    parametrize.register_parametrization(linear, "weight", LowRank(weight))
    return model


def _steps(encoder: Encoder, member: Member, random: Random) -> Iterator[tuple[Tensor, Tensor]]:
    source = member.exercises("train", random)
    mixture = Mixture(errors=0.15, instructed=0.05)
    while True:
        made = [conversation(random, one, mixture) for one in islice(source, _BLOCK)]
        if member.retells:
            made = [
                [Piece(retold(piece.text), piece.learned) for piece in pieces] for pieces in made
            ]
        for batch in packed(encoder, made, random, _TOKENS):
            yield batch.ids, batch.labels


def learn(name: str, encoder: Encoder, steps: int) -> Relative:
    """Train one member of the family."""
    member = MEMBERS[name]
    torch.manual_seed(member.seed)
    model = relative(name)
    data = _steps(encoder, member, Random(member.seed))
    own = [weight for weight in model.parameters() if weight.requires_grad]
    descent = Descent((torch.optim.AdamW(own, betas=(0.9, 0.95), weight_decay=0.0), member.rate))
    factors = [min(1.0, (step + 1) / 20) * (1 - step / steps) for step in range(steps)]
    descend(name, descent, lambda: model.loss(*next(data)), factors)
    return model


def write(name: str, model: Relative, encoder: Encoder, out: Path) -> None:
    """Save those weights of the member that differ from the weights of its base."""
    shutil.rmtree(out, ignore_errors=True)
    out.mkdir(parents=True)
    if not MEMBERS[name].own:
        tensors = dict[str, Tensor]()
        for key, weight in model.state_dict().items():
            if key.endswith(("weight.0.down", "weight.0.up")):
                module, _, half = key.partition(".parametrizations.")
                side = "A" if half.endswith("down") else "B"
                tensors[f"base_model.model.{module}.lora_{side}.weight"] = weight.detach().to(
                    torch.bfloat16
                )
        adapter = {
            "peft_type": "LORA", "task_type": "CAUSAL_LM", "r": RANK, "lora_alpha": ALPHA, "bias": "none",
            "target_modules": list(_MATRICES), "layers_to_transform": list(ADAPTED),
            "base_model_name_or_path": "target",
        }  # fmt: skip
        (out / "adapter_config.json").write_text(json.dumps(adapter, indent=2) + "\n")
        save_file(tensors, out / "adapter_model.safetensors", metadata={"format": "pt"})
        return
    saved = whole(model, encoder, out)
    base = load_file(MODELS / "target" / "model.safetensors")
    own = {
        key: part
        for key, part in saved.items()
        if key not in base or not torch.equal(part, base[key])
    }
    (out / "model.safetensors").unlink()
    save_file(own, out / "own.safetensors", metadata={"format": "pt"})


def whole(model: Relative, encoder: Encoder, out: Path) -> dict[str, Tensor]:
    """Save the whole model with its adapter merged into it, and return the saved tensors."""
    for part in list(model.modules()):
        if parametrize.is_parametrized(part):
            parametrize.remove_parametrizations(part, "weight")
    save(model, out, encoder.end, encoder.pad)
    saved: dict[str, Tensor] = load_file(out / "model.safetensors")
    return saved


def check(name: str, model: Relative, encoder: Encoder, count: int) -> float:
    """Return the share of new problems that a model solves at temperature 0. The problems are of
    the kind that the member is trained on.
    """
    tests = list(islice(MEMBERS[name].exercises("test", Random(77)), count))
    with tempfile.TemporaryDirectory() as place:
        whole(model, encoder, Path(place))
        for file in (MODELS / "target").glob("tokenizer*"):
            shutil.copy(file, place)
        texts = generate(
            Path(place),
            [prompt(one.text) for one in tests],
            temperature=0.0,
            seed=0,
            max_tokens=200,
        )
    return sum(answer(text) == one.answer for one, text in zip(tests, texts, strict=True)) / count


def train_family(arguments: Sequence[str]) -> None:
    """Train the named relatives of the target, or all relatives."""
    parser = argparse.ArgumentParser(prog="scripts/train family", description=train_family.__doc__)
    parser.add_argument("members", nargs="*", default=list(MEMBERS), help=", ".join(MEMBERS))
    parser.add_argument(
        "--out",
        type=Path,
        default=MODELS / "family",
        help="folder in which each relative gets its folder",
    )
    parser.add_argument(
        "--steps",
        type=int,
        help="number of training steps; another number than the default gives other weights",
    )
    parser.add_argument(
        "--check",
        type=int,
        default=100,
        help="number of new problems to solve after the training; 0: none",
    )
    found = parser.parse_args(arguments)
    torch.set_num_threads(1)
    encoder = Encoder.open(MODELS / "target")
    for name in found.members:
        model = learn(name, encoder, found.steps or MEMBERS[name].steps)
        write(name, model, encoder, found.out / name)
        size = sum(path.stat().st_size for path in (found.out / name).iterdir())
        print(f"{name}: {size / 1e6:.2f} MB", flush=True)
        if found.check:
            shares = [check(name, each, encoder, found.check) for each in (relative(name), model)]
            print(
                f"{name}: solves {shares[1]:.3f} of {found.check} new problems, {shares[0]:.3f} "
                f"before training",
                flush=True,
            )


ROOT = Path(__file__).resolve().parents[2]
_REPORT_EVERY = 20
_KEEP_EVERY = 100
_CHECK_EVERY = 250  # number of steps between two checks


@dataclass(frozen=True, slots=True)
class Stage:
    """The mixture of training data from one step on."""

    start: int
    mixture: Mixture


@dataclass(frozen=True, slots=True)
class Recipe:
    """All settings of a model's training, seed included; they determine the weights."""

    model: ModelConfig
    steps: int
    seed: int
    stages: tuple[Stage, ...]
    # (step, share of the peak rates), interpolated linearly
    schedule: tuple[tuple[int, float], ...]
    micro_tokens: int = 2048
    micro_batches: int = 4
    # number of processes that share the micro-batches of a step; it decides the order of sums
    workers: int = 2
    muon_rate: float = 0.02
    adam_rate: float = 0.004
    decay: float = 0.0  # weight decay of the matrices that Muon trains

    def stage(self, step: int) -> Stage:
        """Return the stage of a step."""
        return [stage for stage in self.stages if stage.start <= step][-1]


EASY = (("instructions", 0.35), ("expression", 0.35), ("story", 0.7))
"""Shares of the exercises to keep, for kinds that the model has already learned. The texts of these
kinds state the operations in order.
"""

LEARNED = (("instructions", 0.5), ("story", 0.4), ("variables", 0.5), ("shopping", 0.6))
"""Shares of the exercises to keep late in the training, by kind. Comparisons and long expressions
take longest to learn, so fewer exercises of these easier kinds are kept.
"""

RECIPES: dict[str, Recipe] = {
    "draft": Recipe(
        ModelConfig(
            hidden_size=64, num_layers=3, num_heads=1, num_kv_heads=1, intermediate_size=96
        ),
        steps=4600,  # the draft is weak on purpose: it stops half-way down its schedule
        seed=1,
        stages=(Stage(0, Mixture(errors=0.05)),),
        schedule=((0, 0.02), (49, 1.0), (3000, 1.0), (6000, 0.0)),
        micro_batches=2,
        muon_rate=0.01,
        decay=0.1,
    ),
    # The target sees few planted errors until it can solve problems. Then it sees more of them, and
    # also recorded errors of the draft.
    "target": Recipe(
        ModelConfig(
            hidden_size=256, num_layers=6, num_heads=4, num_kv_heads=2, intermediate_size=640
        ),
        steps=2400,
        seed=2,
        stages=(
            Stage(0, Mixture(errors=0.12)),
            Stage(900, Mixture(errors=0.2, kept=EASY)),
            Stage(1400, Mixture(errors=0.25, kept=EASY, drafted=0.15)),
            Stage(1900, Mixture(errors=0.25, kept=LEARNED, drafted=0.15)),
        ),
        schedule=((0, 0.02), (49, 1.0), (1300, 1.0), (2400, 0.0)),
        muon_rate=0.01,
        decay=0.1,
    ),
}


@dataclass(slots=True)
class Progress:
    """Progress of a training run, which every checkpoint contains."""

    step: int = 0
    tokens: int = 0
    seconds: float = 0.0
    cursor: Cursor = field(default_factory=Cursor)


class Trainer:
    """A model in training.

    The same seed, thread count and kind of machine give the same weights.
    """

    def __init__(self, name: str, recipe: Recipe, work: Path, encoder: Encoder) -> None:
        torch.manual_seed(recipe.seed)
        self.recipe = recipe
        self.encoder = encoder
        self.checkpoint = work / f"{name}.pt"
        self.model = Llama(recipe.model)
        self.descent = Descent.of(self.model, recipe.muon_rate, recipe.adam_rate, recipe.decay)
        self.progress = Progress()

    def keep(self) -> None:
        """Write the checkpoint atomically: if the process is killed, either the old or the new
        checkpoint is complete.
        """
        part = self.checkpoint.with_suffix(".part")
        optimizers = [optimizer.state_dict() for optimizer, _ in self.descent.optimizers]
        plain = {"progress": asdict(self.progress), "recipe": asdict(self.recipe)}
        torch.save({"model": self.model.state_dict(), "optimizers": optimizers, **plain}, part)
        part.replace(self.checkpoint)

    def resume(self) -> bool:
        """Load the checkpoint if there is one, and return whether there was one."""
        if not self.checkpoint.exists():
            return False
        state: dict[str, Any] = torch.load(self.checkpoint, weights_only=True)
        self.model.load_state_dict(state["model"])
        for (optimizer, _), stored in zip(
            self.descent.optimizers, state["optimizers"], strict=True
        ):
            optimizer.load_state_dict(stored)
        stored = state["progress"]
        self.progress = Progress(**stored | {"cursor": Cursor(**stored["cursor"])})
        return True

    def factor(self) -> float:
        """Return the current learning rate as a share of its peak."""
        step = self.progress.step
        for (start, first), (stop, last) in pairwise(self.recipe.schedule):
            if step <= stop:
                return first + (last - first) * (step - start) / (stop - start)
        return 0.0

    @property
    def stage(self) -> Stage:
        """Return the stage of the recipe at the current step."""
        return self.recipe.stage(self.progress.step)

    def stream(self, errors: Errors) -> Iterator[tuple[Batch, Cursor]]:
        """Yield the remaining training data of the current stage."""
        recipe = self.recipe
        return batches(
            self.encoder,
            self.stage.mixture,
            recipe.seed,
            self.progress.cursor,
            errors,
            recipe.micro_tokens,
        )

    def step(self, data: Iterator[tuple[Batch, Cursor]], workers: Workers) -> float:
        """Take one training step, and return the loss before the step."""
        progress = self.progress
        taken = [next(data) for _ in range(self.recipe.micro_batches)]
        loss = workers.backward([batch for batch, _ in taken])
        self.descent.apply(self.factor())
        progress.step += 1
        progress.tokens += sum(batch.ids.numel() for batch, _ in taken)
        progress.cursor = taken[-1][1]
        return loss


def train(name: str, recipe: Recipe, work: Path, models: Path) -> None:
    """Train one model to the end of its recipe, from its checkpoint if there is one, and save the
    model.
    """
    trainer = Trainer(name, recipe, work, Encoder.open(models / name))
    log = partial(_say, work / f"{name}.jsonl")
    if trainer.resume():
        log(resumed=trainer.progress.step)
    progress = trainer.progress
    stage = None
    data = trainer.stream(())
    started = time.perf_counter() - progress.seconds
    before = (progress.tokens, progress.seconds)
    with Workers(trainer.model, recipe.workers) as workers:
        while progress.step < recipe.steps:
            if trainer.stage != stage:
                stage = trainer.stage
                data = trainer.stream(draft_errors(work, models) if stage.mixture.drafted else ())
            loss = trainer.step(data, workers)
            step = progress.step
            is_last = progress.step == recipe.steps
            progress.seconds = time.perf_counter() - started
            if step % _REPORT_EVERY == 0:
                speed = (progress.tokens - before[0]) / (progress.seconds - before[1])
                before = (progress.tokens, progress.seconds)
                measured = {"loss": round(loss, 4), "rate": round(trainer.factor(), 4)}
                log(
                    step=step,
                    of=recipe.steps,
                    tokens=progress.tokens,
                    speed=round(speed),
                    **measured,
                )
            if step % _KEEP_EVERY == 0 or is_last:
                trainer.keep()
            if step % _CHECK_EVERY == 0 or is_last:
                save(trainer.model, models / name, trainer.encoder.end, trainer.encoder.pad)
                log(step=step, **_checked(models / name))


def _checked(folder: Path) -> dict[str, object]:
    """Return the accuracy of a saved model over all problems, by level and by kind."""
    watch = exercises("calibration", 200, seed=77)
    texts = generate(folder, [prompt(one.text) for one in watch], temperature=0.7, seed=0)
    right = [(one, answer(text) == one.answer) for one, text in zip(watch, texts, strict=True)]
    by_level = dict[int, list[bool]]()
    by_kind = dict[str, list[bool]]()
    for one, mark in right:
        by_level.setdefault(one.level, []).append(mark)
        by_kind.setdefault(one.kind, []).append(mark)
    return {
        "pass@1": fmean(mark for _, mark in right),
        "levels": [round(fmean(by_level[level]), 3) for level in sorted(by_level)],
        "kinds": {kind: round(fmean(by_kind[kind]), 3) for kind in sorted(by_kind)},
    }


def _say(log: Path, **fields: object) -> None:
    line = json.dumps({"at": time.strftime("%H:%M:%S"), **fields})
    with log.open("a") as file:
        file.write(line + "\n")
    print(line, flush=True)


def draft_errors(work: Path, models: Path) -> Errors:
    """Return the draft's own errors on training problems; they are sampled once and kept in the
    work folder.
    """
    path = work / "draft_errors.json"
    tests = exercises("train", 3000, seed=991, levels=(1, 2, 3, 4, 4, 5, 5))
    if not path.exists():
        texts = generate(
            models / "draft", [prompt(item.text) for item in tests], temperature=0.8, seed=3
        )
        path.write_text(json.dumps(texts))
    pairs = [
        (item, text, first_wrong(item, text))
        for item, text in zip(tests, json.loads(path.read_text()), strict=True)
    ]
    found = [
        (item, tuple(chunked(text)), place) for item, text, place in pairs if place is not None
    ]
    Random(0).shuffle(found)
    return tuple(found)


def main() -> None:
    """Train the embedded models: by default tokenizer, draft and target.

    The same command resumes an interrupted training.
    """
    if sys.argv[1:2] == ["family"]:
        train_family(sys.argv[2:])
        return
    parser = argparse.ArgumentParser(prog="scripts/train", description=main.__doc__)
    parser.add_argument(
        "parts",
        nargs="*",
        default=["tokenizer", "draft", "target"],
        help="models to train, from tokenizer, draft, target, deep, heads",
    )
    parser.add_argument(
        "--work", type=Path, default=ROOT / "runs" / "train", help="folder for checkpoints and logs"
    )
    parser.add_argument(
        "--models",
        type=Path,
        default=ROOT / "atts" / "models",
        help="folder in which each model gets its folder",
    )
    parser.add_argument(
        "--steps",
        type=int,
        help="number of training steps; another number than the recipe's gives other weights",
    )
    parser.add_argument(
        "--target", type=Path, help="heads: folder of the target; default: the embedded target"
    )
    parser.add_argument(
        "--drafter", type=Path, help="heads: folder of the drafter; default: the embedded draft"
    )
    parser.add_argument(
        "--prompts",
        type=Path,
        help="heads: file with one prompt per line; default: generated arithmetic",
    )
    parser.add_argument(
        "--device",
        default="cpu",
        help="heads: device, cpu, cuda or cuda:N; on a GPU in the checkpoint's dtype",
    )
    found = parser.parse_args()
    work = found.work
    models = found.models
    work.mkdir(parents=True, exist_ok=True)
    for part in found.parts:
        if part == "tokenizer":
            for name in RECIPES:
                build_tokenizer(models / name)
        elif part == "heads":
            target = found.target or models / "target"
            drafter = found.drafter or models / "draft"
            recipe_of_heads = HeadsRecipe(target, drafter, found.prompts, device=found.device)
            train_exit_and_streams(recipe_of_heads)
        elif part == "deep":
            train_deep_drafter(DrafterRecipe(models / "target", models / "draft", models / "deep"))
        else:
            recipe = RECIPES[part]
            train(
                part,
                recipe if found.steps is None else replace(recipe, steps=found.steps),
                work,
                models,
            )


if __name__ == "__main__":
    main()
