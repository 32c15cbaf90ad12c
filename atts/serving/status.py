"""Status of a server or of a run directory, with the web page that shows it, and the endpoint's
metrics.

The metrics are in Prometheus's text format.
"""

from __future__ import annotations

import json
import math
import time
from collections import Counter, OrderedDict
from collections.abc import Callable, Iterator, Mapping
from dataclasses import asdict
from functools import cache, partial
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from importlib.resources import files
from pathlib import Path
from typing import Any

import anyio

from atts.analysis import is_running
from atts.core import CallSpan
from atts.errors import ATTSError, JournalCorrupt
from atts.evaluators import Estimate, share_estimate
from atts.journal import (
    JOURNAL,
    Drifted,
    Entry,
    Graded,
    OutcomeReached,
    ProblemStarted,
    RolloutFinished,
    RunClock,
    TurnFinished,
    Warned,
    open_run,
)
from atts.ledger import LEDGER, Account, Amount, read_ledger
from atts.run import Progress
from atts.serving.replies import BusyShare, ServedRun
from atts.serving.service import Service

_MOST_ENDED = 30  # largest number of finished requests, or finished problems, on the page
# largest number of characters of a rollout on the page; a longer rollout loses its beginning
_MOST_TEXT = 6_000
_CAPS = ("max_calls", "max_target_tokens", "max_total_tokens", "max_cost")


def server_status(service: Service, user: str = "") -> dict[str, Any]:
    """Return the server's status as JSON data for the status page.

    If `user` is given, the list of requests contains only this user's.
    """
    runs = [one for one in reversed(service.runs.values()) if user in ("", one.user)]
    working = [one for one in runs if not one.is_over]
    ended = [one for one in runs if one.is_over]
    leading = next((one for one in reversed(working) if one.live.text), None)
    state = "ready" if service.is_ready else "draining"
    return {
        "kind": "server",
        "name": service.options.name,
        "state": state,
        "seconds": time.time() - service.began,
        "counts": {
            "in flight": service.in_flight,
            "answered": service.counts.answered,
            "cancelled": service.counts.cancelled,
            "failed": service.counts.failed,
            "refused": service.counts.refused,
        },
        "items": [_request(one) for one in (*working, *ended[:_MOST_ENDED])],
        "leader": None if leading is None else _leader(leading),
        "budgets": _budgets(service.account),
        "rates": [
            _rate(f"{method} at {rate:g}", rate, share_estimate(judged))
            for (method, rate), judged in service.judged.items()
        ],
        "engines": _engines(
            {role: engine.spec.model for role, engine in service.engines.items()},
            service.busy.shares(anyio.current_time()),
            {role: engine.stats().in_flight for role, engine in service.engines.items()},
        ),
        "alarms": [
            f"{method} at {rate:g}: {alarm.message}"
            for (method, rate), plan in service.gates.items()
            for alarm in plan.alarms()
        ],
    }


def _request(served: ServedRun) -> dict[str, Any]:
    facts = served.facts or {}
    live = served.live.as_json()
    plain = {
        "name": served.run,
        "status": served.status,
        "model": served.model,
        "seconds": (served.ended or time.time()) - served.began,
        "rollouts": f"{live['rollouts']['ended']} of {served.samples}",
        "turns": live["turns"],
        "votes": facts.get("votes", live["votes"]),
        "answer": facts.get("answer"),
        "tokens": served.account.spent.total_tokens,
    }
    if served.account.prices:
        plain["cost"] = served.account.spent.dollars
    if served.user:
        plain["model"] = f"{served.model}, {served.user}"
    return plain


def _leader(served: ServedRun) -> dict[str, Any]:
    live = served.live
    return {
        "name": f"{served.run}, rollout {live.leader}",
        "text": live.text[-_MOST_TEXT:],
        "turns": live.turns[live.leader or 0],
    }


