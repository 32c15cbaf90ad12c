"""Tests that each example on the pages runs, or has a comment with the reason why it is not run."""

from __future__ import annotations

import ast
import doctest
import inspect
import io
import os
import re
import shlex
import subprocess
import sys
from collections.abc import Coroutine, Iterator
from contextlib import redirect_stderr, redirect_stdout
from dataclasses import dataclass
from pathlib import Path
from types import CodeType, FunctionType
from typing import Any, get_args

import anyio
import pytest

from atts.cli.app import run as atts
from atts.core import Role

pytestmark = pytest.mark.checkout
ROOT = Path(__file__).resolve().parents[2]
GENERATED = {"cli.md", "modules.md", "grading_policies.md"}
PAGES = [
    ROOT / "README.md",
    *sorted(page for page in (ROOT / "docs").glob("*.md") if page.name not in GENERATED),
]
EXAMPLES = ("python", "console", "bash", "sh", "shell", "pycon")
SHELL = set("|<>&;$`*")
FENCE = re.compile(
    r"(?:^<!-- (?P<word>not run|exit): (?P<why>.+?) -->\n+)?^```(?P<kind>\w*)\n(?P<text>.*?)^```$",
    re.M | re.S,
)


@dataclass(frozen=True, slots=True)
class Example:
    """One fenced block of a page, with its language and the comment above it."""

    kind: str
    text: str
    line: int
    skipped: str = ""  # the reason why the example is not run; "" if it is run
    exit: int = 0


def examples(page: Path) -> Iterator[Example]:
    """Yield the blocks of a page that a reader can run."""
    text = page.read_text()
    for found in FENCE.finditer(text):
        if found["kind"] in EXAMPLES:
            line = text.count("\n", 0, found.start("text")) + 1
            skipped = found["why"] if found["word"] == "not run" else ""
            yield Example(
                found["kind"],
                found["text"],
                line,
                skipped,
                int(found["why"]) if found["word"] == "exit" else 0,
            )


def commands(text: str) -> Iterator[tuple[str, str]]:
    """Yield the commands of a console block ("$ ", continued by "> "), each with the output that it
    should print.
    """
    for part in re.split(r"^\$ ", text, flags=re.M)[1:]:
        lines = part.splitlines()
        more = 1
        while more < len(lines) and lines[more].startswith("> "):
            more += 1
        words = "\n".join([lines[0], *(line[2:] for line in lines[1:more])])
        yield words, "".join(f"{line}\n" for line in lines[more:])


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.name)
def test_every_example_runs(
    page: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, request: Any
) -> None:
    """The blocks of a page run in order, in one folder and one namespace, as if a reader typed
    them.
    """
    if page.name == "two_servers.md":
        request.getfixturevalue("two_servers")
    # A reader's local engines run in their own processes, which start slowly; tests/cli and
    # tests/local test such processes.
    else:
        for role in get_args(Role):
            monkeypatch.setenv(f"ATTS_{role.upper()}", f"embedded:{role}?worker=thread")
    monkeypatch.chdir(tmp_path)
    for name, value in {
        "COLUMNS": "120",
        "NO_COLOR": "1",
        "TERM": "dumb",
        "HF_HUB_OFFLINE": "1",
    }.items():
        monkeypatch.setenv(name, value)
    monkeypatch.setenv(
        "PATH", os.pathsep.join([str(Path(sys.executable).parent), os.environ["PATH"]])
    )
    namespace: dict[str, Any] = {"__name__": "__example__"}
    for example in examples(page):
        if example.skipped:
            continue
        where = f"{page.name}:{example.line}"
        if example.kind == "python":
            run_python(example, where, namespace)
        elif example.kind == "console":
            run_console(example, where)
        else:
            pytest.fail(
                f"{where}: write ```console with `$ ` before commands, or say <!-- not run: why -->"
            )


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.name)
def test_a_block_that_is_not_run_states_the_reason(page: Path) -> None:
    """A block that is not run has a reason of at least a few words."""
    assert [it.line for it in examples(page) if it.skipped and len(it.skipped.split()) < 3] == []


def run_python(example: Example, where: str, namespace: dict[str, Any]) -> None:
    """Run a block, with `await` at its top level; a last comment `# prints: ...` is the expected
    output.
    """
    code: CodeType = compile(
        example.text, where, "exec", ast.PyCF_ALLOW_TOP_LEVEL_AWAIT, dont_inherit=True
    )
    said = io.StringIO()
    with redirect_stdout(said):
        if code.co_flags & inspect.CO_COROUTINE:
            anyio.run(_awaited, code, namespace)
        else:
            exec(code, namespace)
    promised = re.findall(r"^# prints: ?(.*)$", example.text, flags=re.M)
    if promised:
        expect("".join(f"{line}\n" for line in promised), said.getvalue(), where)


