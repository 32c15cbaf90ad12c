"""Parser of server URLs as written on a command line: SCHEME:URL[/MODEL][?SETTING=VALUE&...]."""

from __future__ import annotations

import re
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal
from urllib.parse import parse_qsl, urlsplit

from atts.engine import Capability, Engine
from atts.errors import OptionError
from atts.servers.engine import RemoteEngine
from atts.servers.options import KEY_VARIABLE, ApiKey, DialectName, RemoteOptions, is_url
from atts.servers.pool import ReplicaPool

_DIALECTS: dict[str, DialectName | Literal["auto"]] = {
    "vllm": "vllm", "sglang": "sglang", "llamacpp": "llamacpp", "ollama": "ollama",
    "openai": "chat", "chat": "chat", "server": "auto",
}  # fmt: skip
SCHEMES = tuple(_DIALECTS)
_OPTIONS: dict[str, tuple[str, Callable[[str], Any]]] = {  # by the setting's name
    "in_flight": ("in_flight", int), "timeout": ("timeout_seconds", float), "wait": ("wait_seconds", float),
    "proxy": ("proxy", str), "priorities": ("priorities", str), "prefill": ("prefill", str),
    "extras": ("extras", str), "context": ("context", int),
}  # fmt: skip
_KNOWN = ("tokenizer", "model", *_OPTIONS, "key", "key_file")
_VERSION = re.compile(r"v\d+\w*")


@dataclass(frozen=True, slots=True)
class ServerWords:
    """One server as named in words."""

    url: str
    dialect: DialectName | Literal["auto"] = "auto"
    model: str = ""
    tokenizer: str | None = None
    options: RemoteOptions = RemoteOptions()


def read_server(words: str) -> ServerWords:
    """A server given by its URL alone, or as an engine of a run; several URLs are no one server.

    >>> found = read_server("chat:https://api.openai.com/v1/gpt-4o")
    >>> found.url, found.dialect, found.model
    ('https://api.openai.com/v1', 'chat', 'gpt-4o')

    :raises OptionError: no URL, or a setting that is unknown or impossible.
    """
    scheme, _, rest = words.partition(":")
    return _parse(rest, scheme) if scheme in _DIALECTS else ServerWords(words)


def server_engine(scheme: str, rest: str, name: str, needs: frozenset[Capability]) -> Engine:
    """The engine of "SCHEME:URL[/MODEL][?SETTING=VALUE&...]", not open yet; `docs/servers.md` lists
    the settings.

    Several URLs with commas between them are one pool. "server" finds the dialect out; "openai" and
    "chat" are the chat API, whose URL goes on to its version:
    "openai:https://api.openai.com/v1/MODEL?key=OPENAI_API_KEY", the key being in that variable.

    >>> server_engine("vllm", "http://a:8000/Qwen/Qwen3-8B?in_flight=64", "target", frozenset({"score"})).url
    'http://a:8000'

    :raises OptionError: no URL, or a setting that is unknown or impossible.
    """
    dialect = _DIALECTS[scheme]
    named = [_parse(url.strip(), scheme) for url in rest.split(",")]
    engines = [
        RemoteEngine(
            server.url, dialect=dialect, model=server.model, name=name, tokenizer=server.tokenizer, needs=needs,
            options=server.options,
        )
        for server in named
    ]  # fmt: skip
    if len(engines) == 1:
        return engines[0]
    return ReplicaPool([(engine.url, engine) for engine in engines], name=name)


def _parse(text: str, scheme: str) -> ServerWords:
    dialect = _DIALECTS[scheme]
    if not is_url(text):
        shown = text.rsplit("@", 1)[-1].partition("?")[0]  # without what may be a password or a key
        raise OptionError("engine", f"{shown!r} is no URL; write {scheme}:http://HOST:PORT/MODEL")
    parts = urlsplit(text)
    if parts.username or parts.password:
        raise OptionError(
            "engine",
            "a URL must not hold a user or a password; put an API key into a variable or a file",
        )
    settings = dict(parse_qsl(parts.query, keep_blank_values=True))
    for key in settings:
        if key in ("drafter", "speculate", "k"):
            problem = f"{key!r} is for models of this machine: whether a server speculates is set where it is started"
            raise OptionError("engine", f"{problem} (docs/servers.md)")
        if key not in _KNOWN:
            raise OptionError("engine", f"{key!r} is no setting of a server", _KNOWN, key)
    base, model = _chat_path(parts.path) if dialect == "chat" else ("", parts.path.strip("/"))
    return ServerWords(
        f"{parts.scheme}://{parts.netloc}{base}",
        dialect,
        settings.get("model") or model,
        settings.get("tokenizer") or None,
        _options(settings),
    )


def _chat_path(path: str) -> tuple[str, str]:
    """Where the chat API lives, and the model, which follows the version; without a version it is
    "/v1".

    >>> _chat_path("/api/v1/deepseek/deepseek-r1"), _chat_path("/v1beta/openai/gemini"), _chat_path("/m")
    (('/api/v1', 'deepseek/deepseek-r1'), ('/v1beta/openai', 'gemini'), ('/v1', 'm'))
    """
    parts = path.strip("/").split("/")
    for place, part in enumerate(parts, start=1):
        if _VERSION.fullmatch(part):
            end = place + (parts[place : place + 1] == ["openai"])
            return "/" + "/".join(parts[:end]), "/".join(parts[end:])
    return "/v1", path.strip("/")


def _options(settings: dict[str, str]) -> RemoteOptions:
    try:
        given = {
            option: read(settings[key])
            for key, (option, read) in _OPTIONS.items()
            if key in settings
        }
    except ValueError as error:
        raise OptionError("engine", f"not a number: {error}") from error
    file = settings.get("key_file")
    return RemoteOptions(
        key=ApiKey(settings.get("key", KEY_VARIABLE), Path(file) if file else None), **given
    )
