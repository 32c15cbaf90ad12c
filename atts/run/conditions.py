"""Data that a run takes from other runs, and the check that their settings match its own."""

from __future__ import annotations

import json
from collections.abc import Mapping
from contextlib import suppress
from dataclasses import asdict, dataclass, fields, replace
from types import MappingProxyType
from typing import Any, Literal, get_args

from atts.calibration import Abstention, check_fingerprint
from atts.core import Outcome, Role, Sampling
from atts.errors import FingerprintError, OptionError
from atts.evaluators import Estimate, share_estimate
from atts.files import from_json
from atts.journal import MERGED, FinishedProblem, Json, Manifest, Setting
from atts.pipelines import Chunking, ScoreRule

Conditions = Literal["match", "ignore"]
"""Scores made under other conditions than the run's end it, or are taken as they are, with a
warning.
"""
_SPEC = ("engine", "model", "tokenizer", "dtype", "logprobs", "weights")
_POLICY: Mapping[str, type] = MappingProxyType(
    {"sampling": Sampling, "target_sampling": Sampling, "chunking": Chunking, "score": ScoreRule}
)
_ADVICE = (
    "Make them again under these conditions, or take them as they are with --set conditions=ignore"
)

_ADVICE_TO_FIT = (
    "Fit it again on a run under these conditions, or take it as it is with --set conditions=ignore"
)


def conditions_of(manifest: Manifest) -> dict[str, object]:
    """Return the conditions of a run's scores besides the problems: models, sampling, how text is
    cut.
    """
    conditions: dict[str, object] = {}
    for role, spec in manifest.engines.items():
        for name, value in spec.items():
            if name in _SPEC or name.startswith("probe."):
                conditions[f"{role}.{name}"] = value
    setting = manifest.configuration.get("policy")
    policy: Mapping[str, Any] = {}
    if setting is not None and isinstance(setting.value, Mapping):
        policy = setting.value
    for name in _POLICY:
        part = policy.get(name)
        if isinstance(part, Mapping):
            for key, value in part.items():
                conditions[f"{name}.{key}"] = list(value) if isinstance(value, tuple) else value
    return conditions


def read_conditions(given: Mapping[str, str]) -> dict[str, object]:
    """Read conditions in words as a run would record them, with the names of `conditions_of`.

    >>> read_conditions({"target.model": "QwQ-32B", "sampling.temperature": "0.7"})
    {'target.model': 'QwQ-32B', 'sampling.temperature': 0.7}

    :raises OptionError: a name that no run records.
    """
    of_models = [f"{role}.{name}" for role in get_args(Role) for name in _SPEC]
    of_policy = [f"{part}.{field.name}" for part, kind in _POLICY.items() for field in fields(kind)]
    conditions = dict[str, object]()
    for name, text in given.items():
        if name not in of_models + of_policy and name.partition(".")[2][:6] != "probe.":
            raise OptionError(
                "condition", f"no run records {name!r}", [*of_models, *of_policy], name
            )
        conditions[name] = text
        if name in of_policy:
            with suppress(ValueError):
                conditions[name] = from_json(text)
    return conditions


def check_conditions(
    manifest: Manifest,
    recorded: Mapping[str, object],
    conditions: Conditions,
    what: Literal["the stored scores", "the judge"] = "the stored scores",
) -> str:
    """Return a warning about the stored scores or the judge that a run uses; "" if they fit it.

    What they do not record cannot be checked, which is said as well.

    :raises FingerprintError: something they record is otherwise now, and `conditions` says "match".
    """
    now = conditions_of(manifest)
    is_judge = what == "the judge"
    if not recorded and is_judge:
        return "the judge does not say under which conditions it was fitted"
    if not recorded:
        return "the stored scores do not say what they were made under: whether they fit this run is unknown"
    try:
        check_fingerprint("scores", recorded, {name: now[name] for name in recorded if name in now})
    except FingerprintError as error:
        if conditions == "match":
            name = what if is_judge else "the stored calibration"
            advice = _ADVICE_TO_FIT if is_judge else _ADVICE
            raise FingerprintError(name, error.differences, advice) from None
        names = ", ".join(name for name, _, _ in error.differences)
        if is_judge:
            return f"the judge was fitted under other conditions, and taken all the same: {names}"
        return (
            f"the stored scores were made under other conditions, and taken all the same: {names}"
        )
    if is_judge:
        return ""
    unknown = ", ".join(name for name in now if name not in recorded)
    return f"the stored scores say nothing of {unknown}" if unknown else ""


_OWN = (
    "seed",
    "dataset",
    *(f"configuration.{name}" for name in ("abstain", "until", "shard", MERGED)),
)
"""Settings that do not change how votes are distributed."""
_ADVICE_TO_LABEL = "Label problems by a run of the same settings, or go back to those"


@dataclass(frozen=True, slots=True)
class Abstain:
    """Labelled problems' evidence on answering, and the run that they come from."""

    found: Abstention
    labelled: Manifest

    def setting(self) -> dict[str, Setting]:
        """Return the settings that a resume must find unchanged, and that results and reports read."""
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
            raise FingerprintError("the labelled run", differences, _ADVICE_TO_LABEL)

    def applied(self, outcome: Outcome) -> Outcome:
        """Return the outcome, its answer withheld where too few votes agree."""
        threshold = self.found.threshold
        if outcome.answer is None or threshold is None or outcome.agreement >= threshold - 1e-9:
            return outcome
        why = f"abstained: {100 * outcome.agreement:.0f} % of the votes agree, an answer needs {100 * threshold:.0f} %"
        return replace(outcome, answer=None, status="unanswered", why=why)


@dataclass(frozen=True, slots=True)
class Answered:
    """The problems that were answered by a run that abstains, and what was promised of them."""

    share: Estimate
    wrong: Estimate  # share of the answered and graded problems that are wrong
    guarantee: str
    voided_by: str


def answered(problems: tuple[FinishedProblem, ...], manifest: Manifest) -> Answered | None:
    """Return the summary of a run that abstains; None for any other run."""
    setting = manifest.configuration.get("abstain")
    if setting is None or not isinstance(setting.value, dict):
        return None
    given = [one for one in problems if one.answer is not None]
    return Answered(
        share_estimate((one.answer is not None, 1) for one in problems),
        share_estimate((not one.is_correct, 1) for one in given if one.verdict is not None),
        str(setting.value["guarantee"]),
        str(setting.value["voided_by"]),
    )


def _settings(manifest: Manifest) -> dict[str, Json]:
    """Return everything that the distribution of votes depends on besides the problems."""
    return {name: value for name, value in manifest.decisive() if not name.startswith(_OWN)}


def _brief(value: Json) -> Json:
    text = json.dumps(value)
    return value if len(text) <= 40 else text[:39] + "…"
