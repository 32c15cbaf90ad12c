"""The side of `transformers` in comparisons: models in float32, and sampling of so many tokens."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch
from torch import Tensor


def opened(folder: Path) -> Any:
    """A saved model."""
    from transformers import AutoModelForCausalLM

    return AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32).eval()


def random_model(dtype: torch.dtype, **sizes: Any) -> Any:
    """A Llama of random weights that never ends a text; `sizes` as its configuration has them."""
    from transformers import AutoModelForCausalLM, LlamaConfig

    own: dict[str, Any] = {
        "eos_token_id": None,
        "bos_token_id": None,
        "pad_token_id": 0,
        "tie_word_embeddings": True,
    }
    return AutoModelForCausalLM.from_config(LlamaConfig(**sizes, **own), dtype=dtype).eval()


def generated(model: Any, ids: Tensor, count: int, **settings: Any) -> Tensor:
    """The prompts [batch, seq] with so many tokens more, at temperature .7."""
    law: dict[str, Any] = {"do_sample": True, "temperature": 0.7, "top_k": 0, "pad_token_id": 0}
    counts = {
        "max_new_tokens": count,
        "min_new_tokens": count,
        "attention_mask": torch.ones_like(ids),
    }
    with torch.inference_mode():
        found: Tensor = model.generate(ids, **{**law, **counts, **settings})
    return found
