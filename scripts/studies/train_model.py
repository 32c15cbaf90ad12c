"""Training data of the embedded models: the tokenizer, solutions with planted errors and
corrections, batches.
"""

from __future__ import annotations

import json
import os
import re
import time
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ProcessPoolExecutor
from dataclasses import dataclass, replace
from itertools import chain, islice
from pathlib import Path
from random import Random
from types import TracebackType
from typing import Any, Literal, Self

import torch
import torch.nn.functional as F
from torch import Tensor, multiprocessing, nn
from torch.nn.utils.rnn import pad_sequence

from atts.evaluators.datasets.arithmetic import LIMIT, Exercise, Operation, Operator, Step, stream

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
WORDS = r"\n\n| ?\\boxed\{|\d| ?[+\-*/=] ?| ?[A-Za-z']+(?: (?=\d))?| ?[^\sA-Za-z\d]|\s+"
"""Digits stand alone; a space before a digit belongs to the word or sign before it."""

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
"""Difficulty levels to draw from; long problems are more frequent, because models fail on them."""


@dataclass(frozen=True, slots=True)
class Piece:
    """A stretch of a conversation; only `learned` ones count in the loss."""

    text: str
    learned: bool


@dataclass(frozen=True, slots=True)
class Mixture:
    """The shares in which training conversations are drawn."""

    errors: float = 0.35  # share with planted errors
    instructed: float = 0.15  # share that carry an instruction or a system message
    drafted: float = 0.0  # share built on the draft's own recorded errors
    # kinds of exercise to thin out, and the share of them that stays
    kept: tuple[tuple[str, float], ...] = ()


@dataclass(frozen=True, slots=True)
class Batch:
    """A micro-batch: ids and labels [batch, seq]; label -100 is not learned."""

    ids: Tensor
    labels: Tensor
    learned: int


@dataclass(frozen=True, slots=True)
class Cursor:
    """Position of a run in the endless data."""

    block: int = 0
    offset: int = 0


