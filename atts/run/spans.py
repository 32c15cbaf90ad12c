"""Make OpenTelemetry spans of a run, one for each problem, rollout and engine call."""

# Names and attributes are those of the semantic conventions for generative AI, written out because
# the package that has them as constants calls that part of itself incubating. What the conventions
# have no name for begins with "atts.".

from __future__ import annotations

import time
from collections.abc import Mapping
from dataclasses import dataclass, field
from importlib import import_module
from typing import Any

from atts.concurrency import clock
from atts.core import HOLD, RELEASE
from atts.errors import MissingExtra
from atts.journal import (
    CallFailed,
    CallSpan,
    Graded,
    OutcomeReached,
    ProblemSpan,
    ProblemStarted,
    RolloutSpan,
    Sampled,
    Scored,
)
from atts.run.recording import Background, CallBegun, Notice, RunBegun

_FINISH: Mapping[str, str] = {"length": "length", "delimiter": "stop", "end": "stop"}
"""The finish reasons of the conventions, by atts' reasons why a chunk ended."""


@dataclass(slots=True)
class _OpenProblem:
    """The spans of an open problem."""

    span: Any
    context: Any
    rollouts: dict[int, tuple[Any, Any]] = field(default_factory=dict[int, tuple[Any, Any]])
    attributes: dict[str, Any] = field(default_factory=dict[str, Any])
    verdict: Graded | None = None


