"""Training data of the embedded models: the tokenizer, solutions with planted errors and
corrections, batches.
"""

from __future__ import annotations

import json
import re
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from itertools import chain, islice
from pathlib import Path
from random import Random
from typing import Any

import torch
from torch import Tensor
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
"""Long problems more often: they hold more steps, and are where accuracy is lost."""


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
    """Text to ids in bulk, by the tokenizer file alone."""

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
