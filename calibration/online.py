"""The online calibrator, which decides on each score and learns from the actions carried out.

The last part replays recorded scores through a calibrator, and measures its rate control.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass, field
from fractions import Fraction
from hashlib import blake2b
from pathlib import Path
from statistics import NormalDist
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from atts.calibration.conformal import Rate, exact_rate
from atts.calibration.controllers import DEFAULTS, SLACK, Mode, RunEnd, Tuning, build_mode
from atts.calibration.drift import DriftEvent, DriftMonitor, DriftPolicy
from atts.calibration.guarantees import Facts, describe
from atts.calibration.pools import LengthStrata
from atts.calibration.scores import (
    FEW_SCORES,
    PERPLEXITY,
    Scale,
    StoredScores,
    check_fingerprint,
    check_stored,
    plain_number,
    whole_number,
)
from atts.calibration.state import Persisted, read_state, same, strict, write_state
from atts.core import Action, Decision, Origin
from atts.errors import CalibrationInputError, OptionError, counted

Group = int | tuple[str, int] | None
"""The group of stored scores with which a score is compared: a turn, a (question, turn), or None
for all scores.
"""

HOLD = 64
"""Default limit on the number of scores that wait because an earlier chunk has no score yet."""

_KIND = "atts calibrator"
_VERSION = 1
_NORMAL = NormalDist()
# After a drift alarm with the action "widen", the next `_WIDENED` decisions use a rate that is
# `_WIDER` times as high.
_WIDENED = 500
_WIDER = 1.5
# Reading a damaged or edited state may raise these exceptions.
_UNREADABLE = (
    LookupError,
    TypeError,
    ValueError,
    AttributeError,
    ArithmeticError,
    RecursionError,
    OptionError,
)


class PendingScore(NamedTuple):
    """A score that waits to join a pool."""

    nonconformity: float
    question: str
    turn: int
    length: float | None  # length of the chunk, if scores are ranked by length


class ReorderBuffer:
    """A buffer that returns scores in the order of their issue numbers. A score waits until all
    smaller issue numbers were pushed or skipped.

    Short chunks finish first, so pools filled in order of completion would be biased towards short
    chunks. Issues number the chunks from 0 without gaps; a chunk that never gets a score must be
    skipped. At most `limit` scores wait. If more would wait, the buffer gives up the oldest missing
    issues and counts them in `given_up`. If the score of such an issue arrives later, it is
    returned at once.
    """

    __slots__ = ("_limit", "_next", "_skipped", "_waiting", "given_up")

    def __init__(self, limit: int = HOLD) -> None:
        """Create a buffer in which at most `limit` scores wait.

        :raises CalibrationInputError: for a limit below 1.
        """
        if limit < 1:
            raise CalibrationInputError("limit of waiting scores", limit, "at least 1")
        self._limit = limit
        self._next = 0
        self._waiting = dict[int, PendingScore]()
        self._skipped = set[int]()
        self.given_up = 0

    def push(self, issue: int, score: PendingScore) -> list[PendingScore]:
        """Add the score of an issue; return all scores that need not wait any longer, in order of
        issue.

        :raises CalibrationInputError: for a negative issue.
        """
        if issue < 0:
            raise CalibrationInputError("issue", issue, "a number of at least 0")
        if issue < self._next or issue in self._waiting:
            return [score]
        self._waiting[issue] = score
        return self._release()

    def skip(self, issue: int) -> list[PendingScore]:
        """Stop waiting for this issue; return all scores that need not wait any longer."""
        if issue >= self._next:
            self._skipped.add(issue)
        return self._release()

    @property
    def next_issue(self) -> int:
        """Return one more than the highest issue that was pushed or skipped."""
        return max([self._next, *(issue + 1 for issue in (*self._waiting, *self._skipped))])

    def has_waiting(self, question: str) -> bool:
        """Return True if a score of this question waits for an earlier issue."""
        return any(score.question == question for score in self._waiting.values())

    def flush(self) -> list[PendingScore]:
        """Remove and return all waiting scores, in order of issue."""
        released = [self._waiting[issue] for issue in sorted(self._waiting)]
        if self._waiting:
            self._next = max(self._waiting) + 1
        self._waiting = {}
        self._skipped = {issue for issue in self._skipped if issue >= self._next}
        return released

    def _release(self) -> list[PendingScore]:
        released = list[PendingScore]()
        while True:
            if self._next in self._waiting:
                released.append(self._waiting.pop(self._next))
            elif self._next in self._skipped:
                self._skipped.discard(self._next)
            elif len(self._waiting) > self._limit:
                # Too many scores wait for this missing score, so give it up. Otherwise one lost
                # score would keep all later scores out of the pools.
                self.given_up += 1
            else:
                return released
            self._next += 1

    def state(self) -> dict[str, Any]:
        """Return the waiting scores and the missing issues, as JSON."""
        return {
            "next": self._next,
            "held": [[issue, *score] for issue, score in self._waiting.items()],
            "skipped": sorted(self._skipped),
            "given_up": self.given_up,
        }

    def restore(self, state: Mapping[str, Any]) -> None:
        """Restore the state that `state` returned."""
        self._next = int(state["next"])
        self.given_up = int(state["given_up"])
        self._waiting = {}
        for issue, nonconformity, question, turn, length in state["held"]:
            score = PendingScore(float(nonconformity), str(question), int(turn), length)
            self._waiting[int(issue)] = score
        self._skipped = {int(issue) for issue in state["skipped"]}


class Calibrator(Persisted):
    """A calibrator that decides on a stream of scores and keeps the share of escalations at `rate`.

    The mode sets how strictly the rate is kept, and over which chunks. `decide` changes nothing: it
    may be called repeatedly, in any order, and for chunks that are dropped later. `observe` stores
    the score and the action carried out. Both methods are deterministic for a given seed.

    >>> calibrator = Calibrator(rate=0.25, mode="marginal", stored=[1.1, 1.2, 1.3, 1.4])
    >>> decision = calibrator.decide(9.0, question="q7")
    >>> decision.action
    'escalate'
    >>> calibrator.observe(decision)
    """

    saved = ("decided", "escalated", "_pool", "_controller")

    def __init__(
        self,
        rate: float | Fraction,
        mode: Mode = "question-turn",
        *,
        seed: int = 0,
        scale: Scale = PERPLEXITY,
        stored: StoredScores | Sequence[float] = (),
        fingerprint: Mapping[str, object] | None = None,
        drift: DriftPolicy = "recalibrate",
        window: int | None = None,
        decay: float | None = None,
        hold: int = HOLD,
        tuning: Tuning = DEFAULTS,
        by_length: bool = False,
        cap: Rate | None = None,
    ) -> None:
        """Create a calibrator from the scores of a calibration run; `drift` names what a drift
        alarm does.

        `fingerprint` has the conditions of this run, such as its models. `hold` is the number of
        scores that may wait for an earlier issue; it must be at least the number of chunks in
        flight. With `by_length` every mode replaces a score by its rank among chunks of about the
        same length. At most ceil(`cap` * n) of the first n decisions escalate, for every n, if each
        decision is observed before the next one is taken.

        :raises CalibrationInputError: for an impossible rate, cap, window, decay or stored score;
            mode "split" without stored scores; or `by_length` with stored scores whose lengths are
            not known.
        :raises OptionError: for an unknown mode or drift policy.
        :raises FingerprintError: if the stored scores were made under other conditions.
        """
        self.rate = exact_rate(rate)
        self.cap = None if cap is None else exact_rate(cap, "cap")
        self.mode: Mode = mode
        self.seed = seed
        self.tuning = tuning
        self._nominal = float(self.rate)
        if not isinstance(stored, StoredScores):
            stored = StoredScores.of(stored, scale=scale)
        self.stored = stored
        self.scale = self.stored.scale
        self.fingerprint = dict(self.stored.fingerprint if fingerprint is None else fingerprint)
        check_stored(self.stored, self.fingerprint, mode, by_length=by_length)
        # These options are saved with the state, under these names. "cap" and "by_length" are saved
        # only if they are set.
        self._options: dict[str, object] = {
            "drift": drift,
            "window": window,
            "decay": decay,
            "hold": hold,
        }
        if cap is not None:
            self._options["cap"] = str(self.cap)
        if by_length:
            self._options["by_length"] = True
        self.decided = 0
        self.escalated = 0
        self._strata = LengthStrata() if by_length else None
        self._pool, self._controller = build_mode(mode, self._nominal, window, decay, tuning)
        self._order = ReorderBuffer(hold)
        self._end = RunEnd()
        # Questions that are finished, but may still have scores in the reorder buffer. Their data
        # is dropped when the buffer has no more scores of them.
        self._over = set[str]()
        # What is being done about the last drift alarm. If that is "widen", `_widened` is the number
        # of decisions that still use the higher rate.
        self._alert: DriftPolicy | None = None
        self._widened = 0
        self._take_stored(drift)

    def _take_stored(self, drift: DriftPolicy) -> None:
        """Add the stored scores to the pools in order, then create the drift monitor."""
        for position, (nonconformity, question, turn, length) in enumerate(self.stored.rows()):
            value = self._pool_value(nonconformity, "", 0, position, length)
            self._pool.add(value, question or f"stored {position}", turn, live=False)
            self._store_length(nonconformity, length)
        self._monitor = DriftMonitor(self.stored, policy=drift)
        for event in self._monitor.events:
            self._act_on(event)

    def decide(
        self,
        score: float,
        question: str = "",
        turn: int = 0,
        sample: int | None = None,
        issue: int | None = None,
        left: float | None = None,
        length: float | None = None,
    ) -> Decision:
        """Return the decision on a chunk with this score; store nothing.

        The decision depends only on stored scores and on observed decisions. `left` is the share of
        the run's decisions that is expected to be left, including this decision. It is None if the
        share is not known. `length` is the length of the chunk, in tokens or any other unit; it is
        used if ranks are by length.

        :raises CalibrationInputError: if the score is not in the declared domain, a turn or sample
            is below 0, `left` is not in [0, 1], or ranks are by length and the length is missing or
            impossible.
        """
        if turn < 0 or (sample is not None and sample < 0):
            raise CalibrationInputError(
                "turn and sample", (turn, sample), "whole numbers of at least 0"
            )
        if left is not None and not 0 <= left <= 1:
            raise CalibrationInputError("left", left, "a fraction in [0, 1]")
        nonconformity = self.scale.nonconformity(score)
        value = self._pool_value(nonconformity, question, turn, sample, length)
        self._end = self._run_end(left)
        theta = self._uniform(nonconformity, question, turn, sample)
        rank = self._pool.rank(value, question, turn)
        p = rank.p(theta)
        rate = self._controller.current_rate(value, question, turn, self._end)
        if left is not None and self.mode == "aci" and rate < 1:
            # A rank among few scores is unreliable, so escalate less for now. The controller
            # escalates more later, when ranks are reliable, to reach the rate.
            rate *= min(1.0, rank.size / FEW_SCORES)
        if self._alert == "escalate":
            rate = 1.0
        elif self._alert and self._widened:
            rate *= _WIDER
        wants_target = rate >= 1 or (rate > 0 and p > 1 - rate)
        action: Action = "escalate" if wants_target else "accept"
        origin: Origin = "gate"
        # The controller's rate may leave [0, 1]; a threshold for p-values may not.
        threshold = min(1.0, max(0.0, 1 - rate))
        why = f"p-value {p:.4f} {'>' if wants_target else '<='} {threshold:.4f}"
        if wants_target and self._is_cap_reached():
            action = "accept"
            origin = "budget"
            why = f"{why}; the hard cap currently allows no escalation"
        counted_length = None
        if length is not None and self._strata is not None:
            counted_length = float(length)
        return Decision(
            action,
            self._nominal,
            question,
            turn,
            sample or 0,
            issue=issue,
            score=float(score),
            p=p,
            why=why,
            origin=origin,
            length=counted_length,
        )

    def _run_end(self, left: float | None) -> RunEnd:
        """Estimate the number of decisions left and the deficit allowed at the end, from the share
        of decisions that is left.
        """
        expected = math.inf
        if left is not None and left < 1:
            expected = self.decided * left / (1 - left)
        return RunEnd(expected, SLACK * (self.decided + expected))

    def _is_cap_reached(self) -> bool:
        """Return whether escalating the n-th decision, which is next, would exceed ceil(cap * n),
        in exact arithmetic.
        """
        if self.cap is None:
            return False
        return self.escalated >= math.ceil(self.cap * (self.decided + 1))

    def observe(self, decision: Decision, escalated: bool | None = None) -> None:
        """Record a decision. `escalated` is the action that was carried out, if it differs from the
        decision because another rule, such as a hard cap, overrode it.

        The realised rate changes at once, but the score is added to the pools in the order of
        issues. A decision without a score (verification was skipped or failed) changes only the
        rate.

        :raises CalibrationInputError: if the score of the decision is not in the declared domain.
        """
        is_escalated = decision.action == "escalate" if escalated is None else escalated
        question = decision.question
        turn = decision.turn
        if decision.score is None:
            self._count(None, question, turn, is_escalated)
            if decision.issue is not None:
                self.skip(decision.issue)
            return
        nonconformity = self.scale.nonconformity(decision.score)
        value = self._pool_value(nonconformity, question, turn, decision.sample, decision.length)
        self._count(value, question, turn, is_escalated)
        pending = PendingScore(nonconformity, question, turn, decision.length)
        if decision.issue is None:
            self._learn_all([pending])
        else:
            self._learn_all(self._order.push(decision.issue, pending))

    def skip(self, issue: int) -> None:
        """Skip the score of this issue, because its chunk was dropped or could not be scored."""
        self._learn_all(self._order.skip(issue))

    def forget(self, question: str) -> None:
        """Drop the state of a finished question.

        The question's scores stay in the pools of all questions, so decisions on other questions do
        not change. Memory then grows only with the number of unfinished questions.
        """
        self._over.add(question)
        self._forget_over()

    def _forget_over(self) -> None:
        # A question may be dropped only after its last score left the reorder buffer. A later score
        # would add the question to the pools again.
        ready = [question for question in self._over if not self._order.has_waiting(question)]
        for question in ready:
            self._over.discard(question)
            self._pool.forget(question)
            self._controller.forget(question)

    @property
    def settings(self) -> tuple[object, ...]:
        """Return the settings that must be the same if one calibrator continues the work of
        another.
        """
        limits = (self._options.get("cap"), self._options.get("by_length"))
        return self.rate, self.mode, self.seed, self.stored, self.fingerprint, limits

    @property
    def next_issue(self) -> int:
        """Return the issue number that the next score gets: one more than the highest number so
        far.
        """
        return self._order.next_issue

    def settle(self) -> None:
        """End the run: add all waiting scores to the pools, although earlier scores may be missing.

        The states of two calibrators can be merged only after this call.
        """
        self._learn_all(self._order.flush())

    def p_value(self, score: float, group: Group = None, length: float | None = None) -> float:
        """Return the conformal p-value of a score among the stored scores, without random
        tie-breaking.

        P(p <= a) <= a if stored and new scores are exchangeable.

        :raises CalibrationInputError: as in `decide`.
        """
        question, turn = group if isinstance(group, tuple) else (None, group)
        nonconformity = self.scale.nonconformity(score)
        value = self._pool_value(nonconformity, question or "", turn or 0, None, length)
        return self._pool.rank(value, question, turn).p(1.0)

    @property
    def realised(self) -> float:
        """Return the share of decisions that were escalated so far; NaN before the first decision."""
        return self.escalated / self.decided if self.decided else float("nan")

    @property
    def by_length(self) -> bool:
        """Return whether scores are replaced by their ranks among chunks of about the same length."""
        return self._strata is not None

    @property
    def events(self) -> tuple[DriftEvent, ...]:
        """Return every drift alarm so far."""
        return tuple(self._monitor.events)

    @property
    def guarantee(self) -> str:
        """Return the text of the mode's guarantee, with its assumptions and current numbers."""
        return self._promise()[0]

    @property
    def voided_by(self) -> str:
        """Return the conditions that void the guarantee."""
        return self._promise()[1]

    def resume(self) -> None:
        """End the action that an alarm started ("escalate" or "widen"), after someone checked the
        alarm.
        """
        self._alert = None
        self._widened = 0

    def _count(self, value: float | None, question: str, turn: int, escalated: bool) -> None:
        self.decided += 1
        self.escalated += escalated
        self._widened = max(0, self._widened - 1)
        self._controller.update(value, question, turn, escalated)

    def _learn_all(self, released: Sequence[PendingScore]) -> None:
        for pending in released:
            self._learn(pending)
        if self._over:  # The released scores may include the last score of a finished question.
            self._forget_over()

    def _learn(self, pending: PendingScore) -> None:
        nonconformity, question, turn, length = pending
        # Real samples have indices from 0. With index -1, the random numbers here differ from those
        # of `decide`.
        value = self._pool_value(nonconformity, question, turn, -1, length)
        self._store_length(nonconformity, length)
        self._pool.add(value, question, turn)
        if self._monitor.watching:
            theta = self._uniform(nonconformity, question, turn, -1)
            event = self._monitor.observe(nonconformity, question, turn, theta)
            if event is not None:
                self._act_on(event)

    def _act_on(self, event: DriftEvent) -> None:
        if event.action == "recalibrate":
            self._pool.drop_stored()
            if self._strata is not None:
                self._strata = LengthStrata()
        elif event.action != "report":
            self._alert = event.action
            self._widened = _WIDENED

    def _pool_value(
        self,
        nonconformity: float,
        question: str,
        turn: int,
        sample: int | None,
        length: float | None,
    ) -> float:
        """Return the value that replaces the score in pools and controllers.

        It is the score itself or, if ranks are by length, the normal quantile of the score's rank
        among chunks of about this length. Pools then contain one distribution for all lengths.
        """
        if self._strata is None:
            return nonconformity
        if length is None or not 0 < length < math.inf:
            raise CalibrationInputError(
                "length",
                length,
                "the length of the chunk, a number above 0, because scores are ranked by length",
            )
        if math.isinf(nonconformity):
            return nonconformity
        theta = self._uniform(nonconformity, question, turn, sample, "\x1flength")
        p = self._strata.rank(nonconformity, length).p(theta)
        return _NORMAL.inv_cdf(min(max(p, 1e-12), 1 - 1e-12))

    def _store_length(self, nonconformity: float, length: float | None) -> None:
        if self._strata is not None and length is not None and math.isfinite(nonconformity):
            self._strata.add(nonconformity, length)

    def _uniform(
        self, nonconformity: float, question: str, turn: int, sample: int | None, purpose: str = ""
    ) -> float:
        """Return the uniform random number of this chunk.

        The number is the same in every replay, whatever was decided before.
        """
        position = self.decided if sample is None else sample
        text = f"{self.seed}\x1f{question}\x1f{turn}\x1f{position}\x1f{nonconformity!r}{purpose}"
        digest = blake2b(text.encode(), digest_size=7).digest()
        return int.from_bytes(digest, "big") * 2.0**-56

    def _promise(self) -> tuple[str, str]:
        facts = Facts(
            rate=self._nominal,
            stored=self.stored,
            decided=self.decided,
            escalated=self.escalated,
            tuning=self.tuning,
            events=self.events,
            left=self._end.left,
            cap=self.cap,
        )
        additions = list[str]()
        if self._strata is not None:
            additions.append("by-length")
        if self.cap is not None:
            additions.append("cap")
        return describe(self.mode, facts, additions)

    def state(self) -> dict[str, Any]:
        """Return the whole state of the calibrator, as JSON.

        A restored calibrator takes the same decisions on the same stream.
        """
        state: dict[str, Any] = {
            "kind": _KIND,
            "version": _VERSION,
            "rate": str(self.rate),
            "mode": self.mode,
            "seed": self.seed,
            "fingerprint": self.fingerprint,
            "options": self._options,
            "tuning": asdict(self.tuning),
            "stored": self.stored.state(),
            **super().state(),
            "order": self._order.state(),
            "monitor": self._monitor.state(),
            "alert": [self._alert, self._widened],
        }
        if self._strata is not None:
            state["lengths"] = self._strata.state()
        return state

    @classmethod
    def restored(
        cls, state: Mapping[str, Any], fingerprint: Mapping[str, object] | None = None
    ) -> Calibrator:
        """Return a calibrator that continues from a saved state.

        :raises CalibrationInputError: if `state` is not the state of a calibrator.
        :raises FingerprintError: if the state was made under other conditions than `fingerprint`.
        """
        if state.get("kind") != _KIND or state.get("version") != _VERSION:
            raise CalibrationInputError(
                "calibrator state", state.get("kind"), f"{_KIND}, version {_VERSION}"
            )
        try:
            if fingerprint is not None:
                check_fingerprint("the calibrator state", state["fingerprint"], fingerprint)
            calibrator = cls._from_state(state)
            # The state of the new calibrator must equal the given state. It does not if someone
            # edited the given state.
            is_whole = (
                same(calibrator.state(), state)
                and type(calibrator.seed) is int
                and 0 <= calibrator.escalated <= calibrator.decided
            )
        except _UNREADABLE as error:
            problem = f"{type(error).__name__}: {error}"
            raise CalibrationInputError(
                "calibrator state", problem, "the saved state of a calibrator"
            ) from error
        if not is_whole:
            raise CalibrationInputError(
                "calibrator state", "changed by hand", "the saved state of a calibrator"
            )
        return calibrator

    @classmethod
    def _from_state(cls, state: Mapping[str, Any]) -> Calibrator:
        options: dict[str, Any] = dict(state["options"])
        if "cap" in options:
            options["cap"] = Fraction(options["cap"])
        calibrator = cls(
            Fraction(state["rate"]),
            state["mode"],
            seed=state["seed"],
            stored=StoredScores.restore(state["stored"]),
            tuning=Tuning(**state["tuning"]),
            **options,
        )
        calibrator.fingerprint = dict(state["fingerprint"])
        super(Calibrator, calibrator).merge(state)
        if calibrator._strata is not None:
            # Start empty, because the saved strata already include the stored scores.
            calibrator._strata = LengthStrata()
            calibrator._strata.merge(state["lengths"])
        calibrator._order.restore(state["order"])
        calibrator._monitor.restore(state["monitor"])
        if any(event.action == "recalibrate" for event in calibrator.events):
            calibrator._pool.drop_stored()
        calibrator._alert, calibrator._widened = state["alert"]
        return calibrator

    def save(self, path: Path) -> None:
        """Write the state atomically, so that a crash leaves either the old file or the new file.

        :raises StorageError: if the file cannot be written.
        """
        write_state(path, self.state())

    @classmethod
    def load(cls, path: Path, fingerprint: Mapping[str, object] | None = None) -> Calibrator:
        """Return the calibrator that `save` wrote.

        :raises CalibrationInputError: if the file is missing, damaged or not such a state.
        :raises FingerprintError: if the calibrator was made under other conditions than
            `fingerprint`.
        """
        return cls.restored(read_state(path), fingerprint)

    def merge(self, state: Mapping[str, Any]) -> None:
        """Add the live scores of another calibrator with the same rate, mode and stored scores.

        Alarms of the other calibrator are not added, because this monitor has not seen its scores.

        :raises CalibrationInputError: if rate, mode, stored scores or options differ, or if scores
            of the other calibrator wait for an earlier issue.
        :raises FingerprintError: if the conditions differ.
        """
        check_fingerprint("the calibrator to merge", state["fingerprint"], self.fingerprint)
        mine = strict(self.state())
        theirs = strict(state)
        for name in ("kind", "version", "rate", "mode", "options", "tuning", "stored"):
            if theirs.get(name) != mine[name]:
                raise CalibrationInputError(
                    f"{name} of the calibrator to merge",
                    "different",
                    "the same value as in this calibrator",
                )
        if theirs["order"]["held"]:
            raise CalibrationInputError(
                "calibrator to merge",
                "unfinished, with scores that wait for earlier ones",
                "a finished calibrator",
            )
        super().merge(theirs)
        if self._strata is not None:
            self._strata.merge(theirs["lengths"])


