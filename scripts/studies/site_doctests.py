"""Examples in docstrings as the site shows them."""

from __future__ import annotations

import re

_EXAMPLE = re.compile(r"^>>> .*?(?=\n\n|\Z)", re.MULTILINE | re.DOTALL)


def fenced(text: str) -> str:
    """Put each block that begins with `>>> ` between fences, so that it is shown as code."""
    return _EXAMPLE.sub(lambda match: f"```pycon\n{match[0].rstrip()}\n```", text)
