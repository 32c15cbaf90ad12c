"""The loader of weights and adapters, which reads them from safetensors files and checks their
shapes and types.

The first part of the file groups layers. The attentions of adjacent layers can be computed as one
attention with the heads of all these layers.
"""

from __future__ import annotations

import math
import re
from collections.abc import Callable, Generator, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple, overload

import torch
import torch.nn.functional as F
from safetensors import SafetensorError, safe_open
from torch import Tensor

from atts.concurrency import import_lock
from atts.errors import ModelLoadError, OutOfMemory
from atts.local.model_config import NO_ROPE, UNREADABLE, ModelConfig, read_hf_config
from atts.models.folders import read_object, shown
from atts.models.stored_blocks import (
    ADAPTER,
    ADAPTER_CONFIG,
    TensorFile,
    adapter_file,
    tensor_files,
)


class AttentionGroup(NamedTuple):
    """Adjacent layers whose attention may be computed together, with views of their keys and values
    in the cache.
    """

    layers: range
    keys: Tensor  # [slots, KV heads of all layers of the group, head_dim]
    values: Tensor

    def one(self, index: int) -> AttentionGroup:
        """Return a group that contains only the layer with this index."""
        heads = self.keys.shape[1] // len(self.layers)
        own = slice((index - self.layers.start) * heads, (index - self.layers.start + 1) * heads)
        return AttentionGroup(range(index, index + 1), self.keys[:, own], self.values[:, own])


def layer_groups(config: ModelConfig, size: int) -> list[range]:
    """Divide the layers into groups of up to `size` adjacent layers that have the same window and
    rotary embedding. The first layer and the last layer each form a group of their own.
    """
    last = config.num_layers - 1
    ranges = list[range]()
    for at in range(config.num_layers):
        kinds = [
            (config.windows[each], config.ropes[each])
            for each in (ranges[-1].start if ranges else 0, at)
        ]
        if at > 1 and at < last and len(ranges[-1]) < size and kinds[0] == kinds[1]:
            ranges[-1] = range(ranges[-1].start, at + 1)
        else:
            ranges.append(range(at, at + 1))
    return ranges


def attention_groups(config: ModelConfig, cache: Tensor, size: int) -> list[AttentionGroup]:
    """Return the layers in groups of up to `size`, each with views of its keys and values in the
    cache.
    """
    ranges = layer_groups(config, size)
    side_by_side = [
        cache[own.start : own.stop].view(2, cache.shape[2], -1, config.head_dim) for own in ranges
    ]
    return [AttentionGroup(own, *both) for own, both in zip(ranges, side_by_side, strict=True)]


def with_groups(config: ModelConfig, weights: Weights, size: int) -> Weights:
    """Return a copy of the weights with the field `groups` filled in: the joined attention weights
    of each group of up to `size` layers.
    """
    groups = [
        joined(weights.layers[layers.start : layers.stop], config)
        for layers in layer_groups(config, size)
    ]
    return replace(weights, groups=tuple(groups))


def joined(layers: Sequence[LayerWeights], config: ModelConfig) -> LayerWeights:
    """Join the attention weights of these layers, and return them as one layer; its other weights
    are those of the first layer. Each layer's norm weights are multiplied into its query, key and
    value matrix, so that all layers can share one norm.
    """
    first = layers[0]
    sizes = [heads * config.head_dim for heads in (config.num_heads, *[config.num_kv_heads] * 2)]
    if len(layers) == 1:
        return first

    def by_kind(parts: Sequence[Tensor]) -> Tensor:
        """Join the rows of several layers by kind: the queries of all layers, then all keys, then
        all values.
        """
        return torch.cat(
            [
                torch.cat(kind)
                for kind in zip(*[torch.split(part, sizes) for part in parts], strict=True)
            ]
        )

    def stacked(parts: Sequence[Tensor | None]) -> Tensor | None:
        return (
            None if parts[0] is None else torch.stack([part for part in parts if part is not None])
        )

    norms = stacked([each.norm for each in layers])
    scales = [torch.ones_like(first.qkv[0])] * len(layers) if norms is None else list(norms)
    biases = [each.qkv_bias for each in layers if each.qkv_bias is not None]
    return replace(
        first,
        norm=None if norms is None else torch.ones_like(norms[0]),
        qkv=by_kind([each.qkv * scale for each, scale in zip(layers, scales, strict=True)]),
        qkv_bias=by_kind(biases) if biases else None,
        query_norm=stacked([each.query_norm for each in layers]),
        key_norm=stacked([each.key_norm for each in layers]),
    )


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
"""Adapter settings that atts does not support. It supports only adapters that add a product of two
matrices to a weight matrix.
"""
_SERVE = (
    "Merge the adapter into its base model (peft: merge_and_unload, save_pretrained) and add the "
    "resulting folder"
)


