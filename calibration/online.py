"""The online calibrator: one decision per score, fed back with what was done."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import asdict
from fractions import Fraction
from hashlib import blake2b
from pathlib import Path
from statistics import NormalDist
from typing import Any

from atts.calibration.controllers import DEFAULTS, SLACK, Mode, RunEnd, Tuning, build_mode
from atts.calibration.drift import DriftEvent, DriftMonitor, DriftPolicy
from atts.calibration.guarantees import Facts, describe
from atts.calibration.pools import LengthStrata
from atts.calibration.rates import Rate, exact_rate
from atts.calibration.scores import PERPLEXITY, Scale, StoredScores, check_fingerprint, check_stored
from atts.calibration.state import Persisted, read_state, same, strict, write_state
from atts.core import Action, Decision, Origin
from atts.errors import CalibrationInputError, OptionError

Held = tuple[float, str, int, float | None]
"""A score on its way into a pool: nonconformity, question, turn, length of its chunk where that
counts.
"""


HOLD = 64  # scores that may wait for an earlier issue, unless told


class ReorderBuffer:
    """A reorder buffer with a watermark: an issue is released once every earlier one was pushed or
    skipped.

    What finishes first is short, so pools fed in completion order are biased towards short chunks
    at any moment. Issues count up from 0 without gaps; a chunk that never gets a score must be
    skipped. At most `limit` scores are held: beyond that the oldest missing issues are given up
    (counted in `given_up`), and released at once if they arrive after all.
    """

    __slots__ = ("_held", "_limit", "_next", "_skipped", "given_up")

    def __init__(self, limit: int = HOLD) -> None:
        """:raises CalibrationInputError: for a limit below 1."""
        if limit < 1:
            raise CalibrationInputError("limit of held scores", limit, "at least 1")
        self._limit = limit
        self._next = 0
        self._held = dict[int, Held]()
        self._skipped = set[int]()
        self.given_up = 0

    def push(self, issue: int, score: Held) -> list[Held]:
        """Take the score of an issue; all that may now be released, in order of issue.

        :raises CalibrationInputError: for a negative issue.
        """
        if issue < 0:
            raise CalibrationInputError("issue", issue, "a number from 0")
        if issue < self._next or issue in self._held:
            return [score]
        self._held[issue] = score
        return self._release()

    def skip(self, issue: int) -> list[Held]:
        """Do not wait for this issue; all that may now be released."""
        if issue >= self._next:
            self._skipped.add(issue)
        return self._release()

    def holds(self, question: str) -> bool:
        """Whether a score of this question waits."""
        return any(held[1] == question for held in self._held.values())

    def flush(self) -> list[Held]:
        """Everything held, in order, waiting for nothing."""
        released = [self._held[issue] for issue in sorted(self._held)]
        if self._held:
            self._next = max(self._held) + 1
        self._held = {}
        self._skipped = {issue for issue in self._skipped if issue >= self._next}
        return released

    def _release(self) -> list[Held]:
        released = list[Held]()
        while True:
            if self._next in self._held:
                released.append(self._held.pop(self._next))
            elif self._next in self._skipped:
                self._skipped.discard(self._next)
            elif len(self._held) > self._limit:
                self.given_up += 1
            else:
                return released
            self._next += 1

    def state(self) -> dict[str, Any]:
        """What is held and awaited, as JSON."""
        return {
            "next": self._next,
            "held": [[issue, *held] for issue, held in self._held.items()],
            "skipped": sorted(self._skipped),
            "given_up": self.given_up,
        }

    def restore(self, state: Mapping[str, Any]) -> None:
        """The inverse of `state`."""
        self._next = int(state["next"])
        self.given_up = int(state["given_up"])
        self._held = {
            int(issue): (float(b), str(q), int(t), length)
            for issue, b, q, t, length in state["held"]
        }
        self._skipped = set(map(int, state["skipped"]))


def with_lengths(state: Mapping[str, Any]) -> dict[str, Any]:
    """The state of an order as it is written now: older ones hold scores without lengths."""
    return {**state, "held": [[*row, None] if len(row) == 4 else row for row in state["held"]]}


Group = int | tuple[str, int] | None
"""Which stored scores to compare with: a turn's, a question's and turn's, or all."""

