"""Options of an engine on a server: time limits, retries, concurrency, proxies and API keys."""

from __future__ import annotations

import math
import os
import re
from dataclasses import dataclass, field
from pathlib import Path
from typing import Literal, get_args
from urllib.parse import urlsplit

from atts.engine import GIVE_UP_AFTER
from atts.errors import OptionError
from atts.files import open_ordinary

KEY_VARIABLE = "ATTS_API_KEY"
OPENAI_KEY_VARIABLE = "OPENAI_API_KEY"
_LONGEST_KEY = 1 << 16
# This pattern matches spaces and control characters, which a valid URL does not contain.
_SPACES = re.compile(r"[^!-~\xa0-\U0010ffff]")
# This pattern matches names of environment variables: capital letters, "_" and at most three
# digits. It almost never matches an API key.
_VARIABLE = re.compile(r"(?!(.*\d){4})[A-Z_][A-Z0-9_]*")
Prefill = Literal["ask", "continue", "prefix", "trailing"]
"""The technique by which atts makes a chat server continue an unfinished answer. "ask" puts the
unfinished answer into the prompt and asks for a continuation. All other techniques send it as the
last message. "continue" adds two flags to the request (vLLM, SGLang, llama.cpp). "prefix" marks the
message as a prefix (DeepSeek, Mistral). "trailing" adds nothing.
"""


@dataclass(frozen=True, slots=True)
class ApiKey:
    """The place from which an API key is read: an environment variable or a file.

    The key is read when a connection opens. It is never stored in this object.

    >>> ApiKey(variable="ATTS_NO_SUCH_KEY").read()
    Traceback (most recent call last):
    atts.errors.OptionError: key: the variable ATTS_NO_SUCH_KEY is not set; put the API key there, or leave `key` out

    :raises OptionError: `variable` is not the name of a variable, so it may be the key itself.
        Reading the key raises the same error if the variable or file contains no key.
    """

    variable: str = KEY_VARIABLE
    file: Path | None = None

    def __post_init__(self) -> None:
        if self.variable not in os.environ and not _VARIABLE.fullmatch(self.variable):
            problem = (
                "this setting takes the name of an environment variable that contains the API "
                "key, but the given value looks like a key"
            )
            raise OptionError(
                "key",
                f"{problem} (not shown). Put the key in an environment variable or a file, and give "
                "the name of that variable or file",
            )

    def read(self) -> str:
        """Read the key from the file, or from the environment variable if no file is named.

        Return "" if no file is named and the default variable is not set.
        """
        if self.file:
            key = self._read_file(self.file)
        else:
            key = os.environ.get(self.variable, "").strip()
        if not key and (self.file or self.variable != KEY_VARIABLE):
            if self.file:
                problem = f"{self.file} is empty"
            else:
                problem = f"the variable {self.variable} is not set"
            if self.variable == OPENAI_KEY_VARIABLE:
                # The user may not have named this variable: atts reads it for OpenAI's servers. So
                # the advice does not mention the setting `key`.
                advice = f"set this variable, or {KEY_VARIABLE}, to the API key"
            else:
                advice = "put the API key there, or leave `key` out"
            raise OptionError("key", f"{problem}; {advice}")
        if not re.fullmatch(r"[!-~]*", key):
            where = self.file or self.variable
            raise OptionError(
                "key",
                f"the API key in {where} contains a space, a control character or a non-ASCII "
                f"character",
            )
        return key

    def _read_file(self, file: Path) -> str:
        try:
            with open_ordinary(file) as stream:
                return stream.read(_LONGEST_KEY).decode("utf-8").strip()
        except (OSError, ValueError) as error:
            raise OptionError(
                "key file", f"{file} cannot be read ({type(error).__name__})"
            ) from error


