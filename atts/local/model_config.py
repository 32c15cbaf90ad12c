"""The configuration of a supported model, with a check of each value in config.json."""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any, Literal

from atts.concurrency import import_lock
from atts.core import TokenIds
from atts.errors import ModelLoadError, counted
from atts.models.folders import read_end_ids, read_object, refuse_code, refuse_gguf, shown
from atts.models.stored_blocks import tensor_files
from atts.models.tokenizers import ModelTokenizer

NO_ROPE = "none"
UNREADABLE = (OSError, ValueError, LookupError, TypeError, AttributeError, ArithmeticError)
"""Errors that libraries raise when they read a configuration with unexpected values."""
# The supported types of rotary embedding. Their frequencies are known when a request arrives, and
# do not change while its text grows.
_ROPES = (
    "default",
    "linear",
    "llama3",
    "yarn",
    "longrope",
)
_FLOATS = ("float64", "float32", "float16", "bfloat16")
_LONGEST = 1 << 48


@dataclass(frozen=True, slots=True)
class Family:
    """The properties in which a model family differs from Llama."""

    norms: tuple[str, str, str, str] = ("input_layernorm", "", "post_attention_layernorm", "")
    """The names of the norms before and after attention, and before and after the feed-forward
    block. A name is "" if the family has no such norm.
    """
    # whether queries and keys are normalised, and if so, in each head or over all heads together
    head_norms: Literal["none", "each head", "all heads"] = "none"
    # whether checkpoints store query, key and value as one matrix, and gate and up as another one
    is_fused: bool = False
    # True if norms add one to their weights, embeddings are scaled, and gates use GELU
    is_gemma: bool = False
    may_turn_parts: bool = False  # whether the rotary embedding may rotate only a part of each head
    has_windows: bool = True  # whether layers use the sliding window of the configuration
    may_skip_ropes: bool = False  # whether some layers may have no rotary embedding


_AROUND = (
    "input_layernorm",
    "post_attention_layernorm",
    "pre_feedforward_layernorm",
    "post_feedforward_layernorm",
)
FAMILIES: Mapping[str, Family] = {
    "llama": Family(has_windows=False),
    "mistral": Family(),
    "qwen2": Family(),
    "qwen3": Family(head_norms="each head"),
    "smollm3": Family(may_skip_ropes=True),
    "phi3": Family(is_fused=True, may_turn_parts=True),
    "olmo2": Family(
        ("", "post_attention_layernorm", "", "post_feedforward_layernorm"),
        "all heads",
        has_windows=False,
    ),
    "gemma2": Family(_AROUND, is_gemma=True),
    "gemma3_text": Family(_AROUND, "each head", is_gemma=True),
}


@dataclass(frozen=True, slots=True)
class ModelConfig:
    """The dimensions and constants of one decoder-only model of a supported family."""

    family: str
    num_layers: int
    hidden_size: int
    num_heads: int
    num_kv_heads: int
    head_dim: int
    intermediate_size: int  # number of hidden features of the feed-forward block
    vocabulary: int
    context_length: int
    norm_eps: float
    rotary_dim: int  # number of features of each head that the rotary embedding rotates
    # name of each layer's rotary embedding; NO_ROPE for a layer without one
    ropes: tuple[str, ...]
    # for each layer, the number of tokens in its attention window; 0 if a position attends to all
    # tokens before it
    windows: tuple[int, ...]
    query_scale: float  # factor by which attention scores are multiplied before the softmax
    attention_cap: float  # soft cap (tanh) on attention scores; 0 for no cap
    logit_cap: float
    # Requests with more tokens than this use other rotary frequencies; None if the model has only
    # one set of frequencies.
    long_after: int | None
    ties_embeddings: bool
    end_ids: TokenIds

    @property
    def matrix_weights(self) -> int:
        """Return the number of weights in all matrices that multiply one token, including the
        output head.
        """
        attention = self.hidden_size * self.head_dim * (2 * self.num_heads + 2 * self.num_kv_heads)
        mlp = 3 * self.hidden_size * self.intermediate_size
        return self.num_layers * (attention + mlp) + self.vocabulary * self.hidden_size

    @property
    def kv_floats_per_token(self) -> int:
        """Return how many floats the KV cache stores per token."""
        return 2 * self.num_layers * self.num_kv_heads * self.head_dim

    def part(self, layers: range) -> ModelConfig:
        """Return the configuration of a model with only these layers. If the first layer is not
        among them, the vocabulary is 0, because this part of the model has no embedding.
        """
        cut = slice(layers.start, layers.stop)
        vocabulary = 0 if layers.start else self.vocabulary
        ropes = self.ropes[cut]
        windows = self.windows[cut]
        return replace(
            self, num_layers=len(layers), ropes=ropes, windows=windows, vocabulary=vocabulary
        )

    @property
    def rules(self) -> Family:
        """Return the properties in which the model's family differs from Llama."""
        return FAMILIES[self.family]

    @property
    def embedding_scale(self) -> float:
        """Return the factor by which embeddings are multiplied."""
        return math.sqrt(self.hidden_size) if self.rules.is_gemma else 1.0


