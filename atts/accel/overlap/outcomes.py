"""The outcome cache: continuations of possible outcomes, ready before the outcome is known."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from math import prod
from typing import NamedTuple, TypeVar

Branch = TypeVar("Branch")


class Guessing(NamedTuple):
    """Choice of outcomes to continue besides full acceptance: so many of each position's most
    likely tokens.

    They are those that the drafter finds likeliest, or those that the target itself tells on its
    way.
    """

    fan: int
    is_told: bool = False


class OutcomeGuess(NamedTuple):
    """So many proposed tokens stand and this one follows, with this estimated probability."""

    accepted: int
    token: int
    probability: float


@dataclass(frozen=True, slots=True)
class PlaceLaw:
    """Expectation at one position: whether the proposed token is accepted, and what the target may
    write instead.
    """

    # that the proposed token is accepted if all before it are; of the place after the last one: 1
    acceptance: float
    tokens: Sequence[int]
    # probabilities of `tokens`, as far as they are known; they need not sum to 1
    probabilities: Sequence[float]


def ranked_outcomes(proposal: Sequence[int], places: Sequence[PlaceLaw]) -> list[OutcomeGuess]:
    """Rank the outcomes of verifying a proposal; `places` has one more than the proposal.

    With S_i the probability that i tokens stand, outcome (i, v) has S_i (1 - a_i) r_i(v), where r_i
    is the distribution of what else than the proposed token is written there; after the whole
    proposal (k, v) has S_k q(v).

    >>> first = PlaceLaw(0.75, (7, 8), (0.5, 0.25))
    >>> [tuple(guess) for guess in ranked_outcomes((7,), (first, PlaceLaw(1.0, (5,), (0.5,))))]
    [(1, 5, 0.375), (0, 8, 0.125)]
    """
    guesses: list[OutcomeGuess] = []
    reached = 1.0
    for accepted, place in enumerate(places):
        kept = list(zip(place.tokens, place.probabilities, strict=True))
        share = reached
        if accepted < len(proposal):
            chance_proposed = sum(chance for token, chance in kept if token == proposal[accepted])
            kept = [(token, chance) for token, chance in kept if token != proposal[accepted]]
            share = (
                reached * (1 - place.acceptance) / (1 - chance_proposed)
                if chance_proposed < 1
                else 0.0
            )
            reached *= place.acceptance
        guesses += [OutcomeGuess(accepted, token, share * chance) for token, chance in kept]
    return sorted(guesses, key=lambda guess: -guess.probability)


def most_worthwhile(
    chances: Sequence[float], length: Callable[[int], int], acceptance: Sequence[float]
) -> tuple[int, int]:
    """Choose how many of the likeliest outcomes to continue, and by how many tokens.

    `length(n)` is how many tokens n continuations get in the time there is, `acceptance` how likely
    each token of a proposal is accepted given those before it. One outcome is continued in any
    case.
    """
    best = (1, max(0, length(1)))
    covered = 0.0
    most = 0.0
    for count, chance in enumerate(chances, 1):
        covered += chance
        tokens = min(length(count), len(acceptance))
        if tokens < 1:
            break
        expected = covered * sum(prod(acceptance[:place]) for place in range(1, tokens + 1))
        if expected > most:
            best = (count, tokens)
            most = expected
    return best


class OutcomeCache(dict[tuple[int, int], Branch]):
    """The branches of one step, by outcome; used once: one is selected, and all others are given
    back.
    """

    def put(self, accepted: int, token: int, branch: Branch) -> None:
        """Keep what follows this outcome."""
        assert (accepted, token) not in self, "an outcome is continued once"
        self[accepted, token] = branch

    def select(self, accepted: int, token: int) -> tuple[Branch | None, list[Branch]]:
        """Return the branch that follows the actual outcome (None if not guessed), and the branches
        not needed.
        """
        chosen = self.pop((accepted, token), None)
        others = list(self.values())
        self.clear()
        return chosen, others