def build_tokenizer(folder: Path, seed: int = 0) -> None:
    """Train the byte-level BPE on exercises and write `tokenizer.json` and `tokenizer_config.json`
    into `folder`.
    """
    from tokenizers import Regex, Tokenizer, decoders, models, pre_tokenizers, trainers

    tokenizer: Any = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.Sequence(
        [
            pre_tokenizers.Split(Regex(WORDS), "isolated"),
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
    """A tokenizer that encodes many texts at once, read from its file alone."""

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
        """Return one list of ids per text; special tokens written out in the text are recognised."""
        return [
            list(item.ids)
            for item in self.raw.encode_batch_fast(list(texts), add_special_tokens=False)
        ]

    def text(self, ids: Sequence[int]) -> str:
        """Return the text of ids without special tokens."""
        return str(self.raw.decode(list(ids), skip_special_tokens=True))


def prompt(text: str, system: str = "") -> str:
    """Return a rendered question with the assistant's turn open, as the chat template does."""
    before = f"{SYSTEM}{system}{END}" if system else ""
    return f"{before}{USER}{text}{END}{ASSISTANT}"


def conversation(random: Random, exercise: Exercise, mixture: Mixture) -> list[Piece]:
    """Return one training conversation: the prompt, then the solution, perhaps with errors that get
    corrected.
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
    """Return a conversation in which the draft wrote `chunks`, wrong from `wrong` on, and is
    corrected soon after.
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
    """Return the solution with wrong chunks, each corrected in the next one; nothing wrong is
    learned.
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
    """Return the step computing something else; what it restates before mostly agrees with that."""
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
    """Return the step with a wrong result, or with a wrong middle that its result follows."""
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
    """Return another operator, a misread operand, or a number taken from elsewhere in the problem."""
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

    A label is the id itself, or -100 if it is not learned.
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
"""Recorded draft errors: the exercise, the chunks the draft wrote, the first wrong one."""


BLOCK_SIZE = 4096  # conversations that are sorted by length and dealt to micro-batches together


def block(
    encoder: Encoder, mixture: Mixture, seed: int, index: int, errors: Errors, tokens: int
) -> list[Batch]:
    """Return the micro-batches of one block of conversations: alike in length within, shuffled
    between.
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
    """Return conversations as micro-batches of a limited size: alike in length within, shuffled
    between.
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
    labels = labels[:, 1:]  # the label of a place is the id after it
    return Batch(ids[:, :-1], labels, int((labels != -100).sum()))


def batches(
    encoder: Encoder, mixture: Mixture, seed: int, cursor: Cursor, errors: Errors, tokens: int
) -> Iterator[tuple[Batch, Cursor]]:
    """Yield micro-batches from `cursor` on, each with the cursor of the one after it."""
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
    """The size of a model; embeddings and output matrix are one."""

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
    """RMS norm in float32, handed on in the compute type."""

    def __init__(self, hidden: int) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(hidden))

    def forward(self, x: Tensor, compute: torch.dtype) -> Tensor:
        return F.rms_norm(x, x.shape[-1:], self.weight, 1e-5).to(compute)


class Linear(nn.Module):
    """A weight without bias, cast to the compute type where it is used."""

    def __init__(self, inputs: int, outputs: int, scale: float = 1.0) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.randn(outputs, inputs) * scale * inputs**-0.5)

    def forward(self, x: Tensor) -> Tensor:
        return F.linear(x, self.weight.to(x.dtype))


@dataclass(frozen=True, slots=True)
class Where:
    """The positions for attention: rotation tables, and an additive mask."""

    cos: Tensor
    sin: Tensor
    mask: Tensor


class Attention(nn.Module):
    """Grouped-query attention with rotary positions.

    Written out, it is faster than the fused kernel at these lengths.
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
    """SwiGLU."""

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
    """Everything but the output matrix; named as the saved weights are."""

    def __init__(self, config: ModelConfig) -> None:
        super().__init__()
        self.embed_tokens = nn.Embedding(config.vocabulary, config.hidden_size)
        nn.init.normal_(self.embed_tokens.weight, std=0.02)
        self.layers = nn.ModuleList(Layer(config) for _ in range(config.num_layers))
        self.norm = Norm(config.hidden_size)


class Llama(nn.Module):
    """A small Llama with tied embeddings."""

    def __init__(self, config: ModelConfig) -> None:
        super().__init__()
        self.config = config
        self.model = Body(config)

    def where(self, length: int, compute: torch.dtype) -> Where:
        """Return the positions of a fresh sequence."""
        mask = torch.full((length, length), -1e9).triu(1).to(compute)
        rates = 10_000.0 ** (-torch.arange(0, self.config.head_dim, 2) / self.config.head_dim)
        angles = torch.outer(torch.arange(length).float(), rates)
        return Where(angles.cos().to(compute), angles.sin().to(compute), mask)

    def states(self, ids: Tensor, where: Where) -> list[Tensor]:
        """Return the residual stream after every layer, [batch, seq, hidden] each."""
        found = [F.embedding(ids, self.model.embed_tokens.weight)]
        for layer in self.model.layers:
            found.append(layer(found[-1], where))
        return found[1:]

    def logits(self, state: Tensor, compute: torch.dtype) -> Tensor:
        """Return raw next-token scores from a residual stream."""
        return F.linear(self.model.norm(state, compute), self.head.to(compute)).float()

    @property
    def head(self) -> Tensor:
        """Return the output matrix."""
        return self.model.embed_tokens.weight

    def loss(
        self, ids: Tensor, labels: Tensor, reduction: Literal["mean", "sum"] = "mean"
    ) -> Tensor:
        """Return the cross-entropy of the labels that are not -100, computed in bfloat16."""
        wanted = labels.reshape(-1)
        compute = torch.bfloat16
        rows = (wanted != -100).nonzero()[:, 0]
        state = self.states(ids, self.where(ids.shape[1], compute))[-1]
        logits = self.logits(state.reshape(-1, state.shape[-1])[rows], compute)
        return F.cross_entropy(logits, wanted[rows], reduction=reduction)


class Descent:
    """Optimizers of a model's weights, each with its peak rate."""

    def __init__(self, *optimizers: tuple[torch.optim.Optimizer, float]) -> None:
        self.optimizers = optimizers

    @classmethod
    def of(cls, model: Llama, muon: float, adam: float, decay: float) -> Descent:
        """Return Muon for the matrices of a model's layers, AdamW for all else."""
        matrices = [weight for weight in model.model.layers.parameters() if weight.ndim == 2]
        others = [
            weight for weight in model.parameters() if all(weight is not one for one in matrices)
        ]
        return cls(
            (torch.optim.Muon(matrices, lr=muon, momentum=0.95, weight_decay=decay), muon),
            (torch.optim.AdamW(others, lr=adam, betas=(0.9, 0.95), weight_decay=0.0), adam),
        )

    def apply(self, factor: float) -> None:
        """Make a step along the gradients at a share of the peak rates, and clear the gradients."""
        for optimizer, peak in self.optimizers:
            for group in optimizer.param_groups:
                group["lr"] = peak * factor
            optimizer.step()
            optimizer.zero_grad()


def descend(
    name: str, descent: Descent, loss: Callable[[], Tensor], factors: Sequence[float]
) -> None:
    """Make a step along each loss's gradients, clipped to length 1, at each of these shares of the
    peak rates.
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
    """Write configuration and bf16 weights; each file is replaced in one step, the weights last."""
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
    """Load a saved model in float32, so that the caller picks the compute type."""
    from safetensors.torch import load_file

    saved = json.loads((folder / "config.json").read_text())
    sizes = {field: saved[name] for field, name in _FIELDS.items()}
    model = Llama(ModelConfig(**sizes, vocabulary=saved["vocab_size"]))
    model.load_state_dict(
        {name: tensor.float() for name, tensor in load_file(folder / "model.safetensors").items()}
    )
    return model


class Workers:
    """The calling process and its helpers.

    Micro-batches are dealt out in turn, so sums are reproducible.
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
        """Compute the gradients of a whole step in the model, and return its mean loss per learned
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
    """Add the gradients of these batches' part of the mean loss over so many tokens; that part."""
    total = 0.0
    for batch in batches:
        loss = model.loss(batch.ids, batch.labels, "sum") / learned
        loss.backward()  # type: ignore[no-untyped-call]
        total += loss.item()
    return total


# models of a helper process: the one whose weights the caller changes
_models: list[Llama] = []


def _begin(model: Llama) -> None:
    # Linux shares cores between sessions first: in the caller's, all would get one share
    os.setsid()
    torch.set_num_threads(1)
    _models.append(model)


def _assist(batches: Sequence[Batch], learned: int) -> tuple[float, list[Tensor]]:
    """Compute a helper's part of the loss, and its gradients."""
    model = _models[0]
    model.zero_grad()
    loss = _backward(model, batches, learned)
    return loss, [
        torch.zeros_like(one) if one.grad is None else one.grad for one in model.parameters()
    ]