class TracedRun(Background):
    """A listener that makes spans from events.

    If the program has set a tracer provider, that one is used. Otherwise spans are exported by OTLP
    over HTTP, to the address in the OTEL_EXPORTER_OTLP_* variables.

    :raises MissingExtra: OpenTelemetry is not installed.
    """

    def __init__(self, name: str = "otel", provider: Any = None) -> None:
        super().__init__(name)
        try:
            self._trace: Any = import_module("opentelemetry.trace")
            context: Any = import_module("opentelemetry.context")
            self._owned: Any = None  # the provider, if it was made here and must be closed here
            if provider is None:
                provider = self._trace.get_tracer_provider()
                if isinstance(provider, self._trace.ProxyTracerProvider):
                    provider = self._owned = _exporting_provider()
        except ModuleNotFoundError as error:
            raise MissingExtra("--log otel", error.name or "opentelemetry-sdk", "otel") from error
        self._tracer = provider.get_tracer("atts")
        # context with the span of the program that started this run
        self._outside = context.get_current()
        self._offset = 0.0  # seconds to add to the loop's clock to get the date
        self._run: dict[str, Any] = {}  # attributes that the span of every problem gets
        self._providers: dict[str, str] = {}  # keyed by role
        self._models: dict[str, str] = {}
        self._problems: dict[str, _OpenProblem] = {}
        # keyed by problem, rollout and stage
        self._begun: dict[tuple[str, str, str], CallBegun] = {}
        self._reply: Sampled | Scored | None = None
        # keyed by problem: the failed call whose span has not come yet
        self._failures: dict[str, CallFailed] = {}

    def hear(self, event: Notice) -> None:
        """Pass events that make a span to the thread."""
        match event:
            case RunBegun():
                self._offset = time.time() - clock()()
                self.later(lambda: self._begin(event))
            case Sampled() | Scored():
                self._reply = event
            case CallSpan(source="live") if event.stage not in (HOLD, RELEASE):
                # a reply is recorded right before the span of its call
                reply = self._reply
                self._reply = None
                self.later(lambda: self._called(event, reply))
            case CallBegun() | CallFailed() | ProblemStarted() | RolloutSpan():
                self.later(lambda: self._hear(event))
            case Graded(sample=None) | OutcomeReached() | ProblemSpan():
                self.later(lambda: self._hear(event))
            case _:
                pass

    def finish(self) -> None:
        """End all open spans, for example after an interruption, and send everything."""
        now = time.time_ns()
        for problem in self._problems.values():
            for span, _ in problem.rollouts.values():
                self._mark_failed(span, "interrupted")
                span.end(now)
            self._mark_failed(problem.span, "interrupted")
            problem.span.end(now)
        self._problems.clear()
        if self._owned is not None:
            self._owned.shutdown()

    def _begin(self, event: RunBegun) -> None:
        manifest = event.manifest
        self._models = {"draft": event.draft, "target": event.target}
        self._providers = {
            role: str(engine.get("engine", "")).split()[0].lower() if engine.get("engine") else ""
            for role, engine in manifest.engines.items()
        }
        method = manifest.configuration.get("method")
        self._run = {
            "gen_ai.operation.name": "invoke_workflow",
            "gen_ai.workflow.name": "atts" if method is None else str(method.value),
        }
        if event.directory is not None:
            self._run["atts.run"] = event.directory.name

    def _hear(self, event: Notice) -> None:
        match event:
            case CallBegun():
                self._begun[event.problem, event.rollout, event.stage] = event
                self._problem(event.problem)
            case CallFailed():
                self._failures[event.problem] = event
            case ProblemStarted():
                self._problem(event.problem.id)
            case RolloutSpan():
                self._rollout_ended(event)
            case Graded():
                self._problem(event.problem).verdict = event
            case OutcomeReached():
                self._problem(event.problem).attributes.update(_outcome(event))
            case ProblemSpan():
                self._problem_ended(event)
            case _:
                pass

    def _problem(self, name: str) -> _OpenProblem:
        """Return a problem's spans; a resumed problem is opened by its first event."""
        known = self._problems.get(name)
        if known is not None:
            return known
        attributes = {**self._run, "atts.problem": name}
        title = f"invoke_workflow {self._run['gen_ai.workflow.name']}"
        span = self._tracer.start_span(title, context=self._outside, attributes=attributes)
        context = self._trace.set_span_in_context(span, self._outside)
        self._problems[name] = problem = _OpenProblem(span, context)
        return problem

    def _rollout(self, name: str, sample: int, since: float) -> tuple[Any, Any]:
        """Return the span of a rollout and its context; the first call, or the end, opens it."""
        problem = self._problem(name)
        if sample not in problem.rollouts:
            span = self._tracer.start_span(
                "invoke_agent rollout",
                context=problem.context,
                start_time=self._nanoseconds(since),
                attributes={
                    "gen_ai.operation.name": "invoke_agent",
                    "gen_ai.agent.name": "rollout",
                    "atts.problem": name,
                    "atts.sample": sample,
                },
            )
            context = self._trace.set_span_in_context(span, problem.context)
            problem.rollouts[sample] = span, context
        return problem.rollouts[sample]

    def _called(self, node: CallSpan, reply: Sampled | Scored | None) -> None:
        rollout = f"{node.problem}/{node.sample}"
        begun = self._begun.pop((node.problem, rollout, node.stage), None)
        if node.sample < 0:  # the call belongs to the problem
            context = self._problem(node.problem).context
        else:
            _, context = self._rollout(node.problem, node.sample, node.ready)
        operation = "score" if node.stage == "score" else "text_completion"
        model = self._models.get(node.engine, "")
        attributes: dict[str, Any] = {
            "gen_ai.operation.name": operation,
            "gen_ai.provider.name": self._providers.get(node.engine, "") or "unknown",
            "gen_ai.request.model": model,
            "atts.role": node.engine,
            "atts.turn": node.turn,
            "atts.attempt": node.attempt,
            "atts.queue_seconds": node.queue,
        }
        if begun is not None:
            attributes["gen_ai.usage.input_tokens"] = begun.input_tokens
            if begun.max_tokens:
                attributes["gen_ai.request.max_tokens"] = begun.max_tokens
        if isinstance(reply, Sampled):
            done = reply.completion
            attributes["gen_ai.usage.output_tokens"] = len(done.ids)
            attributes["gen_ai.usage.cache_read.input_tokens"] = done.cached_tokens
            attributes["gen_ai.response.finish_reasons"] = [_FINISH[done.ended]]
        elif reply is not None:
            attributes["gen_ai.usage.output_tokens"] = 0
            attributes["gen_ai.usage.cache_read.input_tokens"] = reply.scores.cached_tokens
            attributes["atts.scored_tokens"] = len(reply.scores.logprobs)
        span = self._tracer.start_span(
            f"{operation} {model}".rstrip(),
            context=context,
            kind=self._trace.SpanKind.CLIENT,
            start_time=self._nanoseconds(node.started),
            attributes=attributes,
        )
        failure = self._failures.pop(node.problem, None)
        if node.status == "failed":
            kind = "error" if failure is None else failure.error
            self._mark_failed(span, kind, "" if failure is None else failure.text)
        elif node.status == "cancelled":
            span.set_attribute("atts.status", "cancelled")
        span.end(self._nanoseconds(node.ended))

    def _rollout_ended(self, event: RolloutSpan) -> None:
        problem = self._problem(event.problem)
        span, _ = self._rollout(event.problem, event.sample, event.started)
        del problem.rollouts[event.sample]
        span.set_attribute("atts.status", event.status)
        span.set_attribute("atts.attempts", event.attempts)
        span.set_attribute("atts.queue_seconds", event.started - event.queued)
        span.set_attribute("atts.waited_seconds", event.waited)
        if event.status == "failed":
            self._mark_failed(span, event.error.partition(":")[0], event.error)
        span.end(self._nanoseconds(event.ended))

    def _problem_ended(self, event: ProblemSpan) -> None:
        problem = self._problem(event.problem)
        del self._problems[event.problem]
        self._begun = {key: call for key, call in self._begun.items() if key[0] != event.problem}
        self._failures.pop(event.problem, None)
        problem.span.set_attributes({**problem.attributes, "atts.status": event.status})
        verdict = problem.verdict
        if verdict is not None:
            result: dict[str, Any] = {
                "gen_ai.evaluation.name": "correct",
                "gen_ai.evaluation.score.label": verdict.status,
                "gen_ai.evaluation.explanation": verdict.rule,
            }
            if verdict.status != "unscored":
                result["gen_ai.evaluation.score.value"] = float(verdict.status == "correct")
            problem.span.add_event("gen_ai.evaluation.result", result)
        if event.status == "failed":
            self._mark_failed(problem.span, event.error.partition(":")[0], event.error)
        problem.span.end(self._nanoseconds(event.ended))

    def _mark_failed(self, span: Any, kind: str, text: str = "") -> None:
        span.set_attribute("error.type", kind)
        span.set_status(self._trace.Status(self._trace.StatusCode.ERROR, text or kind))

    def _nanoseconds(self, moment: float) -> int:
        """Return a moment of the loop's clock as a date."""
        return int((moment + self._offset) * 1e9)


