"""Verification: how many tokens of a proposal are accepted, and what replaces the first that is
not.

By replay the target draws at every place with the uniform that belongs to request and position, and
a token stands if it is what was drawn: what is written is what would be written without any
proposal, at any temperature.

By ratio a drawn token stands with probability min(1, p/q), and a residual draw takes the place of
one that does not: the law written is the target's, the tokens are other ones than without
proposals.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
from numpy.typing import NDArray

Law = NDArray[np.float64]


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


def draw(law: Law, uniform: float) -> int:
    """The token at which the cumulated law passes the uniform.

    >>> draw(np.array([0.5, 0.0, 0.5]), 0.5)
    2
    """
    total = np.cumsum(law)
    last = int(np.flatnonzero(law)[-1])  # a uniform just below 1 may round to the whole mass
    return min(int(np.searchsorted(total, uniform * total[-1], side="right")), last)


def residual(law: Law, proposed: Law) -> Law:
    """What is left of the target's law where the proposal's is taken away; the target's own where
    nothing is left.
    """
    left = np.maximum(law - proposed, 0.0)
    mass = left.sum()
    return left / mass if mass > 0 else law


def ratio_walk(
    proposal: Sequence[int], laws: Law, proposed: Law | None, accepts: Law, residuals: Law
) -> tuple[int, int | None]:
    """How many tokens stand, and the residual draw in place of the first that does not; None where
    all stand.

    `laws[i]` is the target's at the place of `proposal[i]`, `proposed[i]` that which the token was
    drawn from (both of [places, vocabulary]); without them the tokens were looked up, and each
    counts as certain. `accepts` and `residuals` are uniforms of two streams of their own, one for
    each place: no number is used twice, each place is tested once.
    """
    for place, token in enumerate(proposal):
        law = laws[place]
        other = np.eye(1, len(law), token)[0] if proposed is None else proposed[place]
        if accepts[place] * other[token] >= law[token]:
            return place, draw(residual(law, other), float(residuals[place]))
    return len(proposal), None
