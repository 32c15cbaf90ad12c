"""Extension of griffe, which reads the docstrings of the site's Python API.

It is outside the typed code, because type checkers run where griffe may be missing.
"""

import griffe

from scripts.studies.docs import fenced


class Doctests(griffe.Extension):
    """Show the examples of every docstring as code."""

    def on_instance(self, *, obj: griffe.Object, **_: object) -> None:
        """Put the examples of one object's docstring between fences."""
        if obj.docstring is not None:
            obj.docstring.value = fenced(obj.docstring.value)