def _outcome(event: OutcomeReached) -> dict[str, Any]:
    """Return the attributes of a problem's outcome; its answer is a text that may be missing."""
    usage = event.usage
    attributes: dict[str, Any] = {
        "atts.outcome": event.status,
        "atts.rollouts": len(event.samples),
        "atts.draft_tokens": usage.draft_tokens,
        "atts.target_tokens": usage.target_tokens,
        "atts.scored_tokens": usage.scored_tokens,
    }
    if event.answer is not None:
        attributes["atts.answer"] = event.answer
    return attributes


def _exporting_provider() -> Any:
    """Return a provider that sends spans by OTLP over HTTP, in batches."""
    trace: Any = import_module("opentelemetry.sdk.trace")
    export: Any = import_module("opentelemetry.sdk.trace.export")
    resources: Any = import_module("opentelemetry.sdk.resources")
    otlp: Any = import_module("opentelemetry.exporter.otlp.proto.http.trace_exporter")
    # OTEL_SERVICE_NAME and OTEL_RESOURCE_ATTRIBUTES take precedence
    resource = resources.Resource.create({})
    if str(resource.attributes.get("service.name", "")).startswith("unknown_service"):
        resource = resource.merge(resources.Resource({"service.name": "atts"}))
    provider = trace.TracerProvider(resource=resource)
    provider.add_span_processor(export.BatchSpanProcessor(otlp.OTLPSpanExporter()))
    return provider
