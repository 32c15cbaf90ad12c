"""Tests of schemes for drafting before or during the target's step: neither a scheme nor a change
of scheme changes a text.
"""

from __future__ import annotations

from itertools import pairwise
from pathlib import Path
from shutil import copytree
from typing import Any, cast

import pytest

from atts.accel.overlap.drafter import PATIENCE, Guessing, InlineTransport, OverlappedDrafter
from atts.accel.overlap.process import DrafterProcess
from atts.accel.overlap.schemes import GUESSING, AdaptiveDrafting
from atts.core import Sampling
from atts.local.batch import StepPlan
from atts.local.seams import FixedLength, Forecast, SpeculationRound
from tests.local.speculating import Make, counts, requests, run, same
from tests.local.test_exits import trained
from tests.local.test_streams import with_heads

HOT = (Sampling(0.0), Sampling(0.8), Sampling(1.0, top_p=0.9))


class Changing:
    """A choice that changes the drafting scheme every third step."""

    is_contested = True

    def __init__(self, schemes: int, **ways: bool) -> None:
        self._schemes = schemes
        self._steps = 0

    @property
    def current(self) -> int:
        """Return the drafting schemes in rotation."""
        return self._steps // 3 % self._schemes

    def observed(self, sequences: tuple[int, int], tokens: int, seconds: float) -> None:
        """Check and count a step, and ignore its duration."""
        assert seconds > 0
        assert 0 <= sequences[1] <= sequences[0] <= tokens
        self._steps += 1


@pytest.mark.parametrize("has_exit", [False, True])
@pytest.mark.parametrize("transport", [InlineTransport, DrafterProcess])
def test_changing_schemes_changes_no_token(
    transport: Any,
    has_exit: bool,
    make_model: Make,
    near: Path,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Changing the drafting scheme during a run changes no bit of the replies. The drafter is in
    this process or another.

    If the target has a trained exit, the schemes include Mirror, the only one that uses the
    drafter's heads.
    """
    folder = make_model("llama")
    near = with_heads(copytree(near, tmp_path / "near"))
    orders = requests(4, 60, HOT)
    folder = trained(folder, tmp_path / "heard") if has_exit else folder
    fans = set[Guessing]()
    drafter: Any = transport if transport is DrafterProcess else OverlappedDrafter
    begin = drafter.restart_drafting

    def seen(self: Any, guessing: Guessing) -> None:
        fans.add(guessing)
        begin(self, guessing)

    monkeypatch.setattr("atts.accel.build.usable_cores", lambda: 2)
    monkeypatch.setattr("atts.accel.overlap.schemes.SchemeControl", Changing)
    monkeypatch.setattr(drafter, "restart_drafting", seen)
    # On a busy machine the drafter's process may take seconds for its current job.
    monkeypatch.setattr("atts.accel.overlap.process.PATIENCE", 60.0)
    plain = run(folder, [orders])
    beside = "process" if transport is DrafterProcess else "inline"
    done = run(folder, [orders], None, None, near, speculate="auto", beside=beside)
    assert same(plain, done)
    assert counts(done).trouble == ""
    assert fans == {way for way in GUESSING.values() if has_exit or not way.is_told}
    assert counts(done).accepted > 0
    overlap = counts(done).overlap
    assert overlap is not None
    asked = overlap.hits + overlap.misses
    if transport is DrafterProcess:
        # The scheme changes every three steps. At the second of them, the drafter's process is late
        # or has made a guess that is checked.
        asked += overlap.late
    assert asked > 0


def test_only_an_open_choice_of_scheme_is_learned(
    make_model: Make, near: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """atts compares drafting schemes only if it may choose both the scheme and the number of
    proposed tokens, on several cores.

    Otherwise the draft is always made before the target's step.
    """
    made = list[AdaptiveDrafting]()

    def make(*args: Any, **ways: Any) -> AdaptiveDrafting:
        made.append(AdaptiveDrafting(*args, **ways))
        return made[-1]

    monkeypatch.setattr("atts.accel.build.AdaptiveDrafting", make)
    folder = make_model("llama")
    orders = requests(1, 4)
    for cores, lengths, way in ((2, 4, "auto"), (2, None, "draft"), (1, None, "auto")):
        monkeypatch.setattr("atts.accel.build.usable_cores", lambda cores=cores: cores)
        run(folder, [orders], None, lengths, near, speculate=way)
        assert made == []
    monkeypatch.setattr("atts.accel.build.usable_cores", lambda: 2)
    run(folder, [orders], None, None, near, speculate="auto")
    assert len(made) == 1


def test_a_drafter_that_does_not_end_is_abandoned(
    make_model: Make, near: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A drafter that does not finish is abandoned and reported, and the texts do not change."""

    class Stuck(InlineTransport):
        def wait(self, seconds: float) -> bool:
            return False

    monkeypatch.setattr("atts.accel.build.InlineTransport", Stuck)
    monkeypatch.setattr("atts.accel.build.usable_cores", lambda: 2)
    monkeypatch.setattr("atts.accel.overlap.schemes.SchemeControl", Changing)
    folder = make_model("llama")
    orders = requests(2, 40, HOT)
    done = run(folder, [orders], None, None, near, speculate="auto")
    assert same(run(folder, [orders]), done)
    assert "the drafter did not finish its current job in time" in counts(done).trouble


def test_a_late_job_makes_no_other_scheme_late(
    make_model: Make, near: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """When the drafting scheme changes, the loop waits for the new scheme's first job, even if the
    previous scheme's last job was late.
    """
    waits = list[float]()

    class Late(InlineTransport):
        def wait(self, seconds: float) -> bool:
            waits.append(seconds)
            return seconds == PATIENCE

    monkeypatch.setattr("atts.accel.build.InlineTransport", Late)
    monkeypatch.setattr("atts.accel.build.usable_cores", lambda: 2)
    monkeypatch.setattr("atts.accel.overlap.schemes.SchemeControl", Changing)
    run(make_model("llama"), [requests(2, 40, HOT)], None, None, near, speculate="auto")
    first = [then for before, then in pairwise(waits) if before == PATIENCE]
    assert 0.0 in waits, "some jobs must be late"
    assert len(first) > 2
    assert min(first) > 0


def test_trial_lengths_count_for_no_scheme(monkeypatch: pytest.MonkeyPatch) -> None:
    """A step that tries another proposal length is not used to compare drafting schemes."""
    seen = list[int]()
    trials = iter((True, False, True))

    class Said(FixedLength):
        def observed(self, plan: StepPlan, rounds: Any, seconds: tuple[float, float]) -> Forecast:
            return Forecast(1.0, 1.0, next(trials))

    class Counting:
        is_contested = False
        current = 0

        def __init__(self, schemes: int, **ways: bool) -> None:
            pass

        def observed(self, sequences: tuple[int, int], tokens: int, seconds: float) -> None:
            seen.append(tokens)

    monkeypatch.setattr("atts.accel.overlap.schemes.SchemeControl", Counting)
    drafting = AdaptiveDrafting(cast(Any, None), cast(Any, None), Said(4), 4, has_exit=False)
    plan = StepPlan([], [], [], [(1, 2)])
    for _ in range(3):
        drafting.observed(plan, [SpeculationRound(1, 2, 2, 2)], (0.1, 0.1))
    assert seen == [2]
