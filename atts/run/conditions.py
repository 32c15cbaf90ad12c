"""Check the conditions of data that a run takes from other runs against the run's settings."""

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
"""The action on scores made under other conditions than the run's: end the run, or use them with a
warning.
"""
_SPEC = ("engine", "model", "tokenizer", "dtype", "logprobs", "weights")
_POLICY: Mapping[str, type] = MappingProxyType(
    {"sampling": Sampling, "target_sampling": Sampling, "chunking": Chunking, "score": ScoreRule}
)
_ADVICE = "Make them again under these conditions, or use them anyway with --set conditions=ignore"

_ADVICE_TO_FIT = (
    "Fit it again on a run under these conditions, or take it as it is with --set conditions=ignore"
)


def conditions_of(manifest: Manifest) -> dict[str, object]:
    """Return the conditions of a run's scores, except the problems: models, sampling, chunk limits."""
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
    """Convert conditions given as texts to the values that a run records, under the names of
    `conditions_of`.

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
                "condition",
                f"{name!r} is not a condition that runs record",
                [*of_models, *of_policy],
                name,
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
    """Return a warning about the stored scores or the judge that a run uses; "" if they have its
    conditions.

    The warning also names conditions that they do not record.

    :raises FingerprintError: if a recorded condition differs, and `conditions` is "match".
    """
    now = conditions_of(manifest)
    is_judge = what == "the judge"
    if not recorded and is_judge:
        return "the judge does not say under which conditions it was fitted"
    if not recorded:
        return (
            "the stored scores do not record their conditions, so it is not known whether they "
            "suit this run"
        )
    try:
        check_fingerprint("scores", recorded, {name: now[name] for name in recorded if name in now})
    except FingerprintError as error:
        if conditions == "match":
            name = what if is_judge else "the stored calibration"
            advice = _ADVICE_TO_FIT if is_judge else _ADVICE
            raise FingerprintError(name, error.differences, advice) from None
        names = ", ".join(name for name, _, _ in error.differences)
        if is_judge:
            return f"the judge was fitted under other conditions but is used anyway: {names}"
        return f"the stored scores were made under other conditions but are used anyway: {names}"
    if is_judge:
        return ""
    unknown = ", ".join(name for name in now if name not in recorded)
    return f"the stored scores do not record {unknown}" if unknown else ""


_OWN = (
    "seed",
    "dataset",
    *(f"configuration.{name}" for name in ("abstain", "until", "shard", MERGED)),
)
"""Settings that do not change the distribution of votes."""
_ADVICE_TO_LABEL = "Label problems by a run with the same settings, or restore those settings"


@dataclass(frozen=True, slots=True)
class Abstain:
    """The certified agreement threshold, with the labelled run that it comes from."""

    found: Abstention
    labelled: Manifest

    def setting(self) -> dict[str, Setting]:
        """Return the settings that must not change at a resume, and that results and reports read."""
        promise = {"guarantee": self.found.guarantee, "voided_by": self.found.voided_by}
        return {"abstain": Setting({**asdict(self.found), **promise}, "setup")}

    def check(self, manifest: Manifest) -> None:
        """Check that the run has the settings of the labelled run.

        :raises FingerprintError: if its settings differ.
        :raises OptionError: if its problems are the labelled problems.
        """
        if manifest.dataset and manifest.dataset == self.labelled.dataset:
            raise OptionError(
                "abstain",
                "the labelled run has the same problems as this run; label other problems",
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
        """Return the outcome, without an answer if too few votes agree."""
        threshold = self.found.threshold
        if outcome.answer is None or threshold is None or outcome.agreement >= threshold - 1e-9:
            return outcome
        why = (
            f"abstained: {100 * outcome.agreement:.0f} % of the votes agree, but an answer needs "
            f"{100 * threshold:.0f} %"
        )
        return replace(outcome, answer=None, status="unanswered", why=why)


@dataclass(frozen=True, slots=True)
class Answered:
    """The problems that an abstaining run answered, with the guarantee for them."""

    share: Estimate
    wrong: Estimate  # share of wrong answers among the answered and graded problems
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
    """Return everything, except the problems, that the distribution of votes depends on."""
    return {name: value for name, value in manifest.decisive() if not name.startswith(_OWN)}


def _brief(value: Json) -> Json:
    text = json.dumps(value)
    return value if len(text) <= 40 else text[:39] + "…"
