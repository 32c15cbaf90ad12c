"""JSON on the wire: by orjson where it is installed, for a long prompt's ids take ten times as long without."""

from __future__ import annotations

import importlib
import importlib.util
import json
from typing import Any

_orjson: Any = importlib.import_module("orjson") if importlib.util.find_spec("orjson") else None
_plain = json.JSONEncoder(separators=(",", ":"), check_circular=False).encode


def encode(value: Any) -> bytes:
    """The value as JSON, without a space too many.

    >>> encode({"prompt": (1, 2), "seed": 3})
    b'{"prompt":[1,2],"seed":3}'
    """
    if _orjson is not None:
        return bytes(_orjson.dumps(value))
    return _plain(value).encode()


def decode(text: bytes) -> Any:
    """What JSON says; Python's NaN and Infinity count, for servers in Python send them, and whoever reads checks.

    >>> decode(b'{"logprob": -Infinity}')
    {'logprob': -inf}

    :raises ValueError: it is none, or not whole.
    """
    if _orjson is not None:
        try:
            return _orjson.loads(text)
        except ValueError:
            return json.loads(text)
    return json.loads(text)
