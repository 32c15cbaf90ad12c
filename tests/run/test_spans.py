"""Tests of OpenTelemetry spans of a run: parents, times and attributes.

The tests need OpenTelemetry's SDK.
"""
# pyright: reportMissingImports=false

from __future__ import annotations

import http.server
import threading
from collections.abc import Generator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import anyio
import pytest

from atts.api import Setup
from atts.api import evaluate_sync as evaluate
from atts.core import HOLD, RELEASE, CallSpan, ProblemSpan, RolloutSpan
from atts.errors import MissingExtra
from atts.journal import OutcomeReached, ProblemStarted, Sampled, Scored
from atts.pipelines import FixedGate
from atts.run import RunBegun, RunOptions, trackers
from atts.run.trackers import TracedRun
from atts.testing import Backend, Faults, ScriptedEngine, toy_problems

sdk: Any = pytest.importorskip(
    "opentelemetry.sdk.trace", reason="OpenTelemetry is not installed: pip install 'atts-llm[otel]'"
)
pytestmark = pytest.mark.filterwarnings("default")


@contextmanager
def recording() -> Generator[tuple[TracedRun, list[Any]]]:
    """Yield a listener, and a list that contains the finished spans after the block."""
    from opentelemetry.sdk.trace.export import SimpleSpanProcessor
    from opentelemetry.sdk.trace.export.in_memory_span_exporter import InMemorySpanExporter

    exporter: Any = InMemorySpanExporter()
    provider = sdk.TracerProvider()
    provider.add_span_processor(SimpleSpanProcessor(exporter))
    listener = TracedRun(provider=provider)
    finished: list[Any] = []
    yield listener, finished
    listener.close()
    finished.extend(exporter.get_finished_spans())


def by_operation(finished: list[Any]) -> dict[str, list[Any]]:
    """Return the spans grouped by operation."""
    groups: dict[str, list[Any]] = {}
    for span in finished:
        groups.setdefault(span.attributes["gen_ai.operation.name"], []).append(span)
    return groups


@pytest.mark.parametrize("backend", ["asyncio", "trio"])
def test_parents_are_correct_under_concurrency(world: Any, backend: Backend) -> None:
    """With twenty concurrent rollouts, each call's span is under its rollout and each rollout under
    its problem, as in the journal.
    """
    with recording() as (listener, finished):
        plan = world.plan(gate=FixedGate("escalate"))
        world.run(plan, world.session(listeners=[listener]), 5, backend)
    events = world.events()
    calls = [
        one for one in events if isinstance(one, CallSpan) and one.stage not in (HOLD, RELEASE)
    ]
    groups = by_operation(finished)
    problems = {span.attributes["atts.problem"]: span for span in groups["invoke_workflow"]}
    rollouts: Mapping[int, Any] = {one.context.span_id: one for one in groups["invoke_agent"]}
    assert len(problems) == sum(isinstance(one, ProblemSpan) for one in events) == 5
    assert len(rollouts) == sum(isinstance(one, RolloutSpan) for one in events) == 20
    models = [*groups["text_completion"], *groups.get("score", [])]
    assert len(models) == len(calls)
    for rollout in rollouts.values():
        problem = problems[rollout.attributes["atts.problem"]]
        assert rollout.parent.span_id == problem.context.span_id
        assert rollout.end_time <= problem.end_time
    expected = sorted((one.problem, one.sample, one.turn, one.stage) for one in calls)
    found = list[tuple[str, int, int, str]]()
    for span in models:
        rollout = rollouts[span.parent.span_id]
        assert rollout.start_time <= span.start_time <= span.end_time <= rollout.end_time
        is_score = span.attributes["gen_ai.operation.name"] == "score"
        stage = "score" if is_score else span.attributes["atts.role"]
        name, sample = rollout.attributes["atts.problem"], rollout.attributes["atts.sample"]
        found.append((name, sample, span.attributes["atts.turn"], stage))
    assert sorted(found) == expected


def test_calls_have_the_conventions_attributes(world: Any) -> None:
    """Spans of calls have the tokens, models and finish reasons of the journal, and spans of
    problems have their verdict.
    """
    with recording() as (listener, finished):
        world.run(world.plan(), world.session(listeners=[listener]))
    groups = by_operation(finished)
    events = world.events()
    written = [one for one in events if isinstance(one, Sampled)]
    calls = groups["text_completion"]
    output = sum(span.attributes["gen_ai.usage.output_tokens"] for span in calls)
    assert output == sum(len(one.completion.ids) for one in written)
    for span in calls:
        assert span.name == f"text_completion {span.attributes['gen_ai.request.model']}"
        assert span.kind.name == "CLIENT"
        assert span.attributes["gen_ai.provider.name"]
        assert span.attributes["gen_ai.usage.input_tokens"] > 0
        assert span.attributes["gen_ai.request.max_tokens"] >= len(
            span.attributes["gen_ai.response.finish_reasons"]
        )
        assert set(span.attributes["gen_ai.response.finish_reasons"]) <= {"stop", "length"}
    scored = sum(len(one.scores.logprobs) for one in events if isinstance(one, Scored))
    assert sum(span.attributes["atts.scored_tokens"] for span in groups["score"]) == scored
    for span in groups["invoke_workflow"]:
        [event] = span.events
        assert event.name == "gen_ai.evaluation.result"
        label = event.attributes["gen_ai.evaluation.score.label"]
        value = event.attributes["gen_ai.evaluation.score.value"]
        assert (label, value) in (("correct", 1.0), ("wrong", 0.0))


