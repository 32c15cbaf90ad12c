"""Selection of problems: slices, samples and filters, the same ones for the same words."""

import random
import re
from collections.abc import Sequence
from dataclasses import dataclass
from difflib import get_close_matches

from atts.core import Problem
from atts.errors import DatasetError, OptionError


@dataclass(frozen=True, slots=True)
class Selection:
    """Which problems, applied in the order of the fields: by id, level and subject, then a draw, then a slice.

    `sample` draws that many with `random.Random(seed).sample`, in the order drawn; ids come in the order asked for.
    """

    ids: tuple[str, ...] = ()
    levels: tuple[int, ...] = ()
    subjects: tuple[str, ...] = ()
    sample: int | None = None
    seed: int = 0
    start: int | None = None
    stop: int | None = None
    step: int | None = None

    def words(self) -> str:
        """The selection in words; "" when everything is selected."""
        ends = ["" if end is None else str(end) for end in (self.start, self.stop, self.step)]
        parts = [
            f"{len(self.ids)} ids" if self.ids else "",
            f"levels {', '.join(map(str, self.levels))}" if self.levels else "",
            f"subjects {', '.join(self.subjects)}" if self.subjects else "",
            f"{self.sample} drawn with seed {self.seed}" if self.sample is not None else "",
            f"slice [{':'.join(ends if ends[2] else ends[:2])}]" if any(ends) else "",
        ]
        return ", ".join(part for part in parts if part)


def split_slice(name: str) -> tuple[str, Selection]:
    """A name such as "math500[:100]" as the name and the slice.

    >>> split_slice("aime24[10:20]")[1].words()
    'slice [10:20]'
    """
    found = re.fullmatch(r"(.+?)\[(-?\d{0,18}):(-?\d{0,18})(?::(-?\d{0,18}))?\]", name)
    if not found:
        return name, Selection()
    start, stop, step = (int(end) if end and end != "-" else None for end in found.groups()[1:])
    if step == 0:
        raise OptionError("dataset", f"{name!r} has a step of 0")
    return found[1], Selection(start=start, stop=stop, step=step)


def select(problems: Sequence[Problem], selection: Selection, source: str = "selection") -> list[Problem]:
    """The problems selected; raises DatasetError for an id, level or subject that none has, and for an empty result."""
    chosen = list(problems)
    if selection.ids:
        chosen = _by_id(chosen, selection.ids, source)
    for field, wanted in (("level", selection.levels), ("subject", selection.subjects)):
        chosen = _by(chosen, field, wanted, source) if wanted else chosen
    if selection.sample is not None:
        if not 0 < selection.sample <= len(chosen):
            raise DatasetError(source, f"cannot draw {selection.sample} of {len(chosen)} problems", "Ask for fewer")
        chosen = random.Random(selection.seed).sample(chosen, selection.sample)
    chosen = chosen[selection.start : selection.stop : selection.step]
    if not chosen:
        raise DatasetError(source, f"nothing is left of {len(problems)} problems by {selection.words()}", "Select less")
    return chosen


def _by_id(problems: list[Problem], ids: Sequence[str], source: str) -> list[Problem]:
    by_id = {problem.id: problem for problem in problems}
    short = {name.split("/", 1)[-1]: problem for name, problem in by_id.items()}
    for name in ids:
        if name not in by_id and name not in short:
            near = get_close_matches(name, [*by_id, *short], n=3)
            raise DatasetError(source, f"no problem has the id {name!r}", f"Near it: {', '.join(near or [*by_id][:3])}")
    return [by_id.get(name) or short[name] for name in dict.fromkeys(ids)]


def _by(problems: list[Problem], field: str, wanted: Sequence[int | str], source: str) -> list[Problem]:
    def folded(value: int | str | None) -> int | str | None:
        return value.casefold() if isinstance(value, str) else value

    there = {folded(getattr(problem, field)): getattr(problem, field) for problem in problems}
    asked = [folded(name) for name in wanted]
    if unknown := [name for name in asked if name not in there]:
        known = ", ".join(sorted(str(name) for name in there.values() if name not in (None, "")))
        raise DatasetError(source, f"no problem has {field} {unknown[0]!r}", f"Known: {known or 'it states none'}")
    return [problem for problem in problems if folded(getattr(problem, field)) in asked]
