"""Redaction of known secrets in what a server says, before anything else reads it."""

from __future__ import annotations

import os
import re
from collections.abc import Callable
from functools import partial
from urllib.parse import urlsplit

from atts.servers.options import RemoteOptions

HIDDEN = b"[API key]"
_SHORTEST = 8  # a shorter one is no secret, and may be a word that replies are made of


def redactor(key: str, options: RemoteOptions) -> Callable[[bytes], bytes]:
    r"""Takes the API key and the passwords of the proxies in use out of a text, also as JSON or
    URLs escape them.

    >>> redactor("sk-12/3456", RemoteOptions())(rb'{"error": "Bearer sk-12\/3456, sk-12%2F3456"}')
    b'{"error": "Bearer [API key], [API key]"}'
    """
    proxies = [value for name, value in os.environ.items() if name.lower().endswith("_proxy")]
    passwords = [
        urlsplit(proxy).password or "" for proxy in proxies if options.proxy == "environment"
    ]
    patterns = [
        "".join(map(_forms, secret)) for secret in (key, *passwords) if len(secret) >= _SHORTEST
    ]
    return partial(re.compile("|".join(patterns).encode()).sub, HIDDEN) if patterns else bytes


def _forms(letter: str) -> str:
    if letter.isalnum():
        return letter
    code = ord(letter)
    return rf"(?:\\?{re.escape(letter)}|\\u00{code:02x}|\\u00{code:02X}|%{code:02x}|%{code:02X})"