@dataclass(frozen=True, slots=True)
class LowRank:
    """A low-rank addition to a matrix: the product `up @ down`. The factor `up` includes the
    adapter's scale.
    """

    down: Tensor  # shape [rank, columns of the matrix]
    up: Tensor  # shape [rows of the matrix, rank]

    def added_to(self, weight: Tensor) -> Tensor:
        """Return the sum of a matrix and this addition, computed in float32."""
        return (weight.float() + self.up.to(weight.device) @ self.down.to(weight.device)).to(
            weight.dtype
        )


Adapter = Mapping[str, LowRank]
"""An adapter: its additions to the weight matrices, keyed by the name of the matrix, such as
layers.0.self_attn.q_proj.
"""


def read_adapter(
    file: TensorFile, settings: Path, config: ModelConfig, name: str
) -> dict[str, LowRank]:
    """Read a LoRA adapter from a safetensors file, and its settings from the folder `settings`.

    :raises ModelLoadError: the adapter is damaged, does not fit the model's shape, or changes more
        than the matrices of layers.
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
                matched = _NAME.fullmatch(outer)
                if matched is None or matched[1] not in sizes:
                    problem = (
                        f"the adapter changes {outer!r}, but atts supports only adapters of "
                        "matrices in the model's layers"
                    )
                    raise ModelLoadError(name, problem, _SERVE)
                halves.setdefault(matched[1], {})[matched[2]] = handle.get_tensor(inner).float()
    except (SafetensorError, OSError) as error:
        raise ModelLoadError(
            name, f"the adapter {file.path} is damaged ({error})", "Download the adapter again"
        ) from error
    return {
        module: _low_rank(module, pair, sizes[module], (said, name))
        for module, pair in halves.items()
    }


def _problems(said: Mapping[str, Any]) -> Iterator[str]:
    if said.get("peft_type") != "LORA":
        yield f"is of type {shown(said.get('peft_type'))}, not LORA"
    yield from (f"has {key}, which atts does not support" for key in _UNKNOWN if said.get(key))
    if said.get("bias", "none") != "none":
        yield "has its own biases"
    if not isinstance(said.get("lora_alpha", 8), int | float):
        yield f"has lora_alpha {shown(said['lora_alpha'])}, which is not a number"
    patterns = said.get("alpha_pattern") or {}
    if not isinstance(patterns, dict):
        yield f"has alpha_pattern {shown(patterns)}, which is not an object"
        return
    for pattern, alpha in patterns.items():
        try:
            re.compile(pattern)
        except re.error as error:
            yield (
                f"has {shown(pattern)} in alpha_pattern, which is not a regular expression "
                f"({error})"
            )
        if not isinstance(alpha, int | float):
            yield f"has {shown(alpha)} in alpha_pattern, which is not a number"


def _low_rank(
    module: str, pair: Mapping[str, Tensor], size: tuple[int, int], at: tuple[Any, str]
) -> LowRank:
    said, name = at
    if set(pair) != {"A", "B"}:
        problem = f"the adapter lacks lora_{'B' if 'A' in pair else 'A'} of {module}"
        raise ModelLoadError(name, problem, "Download the adapter again")
    down = pair["A"]
    up = pair["B"]
    if (
        down.ndim != 2
        or tuple(up.shape) != (size[0], len(down))
        or down.shape[1] != size[1]
        or not len(down)
    ):
        problem = (
            f"the adapter's matrices for {module} have the shapes {tuple(up.shape)} and "
            f"{tuple(down.shape)}, which do not fit its shape {size}"
        )
        raise ModelLoadError(name, problem, "The adapter was made for another base model")
    if not (down.isfinite().all() and up.isfinite().all()):
        raise ModelLoadError(
            name,
            f"the adapter has infinite or NaN values in {module}",
            "Train the adapter again",
        )
    alpha = _of_module(said.get("alpha_pattern"), module, said.get("lora_alpha", 8))
    return LowRank(
        down.contiguous(),
        (up * (alpha / (math.sqrt(len(down)) if said.get("use_rslora") else len(down)))),
    )


def _of_module(patterns: object, module: str, default: float) -> float:
    """Return the value of the first pattern that matches the end of a module's name, or else the
    default. The package peft reads patterns in the same way.
    """
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
    """Return the shape (rows, columns) of every matrix in the layers, keyed by matrix name."""
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
    """Combine an adapter's additions to several matrices into one addition to the matrix that
    stacks their rows. Return None if the adapter changes none of these matrices.
    """
    by_module = [(module, adapter.get(module)) for module in modules]
    downs = [low.down for _, low in by_module if low is not None]
    if not downs:
        return None
    ups = torch.zeros(sum(modules.values()), sum(map(len, downs)))
    top = left = 0
    for module, low in by_module:
        if low is not None:
            ups[top : top + len(low.up), left : left + len(low.down)] = low.up
            left += len(low.down)
        top += modules[module]
    return LowRank(torch.cat(downs), ups if rows is None else ups[rows])


_FLOATS = ("F64", "F32", "F16", "BF16")
"""The data types that weights may have. Smaller types need separately stored scales, which atts
does not support.
"""


@dataclass(frozen=True, slots=True)
class LayerWeights:
    """The weights of one decoder layer. Matrices are [out, in]. The query, key and value matrices
    are stacked into one matrix, and so are the gate and up matrices.
    """

    norm: Tensor | None
    qkv: Tensor
    qkv_bias: Tensor | None
    # [head_dim]; or [heads * head_dim], if all heads are normalised together
    query_norm: Tensor | None
    key_norm: Tensor | None
    out: Tensor
    out_bias: Tensor | None
    out_norm: Tensor | None
    mlp_norm: Tensor | None
    gate_up: Tensor
    gate_up_bias: Tensor | None
    down: Tensor
    down_bias: Tensor | None
    down_norm: Tensor | None


@dataclass(frozen=True, slots=True)
class Rope:
    """A rotary embedding, which rotates feature i of a head together with feature i + head_dim / 2.
    Features with frequency 0 are not rotated.
    """

    # [1 or 2, head_dim / 2] in float32, on the CPU; long requests use the second row, if there is
    # one
    frequencies: Tensor
    scales: Tensor  # [head_dim / 2] factors by which the cosines and sines are multiplied

    def angles(self, rows: int) -> Tensor:
        """Return the rotation angles at the first `rows` positions, [variants * rows, head_dim /
        2]; each row of `frequencies` is a variant.
        """
        positions = torch.arange(rows, dtype=torch.float32)
        return torch.cat([torch.outer(positions, frequencies) for frequencies in self.frequencies])


class LayersOnDemand(Sequence[LayerWeights]):
    """A sequence of layers that reads a layer from disk each time the layer is accessed."""

    def __init__(self, places: range, read: Callable[[int], LayerWeights]) -> None:
        """Create a sequence of the layers with these indices. The function `read` reads the layer
        with a given index.
        """
        self._places = places
        self._read = read

    def __len__(self) -> int:
        """Return the number of layers."""
        return len(self._places)

    @overload
    def __getitem__(self, at: int) -> LayerWeights: ...

    @overload
    def __getitem__(self, at: slice) -> Sequence[LayerWeights]: ...

    def __getitem__(self, at: int | slice) -> LayerWeights | Sequence[LayerWeights]:
        """Read one layer from disk, or all layers of a slice."""
        if isinstance(at, slice):
            return [self._read(place) for place in self._places[at]]
        return self._read(self._places[at])


@dataclass(frozen=True, slots=True)
class Weights:
    """All of a model's weights, and the frequencies of its rotary embedding."""

    embedding: Tensor  # shape [vocabulary, hidden_size]
    layers: Sequence[LayerWeights]
    norm: Tensor
    # [vocabulary, hidden_size]; the same tensor as `embedding` if the model uses one matrix for
    # input and output
    head: Tensor
    ropes: Mapping[str, Rope]  # rotary embeddings, keyed by the names in `ModelConfig.ropes`
    # whether the two features of a head that are rotated together are adjacent, as the torch model
    # needs
    is_paired: bool = False
    # for each group of layers: its first layer, with the attention weights of the whole group
    # joined; empty if layers are not grouped
    groups: Sequence[LayerWeights] = ()