async def _awaited(code: CodeType, namespace: dict[str, Any]) -> None:
    work: Coroutine[Any, Any, object] = FunctionType(code, namespace)()
    await work


def run_console(example: Example, where: str) -> None:
    """Run each command and compare its output with the page, where `...` matches anything.

    The page shows at least one line of each command's output.
    """
    for words, promised in commands(example.text):
        code, said = run_command(words)
        assert code == example.exit, f"{where}: `{words}` ended with {code}:\n{said}"
        shown = [line for line in promised.splitlines() if line.strip() not in ("", "...")]
        assert shown or not said.strip(), (
            f"{where}: show some lines of the output of `{words}`:\n{said}"
        )
        if promised:
            # numbers in a real run's output vary with the machine and its load
            expect(NUMBER.sub("0", promised), NUMBER.sub("0", said), f"{where}: `{words}`")


def run_command(words: str) -> tuple[int, str]:
    """Run `atts` in this process, which is faster, and any other command in a shell."""
    words = words.partition("  # ")[0]  # drop the comment that the page has after the command
    plain = re.sub(r"\$\(cat (\w+)\)", lambda found: Path(found[1]).read_text().strip(), words)
    if plain.startswith("atts ") and not SHELL & set(plain):
        said = io.StringIO()
        with redirect_stdout(said), redirect_stderr(said):
            code = atts([in_thread(word) for word in shlex.split(plain)[1:]])
        return code, said.getvalue()
    done = subprocess.run(
        ["bash", "-euo", "pipefail", "-c", words],
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        check=False,
    )
    return done.returncode, done.stdout


def in_thread(word: str) -> str:
    """Change the address of a local engine so that the engine runs in a thread; return other
    arguments unchanged.
    """
    if "stages=" in word or not re.match(r"(zoo:[^?]+/\w+|embedded)(\?|$)", word):
        return word
    return f"{word}{'&' if '?' in word else '?'}worker=thread"


NUMBER = re.compile(r"[+-]?\d[\d,]*(?:\.\d+)?")


def expect(promised: str, said: str, where: str) -> None:
    """Compare the printed output with the page. White space may differ, and `...` on the page
    matches anything.
    """
    options = doctest.ELLIPSIS | doctest.NORMALIZE_WHITESPACE
    assert doctest.OutputChecker().check_output(promised, said, options), (
        f"{where} printed\n{said}\nnot\n{promised}"
    )


def leaf_commands() -> dict[str, str]:
    """Return every command that is not a group, with its help, from the generated page."""
    parts = re.split(r"^## (atts.*)$", (ROOT / "docs" / "cli.md").read_text(), flags=re.M)[1:]
    found = dict(zip(parts[::2], parts[1::2], strict=True))
    return {
        name: text
        for name, text in found.items()
        if not any(other.startswith(f"{name} ") for other in found)
    }


def test_every_command_is_shown_by_an_example() -> None:
    """Each command has an example in its help, and an example on a page that runs or states why it
    does not.
    """
    shown = "\n".join(example.text for page in PAGES for example in examples(page))
    commands_ = leaf_commands()
    assert len(commands_) > 10
    assert [name for name in commands_ if not re.search(rf"\b{name}\b", shown)] == []
    assert [
        name for name, text in commands_.items() if not re.search(r"Example: .*atts ", text)
    ] == []


def test_the_checker_reads_blocks_and_notices_wrong_output(tmp_path: Path) -> None:
    """The checker reads blocks, reasons, exit codes and continued commands, and notices a wrong
    output and a wrong exit code.
    """
    page = tmp_path / "page.md"
    page.write_text(
        "<!-- not run: needs a server -->\n```bash\nvllm serve\n```\n"
        "<!-- exit: 2 -->\n\n```console\n$ atts eval nosuch\natts: ...\n```\n```python\nx = "
        "1\n```\n"
    )
    found = list(examples(page))
    assert [(it.kind, it.skipped, it.exit, it.line) for it in found] == [
        ("bash", "needs a server", 0, 3), ("console", "", 2, 8), ("python", "", 0, 12)
    ]  # fmt: skip
    assert list(commands("$ cat <<E\n> a\n> E\na\n$ true\n")) == [
        ("cat <<E\na\nE", "a\n"),
        ("true", ""),
    ]
    with pytest.raises(AssertionError, match="printed"):
        run_console(Example("console", "$ echo one\ntwo\n", 1), "here")
    with pytest.raises(AssertionError, match="show some lines"):
        run_console(Example("console", "$ echo one\n...\n", 1), "here")
    with pytest.raises(AssertionError, match="ended with 1"):
        run_console(Example("console", "$ false\n", 1), "here")
    with pytest.raises(AssertionError, match="printed"):
        run_python(Example("python", "print(1)\n# prints: 2\n", 1), "here", {})
