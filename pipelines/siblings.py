"""What the rollouts of one problem know of each other: answers so far, rounds, and lines to fork from."""

from __future__ import annotations

from collections.abc import Mapping

from atts.core import Decision, Rollout
from atts.pipelines.context import Context
from atts.pipelines.gates import Features, RoundGate
from atts.pipelines.votes import classes

Round = Mapping[int, tuple[Features, float]]


class Siblings:
    """One problem's rollouts by sample; each line keeps its own entry current."""

    def __init__(self, context: Context) -> None:
        self._context = context
        gate = context.gate  # which kind it is, is asked here once: the check is dear, and turns are many
        self.round_gate = gate if isinstance(gate, RoundGate) else None
        self.gate = None if isinstance(gate, RoundGate) else gate
        self.rollouts: dict[int, Rollout] = {}
        self.claimed: set[tuple[int, int]] = set()  # (sample, turn): forked from already
        self.judged: list[tuple[Features, Decision]] = []  # by a gate that decides one by one, in that order
        self._round: Round = {}
        self._ranked: Mapping[int, Decision] = {}

    def ranked(self, round_: Round, gate: RoundGate) -> Mapping[int, Decision]:
        """The decisions of a round, made once by whoever comes first; every member sees the same."""
        if self._round is not round_:  # no round begins before every member has read the last one's decisions
            decisions = gate.decide_round([round_[sample] for sample in sorted(round_)])
            self._round, self._ranked = round_, dict(zip(sorted(round_), decisions, strict=True))
        return self._ranked

    def answers(self, but: int) -> list[str]:
        """Answers of the other rollouts that have one."""
        ended = (line for sample, line in sorted(self.rollouts.items()) if sample != but and line.finish)
        return [line.answer for line in ended if line.answer is not None]

    def agreement(self, but: int, answer: str | None) -> tuple[int, float, bool]:
        """Answered siblings, the leading answer's share among them, and whether `answer` belongs to it."""
        others = self.answers(but)
        if not others:
            return 0, 0.0, False
        labels = classes([*others, *([answer] if answer is not None else [])], self._context.answers.group)
        theirs = labels[: len(others)]
        lead = max(set(theirs), key=theirs.count)
        return len(others), theirs.count(lead) / len(others), answer is not None and labels[-1] == lead
