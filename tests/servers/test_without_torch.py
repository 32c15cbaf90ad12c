"""Tests that a run on servers needs neither torch nor transformers."""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Callable
from functools import partial
from pathlib import Path

import pytest

from atts.core import Role
from atts.local import LocalEngine
from atts.models import path
from atts.testing.servers import DialectServer

pytestmark = pytest.mark.both
BLOCKED = """
import sys

class Blocked:
    def find_spec(self, name, path=None, target=None):
        if name.partition(".")[0] in ("torch", "transformers"):
            raise ModuleNotFoundError(f"No module named {name!r}", name=name.partition(".")[0])

sys.meta_path.insert(0, Blocked())
from atts.cli import run
sys.exit(run(sys.argv[1:]))
"""


def run_blocked(*arguments: str) -> subprocess.CompletedProcess[str]:
    """Run a command in a Python that has neither torch nor transformers."""
    command = [sys.executable, "-c", BLOCKED, *arguments]
    return subprocess.run(command, capture_output=True, text=True, check=False)


def test_a_run_on_servers_needs_neither_torch_nor_transformers(
    serve: Callable[..., DialectServer], tmp_path: Path
) -> None:
    """Without torch and transformers, a whole run on servers works with real tokenizers, chat
    templates, journal, grades and report.
    """
    addresses = list[str]()
    roles: tuple[Role, ...] = ("draft", "target")
    for role in roles:
        server = serve("vllm", partial(LocalEngine, str(path(role)), name=role))
        addresses.append(f"vllm:{server.url}?tokenizer={path(role)}")
    out = tmp_path / "run"
    done = run_blocked(
        *("eval", "arithmetic", "--limit", "2", "--samples", "2", "--out", str(out)),
        *("--draft", addresses[0], "--target", addresses[1]),
    )
    assert done.returncode == 0, done.stderr
    assert (out / "report.html").is_file()


def test_a_local_model_without_torch_names_what_to_install(tmp_path: Path) -> None:
    """The error about a local model without torch is one line that names the package to install,
    with the exit code of a usage error.
    """
    done = run_blocked("eval", "arithmetic", "--limit", "1", "--out", str(tmp_path / "run"))
    assert done.returncode == 2, done.stderr
    assert "pip install 'atts-llm[local]'" in done.stderr
    assert "Traceback" not in done.stderr
