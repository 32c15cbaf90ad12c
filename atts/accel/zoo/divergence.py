"""Divergence of two models: how far apart their next-token distributions are after the same texts."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, NamedTuple

from atts.concurrency import import_lock
from atts.core import TokenIds
from atts.local.model_config import read_model_config

if TYPE_CHECKING:
    from torch import Tensor

    from atts.local.model import TorchModel


class Divergence(NamedTuple):
    """Of one model's laws from another's, over all places of some texts."""

    tokens: int  # places
    nats: float  # mean Kullback-Leibler divergence
    flips: float  # the share of places where another token is the likeliest


def divergence(one: Path, other: Path, texts: Sequence[tuple[TokenIds, int]]) -> Divergence:
    """Measure the divergence from the model in `one` to that in `other` over texts, in float32.

    :raises ModelLoadError: the weights of one cannot be used.
    """
    longest = max(len(ids) for ids, _ in texts)
    (tokens, nats, flips) = (0, 0.0, 0)
    models = [_model(folder, longest) for folder in (one, other)]
    for ids, given in texts:
        mine, theirs = (_laws(model, ids)[given - 1 : -1] for model in models)
        tokens += len(mine)
        nats += float((mine.exp() * (mine - theirs)).sum())
        flips += int((mine.argmax(-1) != theirs.argmax(-1)).sum())
    return Divergence(tokens, nats / max(1, tokens), flips / max(1, tokens))


def _model(folder: Path, longest: int) -> TorchModel:
    with import_lock:
        import torch

        from atts.local.loader import load_weights
        from atts.local.model import TorchModel
    config = read_model_config(folder, folder.name)
    cpu = torch.device("cpu")
    cache = torch.zeros(config.num_layers, 2, longest + 2, config.num_kv_heads, config.head_dim)
    return TorchModel(config, load_weights(folder, config, torch.float32, cpu, folder.name), cache)


def _laws(model: TorchModel, ids: TokenIds) -> Tensor:
    """Return the logarithms of what is likely after each token: [tokens, vocabulary]."""
    import numpy as np

    from atts.local.batch import single_rows

    at = np.arange(len(ids))
    rows = single_rows(np.array(ids), at, np.zeros_like(at), (at[None] + 1).astype(np.int32))
    return (
        model.compute_logits(model.forward(rows, (at[None] + 1).astype(np.int32)))
        .double()
        .log_softmax(-1)
    )
