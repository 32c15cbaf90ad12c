"""Metrics of the endpoint in Prometheus's text format."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import asdict

from atts.serving.service import Service


def metrics_text(service: Service) -> str:
    """Return every counter and gauge, with its help and type."""
    return "\n".join(_lines(service)) + "\n"


def _lines(service: Service) -> Iterator[str]:
    yield from _metric("atts_requests_in_flight", "gauge", "Requests now.", service.in_flight)
    yield "# HELP atts_requests_total Requests by what came of them."
    yield "# TYPE atts_requests_total counter"
    for name, value in asdict(service.counts).items():
        yield f'atts_requests_total{{result="{name}"}} {value}'
    account = service.account
    for name, text, value in (
        ("atts_calls", "Engine calls, including cancelled ones.", account.spent.calls),
        ("atts_tokens", "Tokens of all calls.", account.spent.total_tokens),
        ("atts_generation_tokens", "Tokens written since the start.", account.written),
        ("atts_cached_tokens", "Prompt tokens from a cache since the start.", account.cached),
        ("atts_cost_dollars", "Money, by the prices of the models.", account.spent.dollars),
    ):
        yield from _metric(f"{name}_total", "counter", text, value)
    for name, text, value in (
        ("atts_reserved_calls", "Engine calls in flight.", account.reserved.calls),
        ("atts_reserved_tokens", "Tokens reserved for them.", account.reserved.total_tokens),
    ):
        yield from _metric(name, "gauge", text, value)


def _metric(name: str, kind: str, text: str, value: float) -> Iterator[str]:
    yield f"# HELP {name} {text}"
    yield f"# TYPE {name} {kind}"
    yield f"{name} {value}"
