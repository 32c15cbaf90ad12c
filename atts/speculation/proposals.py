"""Proposals of next tokens: their protocol, and the choice of the best among several proposers."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Protocol

import numpy as np
from numpy.typing import NDArray

from atts.core import Sampling, TokenIds


@dataclass(frozen=True, slots=True)
class Ask:
    """All that a proposer is told of one sequence, of which the next tokens are wanted."""

    key: int  # names the sequence as long as it runs
    ids: Sequence[int]  # the prompt and what is written so far; never to be changed
    written: int  # how many of the last ids are not of the prompt
    room: int  # most tokens to propose now, at least 1
    uniforms: NDArray[np.float64]  # with which the next tokens are drawn: [room] or more
    sampling: Sampling
    rollout: str = ""  # "PROBLEM/SAMPLE" where the request says so
    hint: TokenIds = ()  # text that came with the request

    @property
    def group(self) -> str:
        """What siblings have in common: the problem."""
        return self.rollout.rpartition("/")[0]


@dataclass(frozen=True, slots=True)
class TokenProposal:
    """Tokens that may follow, and how likely the first of them is thought to stand."""

    tokens: TokenIds = ()
    confidence: float = 0.0


NOTHING = TokenProposal()


@dataclass(slots=True)
class OverlapStats:
    """What came of guesses that were continued while the step they were about was computed."""

    hits: int = 0  # outcomes that had been guessed
    misses: int = 0
    late: int = 0  # sequences that stepped without a proposal because the drafter was not done
    wasted: int = 0  # continued guesses that did not come true
    passes: int = 0  # of the draft model over a continued guess, one or more tokens each
    drafted: int = 0  # tokens of these


class Proposer(Protocol):
    """Guesses what comes next. A wrong guess costs time, never the text: the target draws every
    token itself.
    """

    def propose(self, asks: Sequence[Ask]) -> Sequence[TokenProposal]:
        """One proposal an ask, at most `room` tokens each; none is fine."""
        ...

    def settled(self, key: int, proposal: TokenProposal, stood: int) -> None:
        """How many tokens of this sequence's last proposal stood; the others are gone."""
        return

    def ended(self, key: int) -> None:
        """The sequence is finished, or was cancelled: what is kept about it can go."""
        return

    def overlap(self) -> OverlapStats | None:
        """Of one that drafts beside the target: what came of its guesses."""
        return None


class BestProposer(Proposer):
    """Asks several proposers in turn, the cheapest first: one that is confident enough spares the
    others the work.
    """

    def __init__(self, proposers: Sequence[Proposer], enough: float = 0.7) -> None:
        self._proposers = tuple(proposers)
        self._enough = enough
        self._chosen: dict[int, Proposer] = {}  # whose proposal a sequence was given last

    def propose(self, asks: Sequence[Ask]) -> list[TokenProposal]:
        """The first confident proposal of each, else the most confident one."""
        best = [NOTHING] * len(asks)
        open_places = list(range(len(asks)))
        for proposer in self._proposers:
            found = proposer.propose([asks[place] for place in open_places]) if open_places else ()
            for place, proposal in zip(open_places, found, strict=True):
                if proposal.tokens and proposal.confidence >= best[place].confidence:
                    best[place], self._chosen[asks[place].key] = proposal, proposer
            open_places = [place for place in open_places if best[place].confidence < self._enough]
        return best

    def settled(self, key: int, proposal: TokenProposal, stood: int) -> None:
        """Told to the one whose proposal it was."""
        self._chosen[key].settled(key, proposal, stood)

    def ended(self, key: int) -> None:
        """Told to all."""
        self._chosen.pop(key, None)
        for proposer in self._proposers:
            proposer.ended(key)
