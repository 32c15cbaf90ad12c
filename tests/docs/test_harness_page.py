"""Tests of the docs page on other evaluation harnesses, which need not be installed."""

from __future__ import annotations

import ast
import re
from pathlib import Path

import pytest

pytestmark = pytest.mark.checkout
PAGE = Path(__file__).resolve().parents[2] / "docs/harnesses.md"


def test_the_page_passes_the_solver_by_keyword() -> None:
    """The page passes the solver by keyword, because the second positional argument of an
    inspect_ai Task is its set-up.
    """
    blocks = re.findall(r"^```python\n(.*?)^```$", PAGE.read_text(), flags=re.M | re.S)
    [block] = [text for text in blocks if "atts_solver" in text]
    calls = [node for node in ast.walk(ast.parse(block)) if isinstance(node, ast.Call)]
    [task] = [call for call in calls if ast.unparse(call.func) == "Task"]
    assert len(task.args) == 1
    given = {word.arg: ast.unparse(word.value).split("(")[0] for word in task.keywords}
    assert given == {"solver": "atts_solver", "scorer": "match"}
