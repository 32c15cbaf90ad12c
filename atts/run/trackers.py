"""Listeners that send a run's settings and metrics to other tools.

`TracedRun` makes OpenTelemetry spans: one for each problem, rollout and engine call. `TrackedRun`
sends numbers to an experiment tracker.
"""

from __future__ import annotations

import contextlib
import json
import math
import os
import sys
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from importlib import import_module
from pathlib import Path
from secrets import token_hex
from types import MappingProxyType
from typing import Any, Protocol

import msgspec

from atts.concurrency import clock
from atts.core import HOLD, RELEASE, Usage
from atts.errors import MissingExtra, OptionError
from atts.evaluators import Estimate
from atts.files import write_atomic
from atts.journal import (
    CallFailed,
    CallSpan,
    Event,
    Graded,
    Manifest,
    OutcomeReached,
    ProblemSpan,
    ProblemStarted,
    RolloutSpan,
    Sampled,
    Scored,
    VerdictStatus,
    judged,
)
from atts.ledger import PRICES, Prices, money_of, recorded_prices
from atts.run.calls import (
    CLOSING_SECONDS,
    Background,
    CallBegun,
    Listener,
    Notice,
    RunBegun,
    RunEnded,
)
from atts.run.result import RunResult

# The names of spans and attributes follow OpenTelemetry's semantic conventions for generative AI.
# They are literals here, because OpenTelemetry marks its constants for them as incubating.
# A name begins with "atts." if the conventions do not define a name.

_FINISH: Mapping[str, str] = {"length": "length", "delimiter": "stop", "end": "stop"}
"""OpenTelemetry's finish reason for each reason why a chunk ended."""


@dataclass(slots=True)
class _OpenProblem:
    """The open spans of a problem that has not ended."""

    span: Any
    context: Any
    rollouts: dict[int, tuple[Any, Any]] = field(default_factory=dict[int, tuple[Any, Any]])
    attributes: dict[str, Any] = field(default_factory=dict[str, Any])
    verdict: Graded | None = None


class TracedRun(Background):
    """A listener that creates OpenTelemetry spans from a run's events: one for each problem,
    rollout and engine call.

    If the program has set a tracer provider, the spans go to this provider. Otherwise they are
    exported by OTLP over HTTP to the address in the environment variables OTEL_EXPORTER_OTLP_*.

    :raises MissingExtra: OpenTelemetry is not installed.
    """

    def __init__(self, name: str = "otel", provider: Any = None) -> None:
        super().__init__(name)
        try:
            self._trace: Any = import_module("opentelemetry.trace")
            context: Any = import_module("opentelemetry.context")
            # the tracer provider if this object created it, so that this object also shuts it down
            self._owned: Any = None
            if provider is None:
                provider = self._trace.get_tracer_provider()
                if isinstance(provider, self._trace.ProxyTracerProvider):
                    provider = self._owned = _exporting_provider()
        except ModuleNotFoundError as error:
            raise MissingExtra("--log otel", error.name or "opentelemetry-sdk", "otel") from error
        self._tracer = provider.get_tracer("atts")
        # The context in which the program started this run. The context's current span is the
        # parent of the problems' spans.
        self._outside = context.get_current()
        # seconds that are added to a time of the event loop's clock to get the Unix time
        self._offset = 0.0
        # attributes of the run, which the span of every problem also gets
        self._run: dict[str, Any] = {}
        # keyed by role: the provider's name that the spans of the engine's calls get
        self._providers: dict[str, str] = {}
        self._models: dict[str, str] = {}
        self._problems: dict[str, _OpenProblem] = {}
        # calls that have begun but not ended, keyed by problem, rollout and stage
        self._begun: dict[tuple[str, str, str], CallBegun] = {}
        self._reply: Sampled | Scored | None = None
        # keyed by problem: the failure of a call, until the span of the call ends
        self._failures: dict[str, CallFailed] = {}

    def hear(self, event: Notice) -> None:
        """Queue an event for the thread if it begins, changes or ends a span."""
        match event:
            case RunBegun():
                self._offset = time.time() - clock()()
                self.later(lambda: self._begin(event))
            case Sampled() | Scored():
                self._reply = event
            case CallSpan(source="live") if event.stage not in (HOLD, RELEASE):
                # The event with a reply comes directly before the `CallSpan` of the same call.
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
        """End all spans that are still open, for example after an interruption. If atts created the
        tracer provider, also send all spans.
        """
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
        """Return the spans of a problem. If the problem has none yet, start its span."""
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
        """Return the span and the context of a rollout. If the rollout has none yet, start them."""
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
        if node.sample < 0:  # the call belongs to the problem, not to a rollout
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
        """Convert a time on the event loop's clock to Unix time in nanoseconds."""
        return int((moment + self._offset) * 1e9)


