"""Scores of rows rounded to bfloat16 beside those in float32: time, numbers, and whether a gate decides as before."""

from __future__ import annotations

import time
from collections.abc import Sequence
from functools import partial
from statistics import fmean

import numpy as np
import torch
from anyio.from_thread import start_blocking_portal
from numpy.typing import NDArray

from atts.core import ScoreRequest, TokenIds
from atts.evaluators.datasets.arithmetic import problems
from atts.local import LocalEngine
from atts.models import path
from atts.tasks import collect
from scripts.studies.harness import Options, Spread, Table, say
from scripts.studies.local_subjects import Lab, asked, texts

RATES = (0.1, 0.2, 0.4)
_ROUND = 100
"""Problems whose chunks are scored at once."""


def study(options: Options) -> list[Table]:
    """Chunks of the embedded draft, scored by the embedded target in both ways, in turn."""
    torch.set_num_threads(1)
    questions = [problem.text for problem in problems("test", options.pick(200, 1500, 3000), 7 + options.seed)]
    with start_blocking_portal() as portal:
        lab = Lab(options, portal)
        with lab.engine(path("draft")) as draft:
            requests = asked(draft, questions, 300, 1)
            written = zip(requests, portal.call(texts, draft, requests), strict=True)
            chunks = [_chunks(draft, request.ids, text) for request, text in written]
        with lab.engine(path("target")) as exact, lab.engine(path("target"), scores="bfloat16") as rounded:
            arms, found, ratios = (exact, rounded), [list[float](), list[float]()], list[float]()
            for first in range(0, len(chunks), _ROUND):
                say(f"rounded scores: {first} of {len(chunks)} problems")
                turn = [chunk for own in chunks[first : first + _ROUND] for chunk in own]
                seconds = [_timed(lab, arm, turn, values) for arm, values in zip(arms, found, strict=True)]
                ratios.append(seconds[0] / seconds[1])
    return [_table(np.array(found[0]), np.array(found[1]), Spread.of(ratios[1:]))]


def _table(exact: NDArray[np.float64], rounded: NDArray[np.float64], faster: Spread) -> Table:
    apart = abs(exact - rounded)
    bounds = [np.quantile(exact, 1 - rate) for rate in RATES]
    others = [int(((exact > bound) != (rounded > bound)).sum()) for bound in bounds]
    header = "chunks | times as fast | mean difference, nats a token | largest | " + " | ".join(
        f"decided otherwise at {rate}" for rate in RATES
    )
    return Table.of(
        "Scores of rows rounded to bfloat16",
        header,
        [(len(exact), str(faster), float(apart.mean()), float(apart.max()), *others)],
        "Scored from the prompt on, in batches of 100 problems, processor time with the caller's own tasks. A chunk is "
        "decided otherwise where only one of its two scores is above the bound that the rate sets in float32.",
    )


def _chunks(engine: LocalEngine, prompt: TokenIds, text: TokenIds) -> list[ScoreRequest]:
    """A text's lines, each after what is before it."""
    ends = [at for at in range(1, len(text)) if engine.tokenizer.decode(text[at - 1 : at]).endswith("\n")]
    bounds = [0, *ends, len(text)]
    pieces = zip(bounds, bounds[1:], strict=False)
    return [ScoreRequest(prompt + text[:start], text[start:stop]) for start, stop in pieces if stop > start]


def _timed(lab: Lab, engine: LocalEngine, chunks: Sequence[ScoreRequest], values: list[float]) -> float:
    """Processor seconds; `values` gets each chunk's mean negative log-probability."""
    began = time.process_time()
    scores = lab.portal.call(collect, [partial(engine.score, chunk) for chunk in chunks])
    seconds = time.process_time() - began
    values.extend(-fmean(score.logprobs) for score in scores)
    return seconds
