"""Tests of help texts, shell completion and exit codes."""

from __future__ import annotations

import importlib
import os
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import typer

from atts import errors
from atts.cli.app import COMMANDS, EXIT_CODES


def commands() -> Iterator[tuple[str, ...]]:
    """Yield every command, including those inside groups."""
    for name, entry in COMMANDS.items():
        code: Any = getattr(importlib.import_module(entry.module), entry.attribute)
        yield (name,)
        if isinstance(code, typer.Typer):
            for command in code.registered_commands:
                yield (
                    name,
                    command.name
                    or str(getattr(command.callback, "__name__", "")).replace("_", "-"),
                )


@pytest.mark.parametrize("words", [pytest.param(words, id=" ".join(words)) for words in commands()])
def test_every_command_has_help_with_an_example(words: tuple[str, ...], atts: Any) -> None:
    """Every command's help has an example, which names the command itself."""
    said = atts(*words, "--help")
    assert said.code == 0
    if len(words) > 1 or "COMMAND" not in said.out:
        flat = " ".join(said.out.split())
        assert f"atts {' '.join(words)}" in flat.partition("Example:")[2], said.out


def test_every_error_has_a_documented_code() -> None:
    """The help explains an exit code for each error class."""

    def tree(kind: type[errors.ATTSError]) -> Iterator[type[errors.ATTSError]]:
        yield kind
        for each in kind.__subclasses__():
            yield from tree(each)

    assert {kind.exit_code for kind in tree(errors.ATTSError)} <= set(EXIT_CODES)


def test_the_shell_completes_commands_and_options(tmp_path: Path) -> None:
    """bash completes the names of commands and options."""

    def completed(line: str) -> list[str]:
        asked = {
            "_ATTS_COMPLETE": "complete_bash",
            "COMP_WORDS": line,
            "COMP_CWORD": str(len(line.split()) - 1),
        }
        command = [sys.executable, "-m", "atts"]
        done = subprocess.run(
            command,
            env={**os.environ, **asked},
            cwd=tmp_path,
            capture_output=True,
            text=True,
            check=False,
        )
        return done.stdout.split()

    assert completed("atts ev") == ["eval"]
    assert completed("atts eval --dry") == ["--dry-run"]