def _outcome(event: OutcomeReached) -> dict[str, Any]:
    """Return the span attributes of a problem's outcome. An outcome without an answer has no answer
    attribute.
    """
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
    """Return a tracer provider that sends spans in batches by OTLP over HTTP."""
    trace: Any = import_module("opentelemetry.sdk.trace")
    export: Any = import_module("opentelemetry.sdk.trace.export")
    resources: Any = import_module("opentelemetry.sdk.resources")
    otlp: Any = import_module("opentelemetry.exporter.otlp.proto.http.trace_exporter")
    # `Resource.create` reads OTEL_SERVICE_NAME and OTEL_RESOURCE_ATTRIBUTES. The name "atts" is
    # only used if these variables do not set a name.
    resource = resources.Resource.create({})
    if str(resource.attributes.get("service.name", "")).startswith("unknown_service"):
        resource = resource.merge(resources.Resource({"service.name": "atts"}))
    provider = trace.TracerProvider(resource=resource)
    provider.add_span_processor(export.BatchSpanProcessor(otlp.OTLPSpanExporter()))
    return provider


FILE = "trackers.json"
"""Name of the file, in a run directory, that contains the run's id in each tracker."""
PROJECT = "atts"
"""Default name of the project or experiment in a tracker."""
# needed because each tracker of a run writes this file from its own thread
_file_lock = threading.Lock()


@dataclass(frozen=True, slots=True)
class RunDescription:
    """The description of a run that a tracker gets when a session begins."""

    name: str  # the name of the run directory, or a generated one
    settings: Mapping[str, object]
    directory: Path | None
    key: str  # key in the file of run ids under which the id of this tracker is stored

    def continued(self) -> str | None:
        """Return the id of the run in this tracker, stored by an earlier session; None if there is
        none.
        """
        return self._stored().get(self.key)

    def keep(self, identity: str) -> None:
        """Store the id of the run in this tracker, so that later sessions continue the same run."""
        if self.directory is None:
            return
        with _file_lock:
            text = json.dumps({**self._stored(), self.key: identity}, indent=1)
            write_atomic(self.directory / FILE, text.encode(), durable=False)

    def _stored(self) -> dict[str, str]:
        if self.directory is None or not (self.directory / FILE).exists():
            return {}
        return msgspec.json.decode((self.directory / FILE).read_bytes(), type=dict[str, str])


Point = tuple[int, Mapping[str, float]]
"""A point: the number of problems finished so far (the step), and the metrics at this moment, keyed
by name.
"""


class Tracker(Protocol):
    """A tool that stores a run's metrics. One thread calls `begin`, `log` and `end` in this
    order.
    """

    def begin(self, run: RunDescription) -> None:
        """Create a run in the tool, or continue the run that an earlier session created."""
        ...

    def log(self, points: Sequence[Point]) -> None:
        """Store one or more points. If the tool is slow, several points are passed in one call."""
        ...

    def end(self, final: Point, status: str) -> None:
        """Store the final metrics and the status, and close the run in the tool."""
        ...


class Wandb:
    """Tracker that sends metrics to Weights & Biases, configured by the environment variables
    WANDB_*.
    """

    def __init__(self, project: str) -> None:
        self._wandb = _module("wandb", "wandb")
        self._project = project or os.environ.get("WANDB_PROJECT", PROJECT)
        self._run: Any = None
        # Without a key, wandb would later ask for the key on the terminal, in the middle of the
        # run.
        if not _has_wandb_key():
            raise OptionError(
                "log", "wandb has no API key; run `wandb login`, or set WANDB_MODE=offline"
            )

    def begin(self, run: RunDescription) -> None:
        """Open a wandb run. Its id is chosen by atts, so that a later session finds the run even if
        this session is offline.
        """
        identity = run.continued() or token_hex(4)
        run.keep(identity)
        self._run = self._wandb.init(
            project=self._project,
            id=identity,
            name=run.name,
            resume="allow",
            # if the calling program has its own wandb run open, leave that run unchanged
            reinit="create_new",
            settings=self._wandb.Settings(silent=True, console="off"),
        )
        # The settings are not passed as `config=`, because some settings, such as the concurrency,
        # may change when a run is resumed.
        self._run.config.update(dict(run.settings), allow_val_change=True)
        self._run.define_metric("problems")
        self._run.define_metric("*", step_metric="problems")

    def log(self, points: Sequence[Point]) -> None:
        """Send each point to wandb."""
        for step, values in points:
            self._run.log({"problems": step, **values})

    def end(self, final: Point, status: str) -> None:
        """Write the summary, and finish the wandb run. A run that failed gets the exit code 1."""
        self._run.summary.update({**final[1], "status": status})
        self._run.finish(exit_code=0 if status in _GOOD else 1)