def _budgets(account: Account) -> list[dict[str, Any]]:
    values = account.spent.by_cap()
    reserved = account.reserved.by_cap()
    budgets: list[dict[str, Any]] = []
    for name in _CAPS:
        if name == "max_cost" and not account.prices:
            continue
        budgets.append(
            {
                "name": name.removeprefix("max_").replace("_", " "),
                "spent": values[name],
                "reserved": reserved[name],
                "cap": getattr(account.caps, name),
            }
        )
    return budgets


def _rate(name: str, nominal: float | None, realised: Estimate) -> dict[str, Any]:
    """Return a realised rate with its confidence interval as JSON data. Values that are not finite
    become None.
    """
    values = (realised.value, realised.low, realised.high)
    value, low, high = (one if math.isfinite(one) else None for one in values)
    return {
        "name": name,
        "nominal": nominal,
        "realised": value,
        "low": low,
        "high": high,
        "chunks": realised.n_samples,
        "problems": realised.n_problems,
    }


def _engines(
    models: Mapping[str, str], shares: Mapping[str, float], in_flight: Mapping[str, int]
) -> list[dict[str, Any]]:
    return [
        {
            "role": role,
            "model": model,
            "busy": shares.get(role, 0.0),
            "in_flight": in_flight.get(role, 0),
        }
        for role, model in models.items()
    ]


class RunStatus:
    """The status of a run directory.

    The whole journal is read again each time it has grown.
    """

    def __init__(self, directory: Path) -> None:
        """Open the run directory.

        :raises JournalError: if the directory does not contain a run.
        """
        self._run = open_run(directory)
        self._size = -1
        self._read: dict[str, Any] = {}

    def status(self) -> dict[str, Any]:
        """Return the run's current status as JSON data for the status page.

        If the journal's last line is only partly written, it is read by a later call.

        :raises JournalError: the journal is damaged before its end.
        :raises OSError: the journal is gone.
        """
        directory = self._run.directory
        goes_on = is_running(directory)
        size = (directory / JOURNAL).stat().st_size
        if size != self._size:
            try:
                self._read = self._status()
                self._size = size
            except JournalCorrupt:
                if not goes_on or not self._read:
                    raise
        return {**self._read, "state": "running" if goes_on else "not running"}

    def _status(self) -> dict[str, Any]:
        reading = RunReading()
        for entry in self._run.entries():
            reading.take(entry)
        progress = reading.progress.snapshot()
        manifest = self._run.manifest
        open_problems = [one for one in reading.problems.values() if not one["is_over"]]
        over = [one for one in reading.problems.values() if one["is_over"]]
        ledger = sum(read_ledger(self._run.directory / LEDGER).values(), Amount())
        settings = {name: setting.value for name, setting in manifest.settings.items()}
        spent = ledger.by_cap()
        tokens = progress.tokens
        # A run without caps has no ledger, so count its tokens from the journal.
        if not ledger.calls:
            # The journal has the tokens that the target drew while it scored only for finished
            # problems.
            target = max(tokens["target"], progress.usage.target_tokens)
            spent = {"max_target_tokens": target, "draft tokens": tokens["draft"]}
        budgets = [
            {
                "name": name.removeprefix("max_").replace("_", " "),
                "spent": value,
                "reserved": 0,
                "cap": settings.get(name),
            }
            for name, value in spent.items()
            if name != "max_cost" or value
        ]
        models = {role: str(one.get("model", "")) for role, one in manifest.engines.items()}
        return {
            "kind": "run",
            "name": str(self._run.directory),
            "seconds": reading.clock.seconds,
            "counts": {
                "problems": manifest.problems,
                "open": len(open_problems),
                "finished": len(over),
                "correct": sum(one["verdict"] == "correct" for one in over),
            },
            "items": [
                {name: value for name, value in one.items() if name != "is_over"}
                for one in (*open_problems, *reversed(over[-_MOST_ENDED:]))
            ],
            "leader": reading.leader(),
            "budgets": budgets,
            "rates": [_rate(f"escalated {progress.judged_unit}", progress.nominal, progress.rate)],
            "engines": _engines(models, reading.busy.shares(reading.clock.seconds), {}),
            "alarms": reading.alarms,
        }


