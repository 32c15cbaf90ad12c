"""Models with the words of a small model at the cost of a large one, for studies of speed.

A padded folder holds the small model's weights inside matrices of the large model's sizes: what is
added multiplies zeros or is multiplied by them, so texts stay the same up to the order of sums, and
no kernel skips any of it.
"""

from __future__ import annotations

import json
import math
import re
import shutil
from collections.abc import Sequence
from dataclasses import fields, replace
from functools import cache
from pathlib import Path
from tempfile import mkdtemp
from typing import Any, overload

import torch
from safetensors.torch import load_file, save_file
from torch import Tensor

from atts.local.loader import LayerWeights, Rope, Weights
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
_POOL = (1 << 20) + 7  # random numbers that matrices are filled from, over and over


def read_size(words: str) -> int:
    """Return the number of weights that people write as 1.5B or 512.

    >>> read_size("1.5B"), read_size("512")
    (1500000000, 512)
    """
    found = re.fullmatch(r"(\d{1,6}(?:\.\d{1,6})?)([KMB]?)", words.strip().upper())
    assert found is not None, f"{words!r} is not a size such as 20M or 1.5B"
    return round(float(found[1]) * _SCALES[found[2]])


def _shape(size: int) -> tuple[int, int, int, int, int]:
    return next((shape for most, shape in _SHAPES if size <= most), _SHAPES[-1][1])


def shape_of_size(model: ModelConfig, size: int, vocabulary: int = 0) -> ModelConfig:
    """Return the shape of a model of `size` weights, with a head for at least this model's tokens."""
    hidden, layers, heads, kv_heads, head = _shape(size)
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
    missing = size - stack.matrix_weights
    width = max(1, round(missing / (3 * hidden * layers * _STEP))) * _STEP
    return replace(stack, intermediate_size=width)


