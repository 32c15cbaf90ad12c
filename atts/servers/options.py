"""Options of a remote engine: time-outs, retries, concurrency, proxies, API keys."""

from __future__ import annotations

import math
import os
import re
from dataclasses import dataclass, field
from pathlib import Path
from typing import Literal, get_args
from urllib.parse import urlsplit

from atts.errors import OptionError
from atts.files import open_ordinary

KEY_VARIABLE = "ATTS_API_KEY"
_LONGEST_KEY = 1 << 16
_SPACES = re.compile(r"[^!-~\xa0-\U0010ffff]")  # and control characters
# capitals with few digits: a key hardly looks so
_VARIABLE = re.compile(r"(?!(.*\d){4})[A-Z_][A-Z0-9_]*")
Prefill = Literal["ask", "continue", "prefix", "trailing"]
"""How a server that takes messages goes on with an answer: asked in words, by two flags (vLLM,
SGLang, llama.cpp), by a mark on the message (DeepSeek, Mistral), or of itself."""


@dataclass(frozen=True, slots=True)
class ApiKey:
    """Where an API key is read from when a connection opens; the key itself is never kept here, nor
    shown anywhere.

    >>> ApiKey(variable="ATTS_NO_SUCH_KEY").read()
    Traceback (most recent call last):
    atts.errors.OptionError: key: the variable ATTS_NO_SUCH_KEY is not set; set it to the API key, or leave `key` out

    :raises OptionError: what is given is no name of a variable: it may be the key itself. On
        reading: a variable or file that is named and holds no key.
    """

    variable: str = KEY_VARIABLE
    file: Path | None = None

    def __post_init__(self) -> None:
        if self.variable not in os.environ and not _VARIABLE.fullmatch(self.variable):
            problem = (
                "it names the variable that holds the API key, and what is given looks like a key"
            )
            raise OptionError(
                "key",
                f"{problem} (not shown). Put the key into a variable or a file, and name that",
            )

    def read(self) -> str:
        """The key: from the file when one is named, else from the environment; empty without the
        usual variable.
        """
        key = self._from_file(self.file) if self.file else os.environ.get(self.variable, "").strip()
        if not key and (self.file or self.variable != KEY_VARIABLE):
            problem = (
                f"{self.file} is empty" if self.file else f"the variable {self.variable} is not set"
            )
            raise OptionError("key", f"{problem}; set it to the API key, or leave `key` out")
        if not re.fullmatch(r"[!-~]*", key):
            where = self.file or self.variable
            raise OptionError(
                "key",
                f"the one in {where} holds a space, a control character or a letter beyond ASCII",
            )
        return key

    def _from_file(self, file: Path) -> str:
        try:
            with open_ordinary(file) as stream:
                return stream.read(_LONGEST_KEY).decode("utf-8").strip()
        except (OSError, ValueError) as error:
            raise OptionError(
                "key file", f"{file} cannot be read ({type(error).__name__})"
            ) from error


@dataclass(frozen=True, slots=True)
class RemoteOptions:
    """Patience, retries and load of one server.

    `timeout_seconds` bounds a call with all its retries; `attempts` counts the first try. At most
    `in_flight` requests are under way at once, fewer after the server says that it is too many.
    `wait_seconds` is how long a server that is still loading, or was lost in mid-run, is waited
    for. Every `recheck_seconds`, after a lost connection or a reply under another model's name or
    fingerprint, and after `idle_seconds` of silence, in which a server might have been replaced,
    the engine is asked again who it is. `proxy` "environment" goes through HTTP_PROXY and its kin;
    otherwise they are not looked at. `priorities` "send" is for servers started with priority
    scheduling; others refuse them.

    For servers that take messages: `prefill` is how they go on with an answer, `extras` "send" says
    that they know top_k and min_p, `context` how many tokens they hold where they do not say (0: a
    usual number).

    :raises OptionError: a value no server can be spoken to with.
    """

    timeout_seconds: float = 600.0
    attempts: int = 3
    delay_seconds: float = 0.25  # before the second attempt; doubles
    in_flight: int = 4096
    # thousands of connections at once take a busy machine some seconds
    connect_seconds: float = 10.0
    wait_seconds: float = 600.0
    cancel_seconds: float = 2.0  # for telling the server to free a request
    recheck_seconds: float = 15.0
    idle_seconds: float = 2.0
    proxy: Literal["never", "environment"] = "never"
    priorities: Literal["ignore", "send"] = "ignore"
    prefill: Prefill = "ask"
    extras: Literal["refuse", "send"] = "refuse"
    context: int = 0
    key: ApiKey = field(default_factory=ApiKey)
    # certificates to trust instead of the system's; they are always verified
    ca_file: Path | None = None

    def __post_init__(self) -> None:
        if self.attempts < 1 or self.in_flight < 1 or self.context < 0:
            given = f"attempts {self.attempts}, in_flight {self.in_flight}, context {self.context}"
            raise OptionError("remote", f"{given}: expected at least 1, 1, 0")
        for name in ("timeout_seconds", "connect_seconds", "cancel_seconds", "recheck_seconds"):
            if not getattr(self, name) > 0:
                raise OptionError(name, f"{getattr(self, name)} is not positive")
        if not 0 <= self.wait_seconds < math.inf:
            raise OptionError(
                "wait_seconds", f"{self.wait_seconds} is no number of seconds to wait"
            )
        for name, known in _CHOICES.items():
            if getattr(self, name) not in known:
                raise OptionError(name, f"{getattr(self, name)!r} is unknown", known)


_CHOICES: dict[str, tuple[str, ...]] = {
    "proxy": ("never", "environment"),
    "priorities": ("ignore", "send"),
    "prefill": get_args(Prefill),
    "extras": ("refuse", "send"),
}
DialectName = Literal["vllm", "sglang", "llamacpp", "ollama", "chat"]
DIALECTS: tuple[str, ...] = get_args(DialectName)


def is_url(text: str) -> bool:
    """Whether a server could be there: a host, a port that is one, nothing that is no part of a
    URL.

    >>> is_url("http://[::1]:8000/m"), is_url("http://[::1"), is_url("http://h:99999"), is_url("h:8000")
    (True, False, False, False)
    """
    try:
        parts = urlsplit(text)
        reachable = parts.scheme in ("http", "https") and bool(parts.hostname) and parts.port != 0
        return reachable and _SPACES.search(text) is None
    except ValueError:  # a bracket that is never closed, a port that is none
        return False
