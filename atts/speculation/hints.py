"""The hint proposer: it proposes text that came with a request, such as a rejected chunk or a
sibling's.
"""

from __future__ import annotations

from collections.abc import Sequence

from atts.speculation.proposals import NOTHING, Ask, Proposer, TokenProposal

_ANCHOR = 4
"""Tokens that must agree again before a hint is followed after a difference."""


class HintProposer(Proposer):
    """Follows `Ask.hint` as long as the text does; after a difference it looks for the place where
    they meet again.
    """

    def __init__(self) -> None:
        self._places: dict[int, int] = {}  # by key: how much of the hint is written

    def propose(self, asks: Sequence[Ask]) -> list[TokenProposal]:
        """The rest of each hint."""
        return [self._next(ask) if ask.hint else NOTHING for ask in asks]

    def ended(self, key: int) -> None:
        """Forget the place."""
        self._places.pop(key, None)

    def _next(self, ask: Ask) -> TokenProposal:
        place = self._aligned(ask)
        if place is None:
            return NOTHING
        self._places[ask.key] = place
        tokens = ask.hint[place : place + ask.room]
        return TokenProposal(tokens, 0.9 if tokens else 0.0)

    def _aligned(self, ask: Ask) -> int | None:
        """The place in the hint where the text goes on; None when they have parted."""
        if ask.written == 0:
            return 0
        written = tuple(ask.ids[-min(ask.written, _ANCHOR) :])
        last = self._places.get(ask.key, 0)
        if (
            ask.written <= len(ask.hint)
            and ask.hint[ask.written - len(written) : ask.written] == written
        ):
            return ask.written
        if len(written) < _ANCHOR:
            return None
        for place in range(max(_ANCHOR, last), len(ask.hint) + 1):
            if ask.hint[place - _ANCHOR : place] == written:
                return place
        return None
