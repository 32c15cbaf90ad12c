"""Engines from short strings: the one place that knows which kinds exist."""

from __future__ import annotations

from typing import TYPE_CHECKING

from atts.core import Role
from atts.engine import Engine
from atts.errors import OptionError

if TYPE_CHECKING:
    from atts.local import LocalOptions

SCHEMES = ("embedded", "hf", "scripted", "vllm", "sglang", "llamacpp", "server")
_SERVERS = SCHEMES[3:]


def build_engine(name: str | Engine, role: Role, options: LocalOptions | None = None) -> Engine:
    """An engine that is not open yet: "embedded", "scripted", "hf:Qwen/Qwen3-1.7B", "hf:./folder", or one you made.

    Servers are "vllm:http://host:8000/Model", "sglang:...", "llamacpp:...", or "server:..." when the server may say
    what it is; several URLs with commas between them are replicas of one engine (`docs/servers.md`).

    :raises OptionError: no engine is called that.

    >>> build_engine("scripted", "draft").spec.name
    'draft'
    """
    if not isinstance(name, str):
        return name
    scheme, _, rest = name.partition(":")
    if scheme == "scripted":
        from atts.testing import ScriptedEngine

        return ScriptedEngine("target" if (rest or role) == "target" else "draft")
    if scheme in ("embedded", "hf"):
        from atts.local import LocalEngine

        if scheme == "embedded":
            from atts.models import path

            return LocalEngine(path("target" if (rest or role) == "target" else "draft"), name=role, options=options)
        if rest:
            return LocalEngine(rest, name=role, options=options)
    if scheme in _SERVERS and rest:
        from atts.remote import server_engine

        return server_engine(scheme, rest, role, frozenset({"sample", "score"} if role == "target" else {"sample"}))
    raise OptionError("engine", f"{name!r} names no engine; give SCHEME or SCHEME:MODEL", SCHEMES, scheme)
