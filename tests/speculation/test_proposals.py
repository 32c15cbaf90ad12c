"""Tests of proposers that find likely tokens in earlier texts, and of the counters of speculation."""

from __future__ import annotations

import numpy as np
import pytest

from atts.accel.speculate.proposers import BestProposer, HintProposer, SuffixProposer
from atts.core import Sampling, TokenIds
from atts.engine import Speculated, speculated_since, together
from atts.local.seams import Ask, TokenProposal


def ask(
    ids: TokenIds,
    written: int,
    room: int = 8,
    key: int = 1,
    hint: TokenIds = (),
    rollout: str = "p/0",
) -> Ask:
    """Make the request that a proposer receives."""
    return Ask(key, ids, written, room, np.zeros(room), Sampling(), rollout, hint)


def test_a_hint_is_followed_and_found_again_after_a_difference() -> None:
    """Proposals follow a hint, which is a guess at the text: from its start, after accepted tokens,
    and wherever the text returns to the hint.
    """
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
    """A proposal continues the longest match in the text or its siblings, including finished
    siblings.

    Texts of other problems are not searched.
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


def test_confidence_in_matches_follows_their_acceptance() -> None:
    """Confidence in matches of a given length falls if tokens proposed from them are rejected, and
    rises if they are accepted.
    """
    suffixes = SuffixProposer()
    text = (1, 2, 3, 4, 5, 6)
    suffixes.propose([ask(text, 6, rollout="p/0")])
    seen = list[float]()
    for accepted in (0, 0, 0, 2, 2, 2, 2, 2, 2):
        (found,) = suffixes.propose([ask((9, 1, 2, 3), 4, 2, key=2, rollout="p/1")])
        suffixes.verified(2, found, accepted)
        seen.append(found.confidence)
    assert seen[0] > seen[3] < seen[-1]


def test_the_next_request_of_a_rollout_continues_its_text() -> None:
    """Tokens of a rollout's earlier requests are counted once, and discarded tokens can still be
    matched.
    """
    suffixes = SuffixProposer()
    first = (1, 2, 3, 40, 41, 42, 43)
    suffixes.propose([ask(first, 4, key=1)])
    suffixes.ended(1)
    replaced = (*first[:5], 50, 51, 52)
    suffixes.propose([ask(replaced, 1, key=2)])
    third, fourth = suffixes.propose(
        [ask((8, 41, 42, 43), 1, key=3), ask((8, 40, 41), 1, 2, key=4, rollout="p/1")]
    )
    assert third.tokens == (), "no token follows this suffix"
    assert fourth.tokens == (), "a match needs three tokens"
    (fifth,) = suffixes.propose([ask((8, 3, 40, 41), 1, 4, key=5, rollout="p/2")])
    assert fifth.tokens == (42, 43), "discarded tokens must be counted once and stay known"
    (sixth,) = suffixes.propose([ask((8, 40, 41, 50), 1, 4, key=6, rollout="p/3")])
    assert sixth.tokens == (51, 52)


class Sure(HintProposer):
    """A proposer that always proposes one token with a given confidence, and counts its calls."""

    def __init__(self, token: int, confidence: float) -> None:
        super().__init__()
        self.found = TokenProposal((token,), confidence)
        self.asked = 0
        self.told = 0

    def propose(self, asks: object) -> list[TokenProposal]:
        """Propose the same token for all texts."""
        self.asked += 1
        return [self.found] * len(list(asks))  # type: ignore[call-overload]

    def verified(self, key: int, proposal: TokenProposal, accepted: int) -> None:
        """Count the reports of acceptance."""
        self.told += 1


def test_a_confident_proposer_is_the_last_one_asked() -> None:
    """After a confident proposal no further proposer is called, and acceptance is reported to the
    proposer whose proposal was used.
    """
    unsure = Sure(5, 0.2)
    sure = Sure(6, 0.8)
    never = Sure(7, 0.9)
    best = BestProposer([unsure, sure, never])
    (found,) = best.propose([ask((1, 2), 1)])
    best.verified(1, found, 1)
    assert found.tokens == (6,)
    assert (unsure.asked, sure.asked, never.asked) == (1, 1, 0)
    assert (unsure.told, sure.told) == (0, 1)
    best.ended(1)


def test_counters_can_be_added_and_subtracted() -> None:
    """A position that only one of two counters has counts as zero in the other."""
    first = Speculated(2, 5, 3, (2, 2), (2, 1), 0.5, 4, 6, 3.0, 0.125, 4, 0.25)
    more = Speculated(1, 3, 3, (1, 1, 1), (1, 1, 1), 0.25, 2, 6, 2.0, 0.125, 3, 0.5)
    both = first + more
    assert (both.tested_at, both.accepted_at, both.chosen, both.came_tokens) == (
        (3, 3, 1),
        (3, 2, 1),
        12,
        7,
    )
    assert both - first == more
    assert both.accepted_share == pytest.approx((1.0, 2 / 3, 1.0))
    faster = str(Speculated(1, 2, 2, came_seconds=0.25, saved_seconds=0.5))
    assert faster.endswith("0.5 s faster than the 0.8 s expected without speculation")
    slower = str(Speculated(1, 2, 2, came_seconds=7.7, saved_seconds=-5.2))
    assert slower.endswith("5.2 s slower than the 2.5 s expected without speculation")
    assert str(Speculated()) == "no tokens proposed"
    assert together(None, first) == together(first, None) == first
    assert together(first, more) == both
    assert speculated_since(None, object()) is None
    silent = Speculated(choices=4, silence="no length was expected to pay", came_seconds=2.0)
    assert str(silent) == "no tokens proposed, no length was expected to pay"
    assert (silent + first).silence == (first + silent).silence == ""
    assert (silent + silent).silence == (silent - silent).silence == silent.silence
