"""What a trained model can do: sampled solutions graded exactly, and how often a wrong chunk is put
right.
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from functools import partial
from pathlib import Path
from random import Random

import anyio

from atts.concurrency import collect
from atts.core import SampleRequest, Sampling
from atts.evaluators import Estimate, mean_estimate
from atts.evaluators.datasets.arithmetic import Exercise
from atts.local import LocalEngine, LocalOptions
from atts.sampling import Seed
from scripts.studies.train_data import Encoder, prompt, wrong_chunk

BOX = re.compile(r"\\boxed\{(-?\d+)\}")
EQUATION = re.compile(r"(\d+) ([-+*/]) (\d+) = (?:\d+ [-+] \d+ = )?(\d+)")


def generate(
    folder: Path, prompts: Sequence[str], *, temperature: float, seed: int, max_tokens: int = 400
) -> list[str]:
    """What a saved model goes on with after each rendered prompt, until its end or `max_tokens`."""
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
    """The first chunk whose computation or answer differs from the reference's; None when all
    agree.

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
    folder: Path, starts: Sequence[tuple[Exercise, str]], *, temperature: float, seed: int
) -> Estimate:
    """How often the model still reaches the right answer after a solution that starts with a wrong
    chunk.
    """
    prompts = [prompt(item.text) + begun for item, begun in starts]
    texts = generate(folder, prompts, temperature=temperature, seed=seed)
    pairs = zip(texts, starts, strict=True)
    return rate(
        [
            [answer(begun + text) == item.answer and answer(text) is not None]
            for text, (item, begun) in pairs
        ]
    )


def planted_starts(tests: Sequence[Exercise], seed: int) -> list[tuple[Exercise, str]]:
    """Each exercise right up to a random step and wrong in it, as in training."""
    random = Random(seed)
    starts: list[tuple[Exercise, str]] = []
    for item in tests:
        place = random.randrange(len(item.steps))
        starts.append((item, "".join(item.chunks[:place]) + wrong_chunk(random, item, place)))
    return starts


def drafted_starts(draft: Path, tests: Sequence[Exercise], seed: int) -> list[tuple[Exercise, str]]:
    """The draft's own solutions up to and with its first wrong chunk, where it makes one."""
    texts = generate(draft, [prompt(item.text) for item in tests], temperature=0.7, seed=seed)
    starts: list[tuple[Exercise, str]] = []
    for item, text in zip(tests, texts, strict=True):
        place = first_wrong(item, text)
        if place is not None:
            starts.append((item, "".join(chunked(text)[: place + 1])))
    return starts