_KINDS: Mapping[str, tuple[type, ...]] = {
    "whole number": (int,), "number": (int, float), "true or false": (bool,), "text": (str,), "list": (list,),
    "object": (dict,),
}  # fmt: skip


@dataclass(frozen=True, slots=True)
class _Value:
    """The values that a key of config.json may have. With `optional`, null is allowed too."""

    kind: Literal["whole number", "number", "true or false", "text", "list", "object"]
    low: float = -math.inf
    high: float = math.inf
    optional: bool = False
    parts: _Value | None = None  # if the value is a list: the values of its items
    choices: tuple[str, ...] = ()

    def __str__(self) -> str:
        limits = f" from {self.low:g} to {self.high:g}" if math.isfinite(self.high) else ""
        inside = f" of {self.parts}" if self.parts else ""
        return (
            f"one of {', '.join(self.choices)}"
            if self.choices
            else f"a {self.kind}{inside}{limits}"
        )

    def accepts(self, value: object) -> bool:
        """Return whether the key may have this value."""
        if value is None:
            return self.optional
        if type(value) not in _KINDS[self.kind]:
            return False
        if isinstance(value, list):
            return self.parts is None or all(map(self.parts.accepts, value))
        if isinstance(value, int | float):
            return self.low <= value <= self.high
        return not self.choices or value in self.choices


def _whole(low: float, high: float, *, optional: bool = False) -> _Value:
    return _Value("whole number", low, high, optional)


def _number(low: float, high: float, *, optional: bool = False) -> _Value:
    return _Value("number", low, high, optional)


_FLAG = _Value("true or false", optional=True)
_TEXT = _Value("text", optional=True)
_FACTOR = _number(1e-6, 1e6)
_FACTORS = _Value("list", parts=_FACTOR, optional=True)
_ROPE_KEYS: Mapping[str, _Value] = {
    "rope_type": _TEXT,
    "type": _TEXT,
    "rope_theta": _number(1e-3, 1e15),
    "partial_rotary_factor": _number(1e-3, 1.0),
    "original_max_position_embeddings": _whole(1, _LONGEST),
    "short_factor": _FACTORS,
    "long_factor": _FACTORS,
    "truncate": _FLAG,
    **dict.fromkeys(
        ("factor", "low_freq_factor", "high_freq_factor", "beta_fast", "beta_slow"), _FACTOR
    ),
    **dict.fromkeys(
        ("attention_factor", "mscale", "mscale_all_dim"), _number(0.0, 1e6, optional=True)
    ),
}
_ROPE = _Value("object", optional=True)
_KEYS: Mapping[str, _Value] = {
    "hidden_size": _whole(1, 1 << 20),
    "intermediate_size": _whole(1, 1 << 24),
    "num_hidden_layers": _whole(1, 4096),
    "num_attention_heads": _whole(1, 1 << 14),
    "num_key_value_heads": _whole(1, 1 << 14, optional=True),
    "head_dim": _whole(1, 1 << 14, optional=True),
    "vocab_size": _whole(1, 1 << 24),
    "max_position_embeddings": _whole(1, _LONGEST),
    "original_max_position_embeddings": _whole(1, _LONGEST),
    "sliding_window": _whole(1, _LONGEST, optional=True),
    "sliding_window_pattern": _whole(1, 4096),
    "max_window_layers": _whole(0, 1 << 20),
    "no_rope_layer_interval": _whole(1, 4096),
    "no_rope_layers": _Value("list", parts=_whole(0, 1), optional=True),
    "layer_types": _Value("list", parts=_Value("text"), optional=True),
    "rms_norm_eps": _number(0.0, 1.0),
    "query_pre_attn_scalar": _number(1e-3, 1e6),
    "hidden_act": _TEXT,
    "hidden_activation": _TEXT,
    "rope_scaling": _ROPE,
    "rope_parameters": _ROPE,
    "dtype": _Value("text", optional=True, choices=_FLOATS),
    "torch_dtype": _Value("text", optional=True, choices=_FLOATS),
    **{key: _ROPE_KEYS[key] for key in ("rope_theta", "partial_rotary_factor")},
    "rope_local_base_freq": _ROPE_KEYS["rope_theta"],
    **dict.fromkeys(
        ("attn_logit_softcapping", "final_logit_softcapping"), _number(1e-3, 1e6, optional=True)
    ),
    **dict.fromkeys(("attention_bias", "mlp_bias", "tie_word_embeddings"), _FLAG),
    **dict.fromkeys(("use_sliding_window", "use_bidirectional_attention"), _FLAG),
}
"""The possible values of every key of config.json that atts reads. Other keys are ignored."""
_WHOLE = (
    "hidden_size", "intermediate_size", "num_hidden_layers", "num_attention_heads", "num_key_value_heads", "head_dim",
    "vocab_size", "max_position_embeddings", "rms_norm_eps", "hidden_act", "tie_word_embeddings", "eos_token_id",
)  # fmt: skip
"""The keys that a complete configuration of a Llama model has. If a key is missing, transformers
fills in the default value.
"""