class RunReading:
    """Data for the status page, collected in one pass over a journal."""

    def __init__(self) -> None:
        self.progress = Progress(lambda: 0.0)
        self.clock = RunClock()
        self.busy = BusyShare()
        self.alarms: list[str] = []
        self.problems = OrderedDict[str, dict[str, Any]]()
        # texts so far of the rollouts of problems that are not finished
        self._texts = dict[tuple[str, int], str]()
        self._turns = Counter[tuple[str, int]]()

    def take(self, entry: Entry) -> None:
        """Update the data with one journal entry."""
        event = entry.event
        self.clock.advance(entry)
        self.progress.recalled(event)
        match event:
            case CallSpan(source="live"):
                span = self.clock.aligned(event, entry.at)
                self.busy.add(span.engine, span.started, span.ended)
            case ProblemStarted():
                self._started(event.problem.id)
            case TurnFinished():
                self._turned(event)
            case RolloutFinished():
                self._rollout_ended(event)
            case OutcomeReached():
                self._ended(event)
            case Graded(sample=None):
                self.problems[event.problem]["verdict"] = event.status
            case Drifted():
                self.alarms.append(event.text)
            case Warned():
                self.alarms.append(event.text)
            case _:
                pass

    def _started(self, name: str) -> None:
        self.problems[name] = {
            "name": name,
            "is_over": False,
            "status": "open",
            "began": self.clock.seconds,
            "seconds": 0.0,
            "rollouts": 0,
            "turns": 0,
            "votes": dict[str, float](),
            "answer": None,
            "verdict": "",
            "tokens": 0,
        }

    def _turned(self, event: TurnFinished) -> None:
        key = (event.problem, event.sample)
        turn = event.turn
        if turn.index < self._turns[key]:
            # The turn is counted already: a resumed session wrote it into the journal again.
            return
        self._turns[key] = turn.index + 1
        row = self.problems[event.problem]
        row["turns"] += 1
        row["seconds"] = self.clock.seconds - row["began"]
        text = "".join(chunk.text for chunk in turn.chunks)
        before = "" if turn.restarts else self._texts.get(key, "")
        self._texts[key] = (before + text)[-_MOST_TEXT:]

    def _rollout_ended(self, event: RolloutFinished) -> None:
        row = self.problems[event.problem]
        row["rollouts"] += 1
        row["tokens"] += event.usage.draft_tokens + event.usage.target_tokens
        if event.answer is not None:
            row["votes"][event.answer] = row["votes"].get(event.answer, 0) + 1

    def _ended(self, event: OutcomeReached) -> None:
        row = self.problems[event.problem]
        self.problems.move_to_end(event.problem)
        row["is_over"] = True
        row["status"] = event.status
        row["seconds"] = self.clock.seconds - row["began"]
        row["answer"] = event.answer
        row["votes"] = {name: vote for name, vote in event.votes.items() if math.isfinite(vote)}
        row["tokens"] = event.usage.draft_tokens + event.usage.target_tokens
        for key in [key for key in self._texts if key[0] == event.problem]:
            del self._texts[key]

    def leader(self) -> dict[str, Any] | None:
        """Return the name, the text and the number of turns of an example rollout. The example is
        the rollout with the most turns in the oldest unfinished problem that has text.
        """
        for name, row in self.problems.items():
            keys = [key for key in self._texts if key[0] == name]
            if row["is_over"] or not keys:
                continue
            key = max(keys, key=lambda one: (self._turns[one], -one[1]))
            return {
                "name": f"{name}, rollout {key[1]}",
                "text": self._texts[key],
                "turns": self._turns[key],
            }
        return None


HOST = "127.0.0.1"


