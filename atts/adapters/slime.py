"""The slime adapter: a draft and a target write the samples with which slime trains the draft.

slime calls `generate` for each sample of a rollout:

    --custom-generate-function-path atts.adapters.slime.generate --custom-config-path atts.yaml

where `atts.yaml` has a table `atts` with the settings of `atts config show`: at least `draft` (the
servers that the trainer updates) and `target`.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any

from anyio.lowlevel import EventLoopToken, current_token

from atts.adapters.replies import Reply, question_of, setup_of
from atts.api import Session
from atts.core import Outcome, Rollout, Sampling
from atts.errors import EngineError, OptionError, UnsupportedByEngine

_STATUS: Mapping[str, str] = {
    "answer": "COMPLETED",
    "end": "COMPLETED",
    "turns": "TRUNCATED",
    "tokens": "TRUNCATED",
    "settled": "ABORTED",
    "cancelled": "ABORTED",
}
_NAMES = ("temperature", "top_p", "top_k", "min_p")


async def generate(args: Any, sample: Any, sampling_params: Mapping[str, Any]) -> Any:
    """Generate one sample with one rollout, and return the sample with its tokens, mask and
    log-probabilities.

    The mask is 1 for tokens that the draft wrote with log-probabilities. All other tokens, such as
    the target's, have mask 0 and log-probability 0. Log-probabilities are those of the draft at
    temperature 1. The end token is left out. A response that the sample already has is replaced.
    `sample.prompt` is the question, as a string or as messages, without a chat template: leave out
    `--apply-chat-template`.

    :raises OptionError: the settings lack `draft` or `target`, or have an unknown key.
    :raises UsageError: the prompt contains no question.
    """
    worker = _worker_of(args)
    system, question = question_of(_turns(sample.prompt))
    policy = worker.policy(system, sampling_params)
    try:
        outcome, weights = await worker.solve(question, policy)
        rollout = outcome.rollouts[0]
        facts = {**Reply.of(outcome).facts, "weights": weights}
    except EngineError as error:
        sample.status = type(sample).Status.FAILED
        sample.metadata = {**sample.metadata, "atts": {"error": str(error)}}
        return sample
    _fill(sample, rollout)
    sample.metadata = {**sample.metadata, "atts": facts}
    return sample


class _Worker:
    """The session for new samples, and older sessions that are still generating samples.

    Training changes the weights of the draft's servers, and the engines of a session refuse a
    server whose weights have changed. Then the worker opens a new session for the new weights. The
    calibrator of the new session starts without scores, because the earlier scores belong to the
    earlier weights.

    Sessions are numbered. The metadata of each sample contain the number of its session as
    `weights`.
    """

    def __init__(self, options: Mapping[str, object]) -> None:
        self._setup = setup_of("slime", options)
        self._number = 0  # number of the latest session, a key of `_sessions`
        self._sessions = {0: Session(self._setup)}
        # number of samples that each session is writing, keyed by session number
        self._asking = Counter[int]()
        self._has_answered = False

    def policy(self, system: str, params: Mapping[str, Any]) -> dict[str, Any]:
        """Return the policy fields for a single rollout with this system prompt and the trainer's
        sampling parameters.
        """
        given = {name: params[name] for name in _NAMES if params.get(name) is not None}
        if given.get("top_k", 0) < 0:
            del given["top_k"]  # slime writes "no top-k limit" as -1; atts writes it as 0
        changes: dict[str, Any] = {
            "samples": 1,
            "early_stop": "none",
            "sampling": replace(Sampling(), **given),
        }
        if system:
            changes["system"] = system
        most = params.get("max_new_tokens")
        if most:
            changes["max_tokens"] = most
        return changes

    async def solve(self, question: str, policy: Mapping[str, Any]) -> tuple[Outcome, int]:
        """Solve a question in the latest session.

        Return the outcome, and the number that identifies this session.

        :raises EngineError: an engine cannot be opened, is lost, or failed.
        """
        number = self._number
        try:
            return await self._ask(number, question, policy), number
        except UnsupportedByEngine:
            if not self._has_answered:
                raise  # no request has ever succeeded, so a new session would fail too
        if number == self._number:
            self._number += 1
            self._sessions[self._number] = Session(self._setup)
        await self._close_old()
        number = self._number
        return await self._ask(number, question, policy), number

    async def _ask(self, number: int, question: str, policy: Mapping[str, Any]) -> Outcome:
        self._asking[number] += 1
        try:
            outcome = await self._sessions[number].solve(question, policy=policy)
        finally:
            self._asking[number] -= 1
            await self._close_old()
        self._has_answered = True
        return outcome

    async def _close_old(self) -> None:
        """Close every older session that no longer generates a sample."""
        for number in [*self._sessions]:
            if number < self._number and not self._asking[number]:
                await self._sessions.pop(number).aclose()


workers: dict[tuple[EventLoopToken, str], _Worker] = {}


def _worker_of(args: Any) -> _Worker:
    """Return the worker of this event loop and these settings.

    :raises OptionError: the settings lack `draft` or `target`, or have an unknown key.
    """
    options = getattr(args, "atts", None)
    if not isinstance(options, Mapping) or not {"draft", "target"} <= options.keys():
        raise OptionError(
            "--custom-config-path",
            "the configuration file needs a table 'atts' with the keys 'draft' and 'target'",
        )
    given: dict[str, object] = {str(name): value for name, value in options.items()}
    key = current_token(), repr(sorted(given.items(), key=lambda item: item[0]))
    if key not in workers:
        workers[key] = _Worker(given)
    return workers[key]


def _turns(prompt: str | Sequence[Mapping[str, str]]) -> list[tuple[str, str]]:
    if isinstance(prompt, str):
        return [("user", prompt)]
    return [(message["role"], message["content"]) for message in prompt]


def _fill(sample: Any, rollout: Rollout) -> None:
    """Fill a sample with the tokens of a rollout, which are ids of the draft's tokenizer, with
    their mask and with their log-probabilities.
    """
    ids: list[int] = []
    mask: list[int] = []
    logprobs: list[float] = []
    for chunk in rollout.chunks:
        count = len(chunk.draft_ids)
        ids += chunk.draft_ids
        # Training on a token needs its log-probability under the draft. If that is unknown, the
        # token's loss mask is 0, so the token is not trained on.
        is_known = chunk.author == "draft" and len(chunk.logprobs) >= count
        mask += [int(is_known)] * count
        logprobs += chunk.logprobs[:count] if is_known else [0.0] * count
    sample.tokens = [*rollout.prompt.draft_ids, *ids]
    sample.response = rollout.text
    sample.response_length = len(ids)
    sample.loss_mask = mask
    sample.rollout_log_probs = logprobs
    sample.status = type(sample).Status[_STATUS[rollout.finish or "cancelled"]]
