"""Fixtures of models that know the answers of a benchmark, behind servers that speak vLLM's
dialect.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import ExitStack

import pytest

from atts.core import Problem, Role
from atts.models import path
from atts.testing.servers import DialectServer
from tests.reciting import RecitingEngine

pytest.importorskip("scripts.studies.mathematics", reason="needs a checkout")


@pytest.fixture
def serve() -> Iterator[Callable[[Role, str, tuple[Problem, ...]], tuple[DialectServer, str]]]:
    """Return a function that serves a model that knows these problems; it returns the server and
    the engine's address.
    """
    with ExitStack() as stack:

        def start(
            role: Role, model: str, problems: tuple[Problem, ...]
        ) -> tuple[DialectServer, str]:
            server = stack.enter_context(
                DialectServer(lambda: RecitingEngine(role, problems), "vllm", model=model)
            )
            return server, f"vllm:{server.url}/{model}?tokenizer={path('draft')}"

        yield start