Floats = NDArray[np.float64]
Ints = NDArray[np.int64]

METRICS = (
    "overall_error",
    "turn_rms",
    "question_rms",
    "worst_rolling_500",
    "auroc_within_question_turn",
    "agreement_with_sorted",
)

# Ranges of turns, first and last turn included. Later turns are rare, so a range has more turns
# there. Turns above 14 are ignored.
TURN_BINS = ((0, 0), (1, 1), (2, 2), (3, 3), (4, 5), (6, 9), (10, 14))


# A replay with fewer scores than this number may miss its nominal rate by several percentage
# points.
_SHORT_REPLAY = 100


def short_replay_note(
    realised: float, nominal: float, decisions: int, scores: int, mode: Mode | None
) -> str:
    """Return a note if a replay misses its nominal rate by at least one decision and has few
    scores, otherwise "".

    `scores` is the number of scores that the replay ranked, including stored scores. `mode` is the
    calibrator's mode, or None if another gate decided.

    >>> short_replay_note(0.4, 0.4, decisions=16, scores=16, mode="aci")
    ''
    """
    if scores >= _SHORT_REPLAY or not abs(realised - nominal) * decisions >= 1:
        return ""
    note = (
        f"the replay has only {counted(scores, 'score')}; with fewer than {_SHORT_REPLAY} scores, "
        "the realised rate may be far from the nominal rate"
    )
    if mode == "aci" and realised < nominal:
        note += (
            ", and rate scope aci escalates below the nominal rate until it has "
            f"{FEW_SCORES} scores"
        )
    return note