@dataclass(frozen=True, slots=True)
class RemoteOptions:
    """Options of the connection to one server: time limits, retries and concurrency.

    - `timeout_seconds`: time limit of a call, including all its retries.
    - `attempts`: largest number of attempts per call, including the first one.
    - `in_flight`: largest number of concurrent requests. atts sends fewer after the server refuses
      some.
    - `wait_seconds`: how many seconds to wait while the server reports that it is loading its
      model.
    - `give_up_after`: how many seconds to wait for a server that is lost during a run. After that,
      calls fail, and the run can be resumed later.
    - `recheck_seconds`, `idle_seconds`: atts identifies the server again `recheck_seconds` after
      the last check, or after a pause of `idle_seconds` without requests. It also does so after a
      lost connection, and after a reply with another model name or fingerprint.
    - `recheck_requests`: after this many answers, a short request checks that the server's model
      has not changed.
    - `proxy`: "environment" uses the proxy that environment variables such as HTTP_PROXY name,
      "never" ignores these variables.
    - `priorities`: "send" only works on servers that were started with priority scheduling, because
      other servers reject requests with a priority.

    The following options are for servers that take messages instead of token ids.

    - `prefill`: how atts asks the server to continue an answer.
    - `extras`: "send" if the server accepts top_k and min_p.
    - `context`: context length in tokens. 0 means the length that the server reports, or 131,072 if
      it reports none.

    `thinking` selects who enforces thinking budgets. "send": the server does, and it must accept
    the field `thinking_token_budget` (on OpenRouter: `reasoning.max_tokens`). "close": atts stops
    the text at the budget and closes the think block.

    :raises OptionError: an option has an impossible value.
    """

    timeout_seconds: float = 600.0
    attempts: int = 3
    # Seconds to wait before a failed request is sent a second time. The wait doubles before each
    # further attempt.
    delay_seconds: float = 0.25
    in_flight: int = 4096
    # Time limit, in seconds, to open a connection. A busy machine needs some seconds to open
    # thousands of connections.
    connect_seconds: float = 10.0
    wait_seconds: float = 600.0
    give_up_after: float = GIVE_UP_AFTER
    # Time limit, in seconds, of the request with which atts aborts a cancelled request on the
    # server.
    cancel_seconds: float = 2.0
    recheck_seconds: float = 15.0
    recheck_requests: int = 64
    idle_seconds: float = 2.0
    proxy: Literal["never", "environment"] = "never"
    priorities: Literal["ignore", "send"] = "ignore"
    prefill: Prefill = "ask"
    extras: Literal["refuse", "send"] = "refuse"
    thinking: Literal["close", "send"] = "close"
    context: int = 0
    key: ApiKey = field(default_factory=ApiKey)
    # File of certificates to trust instead of the system's certificates. atts always verifies a
    # server's certificate.
    ca_file: Path | None = None

    def __post_init__(self) -> None:
        if self.recheck_requests < 1:
            raise OptionError("recheck_requests", f"{self.recheck_requests} is below 1")
        if self.attempts < 1 or self.in_flight < 1 or self.context < 0:
            given = f"attempts {self.attempts}, in_flight {self.in_flight}, context {self.context}"
            raise OptionError(
                "remote",
                f"attempts and in_flight must be at least 1, and context at least 0 (given: {given})",
            )
        for name in ("timeout_seconds", "connect_seconds", "cancel_seconds", "recheck_seconds"):
            if not getattr(self, name) > 0:
                raise OptionError(name, f"{getattr(self, name)} is not positive")
        for name in ("wait_seconds", "give_up_after"):
            seconds = getattr(self, name)
            if not 0 <= seconds < math.inf:
                raise OptionError(
                    name, f"{seconds} is out of range; give a finite number of seconds, 0 or more"
                )
        for name, known in _CHOICES.items():
            if getattr(self, name) not in known:
                raise OptionError(name, f"{getattr(self, name)!r} is unknown", known)


_CHOICES: dict[str, tuple[str, ...]] = {
    "proxy": ("never", "environment"),
    "priorities": ("ignore", "send"),
    "prefill": get_args(Prefill),
    "extras": ("refuse", "send"),
    "thinking": ("close", "send"),
}


def is_url(text: str) -> bool:
    """Return whether a string is an HTTP URL with a host, a valid port and no spaces.

    >>> is_url("http://[::1]:8000/m"), is_url("http://[::1"), is_url("http://h:99999"), is_url("h:8000")
    (True, False, False, False)
    """
    try:
        parts = urlsplit(text)
        reachable = parts.scheme in ("http", "https") and bool(parts.hostname) and parts.port != 0
        return reachable and _SPACES.search(text) is None
    except ValueError:
        # `urlsplit` or `port` raised this error: the URL has a bracket that is never closed, or a
        # port that is not a number.
        return False
