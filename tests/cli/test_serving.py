"""The options of `atts serve` that are read before anything is served."""

from __future__ import annotations

import pytest

from tests.cli.conftest import Atts


@pytest.mark.parametrize(
    ("words", "problem"),
    [
        (("--model", "scripted", "--draft", "scripted"), "leave --draft out"),
        (("--model", "scripted", "--pair", "r1-1.5b/r1-70b"), "leave --pair out"),
        (("--share", "ann"), "'ann' is not USER=SHARE"),
        (("--share", "=2"), "'=2' is not USER=SHARE"),
        (("--share", "ann=much"), "is not USER=SHARE"),
        (("--share", "ann=0"), "is not a share above 0"),
    ],
)
def test_options_that_mean_nothing_are_refused(
    atts: Atts, words: tuple[str, ...], problem: str
) -> None:
    """The option is named, and nothing is served."""
    pytest.importorskip("starlette", reason="needs the extra serve")
    done = atts("serve", *words)
    assert done.code == 2
    assert problem in done.err