@dataclass(frozen=True, slots=True)
class ReplayResult:
    """Every decision of a replay in arrival order, with metrics of its rate control."""

    rate: float
    mode: Mode
    decisions: tuple[Decision, ...]
    metrics: Mapping[str, float] = field(default_factory=dict[str, float])
    guarantee: str = ""
    voided_by: str = ""
    events: tuple[DriftEvent, ...] = ()
    stored: int = 0  # number of stored scores at the start

    @property
    def note(self) -> str:
        """Return a note if the realised rate is off and the replay has few scores, otherwise ""."""
        decisions = len(self.decisions)
        scores = self.stored + decisions
        return short_replay_note(self.escalated, self.rate, decisions, scores, self.mode)

    @property
    def escalated(self) -> float:
        """Return the realised rate; NaN if there are no decisions."""
        if not self.decisions:
            return float("nan")
        return sum(decision.escalate for decision in self.decisions) / len(self.decisions)


def replay_scores(
    records: Iterable[Mapping[str, Any]],
    rate: float | Fraction,
    mode: Mode = "question-turn",
    seed: int = 0,
    *,
    scale: Scale = PERPLEXITY,
    stored: StoredScores | Sequence[float] = (),
    drift: DriftPolicy = "recalibrate",
    window: int | None = None,
    decay: float | None = None,
    tuning: Tuning = DEFAULTS,
    by_length: bool = False,
    cap: float | Fraction | None = None,
) -> ReplayResult:
    """Decide on each record {"question", "turn", "score"}, and learn from it before the next one.

    The records are in arrival order. The options are those of `Calibrator`. The field "sample" is
    optional. So is "left", the share of decisions expected to be left. The optional field "issue"
    is a number from 0 without gaps. Scores with an issue join the pools in the order of issue
    instead of arrival. The field "length" is needed if ranks are by length.

    :raises CalibrationInputError: if a record lacks a field, or its score is not a valid score.
    :raises OptionError: for an unknown mode or drift policy.

    >>> records = [{"question": 1, "turn": 0, "score": score} for score in (1.2, 1.4, 9.0)]
    >>> [decision.escalate for decision in replay_scores(records, rate=0.5, mode="marginal", seed=1).decisions]
    [True, True, True]
    """
    calibrator = Calibrator(
        rate,
        mode,
        seed=seed,
        scale=scale,
        stored=stored,
        drift=drift,
        window=window,
        decay=decay,
        tuning=tuning,
        by_length=by_length,
        cap=cap,
    )
    decisions: list[Decision] = []
    for number, record in enumerate(records, 1):
        decision = _decide(calibrator, record, number)
        calibrator.observe(decision)
        decisions.append(decision)
    metrics = rate_metrics(
        questions=[decision.question for decision in decisions],
        turns=[decision.turn for decision in decisions],
        nonconformity=[calibrator.scale.nonconformity(decision.score) for decision in decisions],
        escalated=[decision.escalate for decision in decisions],
        rate=float(calibrator.rate),
    )
    return ReplayResult(
        rate=float(calibrator.rate),
        mode=mode,
        decisions=tuple(decisions),
        metrics=metrics,
        guarantee=calibrator.guarantee,
        voided_by=calibrator.voided_by,
        events=calibrator.events,
        stored=len(stored),
    )


