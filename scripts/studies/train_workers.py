"""Gradients from one-threaded processes that share the weights: beats threads wherever cores are
shared.
"""

from __future__ import annotations

import os
from collections.abc import Sequence
from concurrent.futures import ProcessPoolExecutor
from types import TracebackType
from typing import Self

import torch
from torch import Tensor, multiprocessing

from scripts.studies.train_data import Batch
from scripts.studies.train_model import Llama


class Workers:
    """The calling process and its helpers; micro-batches are dealt out in turn, so sums are
    reproducible.
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
        """Leave the whole step's gradients in the model; its mean loss per learned token.

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


_models: list[Llama] = []  # of a helper: the one whose weights the caller changes


def _begin(model: Llama) -> None:
    # Linux shares cores between sessions first: in the caller's, all would get one share
    os.setsid()
    torch.set_num_threads(1)
    _models.append(model)


def _assist(batches: Sequence[Batch], learned: int) -> tuple[float, list[Tensor]]:
    """A helper's part of the loss, and its gradients."""
    model = _models[0]
    model.zero_grad()
    loss = _backward(model, batches, learned)
    return loss, [
        torch.zeros_like(one) if one.grad is None else one.grad for one in model.parameters()
    ]