def rope_rows(config: ModelConfig, slots: int) -> int:
    """Return the number of positions in the table of rotary angles: the smaller of the context
    length and the cache size in tokens.
    """
    return min(config.context_length, slots)


def read_model_config(folder: Path, name: str) -> ModelConfig:
    """Read and check the configuration of the model in `folder`.

    :raises ModelLoadError: the configuration cannot be read, or the engine does not support its
        family or attention.
    """
    config = read_hf_config(folder, name)
    layers = range(config.num_hidden_layers)
    rules = FAMILIES[config.model_type]
    window = (getattr(config, "sliding_window", None) or 0) if rules.has_windows else 0
    only_kind = "sliding_attention" if window else "full_attention"
    kinds = getattr(config, "layer_types", None) or [only_kind] * len(layers)
    turned = config.no_rope_layers if rules.may_skip_ropes else [1] * len(layers)
    longest = next(
        (rope.get("original_max_position_embeddings") for rope in _ropes(config) if _is_long(rope)),
        None,
    )
    head = _head_dim(config)
    # Layers of the same kind share a rotary embedding, which is named after the kind. If all layers
    # share one rotary embedding, its name is empty.
    ropes = kinds if _has_many_ropes(config) else [""] * len(layers)
    attention_cap = 0.0
    if config.model_type == "gemma2":
        attention_cap = getattr(config, "attn_logit_softcapping", None) or 0.0
    logit_cap = 0.0
    if rules.is_gemma:
        logit_cap = config.final_logit_softcapping or 0.0
    if longest is not None and longest >= config.max_position_embeddings:
        longest = None
    return ModelConfig(
        family=config.model_type,
        num_layers=config.num_hidden_layers,
        hidden_size=config.hidden_size,
        num_heads=config.num_attention_heads,
        num_kv_heads=getattr(config, "num_key_value_heads", None) or config.num_attention_heads,
        head_dim=head,
        intermediate_size=config.intermediate_size,
        vocabulary=config.vocab_size,
        context_length=config.max_position_embeddings,
        norm_eps=config.rms_norm_eps,
        rotary_dim=_rotary_dim(config),
        ropes=tuple(rope if turns else NO_ROPE for rope, turns in zip(ropes, turned, strict=True)),
        windows=tuple(window if kind == "sliding_attention" else 0 for kind in kinds),
        query_scale=float(config.query_pre_attn_scalar if rules.is_gemma else head) ** -0.5,
        attention_cap=attention_cap,
        logit_cap=logit_cap,
        long_after=longest,
        ties_embeddings=bool(config.tie_word_embeddings),
        end_ids=read_end_ids(folder, name, config.eos_token_id),
    )


