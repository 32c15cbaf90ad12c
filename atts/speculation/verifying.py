"""Verification by replay: how many tokens of a proposal are accepted.

The target draws at every place with the uniform that belongs to request and position, and a token
is accepted if it is what was drawn: what is written is what would be written without any proposal,
at any temperature.
"""

from __future__ import annotations

from collections.abc import Sequence


def standing(proposal: Sequence[int], drawn: Sequence[int]) -> int:
    """How many tokens of a chain stand, where `drawn[i]` was drawn after the first `i` of them.

    The tokens to write are `drawn[: standing + 1]`: after those that stand comes one more, for the
    target's law after them is known, whether the next proposed token was wrong or there was none.

    >>> standing((5, 6, 7), (5, 6, 9, 1)), standing((5, 6), (5, 6, 7)), standing((), (3,))
    (2, 2, 0)
    """
    for place, token in enumerate(proposal):
        if drawn[place] != token:
            return place
    return len(proposal)