_KIND = "atts calibrator"
_VERSION = 1
_NORMAL = NormalDist()
# scores: with fewer known, a run of known size keeps escalations back for when ranks mean more
_FEW = 40
_WRONG = (LookupError, TypeError, ValueError, AttributeError, ArithmeticError, RecursionError)
_WIDENED = 500
# after a "widen" alarm: for so many decisions the current rate is so many times higher
_WIDER = 1.5


class Calibrator(Persisted):
    """Decides on a stream of scores so that the fraction of escalations is `rate`, where its mode
    says so.

    `decide` only reads: it may be asked twice, in any order, for chunks that are then dropped.
    `observe` stores the score and what was really done. Both are deterministic given the seed.

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
        """`stored` are scores of a calibration run, `drift` what an alarm about them does,
        `fingerprint` the conditions of this run, `hold` how many scores may wait for an earlier
        issue: at least as many as chunks are in flight. With `by_length` a score is its rank among
        chunks of about the same length, in every mode. Of any first n decisions at most ceil(`cap`
        * n) escalate, exactly, where each is observed before the next is taken.

        :raises CalibrationInputError: for an impossible rate, cap, window, decay or stored score;
            mode "split" without stored scores; or `by_length` with stored scores whose lengths are
            not known.
        :raises OptionError: for an unknown mode or drift policy.
        :raises FingerprintError: if the stored scores were made under other conditions.
        """
        self.rate = exact_rate(rate)
        self.cap = None if cap is None else exact_rate(cap, "cap")
        self.mode: Mode = mode
        self.seed, self.tuning, self._nominal = seed, tuning, float(self.rate)
        self.stored = (
            stored if isinstance(stored, StoredScores) else StoredScores.of(stored, scale=scale)
        )
        self.scale = self.stored.scale
        self.fingerprint = dict(self.stored.fingerprint if fingerprint is None else fingerprint)
        check_stored(self.stored, self.fingerprint, mode, by_length=by_length)
        given: dict[str, object] = {"drift": drift, "window": window, "decay": decay, "hold": hold}
        self._options = given | ({"cap": str(self.cap)} if cap is not None else {})
        self._options |= {"by_length": True} if by_length else {}
        self.decided = self.escalated = self._widened = 0
        self._strata = LengthStrata() if by_length else None
        self._pool, self._controller = build_mode(mode, self._nominal, window, decay, tuning)
        self._order = ReorderBuffer(hold)
        self._end = RunEnd()
        self._over = set[
            str
        ]()  # questions to forget, once none of their scores waits for its issue
        self._alert: DriftPolicy | None = None
        self._take_stored(drift)

    def _take_stored(self, drift: DriftPolicy) -> None:
        """The stored scores go into the pools, one after the other, and are then watched for drift."""
        for place, (nonconformity, question, turn, length) in enumerate(self.stored.rows()):
            standing = self._standing(nonconformity, "", 0, place, length)
            self._pool.add(standing, question or f"stored {place}", turn, live=False)
            self._store_length(nonconformity, length)
        self._monitor = DriftMonitor(self.stored, policy=drift)
        for event in self._monitor.events:
            self._act(event)

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
        """What to do with a chunk of this score, from stored scores and decisions only; nothing is
        stored.

        `left` is the share of the run's decisions that is expected to be left, this one included;
        None where not known. `length` is that of the chunk, in tokens or any other unit; it counts
        where ranks are by length.

        :raises CalibrationInputError: if it is not a score of the declared domain, a turn or sample
            is below 0, `left` is no share, or the length is missing or impossible where ranks are
            by length.
        """
        if turn < 0 or (sample is not None and sample < 0):
            raise CalibrationInputError("turn and sample", (turn, sample), "numbers from 0")
        if left is not None and not 0 <= left <= 1:
            raise CalibrationInputError("left", left, "a share in [0, 1]")
        nonconformity = self.scale.nonconformity(score)
        standing = self._standing(nonconformity, question, turn, sample, length)
        expected = math.inf if left is None or left >= 1 else self.decided * left / (1 - left)
        self._end = RunEnd(expected, SLACK * (self.decided + expected))
        place = self._pool.rank(standing, question, turn)
        p = place.p(self._theta(nonconformity, question, turn, sample))
        rate = self._controller.current_rate(standing, question, turn, self._end)
        if left is not None and self.mode == "aci" and rate < 1:
            rate *= min(1.0, place.size / _FEW)
        if self._alert:
            rate = 1.0 if self._alert == "escalate" else rate * _WIDER if self._widened else rate
        up = rate >= 1 or (rate > 0 and p > 1 - rate)
        why = f"p {p:.4f} {'>' if up else '<='} {1 - rate:.4f}"
        origin: Origin = "gate"
        if (
            up
            and self.cap is not None
            and self.escalated >= math.ceil(self.cap * (self.decided + 1))
        ):
            up = False
            why = f"{why}; hard cap: no escalation left"
            origin = "budget"
        action: Action = "escalate" if up else "accept"
        return Decision(
            action, self._nominal, question, turn, sample or 0, issue=issue, score=float(score), p=p, why=why,
            origin=origin, length=None if length is None or self._strata is None else float(length),
        )  # fmt: skip

    def observe(self, decision: Decision, escalated: bool | None = None) -> None:
        """Record a decision and what was really done with its chunk, where that differs (a hard
        cap, an override).

        The decision counts at once; its score joins the pools in order of issue, if it has one. A
        decision taken without a score (verification skipped, or failed) counts for the rate alone.

        :raises CalibrationInputError: if its score is not one of the declared domain.
        """
        done = decision.action == "escalate" if escalated is None else escalated
        question = decision.question
        turn = decision.turn
        if decision.score is None:
            self._count(None, question, turn, done)
            if decision.issue is not None:
                self.skip(decision.issue)
            return
        nonconformity = self.scale.nonconformity(decision.score)
        standing = self._standing(nonconformity, question, turn, decision.sample, decision.length)
        self._count(standing, question, turn, done)
        held = (nonconformity, question, turn, decision.length)
        self._learn_all(
            [held] if decision.issue is None else self._order.push(decision.issue, held)
        )

    def skip(self, issue: int) -> None:
        """Do not wait for the score of this issue: its chunk was dropped, or could not be scored."""
        self._learn_all(self._order.skip(issue))

    def forget(self, question: str) -> None:
        """The question is over: its scores stay in the pools of all, what served its own decisions
        is let go.

        Decisions on other questions are what they would have been, and memory is that of the open
        questions.
        """
        self._over.add(question)
        self._forget_over()

    def _forget_over(self) -> None:
        for question in [question for question in self._over if not self._order.holds(question)]:
            self._over.discard(question)
            self._pool.forget(question)
            self._controller.forget(question)

    def settle(self) -> None:
        """The run is over: what still waits for a score that will not come joins the pools; merging
        wants that.
        """
        self._learn_all(self._order.flush())

    def p_value(self, score: float, group: Group = None, length: float | None = None) -> float:
        """The conformal p-value of a score against the stored ones, without a coin: P(p <= a) <= a
        if exchangeable.

        :raises CalibrationInputError: as `decide`.
        """
        question, turn = group if isinstance(group, tuple) else (None, group)
        standing = self._standing(
            self.scale.nonconformity(score), question or "", turn or 0, None, length
        )
        return self._pool.rank(standing, question, turn).p(1.0)

    @property
    def realised(self) -> float:
        """The fraction escalated so far; NaN before the first decision."""
        return self.escalated / self.decided if self.decided else float("nan")

    @property
    def by_length(self) -> bool:
        """Whether a score is its rank among chunks of about the same length."""
        return self._strata is not None

    @property
    def events(self) -> tuple[DriftEvent, ...]:
        """Every drift alarm so far."""
        return tuple(self._monitor.events)

    @property
    def guarantee(self) -> str:
        """What this mode promises, for what sequence, with the numbers of now."""
        return describe(self.mode, self._facts(), self._additions())[0]

    @property
    def voided_by(self) -> str:
        """What makes that promise empty."""
        return describe(self.mode, self._facts(), self._additions())[1]

    def resume(self) -> None:
        """End what an alarm started ("escalate" everything, or "widen"), after someone has looked."""
        self._alert = None
        self._widened = 0

    def _count(self, nonconformity: float | None, question: str, turn: int, done: bool) -> None:
        self.decided += 1
        self.escalated += done
        self._widened = max(0, self._widened - 1)
        self._controller.update(nonconformity, question, turn, done)

    def _learn_all(self, released: Sequence[Held]) -> None:
        for held in released:
            self._learn(*held)
        if self._over:  # some of these may have been the last of a question
            self._forget_over()

    def _learn(self, nonconformity: float, question: str, turn: int, length: float | None) -> None:
        if self._strata is None:
            self._pool.add(nonconformity, question, turn)
        else:
            self._pool.add(
                self._standing(nonconformity, question, turn, -1, length), question, turn
            )
            self._store_length(nonconformity, length)
        if self._monitor.watching:
            event = self._monitor.observe(
                nonconformity, question, turn, self._theta(nonconformity, question, turn, -1)
            )
            if event is not None:
                self._act(event)

    def _act(self, event: DriftEvent) -> None:
        if event.action == "recalibrate":
            self._pool.drop_stored()
            self._strata = self._strata and LengthStrata()
        elif event.action != "report":
            self._alert = event.action
            self._widened = _WIDENED

    def _standing(
        self,
        nonconformity: float,
        question: str,
        turn: int,
        sample: int | None,
        length: float | None,
    ) -> float:
        """The score as pools and controllers take it: itself, or the normal score of its rank among
        such lengths.
        """
        if self._strata is None:
            return nonconformity
        if length is None or not 0 < length < math.inf:
            raise CalibrationInputError(
                "length", length, "the chunk's length, above 0, as ranks are by length"
            )
        if math.isinf(nonconformity):
            return nonconformity
        theta = self._theta(nonconformity, question, turn, sample, "\x1flength")
        p = self._strata.rank(nonconformity, length).p(theta)
        return _NORMAL.inv_cdf(min(max(p, 1e-12), 1 - 1e-12))

    def _store_length(self, nonconformity: float, length: float | None) -> None:
        if self._strata is not None and length is not None and math.isfinite(nonconformity):
            self._strata.add(nonconformity, length)

    def _theta(
        self, nonconformity: float, question: str, turn: int, sample: int | None, purpose: str = ""
    ) -> float:
        """A uniform that belongs to this chunk: the same in every replay, whatever was decided in
        between.
        """
        position = self.decided if sample is None else sample
        text = f"{self.seed}\x1f{question}\x1f{turn}\x1f{position}\x1f{nonconformity!r}{purpose}"
        return int.from_bytes(blake2b(text.encode(), digest_size=7).digest(), "big") * 2.0**-56

    def _facts(self) -> Facts:
        seen = (self.stored, self.decided, self.escalated, self.tuning, self.events)
        return Facts(self._nominal, *seen, left=self._end.left, cap=self.cap)

    def _additions(self) -> list[str]:
        """What adds to the promise of the mode."""
        return ["by-length"] * (self._strata is not None) + ["cap"] * (self.cap is not None)

    def state(self) -> dict[str, Any]:
        """Everything that decides what comes next, as JSON: restored, the same stream gets the same
        decisions.
        """
        return {
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
            **({"lengths": self._strata.state()} if self._strata else {}),
        }

    @classmethod
    def restored(
        cls, state: Mapping[str, Any], fingerprint: Mapping[str, object] | None = None
    ) -> Calibrator:
        """A calibrator that goes on where the one of this state stopped.

        :raises CalibrationInputError: if it is no such state.
        :raises FingerprintError: if it was made under other conditions than `fingerprint`.
        """
        if state.get("kind") != _KIND or state.get("version") != _VERSION:
            raise CalibrationInputError(
                "calibrator state", state.get("kind"), f"{_KIND}, version {_VERSION}"
            )
        try:
            if fingerprint is not None:
                check_fingerprint("the calibrator state", state["fingerprint"], fingerprint)
            state = {**state, "order": with_lengths(state["order"])}
            made = cls._of(state)
            is_whole = (
                same(made.state(), state)
                and type(made.seed) is int
                and 0 <= made.escalated <= made.decided
            )
        except (*_WRONG, OptionError) as error:
            problem = f"{type(error).__name__}: {error}"
            raise CalibrationInputError(
                "calibrator state", problem, "what a calibrator saved"
            ) from error
        if not is_whole:
            raise CalibrationInputError(
                "calibrator state", "changed by hand", "what a calibrator saved"
            )
        return made

    @classmethod
    def _of(cls, state: Mapping[str, Any]) -> Calibrator:
        stored = StoredScores.restore(state["stored"])
        tuning = Tuning(**state["tuning"])
        options: dict[str, Any] = {
            "seed": state["seed"],
            "stored": stored,
            "tuning": tuning,
            **state["options"],
        }
        if "cap" in options:
            options["cap"] = Fraction(options["cap"])
        made = cls(Fraction(state["rate"]), state["mode"], **options)
        made.fingerprint = dict(state["fingerprint"])
        super(Calibrator, made).merge(state)
        if made._strata is not None:
            made._strata = LengthStrata()  # the stored scores are among those of the state
            made._strata.merge(state["lengths"])
        made._order.restore(state["order"])
        made._monitor.restore(state["monitor"])
        if any(event.action == "recalibrate" for event in made.events):
            made._pool.drop_stored()
        made._alert, made._widened = state["alert"]
        return made

    def save(self, path: Path) -> None:
        """Write the state, replacing the file in one step so that a crash leaves the old one or the
        new one.

        :raises StorageError: if the disk refuses.
        """
        write_state(path, self.state())

    @classmethod
    def load(cls, path: Path, fingerprint: Mapping[str, object] | None = None) -> Calibrator:
        """The calibrator that `save` wrote.

        :raises CalibrationInputError: if the file is missing, damaged or something else.
        :raises FingerprintError: if it was made under other conditions than `fingerprint`.
        """
        return cls.restored(read_state(path), fingerprint)

    def merge(self, state: Mapping[str, Any]) -> None:
        """Add what another calibrator of the same rate, mode, conditions and stored scores has seen
        live.

        Its alarms are not taken over: this one's monitor has not seen those scores.

        :raises CalibrationInputError: if rate, mode, stored scores or options differ, or its scores
            wait for an issue.
        :raises FingerprintError: if the conditions differ.
        """
        check_fingerprint("the calibrator to merge", state["fingerprint"], self.fingerprint)
        mine = strict(self.state())
        state = strict(state)
        for name in ("kind", "version", "rate", "mode", "options", "tuning", "stored"):
            if state.get(name) != mine[name]:
                raise CalibrationInputError(
                    f"{name} of the calibrator to merge", "another", "the same as here"
                )
        if state["order"]["held"]:
            raise CalibrationInputError(
                "calibrator to merge", "scores held for their issue", "a finished one"
            )
        super().merge(state)
        if self._strata is not None:
            self._strata.merge(state["lengths"])
