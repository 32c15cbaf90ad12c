"""The tokenizer on this side of the wire: given, or opened from the model's folder or name."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from anyio import to_thread

from atts.core import TokenIds
from atts.engine import Tokenizer
from atts.errors import OptionError


async def open_tokenizer(wanted: Tokenizer | str | Path | None, hint: str, name: str) -> Tokenizer:
    """The tokenizer that was given, or the one at the folder or hub id that was named or that the server named.

    :raises ModelLoadError: there is none.
    """
    if wanted is not None and not isinstance(wanted, str | Path):
        return wanted
    return await to_thread.run_sync(_open, str(wanted or hint), name)


def _open(model: str, name: str) -> Tokenizer:
    from atts.tokenizing import ModelTokenizer, find_tokenizer

    return ModelTokenizer(find_tokenizer(model, name), name)


def ends_of(tokenizer: Tokenizer) -> TokenIds:
    """The ids with which a model ends its text, as far as the tokenizer knows."""
    several: Any = getattr(tokenizer, "end_ids", None)
    if several is not None:
        return tuple(several)
    one: Any = getattr(tokenizer, "end_id", None)
    return () if one is None else (int(one),)


def vocabulary_of(tokenizer: Tokenizer) -> int:
    """How many ids there are.

    :raises OptionError: the tokenizer does not say.
    """
    found: Any = getattr(tokenizer, "vocabulary", None)
    if not isinstance(found, int):
        raise OptionError(
            "tokenizer", f"{type(tokenizer).__name__} has no attribute `vocabulary`, the number of its ids"
        )
    return found
