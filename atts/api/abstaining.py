"""The reader of `abstain`: how seldom answers may be wrong, by a labelled run of the same settings."""

from __future__ import annotations

import math
from pathlib import Path

from atts.calibration import certify_abstention
from atts.errors import OptionError
from atts.journal import open_run
from atts.run import Abstain

_FORM = "RISK@PROBABILITY, such as .1@.9: answers wrong at most .1 of the time with probability .9"


def read_abstain(abstain: str | None, labelled: str | Path | None) -> Abstain | None:
    """The threshold of agreement that a labelled run certifies; None where nothing is asked for.

    :raises OptionError: a text that is none, one without the other, a run that is not over, has no
        graded problem or abstained itself, or one that certifies nothing; the words say how many
        problems it would take.
    :raises JournalError: there is no run.
    """
    if abstain is None and labelled is None:
        return None
    if abstain is None or labelled is None:
        raise OptionError(
            "abstain", "abstain and labelled need each other: how seldom wrong, and by which run"
        )
    risk, kept = _parsed(abstain)
    run = open_run(Path(labelled))
    state = run.state()
    if run.setting("abstain") is not None:
        raise OptionError(
            "labelled",
            f"the run in {labelled} withheld answers itself; label problems without abstain",
        )
    undone = (run.manifest.problems or 0) - state.done
    if undone > 0:
        raise OptionError(
            "labelled",
            f"{undone} problems of {labelled} are not over: those that are were the quick ones",
        )
    graded = state.graded.values()
    if not graded:
        raise OptionError(
            "labelled", f"no problem of {labelled} was graded; problems need reference answers"
        )
    confidence = [one.agreement if one.answer is not None else math.nan for one in graded]
    found = certify_abstention(confidence, [not one.is_correct for one in graded], risk, kept)
    if found.threshold is None:
        raise OptionError("abstain", found.guarantee)
    return Abstain(found, run.manifest)


def _parsed(text: str) -> tuple[float, float]:
    risk, mark, kept = text.partition("@")
    try:
        found = float(risk), float(kept) if mark else 0.9
    except ValueError:
        found = math.nan, math.nan
    if not all(0 < part < 1 for part in found):
        raise OptionError("abstain", f"{text!r} is not {_FORM}")
    return found
