"""Several studies one after the other: what is done stays done when the series is cut off."""

from __future__ import annotations

import json
import math
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from atts.files import write_atomic
from scripts.studies.harness import Effort, say

PROGRESS = "bench-progress.json"


@dataclass(frozen=True, slots=True)
class Step:
    """One study of a series; `seconds` is about how long it takes two quiet cores, 0 where nobody knows."""

    name: str
    effort: Effort
    seconds: float


class Series:
    """Runs steps in order. In a folder, steps that an interrupted series of the same steps has done are not repeated.

    Once all are done the next series begins anew. A step that failed is tried again by the same command.
    """

    def __init__(self, steps: Sequence[Step], seed: int, folder: Path | None) -> None:
        self._steps = tuple(steps)
        self._file = None if folder is None else folder / PROGRESS
        self._about: Mapping[str, Any] = {"steps": [[step.name, step.effort] for step in steps], "seed": seed}
        self.done: dict[str, float] = self._recall()  # seconds that each took
        self._planned = {step.name: step.seconds for step in steps}

    def run(self, work: Callable[[Step], bool]) -> list[str]:
        """Do what is left; the names of steps whose work says that they failed."""
        failed: list[str] = []
        if self.done:
            say(f"bench: {len(self.done)} of {len(self._steps)} are done already; delete {self._file} to repeat them")
        for step in self._steps:
            if step.name in self.done:
                continue
            say(f"bench: {step.name} ({step.effort}); {self.words(failed)}")
            began = time.perf_counter()
            if work(step):
                self.done[step.name] = time.perf_counter() - began
                self._keep()
            else:
                failed.append(step.name)
        if self._file is not None and not failed:
            self._file.unlink(missing_ok=True)
        return failed

    def words(self, failed: Sequence[str] = ()) -> str:
        """How far it is, and how long the rest will take at the pace so far where that is known."""
        left = [step.seconds for step in self._steps if step.name not in {*self.done, *failed}]
        count = f"{len(self._steps) - len(left)} of {len(self._steps)} done"
        minutes = math.ceil(sum(left) * self.pace / 60)
        return f"{count}, about {minutes} min to go" if left and all(left) else count

    @property
    def pace(self) -> float:
        """What was done took so many times the seconds it was planned to take; 1 at the start."""
        planned = sum(self._planned[name] for name in self.done)
        return sum(self.done.values()) / planned if planned else 1.0

    def _recall(self) -> dict[str, float]:
        if self._file is None or not self._file.exists():
            return {}
        held = json.loads(self._file.read_text())
        return dict(held["done"]) if {name: held.get(name) for name in self._about} == self._about else {}

    def _keep(self) -> None:
        if self._file is not None:
            self._file.parent.mkdir(parents=True, exist_ok=True)
            text = json.dumps({**self._about, "done": self.done}, indent=1) + "\n"
            write_atomic(self._file, text.encode())
