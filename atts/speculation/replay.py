"""Verification by replay: the target draws at every place of a proposal, and a token stands if it is what was drawn.

The draws use the uniforms that belong to request and position, so what is written is what would be written without any
proposal, token for token, at any temperature.
"""

from __future__ import annotations

from collections.abc import Sequence


def standing(proposal: Sequence[int], drawn: Sequence[int]) -> int:
    """How many tokens of a chain stand, where `drawn[i]` was drawn after the first `i` of them.

    The tokens to write are `drawn[: standing + 1]`: after those that stand comes one more, for the target's law after
    them is known, whether the next proposed token was wrong or there was none.

    >>> standing((5, 6, 7), (5, 6, 9, 1)), standing((5, 6), (5, 6, 7)), standing((), (3,))
    (2, 2, 0)
    """
    for place, token in enumerate(proposal):
        if drawn[place] != token:
            return place
    return len(proposal)
