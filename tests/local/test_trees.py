"""Proposals that are trees: another token at some places, which stands where the chain does not."""

from __future__ import annotations

import random
from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from atts.core import Sampling, TokenIds
from atts.errors import OptionError
from atts.local import LocalOptions
from atts.local.messages import Cancel, Command
from atts.local.scheduler import Scheduler
from atts.local.speculating import Speculation
from atts.speculation import Ask, Proposer, TokenProposal
from tests.local.speculating import Make, counts, requests, run, same, texts

HOT = (Sampling(0.0), Sampling(0.8), Sampling(1.0, top_p=0.9))


class Beside(Proposer):
    """Chains that are wrong from a place on, and what is right there as another token; or nothing
    but nonsense.
    """

    def __init__(self, texts: dict[int, TokenIds], kind: str) -> None:
        self._texts = texts
        self._kind = kind
        self._random = random.Random(5)

    def propose(self, asks: Sequence[Ask]) -> list[TokenProposal]:
        """Wrong at a place between the first and the last."""
        return [self._next(ask) for ask in asks]

    def _next(self, ask: Ask) -> TokenProposal:
        right = self._texts[ask.key][ask.written : ask.written + ask.room]
        draw = self._random
        if self._kind == "nonsense":
            pairs = [(draw.randrange(-1, ask.room + 3), draw.randrange(-5, 400)) for _ in range(6)]
            return TokenProposal(
                tuple(draw.choices(range(3, 300), k=ask.room)),
                others=tuple(p for p in pairs if p[0] >= 0),
            )
        place = 0 if self._kind == "first" else draw.randrange(max(1, len(right)))
        wrong = (*right[:place], *[(token + 1) % 300 for token in right[place:]])
        return TokenProposal(wrong, others=tuple((at, token) for at, token in enumerate(right)))


@pytest.mark.parametrize("kind", ["any", "first", "nonsense"])
def test_another_token_stands_where_the_chain_does_not(kind: str, make_model: Make) -> None:
    """Ids, ends and log-probabilities to the bit: later steps read the keys and values of the
    branch.
    """
    folder = make_model("llama")
    orders = requests(7, 24)
    plain = run(folder, [orders])
    done = run(folder, [orders], Beside(texts(plain), kind), 5)
    assert same(plain, done)
    if kind == "nonsense":
        return
    assert counts(done).branched >= 0.6 * counts(done).rounds
    if kind == "first":
        assert counts(done).accepted == 0
        assert counts(done).choices <= 0.6 * done.stats.sampled_tokens


@pytest.mark.parametrize("tree", [1, 4])
@pytest.mark.parametrize("kernel", ["native", "torch"])
def test_a_drafter_proposes_its_next_choice_too(
    kernel: str, tree: int, make_model: Make, near: Path
) -> None:
    """Under every law, filters included; the chain is what it would be alone, so no fewer tokens
    stand.
    """
    folder = make_model("llama")
    orders = requests(7, 40) if kernel == "native" else requests(4, 40, [Sampling(0.0)])
    plain = run(folder, [orders], kernel=kernel)
    chain = run(folder, [orders], None, 4, near, kernel=kernel)
    done = run(folder, [orders], None, 4, near, tree=tree, kernel=kernel)
    assert same(plain, done) or (kernel == "torch" and texts(plain) == texts(done))
    assert counts(done).branched > 0
    assert counts(done).trouble == ""
    assert counts(done).choices < counts(chain).choices, "fewer steps of the sequences"


def test_trees_come_and_go(make_model: Make, near: Path) -> None:
    """Cancelled, pre-empted and begun meanwhile, with few slots: nothing is lost, and no slot kept."""
    folder = make_model("llama")
    orders = requests(6, 30, HOT)
    late = [replace(order, request_id=order.request_id + 20) for order in orders]
    script: list[list[Command]] = [[*orders], *[[]] * 5, [*late, Cancel(3)], [Cancel(24)]]
    ways: dict[str, Any] = {"max_batch": 4, "kv_tokens": 100}
    plain = run(folder, script, **ways)
    done = run(folder, script, None, 4, near, tree=4, **ways)
    shared = texts(plain).keys() & texts(done).keys()
    assert len(shared) >= 10
    assert all(texts(plain)[key] == texts(done)[key] for key in shared)
    assert done.stats.preempted > 0
    assert done.stats.kv_locked == 0
    assert counts(done).trouble == ""


def other_numbers(places: Callable[..., list[int]]) -> Callable[..., list[int]]:
    """Branches draw with the numbers of the tokens in them, not of those after."""

    def found(self: Any, sequence: Any, width: int) -> list[int]:
        branches = len(self._branches.get(sequence.request_id, ()))
        return [
            at - (row >= width - branches) for row, at in enumerate(places(self, sequence, width))
        ]

    return found


def taken_untested(settle: Callable[..., list[int]]) -> Callable[..., list[int]]:
    """The first branch of the place stands, whatever was drawn there."""

    def found(self: Any, sequence: Any, drawn: list[int]) -> list[int]:
        branches = self._branches.get(sequence.request_id, [])
        stood = next(
            (
                at
                for at, token in enumerate(self._asked[sequence.request_id][0].tokens)
                if drawn[at] != token
            ),
            -1,
        )
        self._branches[sequence.request_id] = [
            b._replace(token=drawn[stood]) if b.place == stood else b for b in branches
        ]
        return settle(self, sequence, drawn)

    return found


BUGS: dict[str, tuple[Any, str, Callable[..., Any]]] = {
    "a branch's keys are left behind": (Scheduler, "take_branch", lambda take: lambda *args: None),
    "branches draw with other numbers": (Speculation, "places", other_numbers),
    "a branch stands untested": (Speculation, "settle", taken_untested),
}


@pytest.mark.parametrize("bug", BUGS)
def test_planted_bugs_are_found(
    bug: str, make_model: Make, near: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Each changes a text or a log-probability."""
    folder = make_model("llama")
    orders = requests(3, 40, HOT[1:])
    plain = run(folder, [orders])
    assert same(plain, run(folder, [orders], None, 4, near, tree=4))
    owner, name, change = BUGS[bug]
    monkeypatch.setattr(owner, name, change(getattr(owner, name)))
    assert not same(plain, run(folder, [orders], None, 4, near, tree=4))


def test_a_tree_is_of_what_is_drafted_before_a_step() -> None:
    """With a number of tokens; anything else is refused."""
    fit = LocalOptions(drafter="embedded:draft", speculate="draft", k=4, tree=4)
    fit.check()
    for wrong in (
        {"tree": 5},
        {"tree": -1},
        {"k": None},
        {"speculate": "pearl"},
        {"speculate": None},
        {"fuzzy": 2},
    ):
        with pytest.raises(OptionError, match="tree"):
            replace(fit, **wrong).check()
