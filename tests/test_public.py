"""Tests of the public names: complete, sorted, importable, and closed."""

import importlib
import inspect
from typing import Any

import pytest

import atts

pytestmark = pytest.mark.both


def test_the_list_is_sorted_and_complete() -> None:
    """`__all__` is sorted, and has exactly the names that atts imports lazily."""
    home: dict[str, str] = vars(atts)["_HOME"]
    assert list(atts.__all__) == sorted(atts.__all__) == sorted(home)


@pytest.mark.parametrize("name", atts.__all__)
def test_every_public_name_is_the_object_of_its_module(name: str) -> None:
    """A public name is the same object as in its module, and it is documented."""
    home: dict[str, str] = vars(atts)["_HOME"]
    value: Any = getattr(atts, name)
    assert value is getattr(importlib.import_module(home[name]), name)
    assert value.__doc__


def test_an_unknown_name_is_an_attribute_error() -> None:
    """Accessing a misspelt public name raises AttributeError, as in any module."""
    with pytest.raises(AttributeError, match="sovle"):
        _ = atts.sovle  # type: ignore[attr-defined, unused-ignore]


def test_the_signature_of_evaluate_sync_says_what_it_returns() -> None:
    """The signature has the parameters of `evaluate`, and the result of awaiting it."""
    found = inspect.signature(atts.evaluate_sync)
    assert found.return_annotation is atts.RunResult
    assert list(found.parameters) == list(inspect.signature(atts.evaluate).parameters)
