"""The inspect_ai adapter: a model provider named `atts`, and a solver that uses this provider."""
# pyright: reportMissingImports=false, reportUntypedBaseClass=false
# pyright: reportUntypedFunctionDecorator=false, reportUntypedClassDecorator=false

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from inspect_ai.model import GenerateConfig, ModelAPI, ModelOutput, ModelUsage, get_model, modelapi
from inspect_ai.solver import solver

from atts.adapters.replies import (
    Reply,
    ReplyKind,
    policy_changes,
    question_of,
    reply_kind,
    setup_of,
)
from atts.api import Session
from atts.errors import UsageError


@modelapi(name="atts")
class ATTSModelAPI(ModelAPI):  # type: ignore[misc]  # the harness is not installed where types are checked
    """A model of inspect_ai; each of its `generate` calls solves one problem with atts.

    Example: `inspect eval task.py --model atts/embedded -M rate=0.2 -M samples=8`. With `-M`, you
    can set every key of `atts config show`, and `reply` ("text" or "answer").

    atts uses only two of a task's generation settings: the temperature, if it is above 0, and the
    token limit, which applies to each rollout. Requests with tools are refused.
    """

    def __init__(
        self,
        model_name: str,
        base_url: str | None = None,
        api_key: str | None = None,
        config: Any = None,
        reply: Any = "text",
        **options: Any,
    ) -> None:
        super().__init__(model_name, base_url, api_key, [], config or GenerateConfig())
        self._setup = setup_of(model_name, options)
        self._reply: ReplyKind = reply_kind(reply)
        self._session = Session(self._setup)

    async def generate(
        self, input: Sequence[Any], tools: Sequence[Any], tool_choice: Any, config: Any
    ) -> Any:
        """Solve the question of the conversation, and describe the run in the metadata of the
        returned output.

        :raises UsageError: if the task offers tools, or requests several choices.
        :raises EngineError: an engine cannot be opened, is lost, or failed.
        """
        if tools:
            raise UsageError("atts does not support tools; use a solver that offers none")
        if (config.num_choices or 1) > 1:
            raise UsageError(
                "atts returns a single choice, selected by vote; for several answers use --epochs"
            )
        system, question = question_of([(message.role, message.text) for message in input])
        changes = policy_changes(self._setup.policy, system, config.temperature, config.max_tokens)
        outcome = await self._session.solve(question, policy=changes)
        return _output(self.model_name, Reply.of(outcome, self._reply))

    async def aclose(self) -> None:
        """Close the engines."""
        await self._session.aclose()

    def connection_key(self) -> str:
        """Return "atts/" plus the model's name. inspect_ai applies one limit on concurrent requests
        to all models for which this method returns the same key.
        """
        return f"atts/{self.model_name}"

    def max_connections(self) -> int:
        """Return the default number of problems that are solved at the same time."""
        return 16


@solver  # type: ignore[untyped-decorator]
def atts_solver(model: str = "embedded", **options: Any) -> Any:
    """Return a solver that answers each sample with atts instead of the task's model.

    `options` are the arguments of the model provider `atts`. The solver stores a description of the
    run in the sample's metadata, under "atts".
    """

    async def solve(state: Any, generate: Any) -> Any:
        api = get_model(f"atts/{model}", **options)
        state.output = await api.generate(state.messages)
        state.messages.append(state.output.message)
        state.metadata["atts"] = state.output.metadata
        return state

    return solve


def _output(model: str, reply: Reply) -> Any:
    output = ModelOutput.from_content(model=f"atts/{model}", content=reply.text)
    usage = reply.usage
    read = usage.draft_prefill_tokens + usage.target_prefill_tokens + usage.scored_tokens
    written = usage.draft_tokens + usage.target_tokens
    output.usage = ModelUsage(input_tokens=read, output_tokens=written, total_tokens=read + written)
    output.metadata = dict(reply.facts)
    return output
