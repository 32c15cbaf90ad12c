"""Tests of the public names of `evaluators`: the list is complete, and using it imports no heavy
library.
"""

import ast
import importlib
import subprocess
import sys
from pathlib import Path

import pytest

import atts.evaluators as evaluators

PAGE = ast.parse(Path(str(evaluators.__file__)).read_text())


def test_all_equals_the_type_checkers_imports() -> None:
    """`__all__` is sorted and lists exactly what the block for type checkers imports."""
    (block,) = [
        node
        for node in PAGE.body
        if isinstance(node, ast.If) and ast.unparse(node.test) == "TYPE_CHECKING"
    ]
    seen = {
        alias.name: node.module
        for node in block.body
        if isinstance(node, ast.ImportFrom)
        for alias in node.names
    }
    assert list(evaluators.__all__) == sorted(evaluators.__all__) == sorted(seen)
    for name, module in seen.items():
        assert getattr(evaluators, name) is getattr(importlib.import_module(str(module)), name)


def test_an_unknown_name_is_refused() -> None:
    """An unknown name raises AttributeError, as in any module."""
    with pytest.raises(AttributeError, match="'equivalents'"):
        getattr(evaluators, "equivalents")  # noqa: B009


def test_no_name_is_hidden_by_a_folder() -> None:
    """If a folder with the name of a public function is imported first, the name still gives the
    function.
    """
    folders = {path.stem for path in Path(str(evaluators.__file__)).parent.iterdir()}
    assert not folders & set(evaluators.__all__)


def test_grading_imports_no_numpy_scipy_or_sympy() -> None:
    """A command that only grades imports neither numpy, scipy nor sympy, which would take time."""
    code = (
        "import sys; from atts.evaluators import GradeTally, equivalent, extract, grade, group;"
        "assert equivalent('1/2', '0.5').status == 'equal';"
        "print([name for name in ('numpy', 'scipy', 'sympy', 'anyio', 'torch') if name in "
        "sys.modules])"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.strip() == "[]"
