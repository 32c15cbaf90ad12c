"""Gradients from one-threaded processes that share the weights: beats threads wherever cores are shared."""

from __future__ import annotations

import os
from collections.abc import Sequence
from dataclasses import dataclass
from multiprocessing.connection import Connection
from multiprocessing.process import BaseProcess
from types import TracebackType
from typing import Self

import torch
import torch.nn.functional as F
from torch import Tensor, multiprocessing

from scripts.studies.train_data import Batch
from scripts.studies.train_model import Llama


@dataclass(frozen=True, slots=True)
class Work:
    """A micro-batch with what its loss needs: the learned tokens of the whole step, and the layer that exits early."""

    batch: Batch
    learned: int
    exit_layer: int
    exit_weight: float


@dataclass(frozen=True, slots=True)
class Losses:
    """Mean losses per learned token of the last layer and of the early exit."""

    final: float
    early: float


def backward(model: Llama, work: Sequence[Work]) -> Losses:
    """Add the gradients of the micro-batches to the model's."""
    final, early = 0.0, 0.0
    for item in work:
        last, exit_ = _losses(model, item)
        ((last + item.exit_weight * exit_) / item.learned).backward()  # type: ignore[no-untyped-call]
        final, early = final + last.item() / item.learned, early + exit_.item() / item.learned
    return Losses(final, early)


def _losses(model: Llama, work: Work) -> tuple[Tensor, Tensor]:
    compute = torch.bfloat16
    batch = work.batch
    states = model.states(batch.ids, model.where(batch.ids.shape[1], compute))
    wanted = batch.labels.reshape(-1)
    rows = (wanted != -100).nonzero()[:, 0]

    def loss(state: Tensor) -> Tensor:
        logits = model.logits(state.reshape(-1, state.shape[-1])[rows], compute)
        return F.cross_entropy(logits, wanted[rows], reduction="sum")

    return loss(states[-1]), loss(states[work.exit_layer]) if work.exit_weight else torch.zeros(())


class Workers:
    """The calling process and its helpers; micro-batches are dealt out in turn, so sums are reproducible."""

    def __init__(self, model: Llama, count: int) -> None:
        torch.set_num_threads(1)
        self.model = model.share_memory()
        context = multiprocessing.get_context("spawn")
        self.helpers: list[_Helper] = []
        for _ in range(count - 1):
            gradients = [_shared(torch.zeros_like(weight)) for weight in model.parameters()]
            pipe, other = context.Pipe()
            process = context.Process(target=_assist, args=(other, model, gradients), daemon=True)
            process.start()
            other.close()
            self.helpers.append(_Helper(process, pipe, gradients))

    def backward(self, work: Sequence[Work]) -> Losses:
        """Leave the whole step's gradients in the model.

        :raises EOFError: a helper died.
        """
        count = len(self.helpers) + 1
        for place, helper in enumerate(self.helpers):
            helper.pipe.send([_packed(item) for item in work[place + 1 :: count]])
        losses = backward(self.model, work[::count])
        final, early = losses.final, losses.early
        for helper in self.helpers:
            answered = helper.pipe.recv()
            final, early = final + answered[0], early + answered[1]
            for weight, gradient in zip(self.model.parameters(), helper.gradients, strict=True):
                assert weight.grad is not None, "every weight takes part"
                weight.grad += gradient
        return Losses(final, early)

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        for helper in self.helpers:
            helper.process.terminate()
            helper.process.join()


@dataclass(frozen=True, slots=True)
class _Helper:
    process: BaseProcess
    pipe: Connection
    gradients: Sequence[Tensor]


def _shared(tensor: Tensor) -> Tensor:
    shared: Tensor = tensor.share_memory_()  # type: ignore[no-untyped-call]
    return shared


def _packed(work: Work) -> tuple[object, ...]:
    batch = work.batch
    return batch.ids.numpy(), batch.labels.numpy(), batch.learned, work.learned, work.exit_layer, work.exit_weight


def _assist(pipe: Connection, model: Llama, gradients: Sequence[Tensor]) -> None:
    """The other process: gradients of its share, written where the caller reads them."""
    os.setsid()  # Linux shares cores between sessions first: in the caller's, all would get one share
    torch.set_num_threads(1)
    while True:
        try:
            packed = pipe.recv()
        except (EOFError, ConnectionError):
            return  # the caller is gone
        work = [
            Work(Batch(torch.from_numpy(ids), torch.from_numpy(labels), own), *rest)
            for ids, labels, own, *rest in packed
        ]
        losses = backward(model, work)
        for weight, gradient in zip(model.parameters(), gradients, strict=True):
            gradient.copy_(weight.grad if weight.grad is not None else torch.zeros_like(weight))
            weight.grad = None
        pipe.send((losses.final, losses.early))