def read_hf_config(folder: Path, name: str) -> Any:
    """Read and check the configuration of the model in `folder`. The result has the same attributes
    as a configuration of transformers. Keys that atts does not read are ignored.

    :raises ModelLoadError: there is no configuration, a value is invalid, the model needs code from
        its folder, or the model is not supported.
    """
    from huggingface_hub.errors import StrictDataclassError

    path = folder / "config.json"
    refuse_gguf(folder, name)
    if not path.is_file():
        raise ModelLoadError(
            name, f"{folder} has no config.json", "Name a folder written by save_pretrained"
        )
    refuse_code(folder, name)
    values = read_object(path, name)
    family = _family(values, name)
    known = {
        key: values[key] for key in _KEYS if key in values and key not in ("dtype", "torch_dtype")
    }
    for key, value in values.items():
        _check(key, value, _KEYS, name)
    for key in ("rope_scaling", "rope_parameters"):
        if known.get(key):
            known[key] = _known_rope(known[key], key, name)
    if "eos_token_id" in values:
        known["eos_token_id"] = list(read_end_ids(folder, name, values["eos_token_id"])) or None
    try:
        with import_lock:
            config = _whole_config(family, known) or _config_with_defaults(family, known)
            problems = list(_problems(config))
    except (*UNREADABLE, StrictDataclassError) as error:
        raise ModelLoadError(
            name, f"config.json cannot be read as a model configuration ({str(error)[:300]})"
        ) from error
    for problem, advice in problems:
        raise ModelLoadError(name, problem, advice)
    return config


def _whole_config(family: str, known: Mapping[str, Any]) -> Any:
    """Return a complete Llama configuration without importing transformers. Return None if the
    configuration is incomplete or has another family.

    Importing the configurations of transformers also imports torch and its compiler, which would
    take seconds in every process.
    """
    rope = known.get("rope_parameters") or {}
    if (
        family != "llama"
        or any(known.get(key) is None for key in _WHOLE)
        or rope.keys() != {"rope_type", "rope_theta"}
    ):
        return None
    heads = known["num_attention_heads"]
    if rope["rope_type"] != "default" or known.get("rope_scaling") or known["hidden_size"] % heads:
        return None
    return SimpleNamespace(model_type=family, **known)


def _config_with_defaults(family: str, known: Mapping[str, Any]) -> Any:
    from transformers import AutoConfig

    return AutoConfig.for_model(
        family, **{k: v for k, v in known.items() if (k, v) != ("head_dim", None)}
    )


def _family(values: Mapping[str, Any], name: str) -> str:
    family = values.get("model_type")
    if not isinstance(family, str) or family not in FAMILIES:
        advice = (
            f"The local engine supports {', '.join(FAMILIES)}; serve other families with vLLM or "
            "SGLang"
        )
        problem = f"models of type {shown(family)} are not supported"
        raise ModelLoadError(name, problem, f"{advice} and use that server")
    if values.get("quantization_config"):
        raise ModelLoadError(
            name,
            "the model's weights are quantised",
            "Use the unquantised checkpoint, or serve it with vLLM",
        )
    return family


def _check(key: str, value: object, keys: Mapping[str, _Value], name: str) -> None:
    expected = keys.get(key.rpartition(".")[2])
    if expected is not None and not expected.accepts(value):
        raise ModelLoadError(
            name, f"{key} is {shown(value)}, expected {expected}", "Check config.json"
        )


def _known_rope(rope: Mapping[str, Any], at: str, name: str) -> dict[str, Any]:
    """Check the parameters of a rotary embedding, and return those that atts reads. They may be
    nested, with one set of parameters for each kind of layer.
    """
    known = dict[str, Any]()
    for key, value in rope.items():
        if isinstance(value, dict) and key not in _ROPE_KEYS:
            known[key] = _known_rope(value, f"{at}.{key}", name)
        elif key in _ROPE_KEYS:
            _check(f"{at}.{key}", value, _ROPE_KEYS, name)
            known[key] = value
    return known


