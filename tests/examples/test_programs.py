"""Tests that every example program runs and prints what its text promises."""

import re
from collections.abc import Callable
from inspect import iscoroutinefunction, signature
from pathlib import Path
from types import ModuleType

import anyio
import pytest

pytestmark = pytest.mark.checkout
SAYS = {
    "certify": r"deploy: with probability at least 0.9 .* policy split at rate 0\.\d",
    "compare_runs": r"vote: .* difference .*\n(.*\n)*target_tokens: 0\.\d+ times",
    "grade": r"0\.5 +equal(.*\n)*12 +13 +different",
    "own_dataset": r"reference 10\.0 answered 10: correct",
    "own_engine": r"\d\d promises checked, 0 broken\n8 problems for \$0\.\d*[1-9]",
    "own_gate": r"scored (\d+) of \d+ draft tokens; the target wrote [1-9]",
    "own_score": r"of 8 correct; \d+ scores, median \d",
    "replay_policy": r"rate 0\.2: .* 0 % of decisions off-policy\nrate 0\.3",
    "stream_events": r"is correct\n(.*\n)*finished: \d+ chunks accepted, [1-9]\d* escalated",
    "two_servers": r"[5-8] of 8 correct; [1-9]\d+ tokens scored",
}


@pytest.mark.parametrize("name", SAYS)
def test_example_runs(
    name: str, example: Callable[[str], ModuleType], capsys: pytest.CaptureFixture[str]
) -> None:
    """The program's own `main` runs and prints the expected text."""
    main = example(name).main
    if iscoroutinefunction(main):
        anyio.run(main)
    else:
        main(*([[]] if signature(main).parameters else []))
    assert re.search(SAYS[name], capsys.readouterr().out)


def test_every_example_is_tried() -> None:
    """The list names every example program, so a new example must be added with the text that it
    prints.
    """
    found = {path.stem for path in (Path(__file__).parents[2] / "examples").glob("*.py")}
    assert found == {*SAYS, "nano_atts", "distil"}
