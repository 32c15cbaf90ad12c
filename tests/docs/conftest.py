"""Fixtures of servers, models and a benchmark for the commands of docs/two_servers.md."""

from __future__ import annotations

import json
from collections.abc import Iterator
from contextlib import ExitStack
from functools import partial
from pathlib import Path
from typing import get_args

import pytest

from atts.api import find_pair
from atts.core import Problem, Role
from atts.models import path
from atts.testing.servers import DialectServer
from tests.reciting import RecitingEngine


@pytest.fixture
def two_servers(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """Start two servers that reply with the correct answers, put their addresses into variables,
    and write a benchmark's first rows to a file.
    """
    problems = tuple(Problem(f"test/{n}", f"What is ${n} + {n}$?", str(2 * n)) for n in range(1, 7))
    file = tmp_path / "math500.jsonl"
    rows = [
        {
            "problem": it.text,
            "answer": it.answer,
            "unique_id": it.id,
            "level": 1,
            "subject": "Algebra",
        }
        for it in problems
    ]
    file.write_text("".join(json.dumps(row) + "\n" for row in rows))
    monkeypatch.setenv("ATTS_FILE", str(file))
    with ExitStack() as stack:
        for role in get_args(Role):
            model = find_pair("qwen3-1.7b/qwen3-14b").model(role)
            server = stack.enter_context(
                DialectServer(partial(RecitingEngine, role, problems), "vllm", model=model)
            )
            monkeypatch.setenv(
                f"ATTS_{role.upper()}", f"vllm:{server.url}/{model}?tokenizer={path('draft')}"
            )
        yield
