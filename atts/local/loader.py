"""The loader of weights: safetensors files into fused tensors, checked for presence, shape and type."""

from __future__ import annotations

from collections.abc import Mapping
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path

import torch
from safetensors import SafetensorError, safe_open
from torch import Tensor

from atts.errors import ModelLoadError, OutOfMemory
from atts.importing import import_lock
from atts.local.model_config import ModelConfig, read_hf_config
from atts.model_folder import weight_files

_FLOATS = (torch.float64, torch.float32, torch.float16, torch.bfloat16)
"""What weights come in; smaller numbers mean nothing without the scales that some other format keeps beside them."""


@dataclass(frozen=True, slots=True)
class LayerWeights:
    """One decoder layer; matrices are [out, in], query, key and value rows in one, gate and up rows in one."""

    norm: Tensor
    qkv: Tensor
    qkv_bias: Tensor | None
    query_norm: Tensor | None  # [head_dim], Qwen3
    key_norm: Tensor | None
    out: Tensor
    out_bias: Tensor | None
    mlp_norm: Tensor
    gate_up: Tensor
    gate_up_bias: Tensor | None
    down: Tensor
    down_bias: Tensor | None


@dataclass(frozen=True, slots=True)
class Weights:
    """All of a model's weights, and the frequencies of its rotary embedding."""

    embedding: Tensor  # [vocabulary, hidden_size]
    layers: tuple[LayerWeights, ...]
    norm: Tensor
    head: Tensor  # [vocabulary, hidden_size]; the embedding itself when tied
    rope_frequencies: Tensor  # [head_dim / 2] float32, on the CPU
    rope_scale: float  # multiplies cosines and sines


def load_weights(folder: Path, config: ModelConfig, dtype: torch.dtype, device: torch.device, name: str) -> Weights:
    """Read and fuse the weights of the model in `folder`.

    :raises ModelLoadError: no safetensors, a damaged file, a missing weight or one of another shape.
    :raises OutOfMemory: the weights do not fit.
    """
    try:
        with ExitStack() as stack:
            reader = _TensorReader(folder, dtype, device, name, stack)
            return _fuse(reader, config, *_rope_frequencies(folder, config, name))
    except (torch.OutOfMemoryError, MemoryError) as error:
        advice = "Use a smaller model, bfloat16, or another device"
        raise OutOfMemory(name, f"the weights do not fit into memory on {device}", advice) from error


def _fuse(read: _TensorReader, config: ModelConfig, frequencies: Tensor, scale: float) -> Weights:
    embedding = read("embed_tokens.weight", config.vocabulary, config.hidden_size)
    layers = tuple(_layer(read, config, f"layers.{index}.") for index in range(config.num_layers))
    norm = read("norm.weight", config.hidden_size)
    head = embedding if config.ties_embeddings else read("lm_head.weight", config.vocabulary, config.hidden_size)
    return Weights(embedding, layers, norm, head, frequencies, scale)


def _rope_frequencies(folder: Path, config: ModelConfig, name: str) -> tuple[Tensor, float]:
    if config.rope_type == "default":
        exponent = torch.arange(0, config.head_dim, 2, dtype=torch.float32) / config.head_dim
        frequencies, scale = 1.0 / (config.rope_theta**exponent), 1.0
    else:
        with import_lock:
            from transformers.modeling_rope_utils import ROPE_INIT_FUNCTIONS

        frequencies, scale = ROPE_INIT_FUNCTIONS[config.rope_type](read_hf_config(folder, name), torch.device("cpu"))
    return frequencies.float(), float(scale)


def _layer(read: _TensorReader, config: ModelConfig, at: str) -> LayerWeights:
    query, key, width = config.num_heads * config.head_dim, config.num_kv_heads * config.head_dim, config.hidden_size
    rows = {f"{at}self_attn.q_proj": query, f"{at}self_attn.k_proj": key, f"{at}self_attn.v_proj": key}
    mlp = {f"{at}mlp.gate_proj": config.intermediate_size, f"{at}mlp.up_proj": config.intermediate_size}
    is_normed = config.family == "qwen3"
    return LayerWeights(
        norm=read(f"{at}input_layernorm.weight", width),
        qkv=torch.cat([read(f"{part}.weight", count, width) for part, count in rows.items()]),
        qkv_bias=read.biases(rows),
        query_norm=read(f"{at}self_attn.q_norm.weight", config.head_dim) if is_normed else None,
        key_norm=read(f"{at}self_attn.k_norm.weight", config.head_dim) if is_normed else None,
        out=read(f"{at}self_attn.o_proj.weight", width, query),
        out_bias=read.biases({f"{at}self_attn.o_proj": width}),
        mlp_norm=read(f"{at}post_attention_layernorm.weight", width),
        gate_up=torch.cat([read(f"{part}.weight", count, width) for part, count in mlp.items()]),
        gate_up_bias=read.biases(mlp),
        down=read(f"{at}mlp.down_proj.weight", width, config.intermediate_size),
        down_bias=read.biases({f"{at}mlp.down_proj": width}),
    )


class _TensorReader:
    """Reads tensors by name from the safetensors files of one folder, checked for shape."""

    def __init__(self, folder: Path, dtype: torch.dtype, device: torch.device, name: str, stack: ExitStack) -> None:
        self._dtype, self._device, self._name, self._folder = dtype, device, name, folder
        files = weight_files(folder, name)
        try:
            handles = [stack.enter_context(safe_open(path, framework="pt")) for path in files]
        except (SafetensorError, OSError) as error:
            advice = "Download it again"
            raise ModelLoadError(name, f"the weights in {folder} are damaged ({error})", advice) from error
        # some checkpoints carry the prefix of the full model, others hold the bare decoder
        self._where = {key.removeprefix("model."): (handle, key) for handle in handles for key in handle.keys()}

    def __call__(self, key: str, *size: int) -> Tensor:
        if key not in self._where:
            raise ModelLoadError(self._name, f"{self._folder} lacks the weight {key!r}: foreign or incomplete files")
        handle, full = self._where[key]
        tensor: Tensor = handle.get_tensor(full)
        if tensor.dtype not in _FLOATS:
            problem = f"weight {key!r} is of type {str(tensor.dtype).removeprefix('torch.')}"
            advice = "Use the unquantised checkpoint, or serve this one with vLLM"
            raise ModelLoadError(self._name, problem, advice)
        if tuple(tensor.shape) != size:
            problem = f"weight {key!r} has shape {tuple(tensor.shape)}, config.json says {size}"
            raise ModelLoadError(self._name, problem, "Configuration and weights belong to different models")
        return tensor.to(device=self._device, dtype=self._dtype)

    def biases(self, parts: Mapping[str, int]) -> Tensor | None:
        """The biases of these projections in a row, zeros for those without one; None when none has any."""
        if not any(f"{part}.bias" in self._where for part in parts):
            return None
        return torch.cat(
            [
                self(f"{part}.bias", size)
                if f"{part}.bias" in self._where
                else torch.zeros(size, dtype=self._dtype, device=self._device)
                for part, size in parts.items()
            ]
        )