def test_failed_calls_are_errors(world: Any) -> None:
    """A call that fails and is retried gives two spans, and the first has the error."""
    with recording() as (listener, finished):
        target = ScriptedEngine("target", faults=Faults({"refused": 0.3}, seed=1))
        world.run(world.plan(target=target), world.session(listeners=[listener]))
    failed = [one for one in finished if one.status.status_code.name == "ERROR"]
    failed = [one for one in failed if "atts.attempt" in one.attributes]
    assert failed
    assert {one.attributes["error.type"] for one in failed} == {"EngineUnavailable"}
    assert all("target" in one.status.description for one in failed)


def test_an_error_leaves_no_open_span(world: Any) -> None:
    """When an error ends the run, all open spans are ended as errors."""

    class Bomb:
        def recalled(self, event: object) -> None:
            """Ignore events of earlier sessions."""

        def notify(self, event: object) -> None:
            """End the run with the first finished problem."""
            if isinstance(event, OutcomeReached):
                raise RuntimeError("the end")

    with recording() as (listener, finished):
        with pytest.raises(RuntimeError, match="the end"):
            world.run(world.plan(), world.session(listeners=[listener, Bomb()]))
    ids = {one.context.span_id for one in finished}
    assert all(one.parent is None or one.parent.span_id in ids for one in finished)
    statuses = {one.attributes["atts.status"] for one in by_operation(finished)["invoke_workflow"]}
    assert "cancelled" in statuses

    async def cut_short() -> None:
        listener.notify(RunBegun(1, 0, 1, 0.0, draft="a", target="b", directory=None))
        listener.notify(ProblemStarted(toy_problems(1)[0]))

    with recording() as (listener, finished):
        anyio.run(cut_short)
    [problem] = finished
    assert problem.attributes["error.type"] == "interrupted"


def test_a_run_joins_the_trace_of_the_program(world: Any) -> None:
    """A run inside a span of the program belongs to that span's trace."""
    provider = sdk.TracerProvider()
    with provider.get_tracer("program").start_as_current_span("request") as outer:
        with recording() as (listener, finished):
            world.run(world.plan(), world.session(listeners=[listener]), 2)
    assert {one.context.trace_id for one in finished} == {outer.get_span_context().trace_id}


def test_spans_go_out_by_otlp(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """With `log=["otel"]`, spans are sent by OTLP to the collector that the environment variables
    name.
    """
    pytest.importorskip("opentelemetry.exporter.otlp.proto.http.trace_exporter")
    service: Any = pytest.importorskip("opentelemetry.proto.collector.trace.v1.trace_service_pb2")
    bodies: list[tuple[str, str, bytes]] = []

    class Collector(http.server.BaseHTTPRequestHandler):
        def do_POST(self) -> None:
            """Record the request's body."""
            body = self.rfile.read(int(self.headers["Content-Length"]))
            bodies.append((self.path, self.headers.get("Content-Encoding", ""), body))
            self.send_response(200)
            self.end_headers()

        def log_message(self, format: str, *args: object) -> None:
            """Write no access log."""

    with http.server.HTTPServer(("127.0.0.1", 0), Collector) as server:
        threading.Thread(target=server.serve_forever, daemon=True).start()
        monkeypatch.setenv(
            "OTEL_EXPORTER_OTLP_ENDPOINT", f"http://127.0.0.1:{server.server_address[1]}"
        )
        setup = Setup(draft="scripted", target="scripted")
        options = RunOptions(signals="ignore")
        evaluate(toy_problems(2), setup, directory=tmp_path / "run", options=options, log=["otel"])
        server.shutdown()
    names = set[str]()
    for path, encoding, body in bodies:
        assert (path, encoding) == ("/v1/traces", "")
        for resource in service.ExportTraceServiceRequest.FromString(body).resource_spans:
            attributes = {one.key: one.value.string_value for one in resource.resource.attributes}
            assert attributes["service.name"] == "atts"
            names |= {span.name for scope in resource.scope_spans for span in scope.spans}
    assert {"invoke_workflow atts", "invoke_agent rollout"} <= names


def test_a_provider_that_fails_harms_nothing(world: Any, caplog: pytest.LogCaptureFixture) -> None:
    """The first error of a failing tracer provider gives a warning, and the run finishes."""

    class Tracer:
        def start_span(self, *given: object, **named: object) -> Any:
            """Raise an error."""
            raise OSError("no collector")

    class Provider:
        def get_tracer(self, name: str) -> Tracer:
            """Return a tracer that fails."""
            return Tracer()

    listener = TracedRun(provider=Provider())
    result = world.run(world.plan(), world.session(listeners=[listener]))
    listener.close()
    assert result.status == "finished"
    [record] = caplog.records
    assert "no collector" in record.message


def test_a_missing_sdk_names_the_command_to_install_it(monkeypatch: pytest.MonkeyPatch) -> None:
    """Without OpenTelemetry's SDK, the error has the command that installs it."""

    def missing(name: str) -> Any:
        raise ModuleNotFoundError(f"No module named {name!r}", name=name)

    monkeypatch.setattr(trackers, "import_module", missing)
    with pytest.raises(MissingExtra, match=r"pip install 'atts-llm\[otel\]'"):
        TracedRun()