def load_weights(
    folder: Path,
    config: ModelConfig,
    dtype: torch.dtype,
    device: torch.device,
    name: str,
    *,
    merges: bool = True,
    layers: range | None = None,
    words: bool = True,
    pairs: bool | None = None,
    on_demand: bool = False,
) -> Weights:
    """Read the weights of the model in `folder`, and join matrices that are multiplied by the same
    input. With `merges`, add the model's adapter to the weights.

    If `layers` is given, only these layers are read. The embedding and the head are read only if
    the first layer is among them and `words` is true.

    With `pairs`, the default on a GPU, each layer's features are put into the order of the torch
    model while the layer is read. Reordering them later would need a copy, when the cache has
    already taken the memory.

    With `on_demand`, a layer is read each time it is accessed. A caller that packs layers one by
    one then never has all of them in memory.

    :raises ModelLoadError: there is no safetensors file, a file is damaged, or a weight is missing
        or has a wrong shape.
    :raises OutOfMemory: the weights do not fit into memory.
    """
    advice = "Use a smaller model, bfloat16, or another device"
    layers = range(config.num_layers) if layers is None else layers
    needed = config.part(layers).matrix_weights * dtype.itemsize
    free = free_memory() if device.type == "cpu" else None
    if free is not None and needed > free:
        problem = (
            f"the weights need {needed / 1e9:.2f} GB, but only {free / 1e9:.2f} GB of memory is "
            "free"
        )
        raise OutOfMemory(name, problem, advice)
    adapter = load_adapter(folder, config, name) if merges else {}

    @contextmanager
    def reading() -> Generator[_TensorReader]:
        try:
            with ExitStack() as stack:
                reader = _TensorReader(folder, dtype, device, name, stack)
                reader.pairs = device.type == "cuda" if pairs is None else pairs
                reader.adapter = adapter
                yield reader
        except (torch.OutOfMemoryError, MemoryError) as error:
            raise OutOfMemory(
                name, f"the weights do not fit into memory on {device}", advice
            ) from error

    def layer(index: int) -> LayerWeights:
        with reading() as reader:
            return _layer(reader, config, f"layers.{index}.")

    with reading() as reader:
        ropes = load_ropes(folder, config, name)
        own: Sequence[LayerWeights]
        if on_demand:
            own = LayersOnDemand(layers, layer)
        else:
            own = tuple(_layer(reader, config, f"layers.{index}.") for index in layers)
        return _fuse(reader, config, ropes, own, words and not layers.start)


