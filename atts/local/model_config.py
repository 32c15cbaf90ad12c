"""The configuration of a supported model, read from config.json; models the engine cannot compute are refused."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from atts.core import TokenIds
from atts.errors import ModelLoadError
from atts.importing import import_lock
from atts.model_folder import read_end_ids, refuse_code

FAMILIES = ("llama", "mistral", "qwen2", "qwen3")
_SIZES = (
    "hidden_size",
    "intermediate_size",
    "num_hidden_layers",
    "num_attention_heads",
    "vocab_size",
    "max_position_embeddings",
)
_UNREADABLE = (OSError, ValueError, LookupError, TypeError, AttributeError, ArithmeticError)
_ROPES = ("default", "linear", "llama3", "yarn")  # those whose frequencies do not depend on the length at hand


@dataclass(frozen=True, slots=True)
class ModelConfig:
    """The dimensions and constants of one decoder-only model of a supported family."""

    family: str
    num_layers: int
    hidden_size: int
    num_heads: int
    num_kv_heads: int
    head_dim: int
    intermediate_size: int  # of the feed-forward block
    vocabulary: int
    context_length: int
    norm_eps: float
    rope_type: str
    rope_theta: float
    ties_embeddings: bool
    end_ids: TokenIds

    @property
    def matrix_weights(self) -> int:
        """Weights one token is multiplied with, the output head included."""
        attention = self.hidden_size * self.head_dim * (2 * self.num_heads + 2 * self.num_kv_heads)
        mlp = 3 * self.hidden_size * self.intermediate_size
        return self.num_layers * (attention + mlp) + self.vocabulary * self.hidden_size

    @property
    def kv_floats_per_token(self) -> int:
        """Numbers the cache keeps per token."""
        return 2 * self.num_layers * self.num_kv_heads * self.head_dim


def read_model_config(folder: Path, name: str) -> ModelConfig:
    """The configuration of the model in `folder`, checked.

    :raises ModelLoadError: no readable configuration, a family or an attention we do not compute.
    """
    config = read_hf_config(folder, name)
    for problem, advice in _problems(config):
        raise ModelLoadError(name, problem, advice)
    heads = config.num_attention_heads
    return ModelConfig(
        family=config.model_type,
        num_layers=config.num_hidden_layers,
        hidden_size=config.hidden_size,
        num_heads=heads,
        num_kv_heads=getattr(config, "num_key_value_heads", None) or heads,
        head_dim=_head_dim(config),
        intermediate_size=config.intermediate_size,
        vocabulary=config.vocab_size,
        context_length=_context(config),
        norm_eps=config.rms_norm_eps,
        rope_type=_rope_type(config),
        rope_theta=config.rope_parameters["rope_theta"],
        ties_embeddings=bool(config.tie_word_embeddings),
        end_ids=read_end_ids(folder, name, config.eos_token_id),
    )


def read_hf_config(folder: Path, name: str) -> Any:
    """The configuration of the model in `folder`, as transformers has it.

    :raises ModelLoadError: there is none that can be read, or the folder brings code.
    """
    from huggingface_hub.errors import StrictDataclassError

    if not (folder / "config.json").is_file():
        raise ModelLoadError(name, f"{folder} holds no config.json", "Name a folder written by save_pretrained")
    refuse_code(folder, name)
    try:
        with import_lock:
            from transformers import AutoConfig

            return AutoConfig.from_pretrained(folder, local_files_only=True, trust_remote_code=False)
    except (*_UNREADABLE, StrictDataclassError) as error:
        raise ModelLoadError(name, f"config.json cannot be read as a model configuration ({error})") from error


def _problems(config: Any) -> Iterator[tuple[str, str]]:
    """What keeps the local engine from computing such a model, and what to do about it."""
    check, serve = "Check config.json", "Serve this model with vLLM"
    if config.model_type not in FAMILIES:
        advice = f"The local engine computes {', '.join(FAMILIES)}; serve other families with vLLM or SGLang"
        yield f"models of type {config.model_type!r} are not supported", f"{advice} and use the remote engine"
    if getattr(config, "quantization_config", None):
        yield "its weights are quantised", "Use the unquantised checkpoint, or serve it with vLLM"
    if config.hidden_act != "silu":
        yield f"its activation {config.hidden_act!r} is not supported (only silu)", serve
    for size in _SIZES:
        if getattr(config, size) < 1:
            yield f"its {size} is {getattr(config, size)}, expected at least 1", check
    strange = sorted(set(getattr(config, "layer_types", None) or ()) - {"full_attention", "sliding_attention"})
    if strange:
        advice = "The local engine computes full and sliding-window attention; serve this model with vLLM"
        yield f"its attention {', '.join(strange)} is not supported", advice
    rotated = (config.rope_parameters or {}).get("partial_rotary_factor", 1.0)
    if rotated != 1.0:
        yield f"its rotary embedding turns {rotated:g} of each head, not all of it", serve
    heads = config.num_attention_heads
    shared = getattr(config, "num_key_value_heads", None) or heads
    if heads % shared:
        yield f"{shared} key-value heads cannot serve {heads} query heads", check
    if _head_dim(config) % 2:
        yield f"its head dimension {_head_dim(config)} is odd", serve
    kind = _rope_type(config)
    if kind not in _ROPES:
        yield f"its rotary embedding of type {kind!r} is not supported", f"Supported: {', '.join(_ROPES)}"


def _head_dim(config: Any) -> int:
    return int(getattr(config, "head_dim", None) or config.hidden_size // config.num_attention_heads)


def _context(config: Any) -> int:
    """Within its window, sliding attention equals full attention; so the window is the context we offer."""
    window = getattr(config, "sliding_window", None)
    return int(min(config.max_position_embeddings, window or config.max_position_embeddings))


def _rope_type(config: Any) -> str:
    return str((config.rope_parameters or {}).get("rope_type", "default"))