@cache
def page() -> bytes:
    """Return the HTML of the status page, which requests `/atts/status` every second."""
    return (files("atts.serving") / "view.html").read_bytes()


class _Handler(BaseHTTPRequestHandler):
    """HTTP handler that serves only the status page and its JSON data."""

    def __init__(self, status: Callable[[], dict[str, Any]], *rest: Any) -> None:
        self._status = status
        super().__init__(*rest)

    def do_GET(self) -> None:
        """Answer a GET request from a browser on this machine."""
        host = self.headers.get("Host", "").rpartition(":")[0] or self.headers.get("Host", "")
        if host not in (HOST, "localhost"):
            # Refuse other host names. Otherwise a foreign web page could read the run, by a name
            # that its owner lets resolve to this machine (DNS rebinding).
            self._send(403, "text/plain", b"ask 127.0.0.1\n")
        elif self.path in ("/", "/atts/view"):
            self._send(200, "text/html; charset=utf-8", page())
        elif self.path == "/atts/status":
            self._send_status()
        else:
            self._send(404, "text/plain", b"no such page\n")

    def _send_status(self) -> None:
        code = 200
        try:
            status = self._status()
        except (ATTSError, OSError) as error:
            code = 500
            status = {"error": {"message": str(error)}}
        self._send(code, "application/json", json.dumps(status).encode())

    def _send(self, code: int, kind: str, data: bytes) -> None:
        self.send_response(code)
        self.send_header("Content-Type", kind)
        self.send_header("Content-Length", str(len(data)))
        self.send_header("Cache-Control", "no-store")
        self.end_headers()
        self.wfile.write(data)

    def log_message(self, format: str, *args: Any) -> None:
        """Ignore a line for the access log, because the page sends a request every second."""


def view_server(port: int, status: Callable[[], dict[str, Any]]) -> ThreadingHTTPServer:
    """Return an HTTP server for the status page that accepts only connections from this machine.

    The caller must run and close the server.

    :raises OSError: if the server cannot listen on the port.
    """
    return ThreadingHTTPServer((HOST, port), partial(_Handler, status))


def metrics_text(service: Service) -> str:
    """Return all metrics of the server in Prometheus's text format."""
    return "\n".join(_lines(service)) + "\n"


def _lines(service: Service) -> Iterator[str]:
    yield from _metric(
        "atts_requests_in_flight",
        "gauge",
        "Number of requests that are running or waiting.",
        service.in_flight,
    )
    yield "# HELP atts_requests_total Number of requests by result."
    yield "# TYPE atts_requests_total counter"
    for name, value in asdict(service.counts).items():
        yield f'atts_requests_total{{result="{name}"}} {value}'
    account = service.account
    for name, text, value in (
        ("atts_calls", "Number of engine calls, including cancelled calls.", account.spent.calls),
        ("atts_tokens", "Number of tokens in all engine calls.", account.spent.total_tokens),
        (
            "atts_generation_tokens",
            "Number of tokens that engines have written since the server started.",
            account.written,
        ),
        (
            "atts_cached_tokens",
            "Number of prompt tokens that engines have read from a cache since the server started.",
            account.cached,
        ),
        (
            "atts_cost_dollars",
            "Cost in dollars, computed from the prices of the models.",
            account.spent.dollars,
        ),
    ):
        yield from _metric(f"{name}_total", "counter", text, value)
    for name, text, value in (
        ("atts_reserved_calls", "Number of engine calls in flight.", account.reserved.calls),
        (
            "atts_reserved_tokens",
            "Number of tokens reserved for engine calls in flight.",
            account.reserved.total_tokens,
        ),
    ):
        yield from _metric(name, "gauge", text, value)


def _metric(name: str, kind: str, text: str, value: float) -> Iterator[str]:
    yield f"# HELP {name} {text}"
    yield f"# TYPE {name} {kind}"
    yield f"{name} {value}"
