"""Functions that locate the embedded draft and target models, and report the models' sizes and
costs.
"""

from __future__ import annotations

import json
from dataclasses import dataclass
from importlib import resources
from pathlib import Path
from typing import Any, Final, Literal, get_args

from atts.errors import ModelLoadError, OptionError

Embedded = Literal["draft", "target"]
EMBEDDED: Final[tuple[Embedded, ...]] = get_args(Embedded)
"""The names of the embedded models. Both models have the same tokenizer."""
Drafter = Literal["deep"]
"""The name of a third embedded model, a small one with eight narrow layers. It can propose tokens
to the embedded target, because it has the same tokenizer.
"""

_FILES = (
    "config.json",
    "model.safetensors",
    "tokenizer.json",
    "tokenizer_config.json",
    "generation_config.json",
)


@dataclass(frozen=True, slots=True)
class ModelInfo:
    """The size of an embedded model and its cost per token. They are known without loading the
    model.
    """

    name: Embedded
    path: Path
    layers: int
    hidden_size: int
    context_length: int
    vocabulary: int
    # number of multiply-add operations for one token in all weight matrices, including the output
    # matrix
    weights_per_token: int
    # product of the number of attention heads and the dimension of a head, summed over layers
    attention_width: int
    bytes: int  # size of the weights file in bytes

    def flops_per_token(self, context: int = 0) -> float:
        """Return the number of floating-point operations to decode one token that attends to
        `context` earlier tokens.
        """
        return 2.0 * (self.weights_per_token + 2 * context * self.attention_width)


def path(name: Embedded | Drafter) -> Path:
    """Return the folder of an embedded model, in the format of transformers.

    :raises OptionError: there is no embedded model of that name.
    :raises ModelLoadError: the model's files are not installed.

    >>> path("draft").name
    'draft'
    """
    if name not in (known := (*EMBEDDED, *get_args(Drafter))):
        raise OptionError("model", f"no embedded model is called {name!r}", known, given=name)
    folder = Path(str(resources.files("atts.models"))) / name
    missing = [file for file in _FILES if not (folder / file).is_file()]
    if missing:
        raise ModelLoadError(
            f"embedded {name}",
            f"{folder} lacks {', '.join(missing)}",
            "Install atts again, or train the model again with scripts/train.",
        )
    return folder


def scores_path() -> Path:
    """Return the path of the file with the embedded models' scores on the calibration split."""
    return Path(str(resources.files("atts.models"))) / "scores.json"


def info(name: Embedded) -> ModelInfo:
    """Return a model's size and cost, read from its configuration.

    :raises OptionError: there is no embedded model of that name.
    :raises ModelLoadError: the model's files are not installed.

    >>> info("target").flops_per_token() >= 20 * info("draft").flops_per_token()
    True
    """
    folder = path(name)
    config: dict[str, Any] = json.loads((folder / "config.json").read_text(encoding="utf-8"))
    hidden = int(config["hidden_size"])
    layers = int(config["num_hidden_layers"])
    head = int(config["head_dim"])
    heads = int(config["num_attention_heads"])
    kv_heads = int(config["num_key_value_heads"])
    matrices = 2 * hidden * head * (heads + kv_heads) + 3 * hidden * int(
        config["intermediate_size"]
    )
    return ModelInfo(
        name=name,
        path=folder,
        layers=layers,
        hidden_size=hidden,
        context_length=int(config["max_position_embeddings"]),
        vocabulary=int(config["vocab_size"]),
        weights_per_token=layers * matrices + int(config["vocab_size"]) * hidden,
        attention_width=layers * heads * head,
        bytes=(folder / "model.safetensors").stat().st_size,
    )