class Mlflow:
    """Tracker that sends metrics to MLflow: to the server MLFLOW_TRACKING_URI, or to local
    files.
    """

    def __init__(self, experiment: str) -> None:
        mlflow = _module("mlflow", "mlflow")
        self._entities = import_module("mlflow.entities")
        self._make = mlflow.MlflowClient
        self._experiment = experiment or os.environ.get("MLFLOW_EXPERIMENT_NAME", PROJECT)
        self._client: Any = None
        self._run = ""

    def begin(self, run: RunDescription) -> None:
        """Create or continue a run through an MLflow client, so that the calling program's active
        run does not change.
        """
        self._client = client = self._make()
        continued = run.continued()
        if continued is not None:
            self._run = continued
            client.update_run(continued, status="RUNNING")
            return
        known = client.get_experiment_by_name(self._experiment)
        experiment = (
            client.create_experiment(self._experiment) if known is None else known.experiment_id
        )
        self._run = client.create_run(experiment, run_name=run.name).info.run_id
        run.keep(self._run)
        texts = [(name, str(value)[:_MLFLOW_TEXT]) for name, value in run.settings.items()]
        for begin in range(0, len(texts), _MLFLOW_PARAMS):
            part = texts[begin : begin + _MLFLOW_PARAMS]
            client.log_batch(self._run, params=[self._entities.Param(*pair) for pair in part])

    def log(self, points: Sequence[Point]) -> None:
        """Send the points in as few requests as MLflow allows."""
        now = int(1000 * time.time())
        metrics = [
            self._entities.Metric(name, value, now, step)
            for step, values in points
            for name, value in values.items()
        ]
        for begin in range(0, len(metrics), _MLFLOW_METRICS):
            self._client.log_batch(self._run, metrics=metrics[begin : begin + _MLFLOW_METRICS])

    def end(self, final: Point, status: str) -> None:
        """Send the final metrics and the status of the run to MLflow."""
        self.log([final])
        self._client.set_tag(self._run, "atts.status", status)
        self._client.set_terminated(self._run, _MLFLOW_STATUS.get(status, "FAILED"))


_MLFLOW_TEXT = 6000  # MLflow stores at most this many characters of a parameter
_MLFLOW_PARAMS = 100  # MLflow accepts at most this many parameters in one request
_MLFLOW_METRICS = 1000
_MLFLOW_STATUS: Mapping[str, str] = MappingProxyType(
    {"finished": "FINISHED", "decided": "FINISHED", "interrupted": "KILLED", "stopped": "KILLED"}
)
_GOOD = ("finished", "decided")


class TensorBoard:
    """Tracker that writes TensorBoard event files to the run directory or to a folder chosen by the
    user.

    A later session adds a file to the same folder; TensorBoard shows all files of the folder as one
    run.
    """

    def __init__(self, folder: str) -> None:
        self._make = _module("tensorboardX", "tensorboard").SummaryWriter
        self._folder = folder
        self._writer: Any = None

    def begin(self, run: RunDescription) -> None:
        """Open a new event file, and write the run's settings to it as a table."""
        if self._folder:
            folder = Path(self._folder) / run.name
        else:
            assert run.directory is not None, (
                "without a run directory, `open_logs` requires a folder"
            )
            folder = run.directory / "tensorboard"
        self._writer = self._make(logdir=str(folder))
        rows = [f"| {name} | {value} |" for name, value in run.settings.items()]
        self._writer.add_text("settings", "\n".join(["| key | value |", "|---|---|", *rows]), 0)

    def log(self, points: Sequence[Point]) -> None:
        """Write the points, and flush the file so that TensorBoard shows them at once."""
        for step, values in points:
            for name, value in values.items():
                self._writer.add_scalar(name, value, step)
        self._writer.flush()

    def end(self, final: Point, status: str) -> None:
        """Write the final metrics and the status of the run."""
        self.log([final])
        self._writer.add_text("status", status, final[0])
        self._writer.close()


