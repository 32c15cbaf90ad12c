"""Parser of server addresses, SCHEME:URL[/MODEL][?SETTING=VALUE&...], and the table of dialects."""

from __future__ import annotations

import os
import re
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any
from urllib.parse import parse_qsl, urlsplit

from atts.errors import OptionError
from atts.servers.chat import ChatDialect
from atts.servers.dialect import Dialect
from atts.servers.llamacpp import LlamaCppDialect
from atts.servers.ollama import OllamaDialect
from atts.servers.options import (
    KEY_VARIABLE,
    OPENAI_KEY_VARIABLE,
    ApiKey,
    RemoteOptions,
    is_url,
)
from atts.servers.sglang import SglangDialect
from atts.servers.vllm import VllmDialect

# To add a dialect, write one file and add its class here. The scheme `auto` tries the classes in
# this order. SGLang comes before vLLM, because its servers also answer some of vLLM's paths.
_CLASSES: tuple[type[Dialect], ...] = (
    SglangDialect,
    LlamaCppDialect,
    VllmDialect,
    OllamaDialect,
    ChatDialect,
)
DIALECTS: Mapping[str, type[Dialect]] = {kind.name: kind for kind in _CLASSES}
"""All dialect classes, keyed by dialect name."""

AUTO = "auto"
_SCHEMES: Mapping[str, str] = {
    **{scheme: kind.name for kind in _CLASSES for scheme in kind.schemes},
    "server": AUTO,
}
SCHEMES = tuple(_SCHEMES)
"""All schemes that a server's address can begin with, such as "vllm" in "vllm:http://HOST:PORT"."""

# The settings that can follow "?" in an address. Each one has a field of `RemoteOptions` that it
# sets, and a parser for its value.
_OPTIONS: dict[str, tuple[str, Callable[[str], Any]]] = {
    "in_flight": ("in_flight", int),
    "timeout": ("timeout_seconds", float),
    "wait": ("wait_seconds", float),
    "give_up_after": ("give_up_after", float),
    "proxy": ("proxy", str),
    "priorities": ("priorities", str),
    "prefill": ("prefill", str),
    "extras": ("extras", str),
    "thinking": ("thinking", str),
    "context": ("context", int),
}
_SETTINGS = ("tokenizer", "model", *_OPTIONS, "key", "key_file")
_VERSION = re.compile(r"v\d+\w*")
_HOST_AND_PORT = re.compile(r"[^/?]+:\d+(?:[/?].*)?")
_DEFAULTS = RemoteOptions()
OPENAI_URL = "https://api.openai.com/v1"
OPENAI_URL_VARIABLE = "OPENAI_BASE_URL"


@dataclass(frozen=True, slots=True)
class ServerAddress:
    """The parts of one parsed server address: URL, dialect, model, tokenizer and connection
    options.
    """

    url: str
    dialect: str = AUTO
    model: str = ""
    tokenizer: str | None = None
    options: RemoteOptions = field(default_factory=RemoteOptions)


def read_server(address: str) -> ServerAddress:
    """Parse the address of one server. A URL without a scheme such as "vllm:" is accepted too; its
    dialect is detected when the engine connects.

    >>> server = read_server("chat:https://api.openai.com/v1/gpt-4o")
    >>> server.url, server.dialect, server.model
    ('https://api.openai.com/v1', 'chat', 'gpt-4o')

    :raises OptionError: the address has no URL, several URLs, or an unknown or impossible setting.
    """
    scheme, _, rest = address.partition(":")
    if scheme not in _SCHEMES:
        return ServerAddress(address)
    return parse_address(scheme, rest)


def read_servers(
    scheme: str, rest: str, defaults: RemoteOptions = _DEFAULTS
) -> list[ServerAddress]:
    """Parse an address that may list several URLs, separated by commas, and return one entry per
    URL. Several URLs are replicas of one model.

    `defaults` gives the options that the address does not set.

    :raises OptionError: the address has no URL, or an unknown or impossible setting.
    """
    return [parse_address(scheme, part.strip(), defaults) for part in rest.split(",")]


def parse_address(scheme: str, rest: str, defaults: RemoteOptions = _DEFAULTS) -> ServerAddress:
    """Parse the part of an address after its scheme.

    "openai:MODEL" needs no URL. The URL then comes from the environment variable OPENAI_BASE_URL,
    or is OpenAI's own URL if the variable is not set.

    >>> parse_address("vllm", "http://a:8000/Qwen/Qwen3-8B?in_flight=64").model
    'Qwen/Qwen3-8B'

    :raises OptionError: the address has no URL, or an unknown or impossible setting.
    """
    dialect = _SCHEMES[scheme]
    if scheme == "openai" and "://" not in rest.partition("?")[0]:
        return _openai_model(rest, defaults)
    if not is_url(rest):
        # Omit the user, password and query of the address from the message, because they may
        # contain secrets.
        shown = rest.rsplit("@", 1)[-1].partition("?")[0]
        raise OptionError(
            "engine", f"{shown!r} is not a URL; write {scheme}:http://HOST:PORT/MODEL"
        )
    parts = urlsplit(rest)
    if parts.username or parts.password:
        raise OptionError(
            "engine",
            "a URL must not contain a user name or password; put an API key in a variable or a file",
        )
    if parts.fragment:
        raise OptionError(
            "engine",
            "a URL must not contain a fragment (a part after #); servers never receive it, but "
            "the run would store it",
        )
    settings = _settings(parts.query)
    if dialect == ChatDialect.name:
        base, model = _chat_path(parts.path)
    else:
        base = ""
        model = parts.path.strip("/")
    url = f"{parts.scheme}://{parts.netloc}{base}"
    return _server(url, dialect, model, settings, defaults)


