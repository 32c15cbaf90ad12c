"""Abstention in a run: answers are withheld where the vote agrees less than labelled problems
require.
"""

from __future__ import annotations

import json
from dataclasses import asdict, dataclass, replace

from atts.calibration import Abstention
from atts.core import Outcome
from atts.errors import FingerprintError, OptionError
from atts.evaluators import Estimate, share_estimate
from atts.journal import MERGED, FinishedProblem, Json, Manifest, Setting

_OWN = (
    "seed",
    "dataset",
    *(f"configuration.{name}" for name in ("abstain", "until", "shard", MERGED)),
)
"""What leaves the law of votes what it is."""
_ADVICE = "Label problems by a run of the same settings, or go back to those"


@dataclass(frozen=True, slots=True)
class Abstain:
    """What labelled problems said of answering, and the run that they are of."""

    found: Abstention
    labelled: Manifest

    def setting(self) -> dict[str, Setting]:
        """What a resume must find unchanged, and results and reports read."""
        promise = {"guarantee": self.found.guarantee, "voided_by": self.found.voided_by}
        return {"abstain": Setting({**asdict(self.found), **promise}, "setup")}

    def check(self, manifest: Manifest) -> None:
        """Hold the run to the settings of the labelled one.

        :raises FingerprintError: it has others.
        :raises OptionError: it is to answer the very problems that were labelled.
        """
        if manifest.dataset and manifest.dataset == self.labelled.dataset:
            raise OptionError(
                "abstain",
                "the labelled run is of these very problems, whose answers it knows; label others",
            )
        old = _settings(self.labelled)
        new = _settings(manifest)
        differences = [
            (name, _brief(old.get(name)), _brief(new.get(name)))
            for name in sorted(old.keys() | new.keys())
            if old.get(name) != new.get(name)
        ]
        if differences:
            raise FingerprintError("the labelled run", differences, _ADVICE)

    def applied(self, outcome: Outcome) -> Outcome:
        """The outcome, its answer withheld where too few votes agree."""
        threshold = self.found.threshold
        if outcome.answer is None or threshold is None or outcome.agreement >= threshold - 1e-9:
            return outcome
        why = f"abstained: {outcome.agreement:.0%} of the votes agree, an answer needs {threshold:.0%}"
        return replace(outcome, answer=None, status="unanswered", why=why)


@dataclass(frozen=True, slots=True)
class Answered:
    """The problems that were answered by a run that abstains, and what was promised of them."""

    share: Estimate
    wrong: Estimate  # of those answered, as far as they were graded
    guarantee: str
    voided_by: str


def answered(problems: tuple[FinishedProblem, ...], manifest: Manifest) -> Answered | None:
    """What a run that abstains answered; None for any other."""
    held = manifest.configuration.get("abstain")
    if held is None or not isinstance(held.value, dict):
        return None
    given = [one for one in problems if one.answer is not None]
    return Answered(
        share_estimate((one.answer is not None, 1) for one in problems),
        share_estimate((not one.is_correct, 1) for one in given if one.verdict is not None),
        str(held.value["guarantee"]),
        str(held.value["voided_by"]),
    )


def _settings(manifest: Manifest) -> dict[str, Json]:
    """Everything that the law of votes depends on besides the problems."""
    return {name: value for name, value in manifest.decisive() if not name.startswith(_OWN)}


def _brief(value: Json) -> Json:
    text = json.dumps(value)
    return value if len(text) <= 40 else text[:39] + "…"