class Trackio:
    """Tracker that sends metrics to Trackio: to a local database, or to the server in the
    environment variables TRACKIO_*.
    """

    def __init__(self, project: str) -> None:
        self._trackio = _module("trackio", "trackio")
        self._project = project or PROJECT
        self._run: Any = None

    def begin(self, run: RunDescription) -> None:
        """Open the run. Trackio identifies runs by name, so a random id is added to the name."""
        name = run.continued() or f"{run.name}-{token_hex(4)}"
        run.keep(name)
        # Trackio prints to standard output, where atts writes only results. So redirect its prints
        # to stderr.
        with contextlib.redirect_stdout(sys.stderr):
            self._run = self._trackio.init(
                project=self._project,
                name=name,
                config=dict(run.settings),
                resume="allow",
                embed=False,
                auto_log_gpu=False,
                auto_log_cpu=False,
            )

    def log(self, points: Sequence[Point]) -> None:
        """Send each point to Trackio."""
        for step, values in points:
            self._run.log(dict(values), step=step)

    def end(self, final: Point, status: str) -> None:
        """Send the final metrics, and finish the run in Trackio."""
        step, values = final
        self._run.log({**values, "status": status}, step=step)
        with contextlib.redirect_stdout(sys.stderr):
            self._run.finish()


TRACKERS: Mapping[str, Callable[[str], Tracker]] = MappingProxyType(
    {"wandb": Wandb, "mlflow": Mlflow, "tensorboard": TensorBoard, "trackio": Trackio}
)
"""Functions that create trackers, keyed by the tracker's name in `--log`. Their argument is the
string after the colon in `--log`.
"""
OTEL = "otel"
"""The name in `--log` that selects OpenTelemetry, which gets spans instead of metrics."""


class TrackedRun(Background):
    """A listener that computes a run's metrics, and sends them to a tracker after each finished
    problem.
    """

    def __init__(self, name: str, tracker: Tracker) -> None:
        super().__init__(name)
        self._tracker = tracker
        self._totals = RunningTotals()
        self._points: list[Point] = []  # points that have not been sent to the tracker yet
        self._lock = threading.Lock()
        self._begun_at = 0.0
        self._earlier_seconds = 0.0
        self._end: tuple[Point, str] | None = None
        self._is_open = False

    def remember(self, event: Event) -> None:
        """Add an event of an earlier session to the totals, without sending a point. The tracker
        already has that session's points, or gets the totals when the run begins.
        """
        self._totals.add(event)

    def hear(self, event: Notice) -> None:
        """Count an event. If it finishes a problem, queue the run's metrics as a new point."""
        match event:
            case RunBegun():
                self._begin(event)
            case RunEnded(result):
                final = self._totals.problems, final_numbers(result)
                self._end = final, result.status
            case _:
                own = self._totals.add(event)
                if own is not None:
                    self._put(own)

    def finish(self) -> None:
        """Close the run in the tracker. Without a result, the run ended by an error, so its status
        is "failed".
        """
        if self._is_open:
            final, status = self._end or ((self._totals.problems, {}), "failed")
            self._tracker.end(final, status)

    def _begin(self, event: RunBegun) -> None:
        self._begun_at = time.monotonic()
        self._earlier_seconds = event.seconds
        manifest = event.manifest
        self._totals.prices = recorded_prices(_setting(manifest, PRICES))
        made = time.strftime("%Y%m%d-%H%M%S", time.gmtime(manifest.created))
        directory = event.directory
        name = f"atts-{made}" if directory is None else directory.resolve().name
        described = RunDescription(name, settings_of(manifest), directory, self.name)

        def begin() -> None:
            self._tracker.begin(described)
            self._is_open = True

        self.later(begin)
        if self._totals.problems:
            self._put({})

    def _put(self, own: Mapping[str, float]) -> None:
        seconds = self._earlier_seconds + time.monotonic() - self._begun_at
        values = {**self._totals.numbers(), **own, "seconds": seconds}
        with self._lock:
            self._points.append((self._totals.problems, values))
        self.later(self._send)

    def _send(self) -> None:
        """Send all waiting points in one call."""
        with self._lock:
            points = self._points
            self._points = []
        if points:
            self._tracker.log(points)


