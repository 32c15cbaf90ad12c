"""The shape of a padded model's stack of layers: sizes as people write them, widths and depths of
published models.
"""

from __future__ import annotations

import re
from dataclasses import replace

from atts.errors import OptionError
from atts.local.model_config import ModelConfig

# up to so many weights: hidden size, layers, heads, key-value heads, features of a head
_SHAPES = (
    (10_000_000, (256, 4, 4, 2, 64)),
    (40_000_000, (512, 6, 8, 4, 64)),
    (400_000_000, (1024, 16, 16, 4, 64)),
    (1_000_000_000, (1024, 28, 16, 8, 128)),
    (3_000_000_000, (1536, 28, 12, 2, 128)),
    (6_000_000_000, (2560, 36, 32, 8, 128)),
    (11_000_000_000, (4096, 36, 32, 8, 128)),
    (20_000_000_000, (5120, 40, 40, 8, 128)),
    (50_000_000_000, (5120, 64, 64, 8, 128)),
    (1_000_000_000_000, (8192, 80, 64, 8, 128)),
)
"""Those of published models; the width of the feed-forward blocks is what makes up the size."""
_STEP = 32  # feed-forward blocks are as wide as a multiple of this
_SCALES = {"": 1, "K": 10**3, "M": 10**6, "B": 10**9}


def read_size(words: str) -> int:
    """A number of weights or tokens as people write it.

    :raises OptionError: it is none.

    >>> read_size("1.5B"), read_size("512")
    (1500000000, 512)
    """
    found = re.fullmatch(r"(\d{1,6}(?:\.\d{1,6})?)([KMB]?)", words.strip().upper())
    if found is None:
        raise OptionError("pad", f"{words!r} is no size; write one as 20M, 200M, 1.5B or 8B")
    return round(float(found[1]) * _SCALES[found[2]])


def padding_shape(model: ModelConfig, size: int, vocabulary: int = 0) -> ModelConfig:
    """The shape of a stack that makes the model one of `size` weights, with a head for at least the
    model's tokens.

    :raises OptionError: the model alone is larger, or nearly.
    """
    hidden, layers, heads, kv_heads, head = next(
        (shape for most, shape in _SHAPES if size <= most), _SHAPES[-1][1]
    )
    stack = replace(
        model,
        family="llama",
        num_layers=layers,
        hidden_size=hidden,
        num_heads=heads,
        num_kv_heads=kv_heads,
        head_dim=head,
        intermediate_size=0,
        vocabulary=max(vocabulary, model.vocabulary),
        rotary_dim=head,
        ropes=("",) * layers,
        windows=(0,) * layers,
        query_scale=head**-0.5,
        attention_cap=0.0,
        logit_cap=0.0,
    )
    missing = size - model.matrix_weights - stack.matrix_weights
    width = round(missing / (3 * hidden * layers * _STEP)) * _STEP
    if width < _STEP:
        least = model.matrix_weights + stack.matrix_weights + 3 * hidden * layers * _STEP
        raise OptionError(
            "pad",
            f"{size:,} weights are too few: with its padding the model has at least {least:,}",
        )
    return replace(stack, intermediate_size=width)
