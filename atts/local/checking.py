"""Model folders examined before they are loaded: configuration, tokenizer and weights fit together."""

from __future__ import annotations

from pathlib import Path

from atts.concurrency import import_lock
from atts.errors import ModelLoadError
from atts.local.model_config import ModelConfig, read_model_config
from atts.models.stored_blocks import TensorFile, tensor_files
from atts.models.tokenizers import ModelTokenizer


def check_model(folder: Path, name: str) -> tuple[ModelConfig, ModelTokenizer]:
    """Return the configuration and the tokenizer of a model folder, whose weight files are there.

    :raises ModelLoadError: something is missing or cannot be read, or they are of different models.
    """
    config = read_model_config(folder, name)
    tensor_files(folder, name)
    tokenizer = ModelTokenizer(folder, name)
    if tokenizer.vocabulary > config.vocabulary:
        problem = f"its tokenizer has ids up to {tokenizer.vocabulary - 1}, the model knows {config.vocabulary}"
        raise ModelLoadError(name, problem, "Put the model's own tokenizer into its folder")
    return config, tokenizer


def check_weights(folder: Path, config: ModelConfig, name: str) -> None:
    """See that the weights are all there, of the shapes that the configuration says; none is kept.

    :raises ModelLoadError: see `atts.local.loader.load_weights`.
    """
    with import_lock:
        import torch

        from atts.local.loader import load_weights
    load_weights(folder, config, torch.float32, torch.device("meta"), name)


def check_adapter(folder: Path, file: Path, config: ModelConfig, name: str) -> None:
    """See that the folder holds an adapter for a model of this configuration.

    :raises ModelLoadError: it does not.
    """
    with import_lock:
        from atts.local.loader import read_adapter
    read_adapter(TensorFile(file, None), folder, config, name)