def free_memory() -> int | None:
    """Return the number of bytes that this machine can allocate without swapping, or None if it is
    unknown.
    """
    try:
        lines = Path("/proc/meminfo").read_text(encoding="ascii").splitlines()
    except OSError:
        return None
    return next(
        (int(line.split()[1]) * 1024 for line in lines if line.startswith("MemAvailable:")), None
    )


def load_adapter(folder: Path, config: ModelConfig, name: str) -> Adapter:
    """Return the adapter that is stored with a model, or an empty adapter if there is none.

    :raises ModelLoadError: the adapter cannot be used.
    """
    file = adapter_file(folder)
    return read_adapter(file, folder / ADAPTER, config, name) if file else {}


def _fuse(
    read: _TensorReader,
    config: ModelConfig,
    ropes: Mapping[str, Rope],
    layers: Sequence[LayerWeights],
    words: bool,
) -> Weights:
    embedding = (
        read("embed_tokens.weight", config.vocabulary, config.hidden_size) if words else None
    )
    norm = read.norm(config, "norm", config.hidden_size)
    assert norm is not None, "every model has a norm after its last layer"
    if embedding is None:
        nothing = norm.new_empty(0, config.hidden_size)
        return Weights(nothing, layers, norm, nothing, ropes, read.pairs)
    head = (
        embedding
        if config.ties_embeddings
        else read("lm_head.weight", config.vocabulary, config.hidden_size)
    )
    return Weights(embedding, layers, norm, head, ropes, read.pairs)


