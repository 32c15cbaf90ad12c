"""Proposers of one's own: a class named as MODULE:CLASS, found and made in the process that runs the loop."""

from __future__ import annotations

from importlib import import_module
from typing import cast

from atts.errors import OptionError
from atts.speculation import Proposer


def own_proposer(words: str) -> Proposer:
    """An instance of the class that these words name.

    :raises OptionError: there is none, or it proposes nothing.
    """
    module, _, name = words.partition(":")
    try:
        made = getattr(import_module(module), name)()
    except Exception as error:
        problem = f"{words!r} names no proposer that can be made ({type(error).__name__}: {error})"
        raise OptionError("speculate", problem) from error
    if not all(callable(getattr(made, part, None)) for part in ("propose", "settled", "ended")):
        raise OptionError("speculate", f"{words!r} is no proposer: derive it from atts.speculation.Proposer")
    return cast(Proposer, made)
