"""The check that scores from before a run were made under the conditions of the run."""

from __future__ import annotations

from collections.abc import Mapping
from contextlib import suppress
from dataclasses import fields
from types import MappingProxyType
from typing import Any, Literal, get_args

from atts.calibration import check_fingerprint
from atts.core import Role, Sampling
from atts.errors import FingerprintError, OptionError
from atts.files import from_json
from atts.journal import Manifest
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
    "Make them anew under these conditions, or take them as they are with --set conditions=ignore"
)


def conditions_of(manifest: Manifest) -> dict[str, object]:
    """What scores of a run depend on besides the problems: the models, how they are sampled, how
    text is cut.
    """
    found: dict[str, object] = {
        f"{role}.{name}": value
        for role, spec in manifest.engines.items()
        for name, value in spec.items()
        if name in _SPEC or name.startswith("probe.")
    }
    held = manifest.configuration.get("policy")
    policy: Mapping[str, Any] = (
        held.value if held is not None and isinstance(held.value, Mapping) else {}
    )
    for name in _POLICY:
        part = policy.get(name)
        if isinstance(part, Mapping):
            found |= {
                f"{name}.{key}": list(value) if isinstance(value, tuple) else value
                for key, value in part.items()
            }
    return found


def read_conditions(given: Mapping[str, str]) -> dict[str, object]:
    """Conditions in words, as a run would record them: the names of `conditions_of`, numbers as
    numbers.

    >>> read_conditions({"target.model": "QwQ-32B", "sampling.temperature": "0.7"})
    {'target.model': 'QwQ-32B', 'sampling.temperature': 0.7}

    :raises OptionError: a name that no run records.
    """
    of_models = [f"{role}.{name}" for role in get_args(Role) for name in _SPEC]
    of_policy = [f"{part}.{field.name}" for part, kind in _POLICY.items() for field in fields(kind)]
    found = dict[str, object]()
    for name, text in given.items():
        if name not in of_models + of_policy and name.partition(".")[2][:6] != "probe.":
            raise OptionError(
                "condition", f"no run records {name!r}", [*of_models, *of_policy], name
            )
        found[name] = text
        if name in of_policy:
            with suppress(ValueError):
                found[name] = from_json(text)
    return found


def check_conditions(
    manifest: Manifest, recorded: Mapping[str, object], conditions: Conditions
) -> str:
    """What a reader of the run should know of the scores it starts from; "" where all they depend
    on is as it was.

    What the scores do not record cannot be checked, which is said as well.

    :raises FingerprintError: something they record is otherwise now, and `conditions` says "match".
    """
    now = conditions_of(manifest)
    if not recorded:
        return "the stored scores do not say what they were made under: whether they fit this run is unknown"
    try:
        check_fingerprint("scores", recorded, {name: now[name] for name in recorded if name in now})
    except FingerprintError as error:
        if conditions == "match":
            raise FingerprintError("the stored calibration", error.differences, _ADVICE) from None
        names = ", ".join(name for name, _, _ in error.differences)
        return (
            f"the stored scores were made under other conditions, and taken all the same: {names}"
        )
    unknown = ", ".join(name for name in now if name not in recorded)
    return f"the stored scores say nothing of {unknown}" if unknown else ""