def load_ropes(folder: Path, config: ModelConfig, name: str) -> dict[str, Rope]:
    """Return the rotary embeddings of a model's layers, keyed by the names in `ModelConfig.ropes`.

    :raises ModelLoadError: the values in the configuration do not define a rotary embedding.
    """
    half = config.head_dim // 2
    turned = config.rotary_dim // 2
    ropes = {NO_ROPE: Rope(torch.zeros(1, half), torch.ones(half))}
    hf = read_hf_config(folder, name)
    for kind in set(config.ropes) - {NO_ROPE}:
        try:
            rows, scale = _frequencies(hf, config, kind)
        except UNREADABLE as error:
            raise ModelLoadError(
                name, f"the model's rotary embedding cannot be computed ({error})"
            ) from error
        if not (rows.isfinite().all() and (rows >= 0).all() and math.isfinite(scale)):
            raise ModelLoadError(
                name,
                "the model's rotary embedding has negative, infinite or NaN frequencies",
                "Check config.json",
            )
        scales = F.pad(torch.full((turned,), scale), (0, half - turned), value=1.0)
        ropes[kind] = Rope(F.pad(rows, (0, half - turned)), scales)
    return {kind: ropes[kind] for kind in dict.fromkeys(config.ropes)}


def _frequencies(hf: Any, config: ModelConfig, kind: str) -> tuple[Tensor, float]:
    """Return the frequencies of the rotated features, [1 or 2, rotary_dim / 2], and a factor for
    their cosines and sines. The second row, if there is one, is for long requests.
    """
    rope = hf.rope_parameters[kind] if kind else hf.rope_parameters
    if rope["rope_type"] == "default":
        exponent = torch.arange(0, config.rotary_dim, 2, dtype=torch.float32) / config.rotary_dim
        return 1.0 / (rope["rope_theta"] ** exponent).unsqueeze(0), 1.0
    with import_lock:
        from transformers.modeling_rope_utils import ROPE_INIT_FUNCTIONS

    lengths = [None] if config.long_after is None else [None, config.long_after + 1]
    compute = ROPE_INIT_FUNCTIONS[rope["rope_type"]]
    computed = [
        compute(hf, torch.device("cpu"), seq_len=length, layer_type=kind or None)
        for length in lengths
    ]
    return torch.stack([frequencies.float() for frequencies, _ in computed]), float(computed[0][1])


def _layer(read: _TensorReader, config: ModelConfig, at: str) -> LayerWeights:
    heads = config.num_heads
    kv = config.num_kv_heads
    dim = config.head_dim
    width = config.hidden_size
    attention = f"{at}self_attn"
    mlp = f"{at}mlp"
    inner = config.intermediate_size
    rules = config.rules
    parts, gates, rows = fused_parts(config, at)
    order = head_order(config)
    if read.pairs:
        turned_rows, within = paired_order(config)
        rows = rows[turned_rows]
        order = order[within]
    normed = {"none": (0, 0), "each head": (1, 1), "all heads": (heads, kv)}[rules.head_norms]
    before, after, mlp_before, mlp_after = (f"{at}{norm}" if norm else "" for norm in rules.norms)
    return LayerWeights(
        norm=read.norm(config, before, width),
        qkv=read.matrix(parts, width, rows),
        qkv_bias=read.biases(parts, rows),
        query_norm=read.norm(config, f"{attention}.q_norm", normed[0] * dim, order),
        key_norm=read.norm(config, f"{attention}.k_norm", normed[1] * dim, order),
        out=read(f"{attention}.o_proj.weight", width, heads * dim),
        out_bias=read.biases({f"{attention}.o_proj": width}),
        out_norm=read.norm(config, after, width),
        mlp_norm=read.norm(config, mlp_before, width),
        gate_up=read.matrix(gates, width),
        gate_up_bias=read.biases(gates),
        down=read(f"{mlp}.down_proj.weight", width, inner),
        down_bias=read.biases({f"{mlp}.down_proj": width}),
        down_norm=read.norm(config, mlp_after, width),
    )