def _decide(calibrator: Calibrator, record: Mapping[str, Any], number: int) -> Decision:
    """Decide on a record; an error message contains the record's number in the file."""
    for name in ("question", "turn", "score"):
        if name not in record:
            raise CalibrationInputError(f"record {number}", dict(record), f"a field '{name}'")
    options: dict[str, Any] = {}
    whole_number(f"turn of record {number}", record["turn"])
    for name in ("sample", "issue"):
        if record.get(name) is not None:
            whole_number(f"{name} of record {number}", record[name])
            options[name] = record[name]
    for name in ("left", "length"):
        if record.get(name) is not None:
            options[name] = plain_number(f"{name} of record {number}", record[name])
    score = record["score"]
    try:
        return calibrator.decide(score, str(record["question"]), int(record["turn"]), **options)
    except CalibrationInputError as problem:
        if problem.what != "score":
            raise
        raise CalibrationInputError(
            f"score of record {number}", score, calibrator.scale.domain
        ) from None


def rate_metrics(
    questions: Sequence[object],
    turns: Sequence[int],
    nonconformity: Sequence[float],
    escalated: Sequence[bool],
    rate: float,
) -> dict[str, float]:
    """Return six metrics of rate control from sequences of the same length in arrival order. Larger
    nonconformity is worse.

    A metric is NaN if the stream has too little data for it: no pair to rank, or fewer than 500
    decisions. All metrics of an empty stream are NaN.
    """
    if not len(questions):
        return dict.fromkeys(METRICS, math.nan)
    names = np.array([str(question) for question in questions])
    q: Ints = np.unique(names, return_inverse=True)[1].astype(np.int64)
    t: Ints = np.asarray(turns, np.int64)
    x: Floats = np.asarray(nonconformity, float)
    e: Floats = np.asarray(escalated, float)
    question_rates: Floats = np.bincount(q, e) / np.bincount(q)
    # one number for each pair (question, turn), so that decisions can be grouped by it
    question_turn = q * (int(t.max()) + 1) + t
    return {
        "overall_error": float(abs(e.mean() - rate)),
        "turn_rms": turn_rms(t, e, rate),
        "question_rms": float(np.sqrt(np.mean((question_rates - rate) ** 2))),
        "worst_rolling_500": worst_rolling(e, rate),
        "auroc_within_question_turn": pooled_auroc(x, e, question_turn),
        "agreement_with_sorted": float((e == sorted_decisions(q, t, x, rate)).mean()),
    }


