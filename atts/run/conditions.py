"""Holds scores from before a run to the conditions of the run."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, Literal

from atts.calibration import check_fingerprint
from atts.errors import FingerprintError
from atts.journal import Manifest

Conditions = Literal["match", "ignore"]
"""Scores made under other conditions than the run's end it, or are taken as they are, with a warning."""
_SPEC = ("engine", "model", "tokenizer", "dtype", "logprobs")
_POLICY = ("sampling", "target_sampling", "chunking", "score")
_ADVICE = "Make them anew under these conditions, or take them as they are with --set conditions=ignore"


def conditions_of(manifest: Manifest) -> dict[str, object]:
    """What scores of a run depend on besides the problems: the models, how they are sampled, how text is cut."""
    found: dict[str, object] = {
        f"{role}.{name}": value
        for role, spec in manifest.engines.items()
        for name, value in spec.items()
        if name in _SPEC or name.startswith("probe.")
    }
    held = manifest.configuration.get("policy")
    policy: Mapping[str, Any] = held.value if held is not None and isinstance(held.value, Mapping) else {}
    for name in _POLICY:
        part = policy.get(name)
        if isinstance(part, Mapping):
            found |= {
                f"{name}.{key}": list(value) if isinstance(value, tuple) else value for key, value in part.items()
            }
    return found


def check_conditions(manifest: Manifest, recorded: Mapping[str, object], conditions: Conditions) -> str:
    """What a reader of the run should know of the scores it starts from; "" where all they depend on is as it was.

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
        return f"the stored scores were made under other conditions, and taken all the same: {names}"
    unknown = ", ".join(name for name in now if name not in recorded)
    return f"the stored scores say nothing of {unknown}" if unknown else ""
