"""From short words to a plan: methods, gates, datasets, answers."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Literal

from atts.core import AnswerKind, Problem
from atts.engine import Engine
from atts.errors import DatasetError, OptionError
from atts.graph import Limit
from atts.journal import Json, Setting
from atts.pipelines import Answers, Chunking, Gate, Material, Policy, RoundGate, preset
from atts.run import Plan

if TYPE_CHECKING:
    from atts.evaluators import Verdict

CalibrationMode = Literal["split", "marginal", "aci", "tracking", "turn", "question", "question-turn"]

EMBEDDED_CHUNKS = Chunking(draft_tokens=64, target_tokens=64)
"""The embedded models write one step per chunk; the longest has about 40 tokens."""


@dataclass(frozen=True, slots=True)
class Setup:
    """What one wants, in words; `plan` turns it into what is run."""

    draft: str | Engine = "embedded"
    target: str | Engine = "embedded"
    method: str = "atts"
    rate: float = 0.2
    mode: CalibrationMode = "question-turn"
    policy: Policy = field(default_factory=lambda: Policy(samples=8, max_tokens=512, chunking=EMBEDDED_CHUNKS))
    gate: Gate | RoundGate | None = None  # None: the method's own
    stored: Sequence[float] = ()  # calibration scores from before the run
    seed: int = 0
    rollouts: int = 64
    limits: Mapping[str, Limit] = field(default_factory=dict[str, Limit])

    def __post_init__(self) -> None:
        if not 0 <= self.rate <= 1:
            raise OptionError(
                "rate", f"{self.rate} is outside [0, 1]: it is the fraction of chunks the target takes over"
            )

    def plan(self, draft: Engine, target: Engine, kind: AnswerKind = "math") -> Plan:
        """The plan for problems of one kind of answer.

        :raises OptionError: an unknown method or mode.
        """
        from atts.calibration import Calibrator

        chosen = preset(self.method)
        calibrator = Calibrator(self.rate, self.mode, seed=self.seed, stored=self.stored)
        material = Material(self.rate, self.seed, calibrator, self.stored)
        return Plan(
            draft,
            target,
            chosen.policy(self.policy),
            self.gate if self.gate is not None else chosen.gate(material),
            answers_for(kind),
            grade,
            self.seed,
            self.rollouts,
            self.limits,
            configuration=self._configuration(),
            alarms=lambda: calibrator.events,
        )

    def _configuration(self) -> dict[str, Setting]:
        """What decides the gate's behaviour: a resume must find it unchanged."""
        words: dict[str, Json] = {
            "method": self.method,
            "rate": self.rate,
            "mode": self.mode,
            "stored": list(self.stored),
        }
        return {name: Setting(value, "setup") for name, value in words.items()}


def answers_for(kind: AnswerKind) -> Answers:
    """Extraction and grouping for this kind of answer; a guess from unmarked text would end rollouts early."""
    from atts.evaluators import extract, group

    def marked(text: str) -> str | None:
        return extract(text, kind, fallback="none")

    def classes(answers: Sequence[str]) -> Sequence[int]:
        return group(list(answers), kind)

    return Answers(marked, classes)


def grade(answer: str, problem: Problem) -> Verdict:
    """The verdict on an answer to a problem that has a reference."""
    from atts.evaluators import equivalent

    assert problem.answer is not None, "only problems with a reference are graded"
    return equivalent(problem.answer, answer, problem.kind)


def load_problems(dataset: str | Path | Sequence[Problem], limit: int | None = None) -> tuple[Problem, ...]:
    """A benchmark by name, a file, or problems as they are.

    :raises DatasetError: it cannot be read, or holds nothing.
    """
    if limit is not None and limit < 1:
        raise OptionError("limit", f"{limit} leaves no problem")
    if isinstance(dataset, str | Path):
        from atts.evaluators import load_dataset

        found = load_dataset(dataset).problems
    else:
        found = tuple(dataset)
    if not found:
        raise DatasetError(str(dataset)[:60], "it holds no problem")
    return found[:limit]
