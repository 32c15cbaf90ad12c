"""Functions that render chat templates, which are programs, in a child process with limits on time
and memory.
"""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import threading
import weakref
from collections.abc import Mapping, Sequence
from contextlib import suppress
from datetime import datetime
from functools import lru_cache
from typing import Any

from atts.concurrency import python_command

_SECONDS = 5.0
_BYTES = 1 << 30
_CHARACTERS = 4 << 20
"""Limits for the rendering of one conversation in the child process: processor time in seconds,
memory in bytes, and length of the output in characters.
"""
_TOO_LARGE = (
    f"the template takes more than {_BYTES >> 30} GiB of memory, or writes more than "
    f"{_CHARACTERS >> 20} Mi characters"
)
_KEPT = ("HOME", "LANG", "LD_LIBRARY_PATH", "PATH", "SYSTEMROOT", "TMPDIR")
"""The environment variables that the child process inherits."""
_MARK = "CONTINUE-FROM-HERE "
"""A string that is added to the end of an unfinished message before rendering. Its position in the
rendered text shows where the message ends.

The string ends with a space. If this space is missing in the rendered text, the template removes
spaces at the ends of messages.
"""

Rows = Sequence[Mapping[str, str]]
"""The type of messages for templates: mappings with `role` and `content`."""


class TemplateError(Exception):
    """The template raised an error or exceeded a limit. The exception's message says which."""


def render(
    template: str, messages: Rows, special_tokens: Mapping[str, str], *, is_open: bool
) -> str:
    """Render a conversation with a template in this process. Use this only for templates that are
    known to be harmless.

    If `is_open` is true, the text ends inside the last message, so that a model can continue it. If
    `is_open` is false, the text ends where the assistant's turn begins.

    :raises Exception: any error that the template raises.
    """
    rows = [dict(message) for message in messages]
    if is_open:
        rows[-1]["content"] += _MARK
    text = str(
        _compiled(template).render(
            messages=rows,
            tools=None,
            documents=None,
            add_generation_prompt=not is_open,
            **special_tokens,
        )
    )
    if not is_open:
        return text
    before, mark, after = text.rpartition(_MARK.rstrip())
    if not mark:
        raise TemplateError(
            "the template leaves out the last message, which the model must continue"
        )
    # If the template removed the spaces at the end of the message, remove them from the original
    # message too, as transformers does.
    return before if after.startswith(" ") else before.rstrip()


@lru_cache(maxsize=16)
def _compiled(template: str) -> Any:
    """Compile a template, with the Jinja extensions and functions that chat templates of Hugging
    Face models use.
    """
    from jinja2 import nodes
    from jinja2.ext import Extension, loopcontrols
    from jinja2.sandbox import ImmutableSandboxedEnvironment

    class Generation(Extension):
        """A Jinja extension for `{% generation %}` blocks. It renders their content unchanged,
        because such a block only marks text that the assistant wrote.
        """

        tags = {"generation"}

        def parse(self, parser: Any) -> nodes.Node:
            line = next(parser.stream).lineno
            body = parser.parse_statements(("name:endgeneration",), drop_needle=True)
            return nodes.Scope(body, lineno=line)

    def refuse(message: str) -> None:
        raise TemplateError(message)

    def to_json(value: Any, indent: int | None = None, **options: Any) -> str:
        # unlike Jinja's own `tojson`, this filter does not escape HTML
        return json.dumps(value, ensure_ascii=False, indent=indent, **options)

    def now(layout: str) -> str:
        return datetime.now().strftime(layout)

    environment: Any = ImmutableSandboxedEnvironment(
        trim_blocks=True, lstrip_blocks=True, extensions=[Generation, loopcontrols]
    )
    environment.filters["tojson"] = to_json
    environment.globals["raise_exception"] = refuse
    environment.globals["strftime_now"] = now
    return environment.from_string(template)


