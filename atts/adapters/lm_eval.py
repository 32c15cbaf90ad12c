"""The lm_eval adapter: a model named `atts` for generation tasks and for tasks that compare
log-likelihoods.
"""
# pyright: reportMissingImports=false, reportUntypedBaseClass=false
# pyright: reportUntypedFunctionDecorator=false, reportUntypedClassDecorator=false

from __future__ import annotations

import math
from collections.abc import Awaitable, Callable, Sequence
from dataclasses import replace
from functools import partial
from itertools import takewhile
from pathlib import Path
from typing import Any, TypeVar

from lm_eval.api.model import LM
from lm_eval.api.registry import register_model
from lm_eval.utils import get_rolling_token_windows, make_disjoint_window

from atts.adapters.replies import (
    Reply,
    ReplyKind,
    policy_changes,
    question_of,
    reply_kind,
    setup_of,
)
from atts.api import build_engine, evaluate
from atts.concurrency import collect
from atts.core import Problem, SampleRequest, Sampling, ScoreRequest, TokenIds
from atts.engine import Engine
from atts.errors import EngineError
from atts.interrupts import run_async

T = TypeVar("T")


@register_model("atts")
class ATTSLM(LM):  # type: ignore[misc]  # the harness is not installed where types are checked
    """A model of lm_eval; each of its generation requests solves one problem with atts.

    Example: `lm_eval --model atts --model_args pretrained=embedded,rate=0.2,samples=8`. Possible
    arguments are the keys of `atts config show`, `reply` ("text" or "answer"), and `directory`. If
    `directory` is given, runs are stored there and can be resumed.

    atts ignores a task's generation settings except `until` and `max_gen_toks`; the sampling
    settings are those of the atts policy. The target computes the log-likelihoods.
    """

    def __init__(
        self,
        pretrained: str = "embedded",
        reply: ReplyKind = "text",
        directory: str | None = None,
        batch_size: Any = None,
        max_batch_size: Any = None,
        device: Any = None,
        **options: Any,
    ) -> None:
        """Create the model. `batch_size`, `max_batch_size` and `device` are ignored, because
        engines form batches by themselves.
        """
        super().__init__()
        self._setup = setup_of(pretrained, options)
        self._name = pretrained
        self._reply: ReplyKind = reply_kind(reply)
        self._directory = directory
        self._calls = 0

    @property
    def tokenizer_name(self) -> str:
        """Return the name under which lm_eval stores its cached requests to this model."""
        return f"atts/{self._name}"

    def apply_chat_template(
        self, chat_history: list[dict[str, str]], add_generation_prompt: bool = True
    ) -> str:
        """Return the conversation as one question, without a chat template.

        Later, the pipeline applies the chat template of the draft or the target.
        """
        system, question = question_of([(row["role"], row["content"]) for row in chat_history])
        return "\n\n".join(part for part in (system, question) if part)

    def generate_until(self, requests: Sequence[Any], disable_tqdm: bool = False) -> list[str]:
        """Solve all requests.

        Requests with the same token limit are solved concurrently in one run.

        :raises EngineError: an engine is lost, or a problem failed.
        """
        texts: dict[int, str] = {}
        limits: dict[int | None, list[int]] = {}
        for index, request in enumerate(requests):
            limits.setdefault(request.args[1].get("max_gen_toks"), []).append(index)
        for limit, indices in limits.items():
            questions = [requests[index].args[0] for index in indices]
            replies = run_async(partial(self._solve, questions, limit))
            for index, reply in zip(indices, replies, strict=True):
                texts[index] = _cut(reply.text, requests[index].args[1].get("until"))
                self.cache_hook.add_partial("generate_until", requests[index].args, texts[index])
        return [texts[index] for index in range(len(requests))]

    def loglikelihood(
        self, requests: Sequence[Any], disable_tqdm: bool = False
    ) -> list[tuple[float, bool]]:
        """Return two values for each continuation: its log-probability under the target, and
        whether the target would write the same continuation with greedy decoding.
        """
        verbs = [partial(_likelihood, *request.args) for request in requests]
        return run_async(partial(self._scored, verbs))

    def loglikelihood_rolling(
        self, requests: Sequence[Any], disable_tqdm: bool = False
    ) -> list[float]:
        """Return the log-probability of each text under the target.

        A text that is longer than the target's context is scored in windows.
        """
        verbs = [partial(_rolling, request.args[0]) for request in requests]
        return run_async(partial(self._scored, verbs))

    async def _solve(self, questions: Sequence[str], limit: int | None) -> list[Reply]:
        self._calls += 1
        most = None if limit is None else min(limit, self._setup.run_policy.bounds().max_tokens)
        policy = replace(self._setup.policy, **policy_changes(self._setup.policy, "", None, most))
        problems = [Problem(f"request-{number}", text) for number, text in enumerate(questions)]
        directory = (
            None if self._directory is None else Path(self._directory) / f"generate-{self._calls}"
        )
        result = await evaluate(problems, replace(self._setup, policy=policy), directory=directory)
        replies = {
            outcome.problem.id: Reply.of(outcome, self._reply) for outcome in result.outcomes()
        }
        if result.status in ("incomplete", "failed"):
            raise EngineError(
                "atts",
                result.why,
                "Run lm_eval again; if the model argument `directory` is set, finished work is "
                "not repeated",
            )
        if result.status != "finished":
            raise KeyboardInterrupt(result.why)
        return [replies[problem.id] for problem in problems]

    async def _scored(self, work: Sequence[Callable[[Engine], Awaitable[T]]]) -> list[T]:
        async with build_engine(self._setup.target, "target") as target:
            return await collect([partial(one, target) for one in work])


async def _likelihood(context: str, continuation: str, target: Engine) -> tuple[float, bool]:
    prefix, suffix = _split(context, continuation, target)
    scores = await target.score(ScoreRequest(prefix, suffix))
    greedy = await target.sample(SampleRequest(prefix, len(suffix), Sampling(temperature=0.0)))
    return math.fsum(scores.logprobs), greedy.ids == suffix


async def _rolling(text: str, target: Engine) -> float:
    windows = get_rolling_token_windows(
        token_list=list(target.tokenizer.encode(text)),
        prefix_token=target.spec.end_ids[0],
        max_seq_len=target.spec.context_length - 1,
        context_len=1,
    )
    total = 0.0
    for prefix, suffix in map(make_disjoint_window, windows):
        total += math.fsum(
            (await target.score(ScoreRequest(tuple(prefix), tuple(suffix)))).logprobs
        )
    return total


def _split(context: str, continuation: str, target: Engine) -> tuple[TokenIds, TokenIds]:
    """Return two lists of token ids: those of the context and those of the continuation.

    A token that contains characters of both belongs to the continuation. The context's ids are
    therefore the same for every continuation.
    """
    whole = target.tokenizer.encode(context + continuation)
    alone = target.tokenizer.encode(context.rstrip())
    same = sum(
        1 for _ in takewhile(lambda pair: pair[0] == pair[1], zip(whole[:-1], alone, strict=False))
    )
    if not same:
        return target.spec.end_ids[:1], whole
    return whole[:same], whole[same:]


def _cut(text: str, until: str | Sequence[str] | None) -> str:
    stops = [until] if isinstance(until, str) else [stop for stop in until or () if stop]
    ends = [text.find(stop) for stop in stops if stop in text]
    return text[: min(ends)] if ends else text


def main() -> None:
    """Run the command line of lm_eval, in which `--model atts` is possible."""
    from lm_eval.__main__ import cli_evaluate

    cli_evaluate()


if __name__ == "__main__":
    main()
