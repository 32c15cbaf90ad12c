"""Servers from short strings, as they are written on a command line."""

from __future__ import annotations

from typing import Literal, cast
from urllib.parse import parse_qsl, urlsplit

from atts.engine import Capability, Engine
from atts.errors import OptionError
from atts.remote.engine import RemoteEngine
from atts.remote.options import DialectName, RemoteOptions
from atts.remote.pool import ReplicaPool

SCHEMES = ("vllm", "sglang", "llamacpp", "server")
_KNOWN = ("tokenizer", "in_flight", "timeout", "proxy", "priorities")


def server_engine(scheme: str, rest: str, name: str, needs: frozenset[Capability]) -> Engine:
    """The engine of "SCHEME:URL[/MODEL][?tokenizer=FOLDER&in_flight=N&timeout=S&proxy=P&priorities=P]", not open yet.

    Several URLs with commas between them are one pool. "server" finds the dialect out.

    >>> server_engine("vllm", "http://a:8000/Qwen/Qwen3-8B?in_flight=64", "target", frozenset({"score"})).url
    'http://a:8000'

    :raises OptionError: no URL, or a setting that is unknown or impossible.
    """
    dialect = cast(DialectName | Literal["auto"], "auto" if scheme == "server" else scheme)
    engines = [_one(url.strip(), dialect, name, needs) for url in rest.split(",")]
    if len(engines) == 1:
        return engines[0]
    return ReplicaPool([(engine.url, engine) for engine in engines], name=name)


def _one(words: str, dialect: DialectName | Literal["auto"], name: str, needs: frozenset[Capability]) -> RemoteEngine:
    parts = urlsplit(words)
    if parts.scheme not in ("http", "https") or not parts.netloc:
        raise OptionError("engine", f"{words!r} is no URL; write {dialect}:http://HOST:PORT/MODEL")
    settings = dict(parse_qsl(parts.query, keep_blank_values=True))
    for key in settings:
        if key not in _KNOWN:
            raise OptionError("engine", f"{key!r} is no setting of a server", _KNOWN, key)
    return RemoteEngine(
        f"{parts.scheme}://{parts.netloc}",
        dialect=dialect,
        model=parts.path.strip("/"),
        name=name,
        tokenizer=settings.get("tokenizer") or None,
        needs=needs,
        options=_options(settings),
    )


def _options(settings: dict[str, str]) -> RemoteOptions:
    default = RemoteOptions()
    try:
        in_flight = int(settings.get("in_flight", default.in_flight))
        timeout = float(settings.get("timeout", default.timeout_seconds))
    except ValueError as error:
        raise OptionError("engine", f"not a number: {error}") from error
    proxy = cast(Literal["never", "environment"], settings.get("proxy", default.proxy))
    priorities = cast(Literal["ignore", "send"], settings.get("priorities", default.priorities))
    return RemoteOptions(in_flight=in_flight, timeout_seconds=timeout, proxy=proxy, priorities=priorities)