def fused_parts(config: ModelConfig, at: str) -> tuple[dict[str, int], dict[str, int], Tensor]:
    """Return the names and row counts of a layer's query, key and value matrices, and those of its
    gate and up matrices. Also return the new order of the query, key and value rows, which follows
    `head_order`.
    """
    heads = config.num_heads
    kv = config.num_kv_heads
    dim = config.head_dim
    inner = config.intermediate_size
    attention = f"{at}self_attn"
    mlp = f"{at}mlp"
    turning = (torch.arange(heads + kv)[:, None] * dim + head_order(config)).flatten()
    rows = torch.cat([turning, torch.arange(len(turning), (heads + 2 * kv) * dim)])
    if config.rules.is_fused:
        return (
            {f"{attention}.qkv_proj": (heads + 2 * kv) * dim},
            {f"{mlp}.gate_up_proj": 2 * inner},
            rows,
        )
    parts = {
        f"{attention}.q_proj": heads * dim,
        f"{attention}.k_proj": kv * dim,
        f"{attention}.v_proj": kv * dim,
    }
    return parts, {f"{mlp}.gate_proj": inner, f"{mlp}.up_proj": inner}, rows


def layer_deltas(adapter: Adapter, config: ModelConfig) -> list[LowRank | None]:
    """Return an adapter's additions to the four joined matrices of each layer, with None for each
    matrix that the adapter does not change.
    """
    deltas = list[LowRank | None]()
    for index in range(config.num_layers):
        at = f"layers.{index}."
        parts, gates, rows = fused_parts(config, at)
        deltas += [fused(adapter, parts, rows), adapter.get(f"{at}self_attn.o_proj")]
        deltas += [fused(adapter, gates), adapter.get(f"{at}mlp.down_proj")]
    return deltas


def head_order(config: ModelConfig) -> Tensor:
    """Return an order of a head's features. In this order, two features that are rotated together
    lie half a head apart.
    """
    half = config.head_dim // 2
    turned = config.rotary_dim // 2
    turning = torch.arange(2 * turned).view(2, turned)
    staying = torch.arange(2 * turned, config.head_dim)
    return torch.cat([turning, staying.view(2, half - turned)], dim=1).flatten()


def paired_order(config: ModelConfig) -> tuple[Tensor, Tensor]:
    """Return two orders: one for the rows of query, key and value, and one for the features of a
    head. In both, features that were half a head apart become adjacent.
    """
    half = config.head_dim // 2
    within = torch.arange(config.head_dim).view(2, half).t().flatten()
    heads = torch.arange(config.num_heads + config.num_kv_heads)
    turned = (heads[:, None] * config.head_dim + within).flatten()
    values = torch.arange(len(turned), len(turned) + config.num_kv_heads * config.head_dim)
    return torch.cat([turned, values]), within


def read_trained(
    file: Path, weights: Weights, name: str
) -> tuple[dict[str, str], dict[str, Tensor]]:
    """Read a file of trained heads that `scripts/train heads` wrote for a model with these weights.
    Return the file's metadata, and its tensors by name.

    :raises ModelLoadError: the file is damaged.
    """
    try:
        with safe_open(file, framework="pt") as handle:
            return handle.metadata() or {}, {
                part: handle.get_tensor(part).to(weights.norm) for part in handle.keys()
            }
    except (SafetensorError, OSError) as error:
        raise unusable_heads(
            name, file, f"cannot be read ({type(error).__name__}: {error})"
        ) from error


def unusable_heads(name: str, file: Path, problem: str) -> ModelLoadError:
    """Return the error to raise for an unusable file of trained heads."""
    return ModelLoadError(
        name,
        f"{file} {problem}",
        "Remove the file, or train the heads again with scripts/train heads",
    )