def turn_rms(turns: Ints, escalated: Floats, rate: float) -> float:
    """Return the root mean square of the rate's error over the ranges of turns in `TURN_BINS`. Each
    range is weighted by its number of decisions.
    """
    total = 0.0
    for low, high in TURN_BINS:
        inside = (turns >= low) & (turns <= high)
        if inside.any():
            total += float(inside.mean()) * (float(escalated[inside].mean()) - rate) ** 2
    return math.sqrt(total)


def worst_rolling(escalated: Floats, rate: float, width: int = 500) -> float:
    """Return the largest |realised - nominal rate| over any `width` consecutive decisions.

    The result is NaN for a stream with fewer decisions.
    """
    sums = np.concatenate([[0.0], np.cumsum(escalated)])
    if len(sums) <= width:
        return math.nan
    return float(np.abs((sums[width:] - sums[:-width]) / width - rate).max())


def pooled_auroc(nonconformity: Floats, escalated: Floats, group: Ints) -> float:
    """Return the share of pairs in which the escalated chunk is worse than the accepted chunk. Each
    pair has an escalated and an accepted chunk of the same group.

    Ties count as half a pair. The result is NaN if there is no pair.
    """
    order = np.argsort(group, kind="stable")
    bounds = np.flatnonzero(np.diff(group[order])) + 1
    wins = 0.0
    pairs = 0.0
    for members in np.split(order, bounds):
        over = nonconformity[members][escalated[members] == 1]
        kept = np.sort(nonconformity[members][escalated[members] == 0])
        # `below` leaves out tied scores and `up_to` counts them. Their mean therefore counts each
        # tie as half a win.
        below = np.searchsorted(kept, over, "left")
        up_to = np.searchsorted(kept, over, "right")
        wins += float((below + up_to).sum()) / 2
        pairs += len(over) * len(kept)
    return wins / pairs if pairs else math.nan


def sorted_decisions(questions: Any, turns: Any, nonconformity: Any, rate: float) -> Floats:
    """Return the decisions of an ideal rule that sees all chunks of a (question, turn) before it
    decides.

    The rule escalates the worst chunks of each group; the rounding error of a group is carried over
    to the question's next turn.
    """
    q = np.asarray(questions)
    t = np.asarray(turns)
    x = np.asarray(nonconformity, float)
    # Sort by question, then by turn, then from the worst score to the best. Ties stay in order of
    # arrival.
    order = np.lexsort((np.arange(len(q)), -x, t, q))
    starts = np.flatnonzero(np.diff(q[order]) | np.diff(t[order])) + 1
    decisions = np.zeros(len(q))
    carry = dict[int, float]()
    for members in np.split(order, starts):
        question = int(q[members[0]])
        want = rate * len(members) + carry.get(question, 0.0)
        count = max(0, min(len(members), math.floor(want + 0.5)))
        carry[question] = want - count
        decisions[members[:count]] = 1
    return decisions
