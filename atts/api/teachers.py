"""Teacher models for exports; a teacher lists the most likely tokens at every position of a
rollout.
"""

from __future__ import annotations

import importlib
from collections.abc import Generator, Sequence
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any

from atts.analysis import Teacher, TopTokens
from atts.api.engines import check_engine_words
from atts.errors import MissingExtra, OptionError

if TYPE_CHECKING:
    from anyio.from_thread import BlockingPortal

    from atts.servers import RemoteEngine

_KINDS = ("embedded", "hf", "vllm")


@contextmanager
def open_teacher(words: str, top: int) -> Generator[Teacher]:
    """Open the teacher model at this address; the teacher lists `top` tokens at every position.

    :raises OptionError: the address names no model, or its server does not list tokens.
    :raises ModelLoadError: the model's folder cannot be read.
    :raises EngineError: the server cannot be used.
    """
    if top < 1:
        raise OptionError("--top", f"{top} is too few tokens per position; give at least 1")
    scheme, rest = check_engine_words(words)
    if scheme not in _KINDS:
        problem = f"{words!r} cannot list the most likely tokens of a given text"
        raise OptionError("--teacher", f"{problem}; name a model as {', '.join(_KINDS)}")
    if scheme == "vllm":
        with _served(rest, top) as teacher:
            yield teacher
        return
    model = rest.partition("?")[0]
    if scheme == "embedded":
        from atts.models import path

        model = str(path("draft" if model == "draft" else "target"))
    yield LocalTeacher(model, top)


class LocalTeacher:
    """A teacher model on this machine, which computes a whole rollout in one call, in float32."""

    def __init__(self, model: str, top: int) -> None:
        from atts.models.folders import TEXT_FILES, WEIGHT_FILES, find_folder
        from atts.models.tokenizers import ModelTokenizer

        try:
            self._torch = importlib.import_module("torch")
            transformers = importlib.import_module("transformers")
        except ImportError:
            raise MissingExtra("a teacher on this machine", "transformers", "local") from None
        folder = find_folder(model, model, (*TEXT_FILES, *WEIGHT_FILES))
        self.tokenizer = ModelTokenizer(folder, model).digest
        self._top = top
        kind: Any = transformers.AutoModelForCausalLM
        self._model: Any = kind.from_pretrained(folder, dtype=self._torch.float32).eval()

    def top_tokens(self, prompt: Sequence[int], ids: Sequence[int]) -> TopTokens:
        """Return the most likely tokens at each position of `ids`; the prompt comes before `ids`."""
        torch = self._torch
        with torch.inference_mode():
            logits = self._model(torch.tensor([[*prompt, *ids]])).logits[0, len(prompt) - 1 : -1]
            found = logits.float().log_softmax(-1).topk(min(self._top, logits.shape[-1]))
        return TopTokens(found.indices.tolist(), found.values.tolist())


class ServedTeacher:
    """A teacher model on a vLLM server; the connection's event loop runs in a separate thread."""

    def __init__(self, engine: RemoteEngine, portal: BlockingPortal, top: int) -> None:
        self.tokenizer = engine.spec.tokenizer
        self._engine = engine
        self._portal = portal
        self._top = top

    def top_tokens(self, prompt: Sequence[int], ids: Sequence[int]) -> TopTokens:
        """Return the most likely tokens at each position of `ids`; the prompt comes before `ids`."""
        rows = self._portal.call(self._engine.top_tokens, tuple(prompt), tuple(ids), self._top)
        return TopTokens([list(row) for row in rows], [list(row.values()) for row in rows])


@contextmanager
def _served(rest: str, top: int) -> Generator[ServedTeacher]:
    from anyio.from_thread import start_blocking_portal

    from atts.servers import RemoteEngine, server_engine

    engine = server_engine("vllm", rest, "teacher", frozenset({"score"}))
    if not isinstance(engine, RemoteEngine):
        raise OptionError("--teacher", "name one server; a teacher cannot have several replicas")
    with (
        start_blocking_portal() as portal,
        portal.wrap_async_context_manager(engine) as opened,
    ):
        yield ServedTeacher(opened, portal, top)
