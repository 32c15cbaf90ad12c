"""What a trained model can do: sampled solutions graded exactly, and how often a wrong chunk is put right."""

from __future__ import annotations

import re
from collections.abc import Sequence
from random import Random

import torch
from torch import Tensor

from atts.evaluators import Estimate, mean_estimate
from atts.evaluators.datasets.arithmetic import Exercise
from scripts.studies.train_data import Encoder, prompt, wrong_chunk
from scripts.studies.train_model import Llama

BOX = re.compile(r"\\boxed\{(-?\d+)\}")
EQUATION = re.compile(r"(\d+) ([-+*/]) (\d+) = (?:\d+ [-+] \d+ = )?(\d+)")


@torch.inference_mode()
def generate(
    model: Llama,
    encoder: Encoder,
    prompts: Sequence[str],
    *,
    temperature: float,
    seed: int,
    max_tokens: int = 400,
    compute: torch.dtype = torch.float32,
    width: int = 256,
) -> list[str]:
    """One sampled continuation per prompt, until the end token or `max_tokens`; prompts of like length go together."""
    ids = encoder.ids(prompts)
    order = sorted(range(len(ids)), key=lambda index: len(ids[index]))
    texts = [""] * len(ids)
    generator = torch.Generator().manual_seed(seed)
    for start in range(0, len(order), width):
        rows = order[start : start + width]
        prompt_ids = [ids[row] for row in rows]
        made = _generate(prompt_ids, model, encoder, temperature, generator, max_tokens=max_tokens, compute=compute)
        for row, own in zip(rows, made, strict=True):
            texts[row] = encoder.text(own)
    return texts


def _generate(
    ids: Sequence[Sequence[int]],
    model: Llama,
    encoder: Encoder,
    temperature: float,
    generator: torch.Generator,
    max_tokens: int,
    compute: torch.dtype,
) -> list[list[int]]:
    """Left-padded batch with a cache; rotary positions are relative, so padding only needs to be hidden."""
    width = max(len(own) for own in ids)
    tokens = torch.tensor([[encoder.pad] * (width - len(own)) + list(own) for own in ids])
    hidden = torch.zeros(len(ids), width + max_tokens)
    for row, own in enumerate(ids):
        hidden[row, : width - len(own)] = 1
    cache = model.new_cache(len(ids), width + max_tokens, compute)
    made: list[list[int]] = [[] for _ in ids]
    alive = torch.arange(len(ids))
    start, stop = 0, width
    while alive.numel() and stop - width < max_tokens:
        states = model.states(tokens, model.window(start, stop, hidden, compute), cache)
        drawn = _draw(model.logits(states[-1][:, -1], compute), temperature, generator)
        keep = drawn != encoder.end
        for row, token in zip(alive.tolist(), drawn.tolist(), strict=True):
            if token != encoder.end:
                made[row].append(token)
        if not bool(keep.all()):
            alive, drawn, hidden = alive[keep], drawn[keep], hidden[keep]
            cache = [(keys[keep], values[keep]) for keys, values in cache]
        tokens = drawn[:, None]
        start, stop = stop, stop + 1
    return made


def _draw(logits: Tensor, temperature: float, generator: torch.Generator) -> Tensor:
    if temperature == 0:
        return logits.argmax(-1)
    return torch.multinomial((logits / temperature).softmax(-1), 1, generator=generator)[:, 0]


def answer(text: str) -> int | None:
    """The last boxed integer."""
    found = BOX.findall(text)
    return int(found[-1]) if found else None


def rate(marks: Sequence[Sequence[bool]]) -> Estimate:
    """The share of right samples, with an interval over problems."""
    return mean_estimate([sum(row) / len(row) for row in marks], sum(map(len, marks)))


def chunked(text: str) -> list[str]:
    """A solution cut after every blank line, nothing lost."""
    parts = text.split("\n\n")
    return [part + "\n\n" for part in parts[:-1]] + ([parts[-1]] if parts[-1] else [])


def first_wrong(exercise: Exercise, text: str) -> int | None:
    """The first chunk whose computation or answer differs from the reference's; None when all agree.

    Wording is free; an order of steps other than the reference's counts as wrong.
    """
    chunks = chunked(text)
    for place, chunk in enumerate(chunks):
        if place < len(exercise.steps):
            wanted = exercise.steps[place].operation
            found = EQUATION.search(chunk)
            told = (str(wanted.left), wanted.operator, str(wanted.right), str(wanted.value))
            if found is None or found.groups() != told or BOX.search(chunk):
                return place
        elif place > len(exercise.steps) or answer(chunk) != exercise.answer:
            return place
    return None


def recovery(
    model: Llama, encoder: Encoder, starts: Sequence[tuple[Exercise, str]], *, temperature: float, seed: int
) -> Estimate:
    """How often the model still reaches the right answer after a solution that starts with a wrong chunk."""
    prompts = [prompt(item.text) + begun for item, begun in starts]
    texts = generate(model, encoder, prompts, temperature=temperature, seed=seed)
    pairs = zip(texts, starts, strict=True)
    return rate([[answer(begun + text) == item.answer and answer(text) is not None] for text, (item, begun) in pairs])


def planted_starts(tests: Sequence[Exercise], seed: int) -> list[tuple[Exercise, str]]:
    """Each exercise right up to a random step and wrong in it, as in training."""
    random = Random(seed)
    starts: list[tuple[Exercise, str]] = []
    for item in tests:
        place = random.randrange(len(item.steps))
        starts.append((item, "".join(item.chunks[:place]) + wrong_chunk(random, item, place)))
    return starts


def drafted_starts(draft: Llama, encoder: Encoder, tests: Sequence[Exercise], seed: int) -> list[tuple[Exercise, str]]:
    """The draft's own solutions up to and with its first wrong chunk, where it makes one."""
    texts = generate(draft, encoder, [prompt(item.text) for item in tests], temperature=0.7, seed=seed)
    starts: list[tuple[Exercise, str]] = []
    for item, text in zip(tests, texts, strict=True):
        place = first_wrong(item, text)
        if place is not None:
            starts.append((item, "".join(chunked(text)[: place + 1])))
    return starts
