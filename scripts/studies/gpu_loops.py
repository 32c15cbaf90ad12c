"""Step loops over models of random numbers made on the device: how fast they write and score."""

from __future__ import annotations

import statistics
import time
from collections.abc import Sequence
from dataclasses import replace
from functools import partial
from typing import Any

import torch

from atts.core import SampleRequest, Sampling, ScoreRequest, TokenIds
from atts.local.batch import Model
from atts.local.cuda_model import cuda_model
from atts.local.loop import StepLoop
from atts.local.messages import Close, Command, LoopReport, Submit
from atts.local.model_config import ModelConfig, read_model_config, rope_rows
from atts.local.options import Graphs
from atts.local.prefix import PrefixTree
from atts.local.scheduler import Scheduler, SchedulerConfig
from atts.local.sequence import TokenTable
from atts.local.torch_model import TorchModel
from atts.models import path
from atts.sampling import Seed
from scripts.studies.gpu_lab import Lab
from scripts.studies.padded import random_weights, read_size, shape_of_size
from scripts.studies.theirs import generated, random_model

_STEP_TOKENS = 2048  # of prompts and chunks in one step


class Script:
    """An inbox that hands all orders out at once, and notes when each step begins."""

    def __init__(self, orders: Sequence[SampleRequest | ScoreRequest], first: int) -> None:
        self._orders: list[Command] = [
            Submit(first + place, order) for place, order in enumerate(orders)
        ]
        self.times: list[float] = []

    def take(self, *, wait: bool) -> list[Command]:
        """Everything; when that is done, the end."""
        self.times.append(time.perf_counter())
        orders = self._orders
        self._orders = []
        return orders or ([Close()] if wait else [])


def shape_of(lab: Lab, size: str) -> ModelConfig:
    """A published model's sizes."""
    return shape_of_size(
        read_model_config(path("draft"), "draft"), read_size(size), lab.sizes.vocabulary
    )


class RandomModel:
    """A model of a published one's sizes with random weights, and a cache for some sequences."""

    def __init__(self, lab: Lab, size: str, graphs: Graphs) -> None:
        sizes = lab.sizes
        config = shape_of(lab, size)
        self.config = config
        weights = random_weights(config, lab.half, lab.device)
        # a head of zeros would draw tokens at random, and its numbers would be easier on the device
        # than others
        weights = replace(weights, head=weights.embedding * config.hidden_size**-0.5)
        per_sequence = max(sizes.prompt + sizes.tokens, sizes.prefix + 3 * sizes.chunk) + 32
        room = torch.cuda.mem_get_info(lab.device)[0] * 0.8 if lab.is_cuda else 1 << 28
        held = (
            weights_bytes(config, lab.half)
            + 2 * config.vocabulary * config.hidden_size * lab.half.itemsize
        )
        per_token = config.kv_floats_per_token * lab.half.itemsize
        self.slots = int(min(max(sizes.batches) * per_sequence, max(0, room - held) // per_token))
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
        """Serve the rounds one after the other in one loop's cache; when each step of each began,
        and the end.
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
    """What the loop says is not looked at: it is timed."""


def weights_bytes(config: ModelConfig, dtype: torch.dtype) -> int:
    """Of the matrices that every step reads."""
    return config.matrix_weights * dtype.itemsize


def prompts(count: int, length: int, seed: int) -> list[TokenIds]:
    """Random ids, no two alike."""
    generator = torch.Generator().manual_seed(seed)
    return [
        tuple(row) for row in torch.randint(10, 500, (count, length), generator=generator).tolist()
    ]


def decoding(lab: Lab, model: RandomModel, batch: int) -> dict[str, Any]:
    """The median step of the second half, when all write and every size of step was captured."""
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
    """Chunks scored on prefixes that are known: all at once, from the first step to the last."""
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
    """Seconds to read weights and cache at the rate of a copy, or to multiply at the rate of a
    large product.
    """
    context = lab.sizes.prompt + 3 * lab.sizes.tokens / 4
    cache = batch * context * config.kv_floats_per_token * lab.half.itemsize
    moved = (weights_bytes(config, lab.half) + cache) / limits["bytes"]
    return float(max(moved, 2.0 * config.matrix_weights * batch / limits["flops"]))


class TheirModel:
    """The same sizes in transformers, with its own random weights."""

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
        """What the tokens take beyond the first, which the prompt is read for."""
        sizes = lab.sizes
        ids = torch.tensor(prompts(batch, sizes.prompt, batch), device=lab.device)
        counts = (max(2, sizes.tokens // 2), 1)
        generated(self._model, ids, 2)
        whole, first = (
            lab.seconds(partial(generated, self._model, ids, count)) for count in counts
        )
        step = (whole - first) / (counts[0] - 1)
        return {"step": step, "rate": batch / step}
