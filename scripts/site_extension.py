"""Extension of griffe that reads the docstrings of the site's Python API.

This file is not type-checked with the rest of the code, because type checkers may run where griffe
is missing.
"""

import griffe

from scripts.studies.docs import fenced


class Doctests(griffe.Extension):
    """Show the examples of every docstring as code."""

    def on_instance(self, *, obj: griffe.Object, **_: object) -> None:
        """Put code fences around the examples in one object's docstring."""
        if obj.docstring is not None:
            obj.docstring.value = fenced(obj.docstring.value)
