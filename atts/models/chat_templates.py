"""Render chat templates, which are programs, in a child process with time and memory limits."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import threading
import weakref
from collections.abc import Mapping
from contextlib import suppress
from functools import lru_cache
from typing import Any

from atts.concurrency import python_command

_SECONDS = 5.0
_BYTES = 1 << 30
_CHARACTERS = 4 << 20
"""Limits of one rendering in the child: processor seconds, address space, characters of text."""
_TOO_LARGE = f"it takes more than {_BYTES >> 30} GiB of memory, or writes more than {_CHARACTERS >> 20} Mi characters"
_KEPT = ("HOME", "LANG", "LD_LIBRARY_PATH", "PATH", "SYSTEMROOT", "TMPDIR")
"""The environment variables that the child inherits."""


class TemplateError(Exception):
    """The template raised an error or exceeded a limit; the message says which."""


class TemplateProcess:
    """A child process that renders templates, started on first use and again after it died."""

    def __init__(self, seconds: float = _SECONDS) -> None:
        self._seconds = seconds
        self._lock = threading.Lock()
        self.child: subprocess.Popen[bytes] | None = None

    def __reduce__(self) -> tuple[type[TemplateProcess], tuple[float]]:
        """Pickle without the child: another process starts its own."""
        return TemplateProcess, (self._seconds,)

    def start(self) -> subprocess.Popen[bytes]:
        """Start a new child, which ends when this object is collected."""
        self.child = _started(self._seconds)
        weakref.finalize(self, _end, self.child)
        return self.child

    def render(self, request: Mapping[str, Any]) -> str:
        """Return what transformers' renderer makes of these keyword arguments.

        :raises TemplateError: the template raises, or exceeds the limits on time, memory or text.
        """
        with self._lock:
            reply = self._answer(json.dumps(request, default=str).encode() + b"\n")
        if "text" in reply:
            return reply["text"]
        raise TemplateError(reply["error"])

    def _answer(self, request: bytes) -> Mapping[str, str]:
        child = self.child if self.child is not None and self.child.poll() is None else self.start()
        assert child.stdin is not None
        assert child.stdout is not None
        line = b""
        with suppress(OSError):  # the child died while we wrote to it
            child.stdin.write(request)
            child.stdin.flush()
            line = child.stdout.readline()
        if line.endswith(b"\n"):
            reply: Mapping[str, str] = json.loads(line)
            return reply
        _end(child)
        if sys.platform != "win32" and child.returncode == -signal.SIGPROF:
            return {"error": f"it takes more than {self._seconds:g} s of a processor"}
        return {"error": _TOO_LARGE}


@lru_cache(maxsize=16)
def is_plain(template: str) -> bool:
    """Return True if the template only writes its messages one after another.

    Such a template needs no child process: its time and memory grow with the messages only.

    >>> is_plain("{% for m in messages %}{{ m.role + ': ' + m.content }}{% endfor %}"), is_plain("{{ 'x' * 10 ** 10 }}")
    (True, False)
    """
    from jinja2 import Environment, nodes

    statements = (nodes.Template, nodes.Output, nodes.TemplateData, nodes.If, nodes.For)
    values = (
        nodes.CondExpr,
        nodes.Compare,
        nodes.Operand,
        nodes.Name,
        nodes.Const,
        nodes.Getattr,
        nodes.Getitem,
    )
    joins = (nodes.Add, nodes.Concat, nodes.And, nodes.Or, nodes.Not)

    def is_known(node: nodes.Node) -> bool:
        if isinstance(node, nodes.For):
            inner = any(True for _ in node.find_all(nodes.For))
            return node.iter == nodes.Name("messages", "load") and not inner and not node.recursive
        if isinstance(node, nodes.Filter):
            return node.name == "trim"
        if isinstance(node, nodes.Call):
            return node.node == nodes.Name("raise_exception", "load")
        return isinstance(node, (*statements, *values, *joins))

    try:
        whole = Environment(autoescape=False).parse(template)  # nothing is rendered
        return is_known(whole) and all(map(is_known, whole.find_all(nodes.Node)))
    except Exception:  # noqa: BLE001  # a template that does not parse is not plain
        return False


def _started(seconds: float) -> subprocess.Popen[bytes]:
    environment = {name: os.environ[name] for name in _KEPT if name in os.environ} | {
        "USE_TORCH": "0"
    }
    command = python_command("atts.models.chat_templates", str(seconds))
    pipe = subprocess.PIPE
    return subprocess.Popen(
        command, stdin=pipe, stdout=pipe, stderr=subprocess.DEVNULL, env=environment
    )


def _end(child: subprocess.Popen[bytes]) -> None:
    child.kill()
    for pipe in (child.stdin, child.stdout):
        with suppress(OSError):
            pipe.close() if pipe is not None else None
    child.wait()


def _serve(seconds: float) -> None:
    """Answer every line of standard input with one line, until the input ends."""
    from transformers.utils.chat_template_utils import render_jinja_template

    if sys.platform != "win32":
        import resource

        with suppress(OSError, ValueError):  # the limit is lower already, or not supported
            resource.setrlimit(resource.RLIMIT_AS, (_BYTES, _BYTES))
    for line in sys.stdin.buffer:
        if sys.platform != "win32":
            signal.setitimer(signal.ITIMER_PROF, seconds)
        reply = _rendered(render_jinja_template, json.loads(line))
        if sys.platform != "win32":
            signal.setitimer(signal.ITIMER_PROF, 0)
        sys.stdout.buffer.write(json.dumps(reply).encode() + b"\n")
        sys.stdout.buffer.flush()


def _rendered(render: Any, request: dict[str, Any]) -> dict[str, str]:
    try:
        text = str(render(**request)[0][0])
    except MemoryError:
        return {"error": _TOO_LARGE}
    except Exception as error:  # noqa: BLE001  # a template is a program: it may raise anything
        return {"error": str(error)[:1_000]}
    if len(text) > _CHARACTERS:
        return {"error": _TOO_LARGE}
    return {"text": text}


if __name__ == "__main__":
    _serve(float(sys.argv[1]))
