"""The pure parts of speculation: walks, ratio tests, and proposers that look things up."""

from __future__ import annotations

from functools import cache
from itertools import product

import numpy as np
import pytest
from numpy.typing import NDArray

import atts.speculation.verifying as verifying
from atts.core import Sampling, TokenIds
from atts.engine import Speculated, speculated_since, together
from atts.sampling import Seed, uniforms
from atts.speculation import (
    Ask,
    BestProposer,
    HintProposer,
    SuffixProposer,
    TokenProposal,
    ratio_walk,
)
from atts.speculation.verifying import residual


def ask(
    ids: TokenIds,
    written: int,
    room: int = 8,
    key: int = 1,
    hint: TokenIds = (),
    rollout: str = "p/0",
) -> Ask:
    """What a proposer is told."""
    return Ask(key, ids, written, room, np.zeros(room), Sampling(), rollout, hint)


@cache
def laws(seed: int, places: int, size: int) -> NDArray[np.float64]:
    """Random laws, one with a token of no mass."""
    found = np.random.default_rng(seed).dirichlet(np.full(size, 0.7), places)
    found[0, 0] = 0.0
    normed: NDArray[np.float64] = found / found.sum(-1, keepdims=True)
    return normed


def one_round(
    target: NDArray[np.float64],
    proposed: NDArray[np.float64] | None,
    token: int,
    accept: float,
    residual: float,
) -> int:
    """The first token that a round of one proposed token writes."""
    others = None if proposed is None else proposed[:1]
    stood, instead = ratio_walk((token,), target, others, np.array([accept]), np.array([residual]))
    return token if stood else int(instead or 0)


def law_of_a_round(
    p: NDArray[np.float64], q: NDArray[np.float64], proposed: NDArray[np.float64] | None
) -> float:
    """How far the law of a round's first token is from the target's, by enumeration; `q` is what
    tokens come from.

    The uniforms enter only through where they lie between the borders of the laws. `proposed` is
    what the test is told.
    """
    law = np.zeros(5)
    for token in range(5):
        other = np.eye(5)[token] if proposed is None else proposed[0]
        stands = min(1.0, p[0, token] / other[token]) if other[token] else 0.0
        law[token] += q[0, token] * stands
        if stands < 1:
            left = np.maximum(p[0] - other, 0)
            borders = np.append(0.0, (left / left.sum()).cumsum())
            for low, high in zip(borders, borders[1:], strict=False):
                if high > low:
                    written = one_round(p, proposed, token, (1 + stands) / 2, (low + high) / 2)
                    law[written] += q[0, token] * (1 - stands) * (high - low)
        if 0 < stands and q[0, token]:
            written = one_round(p, proposed, token, stands * 0.999, 0.5)
            law[token] -= q[0, token] * stands * (written != token)
    return float(np.abs(law - p[0]).sum() / 2)


@pytest.mark.parametrize("seed", range(6))
def test_a_round_of_the_ratio_test_has_the_law_of_the_target(seed: int) -> None:
    """For tokens that were drawn, and for one that was looked up and is always the same."""
    p = laws(seed, 1, 5)
    q = laws(seed + 50, 1, 5)
    assert law_of_a_round(p, q, q) < 1e-12
    assert law_of_a_round(p, np.eye(5)[[2]], None) < 1e-12
    assert law_of_a_round(p, q, None) < 1e-12, (
        "a token counts as certain once it is known, drawn or not"
    )


RATIO_BUGS: dict[str, tuple[str, object]] = {
    "the target's law instead of what is left of it": ("residual", lambda law, proposed: law),
    "what is left of the proposal's law": (
        "residual",
        lambda law, proposed: residual(proposed, law),
    ),
    "what is left, by size": ("draw", lambda law, uniform: int(law.argmax())),
    "the last token of what is left": ("draw", lambda law, uniform: int(np.flatnonzero(law)[-1])),
}