class TemplateProcess:
    """A child process that renders templates. The process is started when it is first needed, and
    again when it is needed after it has died.
    """

    def __init__(self, seconds: float = _SECONDS) -> None:
        self._seconds = seconds
        self._lock = threading.Lock()
        self.child: subprocess.Popen[bytes] | None = None

    def __reduce__(self) -> tuple[type[TemplateProcess], tuple[float]]:
        """Pickle this object without its child process. Each process that loads the pickle starts
        its own child.
        """
        return TemplateProcess, (self._seconds,)

    def start(self) -> subprocess.Popen[bytes]:
        """Start a new child process, which ends when this object is garbage-collected."""
        self.child = _started(self._seconds)
        weakref.finalize(self, _end, self.child)
        return self.child

    def render(
        self, template: str, messages: Rows, special_tokens: Mapping[str, str], *, is_open: bool
    ) -> str:
        """Render a conversation in the child process, with the same result as the function
        `render`.

        :raises TemplateError: the template raises, or exceeds the limits on time, memory or text.
        """
        request = {
            "template": template,
            "messages": [dict(message) for message in messages],
            "special_tokens": dict(special_tokens),
            "is_open": is_open,
        }
        with self._lock:
            reply = self._answer(json.dumps(request).encode() + b"\n")
        if "text" in reply:
            return reply["text"]
        raise TemplateError(reply["error"])

    def _answer(self, request: bytes) -> Mapping[str, str]:
        child = self.child
        if child is None or child.poll() is not None:
            child = self.start()
        assert child.stdin is not None
        assert child.stdout is not None
        line = b""
        with suppress(OSError):  # raised if the child ended while this process wrote to it
            child.stdin.write(request)
            child.stdin.flush()
            line = child.stdout.readline()
        if line.endswith(b"\n"):
            reply: Mapping[str, str] = json.loads(line)
            return reply
        _end(child)
        if sys.platform != "win32" and child.returncode == -signal.SIGPROF:
            return {"error": f"the template takes more than {self._seconds:g} s of CPU time"}
        return {"error": _TOO_LARGE}


@lru_cache(maxsize=16)
def is_plain(template: str) -> bool:
    """Return whether the template only writes its messages one after another.

    The time and memory that such a template needs grow only with the messages, so it can be
    rendered without the child process.

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
        # this is safe for any template, because `parse` does not render the template
        whole = Environment(autoescape=False).parse(template)
        return is_known(whole) and all(map(is_known, whole.find_all(nodes.Node)))
    except Exception:  # noqa: BLE001  # a template that does not parse is not plain
        return False


def _started(seconds: float) -> subprocess.Popen[bytes]:
    environment = {name: os.environ[name] for name in _KEPT if name in os.environ}
    command = python_command("atts.models.chat_templates", str(seconds))
    pipe = subprocess.PIPE
    return subprocess.Popen(
        command, stdin=pipe, stdout=pipe, stderr=subprocess.DEVNULL, env=environment
    )


def _end(child: subprocess.Popen[bytes]) -> None:
    child.kill()
    for pipe in (child.stdin, child.stdout):
        if pipe is not None:
            with suppress(OSError):
                pipe.close()
    child.wait()


def _serve(seconds: float) -> None:
    """Answer rendering requests until standard input ends. Each request is a line of standard
    input, and each answer is a line of standard output.
    """
    # Compiling an empty template imports Jinja before the limits apply.
    _compiled("")
    if sys.platform != "win32":
        import resource

        # raised if the system already has a lower limit, or does not support this limit
        with suppress(OSError, ValueError):
            resource.setrlimit(resource.RLIMIT_AS, (_BYTES, _BYTES))
    for line in sys.stdin.buffer:
        if sys.platform != "win32":
            signal.setitimer(signal.ITIMER_PROF, seconds)
        reply = _rendered(json.loads(line))
        if sys.platform != "win32":
            signal.setitimer(signal.ITIMER_PROF, 0)
        sys.stdout.buffer.write(json.dumps(reply).encode() + b"\n")
        sys.stdout.buffer.flush()


def _rendered(request: dict[str, Any]) -> dict[str, str]:
    try:
        text = render(
            request["template"],
            request["messages"],
            request["special_tokens"],
            is_open=request["is_open"],
        )
    except MemoryError:
        return {"error": _TOO_LARGE}
    except Exception as error:  # noqa: BLE001  # a template is a program: it may raise anything
        return {"error": (str(error) or type(error).__name__)[:1_000]}
    if len(text) > _CHARACTERS:
        return {"error": _TOO_LARGE}
    return {"text": text}


if __name__ == "__main__":
    _serve(float(sys.argv[1]))
