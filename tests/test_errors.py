"""Tests of the tree of errors: documented classes, messages and exit codes."""

import inspect

import pytest

from atts import errors


def classes() -> list[type[errors.ATTSError]]:
    found = [
        value
        for value in vars(errors).values()
        if inspect.isclass(value) and issubclass(value, errors.ATTSError)
    ]
    return sorted(found, key=lambda cls: cls.__name__)


@pytest.mark.parametrize("cls", classes())
def test_every_error_is_in_the_documented_tree(cls: type[errors.ATTSError]) -> None:
    """The tree of errors in the module's docstring names each error class, with the exit code of
    the branch.
    """
    drawing = inspect.getdoc(errors) or ""
    line = next(line for line in drawing.splitlines() if cls.__name__ in line)
    branch = next(parent for parent in cls.__mro__ if f"{parent.__name__} (" in drawing)
    assert f"{branch.__name__} ({cls.exit_code})" in drawing
    assert ("(retryable)" in line) == cls.retryable


def test_an_unknown_option_suggests_the_nearest() -> None:
    """The error for a misspelt option suggests the most similar option."""
    assert "did you mean 'rate'" in str(
        errors.OptionError("ratee", "unknown option", ["rate", "turns"])
    )


def test_a_fingerprint_names_every_difference() -> None:
    """The error for a different fingerprint names each field that differs, with both values."""
    text = str(
        errors.FingerprintError("calibration", [("model", "A", "B"), ("dtype", "bf16", "fp32")])
    )
    assert "stored 'A', now 'B'" in text
    assert "bf16" in text