def _openai_model(rest: str, defaults: RemoteOptions) -> ServerAddress:
    """Parse the part after "openai:" in an address that names a model but has no URL."""
    model, _, query = rest.partition("?")
    settings = _settings(query)
    if not model or _HOST_AND_PORT.fullmatch(rest):
        # HOST:PORT is a URL without its scheme, so do not read it as the name of a model.
        raise OptionError(
            "engine",
            f"{model!r} is neither a URL nor the name of a model; write "
            f"openai:http://HOST:PORT/MODEL",
        )
    url = os.environ.get(OPENAI_URL_VARIABLE, "").strip() or OPENAI_URL
    parts = urlsplit(url)
    if not is_url(url) or parts.username or parts.password or parts.query:
        raise OptionError(
            OPENAI_URL_VARIABLE,
            f"expected a URL such as {OPENAI_URL}, without a user name, password or query",
        )
    return _server(url.rstrip("/"), ChatDialect.name, model, settings, defaults)


def _settings(query: str) -> dict[str, str]:
    settings = dict(parse_qsl(query, keep_blank_values=True))
    for key in settings:
        if key in ("drafter", "speculate", "k"):
            problem = (
                f"{key!r} applies only to models that run on this machine; choose a server's "
                "speculation when you start the server"
            )
            raise OptionError("engine", f"{problem} (docs/servers.md)")
        if key not in _SETTINGS:
            raise OptionError("engine", f"{key!r} is not a server setting", _SETTINGS, key)
    return settings


def _server(
    url: str, dialect: str, model: str, settings: dict[str, str], defaults: RemoteOptions
) -> ServerAddress:
    return ServerAddress(
        url,
        dialect,
        settings.get("model") or model,
        settings.get("tokenizer") or None,
        _options(settings, url, dialect, defaults),
    )


def _chat_path(path: str) -> tuple[str, str]:
    """Split a URL's path into the base path of the chat API and the model name.

    The base path ends with an API version such as "v1", and the rest is the model name. A path
    without a version is only a model name, and the base path is "/v1".

    >>> _chat_path("/api/v1/deepseek/deepseek-r1"), _chat_path("/v1beta/openai/gemini"), _chat_path("/m")
    (('/api/v1', 'deepseek/deepseek-r1'), ('/v1beta/openai', 'gemini'), ('/v1', 'm'))
    """
    parts = path.strip("/").split("/")
    for number, part in enumerate(parts, start=1):
        if _VERSION.fullmatch(part):
            # in Google's API, the base path continues after the version: /v1beta/openai
            end = number + 1 if parts[number : number + 1] == ["openai"] else number
            return "/" + "/".join(parts[:end]), "/".join(parts[end:])
    return "/v1", path.strip("/")


def _options(
    settings: dict[str, str], url: str, dialect: str, defaults: RemoteOptions
) -> RemoteOptions:
    options: dict[str, Any] = {}
    try:
        for setting, (option, read) in _OPTIONS.items():
            if setting in settings:
                options[option] = read(settings[setting])
    except ValueError as error:
        raise OptionError(
            "engine", f"a setting in the address is not a number ({error})"
        ) from error
    return replace(defaults, key=_key(settings, url, dialect), **options)


def _key(settings: dict[str, str], url: str, dialect: str) -> ApiKey:
    """Return the place from which to read the API key: an environment variable or a file.

    By default, OPENAI_API_KEY is sent only to OpenAI and to the host in OPENAI_BASE_URL. Any other
    host could misuse the key.
    """
    file = settings.get("key_file")
    if "key" in settings:
        return ApiKey(settings["key"], Path(file) if file else None)
    if file:
        return ApiKey(file=Path(file))
    if dialect != ChatDialect.name:
        return ApiKey()
    is_openai = _host(url) == _host(OPENAI_URL)
    is_named = _host(url) == _host(os.environ.get(OPENAI_URL_VARIABLE, ""))
    if (is_openai or is_named) and _is_set(OPENAI_KEY_VARIABLE):
        return ApiKey(OPENAI_KEY_VARIABLE)
    if is_openai and not _is_set(KEY_VARIABLE):
        # No key is set, but OpenAI requires one. Reading this key later raises an error that names
        # OPENAI_API_KEY.
        return ApiKey(OPENAI_KEY_VARIABLE)
    return ApiKey()


def _is_set(variable: str) -> bool:
    return bool(os.environ.get(variable, "").strip())


def _host(url: str) -> tuple[str, str]:
    """Return the scheme and the "host:port" of a URL, or two empty strings if the URL is malformed.
    Two URLs may share an API key only if both their schemes and their "host:port" are the same.
    """
    try:
        parts = urlsplit(url.strip())
    except ValueError:
        return "", ""
    return parts.scheme, parts.netloc