def _problems(config: Any) -> Iterator[tuple[str, str]]:
    """Yield a description of each property that the local engine does not support, with advice to
    the user.
    """
    check = "Check config.json"
    serve = "Serve this model with vLLM"
    rules = FAMILIES[config.model_type]
    layers = config.num_hidden_layers
    heads = config.num_attention_heads
    activation = getattr(config, "hidden_activation", None) or config.hidden_act
    only = "silu"
    if rules.is_gemma:
        only = "gelu_pytorch_tanh"
    if activation != only:
        yield f"the activation {shown(activation)} is not supported (only {only})", serve
    if getattr(config, "use_bidirectional_attention", False):
        yield "the model's attention also reads later tokens (use_bidirectional_attention)", serve
    for key in ("layer_types", "no_rope_layers"):
        named = getattr(config, key, None)
        if named is not None and len(named) != layers:
            listed = counted(len(named), "layer")
            yield f"{key} lists {listed}, but the model has {layers}", check
    strange = sorted(
        set(getattr(config, "layer_types", None) or ()) - {"full_attention", "sliding_attention"}
    )
    if strange:
        yield (
            f"the attention type {', '.join(strange)[:60]} is not supported (only full and "
            "sliding-window attention)",
            serve,
        )
    shared = getattr(config, "num_key_value_heads", None) or heads
    if heads % shared:
        yield (
            f"the number of query heads ({heads}) is not a multiple of the number of key-value "
            f"heads ({shared})",
            check,
        )
    if _head_dim(config) % 2 or _head_dim(config) < 2:
        yield f"the head dimension {_head_dim(config)} is not a positive even number", serve
    for rope in _ropes(config):
        yield from _rope_problems(config, rope)


def _rope_problems(config: Any, rope: Mapping[str, Any]) -> Iterator[tuple[str, str]]:
    kind = rope.get("rope_type")
    part = rope.get("partial_rotary_factor", 1.0)
    turned = _rotary_dim(config)
    if kind not in _ROPES:
        yield (
            f"the rotary embedding of type {shown(kind)} is not supported",
            f"Supported: {', '.join(_ROPES)}",
        )
    if part != 1.0 and not FAMILIES[config.model_type].may_turn_parts:
        yield (
            f"the rotary embedding rotates {part:g} of each head, not the whole head",
            "Serve this model with vLLM",
        )
    if turned % 2 or turned < 2:
        yield (
            f"the rotary embedding rotates {turned} features of each head (partial_rotary_factor); "
            "the number must be even and positive",
            "Check config.json",
        )
    if kind == "longrope":
        for key in ("short_factor", "long_factor"):
            if len(rope.get(key) or ()) != turned // 2:
                count = len(rope.get(key) or ())
                yield (
                    f"{key} has {count} factors, but its rotary embedding needs {turned // 2}",
                    "Check config.json",
                )


def _head_dim(config: Any) -> int:
    return int(
        getattr(config, "head_dim", None) or config.hidden_size // config.num_attention_heads
    )


def _rotary_dim(config: Any) -> int:
    part = (
        1.0
        if _has_many_ropes(config)
        else (config.rope_parameters or {}).get("partial_rotary_factor", 1.0)
    )
    return int(_head_dim(config) * part)


def _has_many_ropes(config: Any) -> bool:
    return any(isinstance(value, dict) for value in (config.rope_parameters or {}).values())


def _ropes(config: Any) -> list[Mapping[str, Any]]:
    """Return the sets of parameters of the model's rotary embeddings: one for each kind of layer,
    or a single one for all layers.
    """
    parameters = config.rope_parameters or {}
    return (
        [rope for rope in parameters.values() if rope] if _has_many_ropes(config) else [parameters]
    )


def _is_long(rope: Mapping[str, Any]) -> bool:
    return rope.get("rope_type") == "longrope"


def check_model(folder: Path, name: str) -> tuple[ModelConfig, ModelTokenizer]:
    """Check that a model folder is complete, and return its configuration and its tokenizer.

    :raises ModelLoadError: something is missing or cannot be read, or the tokenizer belongs to
        another model.
    """
    config = read_model_config(folder, name)
    tensor_files(folder, name)
    tokenizer = ModelTokenizer(folder, name)
    if tokenizer.vocabulary > config.vocabulary:
        problem = (
            f"the tokenizer has ids up to {tokenizer.vocabulary - 1}, but the model has only "
            f"{config.vocabulary} ids"
        )
        raise ModelLoadError(name, problem, "Put the model's own tokenizer into its folder")
    return config, tokenizer
