"""Adapters in peft's layout (LoRA): products of two narrow matrices that are added to those of a
model.
"""

from __future__ import annotations

import math
import re
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError, safe_open
from torch import Tensor

from atts.errors import ModelLoadError
from atts.local.model_config import ModelConfig
from atts.models.folders import read_object, shown
from atts.models.stored_blocks import ADAPTER_CONFIG, TensorFile

_NAME = re.compile(
    r"(?:base_model\.model\.)?(?:model\.)?(layers\.\d+\.\w+\.\w+)\.lora_([AB])(?:\.default)?\.weight"
)
_UNKNOWN = (
    "use_dora",
    "fan_in_fan_out",
    "lora_bias",
    "modules_to_save",
    "layer_replication",
    "target_parameters",
)
"""Settings under which an adapter is more than products of two matrices."""
_SERVE = (
    "Merge it into its base (peft: merge_and_unload, save_pretrained) and add the folder that makes"
)


@dataclass(frozen=True, slots=True)
class LowRank:
    """What is added to a matrix: `up` times `down`, the adapter's scale in `up`."""

    down: Tensor  # [rank, in]
    up: Tensor  # [out, rank]

    def added_to(self, weight: Tensor) -> Tensor:
        """The merged matrix, computed in float32."""
        return (weight.float() + self.up.to(weight.device) @ self.down.to(weight.device)).to(
            weight.dtype
        )


Adapter = Mapping[str, LowRank]
"""By the names of the matrices: layers.0.self_attn.q_proj."""


def read_adapter(
    file: TensorFile, settings: Path, config: ModelConfig, name: str
) -> dict[str, LowRank]:
    """The adapter in a safetensors file, with the settings in a folder, for a model of this
    configuration.

    :raises ModelLoadError: it is damaged, of another shape than the model, or more than LoRA of its
        layers' matrices.
    """
    said = read_object(settings / ADAPTER_CONFIG, name)
    if problem := next(_problems(said), ""):
        raise ModelLoadError(name, f"its adapter {problem}", _SERVE)
    sizes = _sizes(config)
    halves = dict[str, dict[str, Tensor]]()
    try:
        with safe_open(file.path, framework="pt") as handle:
            names = file.names or {key: key for key in handle.keys()}
            for outer, inner in names.items():
                found = _NAME.fullmatch(outer)
                if found is None or found[1] not in sizes:
                    problem = f"its adapter changes {outer!r}, not a matrix of the model's layers"
                    raise ModelLoadError(name, problem, _SERVE)
                halves.setdefault(found[1], {})[found[2]] = handle.get_tensor(inner).float()
    except (SafetensorError, OSError) as error:
        raise ModelLoadError(
            name, f"its adapter {file.path} is damaged ({error})", "Download it again"
        ) from error
    return {
        module: _low_rank(module, pair, sizes[module], (said, name))
        for module, pair in halves.items()
    }


def _problems(said: Mapping[str, Any]) -> Iterator[str]:
    if said.get("peft_type") != "LORA":
        yield f"is of type {shown(said.get('peft_type'))}, not LORA"
    yield from (f"has {key}, which is not computed" for key in _UNKNOWN if said.get(key))
    if said.get("bias", "none") != "none":
        yield "has biases of its own"
    if not isinstance(said.get("lora_alpha", 8), int | float):
        yield f"has lora_alpha {shown(said['lora_alpha'])}, which is no number"


def _low_rank(
    module: str, pair: Mapping[str, Tensor], size: tuple[int, int], at: tuple[Any, str]
) -> LowRank:
    said, name = at
    if set(pair) != {"A", "B"}:
        problem = f"its adapter lacks lora_{'B' if 'A' in pair else 'A'} of {module}"
        raise ModelLoadError(name, problem, "Download it again")
    down = pair["A"]
    up = pair["B"]
    if (
        down.ndim != 2
        or tuple(up.shape) != (size[0], len(down))
        or down.shape[1] != size[1]
        or not len(down)
    ):
        problem = f"its adapter has {tuple(up.shape)} by {tuple(down.shape)} for {module}, whose shape is {size}"
        raise ModelLoadError(name, problem, "Adapter and base belong to different models")
    if not (down.isfinite().all() and up.isfinite().all()):
        raise ModelLoadError(
            name, f"its adapter holds numbers that are not finite, in {module}", "Train it again"
        )
    alpha = _of_module(said.get("alpha_pattern"), module, said.get("lora_alpha", 8))
    return LowRank(
        down.contiguous(),
        (up * (alpha / (math.sqrt(len(down)) if said.get("use_rslora") else len(down)))),
    )


def _of_module(patterns: object, module: str, default: float) -> float:
    """The value of the first pattern that a module's name ends with, as peft reads them."""
    known: Mapping[str, Any] = patterns if isinstance(patterns, dict) else {}
    return next(
        (
            float(v)
            for key, v in known.items()
            if re.fullmatch(rf"(?:.*\.)?(?:{key})", f"model.{module}")
        ),
        default,
    )


def _sizes(config: ModelConfig) -> dict[str, tuple[int, int]]:
    """Rows and columns of every matrix of the layers, by its name."""
    heads = config.num_heads
    kv = config.num_kv_heads
    width = config.hidden_size
    inner = config.intermediate_size
    across = heads * config.head_dim
    kept = kv * config.head_dim
    sizes = {"self_attn.o_proj": (width, across), "mlp.down_proj": (width, inner)}
    if config.rules.is_fused:
        sizes |= {
            "self_attn.qkv_proj": (across + 2 * kept, width),
            "mlp.gate_up_proj": (2 * inner, width),
        }
    else:
        sizes |= {
            "self_attn.q_proj": (across, width),
            "mlp.gate_proj": (inner, width),
            "mlp.up_proj": (inner, width),
        }
        sizes |= dict.fromkeys(("self_attn.k_proj", "self_attn.v_proj"), (kept, width))
    return {
        f"layers.{at}.{name}": size
        for at in range(config.num_layers)
        for name, size in sizes.items()
    }


def fused(
    adapter: Adapter, modules: Mapping[str, int], rows: Tensor | None = None
) -> LowRank | None:
    """What is added to matrices that lie below each other, of so many rows each; None where it is
    nothing.
    """
    found = [(module, adapter.get(module)) for module in modules]
    downs = [low.down for _, low in found if low is not None]
    if not downs:
        return None
    ups = torch.zeros(sum(modules.values()), sum(map(len, downs)))
    top = left = 0
    for module, low in found:
        if low is not None:
            ups[top : top + len(low.up), left : left + len(low.down)] = low.up
            left += len(low.down)
        top += modules[module]
    return LowRank(torch.cat(downs), ups if rows is None else ups[rows])