@dataclass(slots=True)
class _ProblemNumbers:
    """The values of one finished problem that are added to the totals."""

    usage: Usage
    verdict: VerdictStatus | None
    samples_right: float | None  # share (0 to 1) of the problem's rollouts that are correct


class RunningTotals:
    """Totals over the finished problems of a run, updated with each event. Only the realised rate
    also counts chunks of unfinished problems.

    A problem that was incomplete can finish again in a later session. Its new values then replace
    the old ones.
    """

    def __init__(self) -> None:
        self.prices: Prices = {}
        self._problems: dict[str, _ProblemNumbers] = {}
        # verdicts on the answers of open problems, keyed by problem and sample; sample None is the
        # vote
        self._verdicts: dict[str, dict[int | None, VerdictStatus]] = {}
        # keyed by open problem: number of escalated chunks, and number of judged chunks
        self._judged: dict[str, list[int]] = {}
        self._escalated = 0
        self._num_judged = 0
        # Each finished problem is added to these sums. Computing the means from all problems again
        # after each problem would take quadratic time.
        self._correct = 0
        self._graded = 0
        self._samples_right = 0.0
        self._with_samples = 0
        self._tokens = {"draft_tokens": 0, "target_tokens": 0, "scored_tokens": 0}
        self._dollars = 0.0
        self._unpriced = 0  # number of finished problems whose cost is unknown

    @property
    def problems(self) -> int:
        """Return the number of finished problems."""
        return len(self._problems)

    def add(self, event: object) -> Mapping[str, float] | None:
        """Count an event. If it finishes a problem, return the problem's metrics, otherwise
        None.
        """
        for decision, escalated in judged(event):
            self._escalated += escalated
            self._num_judged += 1
            counts = self._judged.setdefault(decision.question, [0, 0])
            counts[0] += escalated
            counts[1] += 1
        match event:
            case Graded():
                self._verdicts.setdefault(event.problem, {})[event.sample] = event.status
            case OutcomeReached():
                return self._finished(event)
            case _:
                pass
        return None

    def numbers(self) -> dict[str, float]:
        """Return the run's metrics so far, keyed by name; unknown ones are left out."""
        values: dict[str, float] = {"problems": self.problems, **self._tokens}
        if self._graded:
            values["accuracy"] = self._correct / self._graded
        if self._with_samples:
            values["pass_at_1"] = self._samples_right / self._with_samples
        if self._num_judged:
            values["realised_rate"] = self._escalated / self._num_judged
        if self.prices and not self._unpriced:
            values["dollars"] = self._dollars
        return values

    def _finished(self, event: OutcomeReached) -> Mapping[str, float]:
        verdicts = self._verdicts.pop(event.problem, {})
        samples = [status for sample, status in verdicts.items() if sample is not None]
        share = samples.count("correct") / len(samples) if samples else None
        numbers = _ProblemNumbers(event.usage, verdicts.get(None), share)
        before = self._problems.get(event.problem)
        if before is not None:
            self._count(before, -1)
        self._problems[event.problem] = numbers
        self._count(numbers, 1)
        usage = event.usage
        own: dict[str, float] = {"problem/tokens": usage.draft_tokens + usage.target_tokens}
        if numbers.verdict is not None:
            own["problem/correct"] = float(numbers.verdict == "correct")
        if share is not None:
            own["problem/pass_at_1"] = share
        escalated, num_judged = self._judged.pop(event.problem, (0, 0))
        if num_judged:
            own["problem/realised_rate"] = escalated / num_judged
        return own

    def _count(self, numbers: _ProblemNumbers, sign: int) -> None:
        if numbers.verdict is not None:
            self._graded += sign
            self._correct += sign * (numbers.verdict == "correct")
        if numbers.samples_right is not None:
            self._with_samples += sign
            self._samples_right += sign * numbers.samples_right
        for name in self._tokens:
            self._tokens[name] += sign * getattr(numbers.usage, name)
        dollars = money_of(numbers.usage, self.prices) if self.prices else None
        self._unpriced += sign * (dollars is None)
        self._dollars += sign * (dollars or 0.0)


def settings_of(manifest: Manifest) -> dict[str, object]:
    """Return all settings of a run in one flat dictionary, with its seed, dataset digest, engines
    and versions.
    """
    given = manifest.settings or manifest.configuration
    plain: dict[str, object] = {name: _plain(setting.value) for name, setting in given.items()}
    plain["seed"] = manifest.seed
    plain["dataset digest"] = manifest.dataset
    for role, engine in manifest.engines.items():
        for name in ("engine", "model", "dtype", "weights"):
            if engine.get(name):
                plain[f"{role}.{name}"] = engine[name]
    plain.update({f"version.{name}": text for name, text in manifest.versions.items()})
    return plain