@cache
def padded_folder(folder: Path, words: str) -> Path:
    """Write a model of `words` weights, as 20M, that says what the one in `folder` says.

    Only models of the Llama family whose weights are in one file.
    """
    size = read_size(words)
    config: dict[str, Any] = json.loads((folder / "config.json").read_text(encoding="utf-8"))
    weights = load_file(folder / "model.safetensors")
    width = config["hidden_size"]
    head = config["head_dim"]
    hidden, layers, *_ = _shape(size)
    assert hidden >= width, "a model is padded to a larger one"
    layers = max(layers, config["num_hidden_layers"])
    # heads keep their features, for a rotation depends on their number; and how many share keys
    group = config["num_attention_heads"] // config["num_key_value_heads"]
    kv_heads = max(config["num_key_value_heads"], hidden // head // group)
    heads = kv_heads * group
    attention = layers * 2 * hidden * head * (heads + kv_heads)
    left = size - attention - config["vocab_size"] * hidden
    inner = max(config["intermediate_size"], round(left / (3 * hidden * layers * _STEP)) * _STEP)
    sizes = {
        "q_proj": (heads * head, hidden),
        "k_proj": (kv_heads * head, hidden),
        "v_proj": (kv_heads * head, hidden),
        "o_proj": (hidden, heads * head),
        "gate_proj": (inner, hidden),
        "up_proj": (inner, hidden),
        "down_proj": (hidden, inner),
        "embed_tokens": (config["vocab_size"], hidden),
        "lm_head": (config["vocab_size"], hidden),
    }
    # the mean of squares is over more features now, all of them zero
    scale = math.sqrt(width / hidden)
    grown = dict[str, Tensor]()
    for name, tensor in weights.items():
        if tensor.ndim == 1:
            grown[name] = torch.zeros(hidden)
            grown[name][:width] = tensor.float() * scale
        else:
            grown[name] = tensor.new_zeros(sizes[name.split(".")[-2]])
            grown[name][: tensor.shape[0], : tensor.shape[1]] = tensor
    first = {name: tensor for name, tensor in grown.items() if ".layers.0." in name}
    for at in range(config["num_hidden_layers"], layers):
        for name, tensor in first.items():  # a layer of zeros adds nothing
            grown[name.replace(".layers.0.", f".layers.{at}.")] = torch.zeros_like(tensor)
    config |= {
        "hidden_size": hidden,
        "num_hidden_layers": layers,
        "num_attention_heads": heads,
        "num_key_value_heads": kv_heads,
        "intermediate_size": inner,
        "rms_norm_eps": config["rms_norm_eps"] * width / hidden,
    }
    made = Path(mkdtemp(prefix="atts-padded-")) / f"{folder.name}-{words}"
    made.mkdir()
    for path in folder.iterdir():
        if path.is_file() and path.suffix == ".json":
            shutil.copy(path, made)
    save_file(grown, made / "model.safetensors")
    (made / "config.json").write_text(json.dumps(config), encoding="utf-8")
    return made


def random_weights(config: ModelConfig, dtype: torch.dtype, device: torch.device) -> Weights:
    """Return seeded numbers for every matrix but the head, which is zero; layers are made when they
    are asked for.
    """
    generator = torch.Generator(device).manual_seed(config.matrix_weights)
    pool = torch.randn(_POOL, generator=generator, device=device).bfloat16().to(dtype)
    exponent = torch.arange(0, config.head_dim, 2, dtype=torch.float32) / config.head_dim
    turns = (10000.0**-exponent).expand(1 if config.long_after is None else 2, -1)
    return Weights(
        embedding=_filled(pool, config.vocabulary, config.hidden_size, 0)
        * math.sqrt(config.hidden_size),
        layers=_Layers(config, pool),
        norm=torch.ones(config.hidden_size, dtype=dtype, device=device),
        head=torch.zeros(config.vocabulary, config.hidden_size, dtype=dtype, device=device),
        ropes={"": Rope(turns, torch.ones(config.head_dim // 2))},
    )


def _filled(pool: Tensor, rows: int, columns: int, start: int) -> Tensor:
    """Return a matrix of its own, of about 1 / sqrt(columns), each number one bfloat16 can hold."""
    numbers = pool.roll(start) * 2.0 ** -round(math.log2(columns) / 2)
    matrix = pool.new_empty(rows * columns)
    for part in torch.split(matrix, len(pool)):
        part.copy_(numbers[: len(part)])
    return matrix.view(rows, columns)


class _Layers(Sequence[LayerWeights]):
    """Layers of random numbers, no two alike, each made again when it is asked for."""

    def __init__(self, config: ModelConfig, pool: Tensor) -> None:
        self._config = config
        self._pool = pool

    def __len__(self) -> int:
        return self._config.num_layers

    @overload
    def __getitem__(self, index: int) -> LayerWeights: ...
    @overload
    def __getitem__(self, index: slice) -> Sequence[LayerWeights]: ...
    def __getitem__(self, index: int | slice) -> LayerWeights | Sequence[LayerWeights]:
        if isinstance(index, slice):
            return [self[at] for at in range(*index.indices(len(self)))]
        if not 0 <= index < len(self):
            raise IndexError(index)
        config = self._config
        first = 1 + 4 * index
        across = config.num_heads * config.head_dim
        width = config.hidden_size
        inner = config.intermediate_size
        norm = self._pool.new_ones(width)
        sizes = [(across + 2 * config.num_kv_heads * config.head_dim, width), (width, across)]
        sizes += [(2 * inner, width), (width, inner)]
        qkv, out, gate_up, down = (
            _filled(self._pool, *size, first + at) for at, size in enumerate(sizes)
        )
        parts: dict[str, Any] = dict.fromkeys(field.name for field in fields(LayerWeights))
        parts |= {
            "norm": norm,
            "qkv": qkv,
            "out": out,
            "mlp_norm": norm,
            "gate_up": gate_up,
            "down": down,
        }
        return LayerWeights(**parts)