class _TensorReader:
    """A reader of tensors in a folder's safetensors files. It finds a tensor by name and checks its
    shape.
    """

    def __init__(
        self, folder: Path, dtype: torch.dtype, device: torch.device, name: str, stack: ExitStack
    ) -> None:
        self._dtype = dtype
        self._device = device
        self._name = name
        self._folder = folder
        # adapter whose matrices are added to the weights while the weights are read
        self.adapter: Adapter = {}
        # whether to reorder each head's features, so that features that are rotated together are
        # adjacent
        self.pairs = False
        files = tensor_files(folder, name)
        try:
            handles = [stack.enter_context(safe_open(file.path, framework="pt")) for file in files]
        # `safe_open` raises RuntimeError if the file is too large to be mapped into memory
        except (SafetensorError, OSError, RuntimeError) as error:
            advice = "Download the weights again"
            raise ModelLoadError(
                name, f"the weights in {folder} are damaged ({error})", advice
            ) from error
        # The prefix "model." is removed from names of weights. Checkpoints that contain only the
        # decoder do not have this prefix.
        self._where = {
            key.removeprefix("model."): (handle, inner)
            for file, handle in zip(files, handles, strict=True)
            for key, inner in (file.names or {key: key for key in handle.keys()}).items()
        }

    def __call__(self, key: str, *size: int) -> Tensor:
        if key not in self._where:
            raise ModelLoadError(
                self._name,
                f"{self._folder} lacks the weight {key!r}, so its files are incomplete or belong "
                "to another model",
            )
        handle, full = self._where[key]
        # This call reads only the file's header. The weight itself is read below, after its type
        # and shape are checked.
        said = handle.get_slice(full)
        if said.get_dtype() not in _FLOATS:
            problem = f"weight {key!r} is of type {said.get_dtype()}"
            advice = "Use the unquantised checkpoint, or serve this one with vLLM"
            raise ModelLoadError(self._name, problem, advice)
        if tuple(said.get_shape()) != size:
            problem = (
                f"weight {key!r} has shape {tuple(said.get_shape())}, but config.json implies "
                f"{size}"
            )
            raise ModelLoadError(
                self._name, problem, "The configuration and the weights belong to different models"
            )
        tensor: Tensor = handle.get_tensor(full)
        if low := self.adapter.get(key.removesuffix(".weight")):
            tensor = low.added_to(tensor)
        return tensor.to(device=self._device, dtype=self._dtype)

    def norm(
        self, config: ModelConfig, key: str, size: int, order: Tensor | None = None
    ) -> Tensor | None:
        """Read the weights of a norm, or return None if the model has no such norm. If `order` is
        given, put the features of each head in this order.
        """
        if not key or not size:
            return None
        weight = self(f"{key}.weight", size) + float(config.rules.is_gemma)
        return (
            weight
            if order is None
            else weight.view(-1, len(order))[:, order.to(self._device)].flatten()
        )

    def matrix(self, parts: Mapping[str, int], width: int, rows: Tensor | None = None) -> Tensor:
        """Read the matrices of these projections, and stack their rows into one matrix. If `rows`
        is given, put the stacked rows in this order.
        """
        whole = torch.cat([self(f"{part}.weight", count, width) for part, count in parts.items()])
        return _in_order(whole, rows)

    def biases(self, parts: Mapping[str, int], rows: Tensor | None = None) -> Tensor | None:
        """Read the biases of these projections, and join them into one vector. A projection without
        a bias gets zeros; if none has a bias, return None.
        """
        if not any(f"{part}.bias" in self._where for part in parts):
            return None
        zeros = partial(torch.zeros, dtype=self._dtype, device=self._device)
        own = {f"{part}.bias": size for part, size in parts.items()}
        whole = [
            self(key, size) if key in self._where else zeros(size) for key, size in own.items()
        ]
        return _in_order(torch.cat(whole), rows)


def _in_order(whole: Tensor, rows: Tensor | None) -> Tensor:
    is_plain = rows is None or bool((rows == torch.arange(len(rows))).all())
    return whole if is_plain or rows is None else whole[rows.to(whole.device)]


def check_weights(folder: Path, config: ModelConfig, name: str) -> None:
    """Check that all weights exist and have the shapes that the configuration implies, without
    loading them.

    :raises ModelLoadError: see `load_weights`.
    """
    load_weights(folder, config, torch.float32, torch.device("meta"), name)


def check_adapter(folder: Path, file: Path, config: ModelConfig, name: str) -> None:
    """Check that a file contains an adapter for a model with this configuration.

    :raises ModelLoadError: the adapter does not fit the model.
    """
    read_adapter(TensorFile(file, None), folder, config, name)