@pytest.mark.parametrize("bug", RATIO_BUGS)
def test_a_wrong_residual_is_found(bug: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """The enumeration sees what takes the place of a token that fell."""
    name, change = RATIO_BUGS[bug]
    monkeypatch.setattr(verifying, name, change)
    assert (
        max(
            law_of_a_round(laws(seed, 1, 5), laws(seed + 50, 1, 5), laws(seed + 50, 1, 5))
            for seed in range(6)
        )
        > 0.02
    )


@pytest.mark.parametrize("bug", ["the most likely token for sure", "a calibrated law"])
def test_a_law_that_tokens_were_not_drawn_from_is_found(bug: str) -> None:
    """What the test is told of a drawn token must be what it was drawn from."""
    p = laws(1, 1, 5)
    q = laws(51, 1, 5)
    told = np.eye(5)[q.argmax(-1)] if bug.startswith("the most") else laws(52, 1, 5)
    assert law_of_a_round(p, q, told) > 0.02


def rounds(seed: int, reuse: bool) -> tuple[int, ...]:
    """Four tokens of a Markov law, three proposed at a time from another one; with `reuse`, by one
    stream for all.
    """
    p = laws(1, 4, 3)
    q = laws(2, 4, 3)
    kinds = ("sample", "sample", "sample") if reuse else ("sample", "accept", "residual")
    draws, accepts, residuals = (uniforms(Seed(seed, purpose=kind), 8) for kind in kinds)
    text = [0]
    while len(text) < 5:
        proposal = list[int]()
        for step in range(3):
            last = (text + proposal)[-1]
            proposal.append(
                min(
                    2, int(np.searchsorted(q[last].cumsum(), draws[len(text) + step], side="right"))
                )
            )
        before = [*text[-1:], *proposal]
        at = len(text)
        target = p[before]
        stood, instead = ratio_walk(proposal, target, q[before[:3]], accepts[at:], residuals[at:])
        bonus = min(2, int(np.searchsorted(p[before[3]].cumsum(), draws[at + 3], side="right")))
        text += [*proposal[:stood], bonus if instead is None else instead]
    return tuple(text[1:5])


def deviation(count: int, reuse: bool) -> float:
    """How far, in standard deviations, the joint law of four tokens is from the target's."""
    p = laws(1, 4, 3)
    seen = np.zeros((3,) * 4)
    for seed in range(count):
        seen[rounds(seed, reuse)] += 1
    expected = np.array([
        p[0, a] * p[a, b] * p[b, c] * p[c, d] * count for a, b, c, d in product(range(3), repeat=4)
    ])  # fmt: skip
    kept = expected > 0
    assert seen.reshape(-1)[~kept].sum() == 0 or reuse
    degrees = int(kept.sum()) - 1
    chi = float(((seen.reshape(-1) - expected)[kept] ** 2 / expected[kept]).sum())
    return (chi - degrees) / float(np.sqrt(2 * degrees))


@pytest.mark.slow
def test_several_rounds_have_the_joint_law_of_the_target() -> None:
    """60,000 runs of four tokens; the same with one stream for draws, tests and residuals is found
    out.
    """
    assert abs(deviation(60_000, reuse=False)) < 4
    assert deviation(60_000, reuse=True) > 40


def test_several_rounds_with_streams_of_their_own_pass_where_a_shared_stream_does_not() -> None:
    """The same with few runs, which tell the two apart all the same."""
    assert abs(deviation(500, reuse=False)) < 4
    assert deviation(500, reuse=True) > 8


def test_a_hint_is_followed_and_found_again_after_a_difference() -> None:
    """From its start, on after what stands, and from where the text meets it again."""
    hints = HintProposer()
    hint = tuple(range(10, 30))
    assert hints.propose([ask((1, 2), 0, 4, hint=hint)])[0].tokens == hint[:4]
    assert hints.propose([ask((1, 2, *hint[:6]), 6, 3, hint=hint)])[0].tokens == hint[6:9]
    assert hints.propose([ask((1, 2, *hint[:6], 99), 7, 3, hint=hint)])[0].tokens == ()
    met = (1, 2, *hint[:6], 99, *hint[9:13])
    assert hints.propose([ask(met, 11, 3, hint=hint)])[0].tokens == hint[13:16]
    assert hints.propose([ask((1, 2, *hint), 20, 3, hint=hint)])[0].tokens == ()
    hints.ended(1)


def test_a_suffix_is_looked_up_in_its_own_text_and_in_siblings() -> None:
    """The longest match goes on; texts of other problems are not looked at; a finished one stays
    known.
    """
    suffixes = SuffixProposer()
    leader = (1, 2, 3, *range(40, 60))
    assert suffixes.propose([ask(leader, 20, rollout="p/0")])[0].tokens == ()
    suffixes.ended(1)
    (found,) = suffixes.propose([ask((1, 2, 3, 40, 41, 42), 3, 4, key=2, rollout="p/1")])
    assert found.tokens == (43, 44, 45, 46)
    assert (
        suffixes.propose([ask((1, 2, 3, 40, 41, 42), 3, 4, key=3, rollout="q/0")])[0].tokens == ()
    )
    own = (7, 8, 9, 10, 11, 12, 7, 8, 9)
    assert suffixes.propose([ask(own, 9, 2, key=4, rollout="r/0")])[0].tokens == (10, 11)


def test_a_suffix_learns_how_far_matches_of_a_length_go() -> None:
    """Confidence falls where they do not stand, and rises where they do."""
    suffixes = SuffixProposer()
    text = (1, 2, 3, 4, 5, 6)
    suffixes.propose([ask(text, 6, rollout="p/0")])
    seen = list[float]()
    for stood in (0, 0, 0, 2, 2, 2, 2, 2, 2):
        (found,) = suffixes.propose([ask((9, 1, 2, 3), 4, 2, key=2, rollout="p/1")])
        suffixes.settled(2, found, stood)
        seen.append(found.confidence)
    assert seen[0] > seen[3] < seen[-1]


def test_the_next_request_of_a_rollout_goes_on_with_its_text() -> None:
    """What its earlier requests wrote is not counted again, and what was taken back is still known."""
    suffixes = SuffixProposer()
    first = (1, 2, 3, 40, 41, 42, 43)
    suffixes.propose([ask(first, 4, key=1)])
    suffixes.ended(1)
    replaced = (*first[:5], 50, 51, 52)
    suffixes.propose([ask(replaced, 1, key=2)])
    third, fourth = suffixes.propose(
        [ask((8, 41, 42, 43), 1, key=3), ask((8, 40, 41), 1, 2, key=4, rollout="p/1")]
    )
    assert third.tokens == (), "nothing came after it"
    assert fourth.tokens == (), "a match is three tokens long"
    (fifth,) = suffixes.propose([ask((8, 3, 40, 41), 1, 4, key=5, rollout="p/2")])
    assert fifth.tokens == (42, 43), "what was taken back is counted once, and known"
    (sixth,) = suffixes.propose([ask((8, 40, 41, 50), 1, 4, key=6, rollout="p/3")])
    assert sixth.tokens == (51, 52)


class Sure(HintProposer):
    """Proposes one token with a confidence of one's own choice, and counts."""

    def __init__(self, token: int, confidence: float) -> None:
        super().__init__()
        self.found = TokenProposal((token,), confidence)
        self.asked = 0
        self.told = 0

    def propose(self, asks: object) -> list[TokenProposal]:
        """The same for all."""
        self.asked += 1
        return [self.found] * len(list(asks))  # type: ignore[call-overload]

    def settled(self, key: int, proposal: TokenProposal, stood: int) -> None:
        """Counted."""
        self.told += 1


def test_the_best_proposer_spares_the_others_the_work() -> None:
    """One that is confident enough is the last that is asked; what stood is told to the one it came
    from.
    """
    unsure = Sure(5, 0.2)
    sure = Sure(6, 0.8)
    never = Sure(7, 0.9)
    best = BestProposer([unsure, sure, never])
    (found,) = best.propose([ask((1, 2), 1)])
    best.settled(1, found, 1)
    assert found.tokens == (6,)
    assert (unsure.asked, sure.asked, never.asked) == (1, 1, 0)
    assert (unsure.told, sure.told) == (0, 1)
    best.ended(1)


def test_counters_add_up_and_what_came_between_is_their_difference() -> None:
    """Places that only one of them has are those of the other's zeros."""
    first = Speculated(2, 5, 3, (2, 2), (2, 1), 0.5, 4, 6, 3.0, 0.125, 4, 0.25)
    more = Speculated(1, 3, 3, (1, 1, 1), (1, 1, 1), 0.25, 2, 6, 2.0, 0.125, 3, 0.5)
    both = first + more
    assert (both.tested_at, both.stood_at, both.chosen, both.came_tokens) == (
        (3, 3, 1),
        (3, 2, 1),
        12,
        7,
    )
    assert both - first == more
    assert both.by_place == pytest.approx((1.0, 2 / 3, 1.0))
    assert "0.5 s saved of 0.8" in str(Speculated(1, 2, 2, came_seconds=0.25, saved_seconds=0.5))
    assert together(None, first) == together(first, None) == first
    assert together(first, more) == both
    assert speculated_since(None, object()) is None