def _plain(value: object) -> object:
    """Return a value that every tracker can store; lists and dictionaries become JSON strings."""
    if value is None or isinstance(value, str | int | float | bool):
        return value
    return json.dumps(value, ensure_ascii=False)


def _setting(manifest: Manifest, name: str) -> object:
    setting = manifest.settings.get(name)
    return None if setting is None else setting.value


def final_numbers(result: RunResult) -> dict[str, float]:
    """Return the final metrics of a run and the bounds of their intervals, keyed by name."""
    summary = result.summary
    usage = summary.usage
    values: dict[str, float] = {
        "final/problems": summary.problems,
        "final/rollouts": summary.samples,
        "final/seconds": summary.seconds,
        "final/unanswered": summary.unanswered,
        "final/failed": summary.failed,
        "final/cut": summary.truncation.cut,
        "final/draft_tokens": usage.draft_tokens,
        "final/target_tokens": usage.target_tokens,
        "final/scored_tokens": usage.scored_tokens,
        "final/wasted_tokens": usage.wasted_tokens,
        "final/target_share": summary.target_share,
    }
    if result.cost is not None:
        values["final/dollars"] = result.cost
    estimates: Mapping[str, Estimate] = {
        "accuracy": summary.answers,
        "pass_at_1": summary.samples_right,
        "realised_rate": summary.rate,
    }
    for name, estimate in estimates.items():
        ends = {"": estimate.value, "_low": estimate.low, "_high": estimate.high}
        for end, value in ends.items():
            if not math.isnan(value):
                values[f"final/{name}{end}"] = value
    return values


def _module(name: str, extra: str) -> Any:
    """Import a tracker's package.

    :raises MissingExtra: the package is not installed.
    """
    try:
        return import_module(name)
    except ModuleNotFoundError as error:
        if error.name != name:
            raise
        raise MissingExtra(f"--log {extra}", name, extra) from error


def _has_wandb_key() -> bool:
    """Return whether wandb can start without asking for a key on the terminal."""
    if os.environ.get("WANDB_MODE", "online") != "online":
        return True
    if os.environ.get("WANDB_API_KEY") or os.environ.get("WANDB_IDENTITY_TOKEN_FILE"):
        return True
    named = os.environ.get("NETRC")
    files = [Path(named)] if named else [Path.home() / ".netrc", Path.home() / "_netrc"]
    host = os.environ.get("WANDB_BASE_URL", "api.wandb.ai").rpartition("//")[2].partition("/")[0]
    return any(file.is_file() and host in file.read_text(errors="replace") for file in files)


class ClosableListener(Listener, Protocol):
    """A listener that may still have data to send when the run ends."""

    def close(self, seconds: float = CLOSING_SECONDS) -> None:
        """Close the listener, and wait at most `seconds` until its data is sent."""
        ...


def check_logs(names: Sequence[str]) -> None:
    """Check the names in `--log`, before any tracker is loaded.

    :raises OptionError: a name is unknown or given twice.
    """
    known = [*TRACKERS, OTEL]
    for name in names:
        tool = name.partition(":")[0]
        if tool not in known:
            raise OptionError("log", f"unknown tracker {tool!r}", known, tool)
        if names.count(name) > 1:
            raise OptionError("log", f"{name} is given twice")


def open_logs(names: Sequence[str], directory: Path | None) -> list[ClosableListener]:
    """Return a listener for each name in `--log`.

    A name is "otel" or a tracker, optionally with a colon and a project, experiment or folder.

    :raises OptionError: a name is unknown or given twice, or there is no folder for TensorBoard's
        files.
    :raises MissingExtra: the tracker's package is not installed.
    """
    check_logs(names)
    listeners: list[ClosableListener] = []
    for name in names:
        tool, _, rest = name.partition(":")
        if tool == OTEL:
            listeners.append(TracedRun(name))
        elif tool == "tensorboard" and not rest and directory is None:
            raise OptionError(
                "log",
                "without a run directory, TensorBoard needs a folder; write tensorboard:FOLDER",
            )
        else:
            listeners.append(TrackedRun(name, TRACKERS[tool](rest)))
    return listeners
