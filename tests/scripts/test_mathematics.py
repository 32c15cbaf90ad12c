"""Tests of `scripts/math`: each preset runs end to end on benchmark files, over servers that speak
vLLM's dialect.
"""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from atts.api import Pair, find_pair, known_pairs
from atts.core import Problem, Role
from atts.evaluators import LoadOptions, load_dataset
from atts.testing.servers import DialectServer
from scripts.studies.mathematics import ARMS, PUBLISHED, main

pytestmark = pytest.mark.checkout
Serve = Callable[[Role, str, tuple[Problem, ...]], tuple[DialectServer, str]]
BENCHMARKS = ("math500", "math100", "aime24", "aime25", "amc23")
KINDS = (
    "r1-1.5b/r1-70b",
    "qwen-7b/qwq-32b",
    "qwen3-1.7b/qwen3-32b",
    "gpt-oss-20b/gpt-oss-120b",
    "llama-8b/llama-70b",
)


@pytest.fixture(autouse=True)
def plain_environment(monkeypatch: pytest.MonkeyPatch) -> None:
    """Hide the machine's keys and proxies."""
    for name in ("ATTS_API_KEY", "HTTP_PROXY", "http_proxy", "ALL_PROXY", "all_proxy"):
        monkeypatch.delenv(name, raising=False)


def file_of(shared_data: Path, benchmark: str) -> Path:
    """Return the benchmark's file; MATH-100 is sampled from all of MATH-500."""
    return (
        shared_data / "benchmarks" / f"{'math500' if benchmark == 'math100' else benchmark}.jsonl"
    )


def words(
    pair: Pair, benchmark: str, file: Path, serve: Serve
) -> tuple[list[DialectServer], list[str]]:
    """Start two servers of the pair's models, and return them with the command line that uses them."""
    problems = load_dataset(benchmark, options=LoadOptions(file=file)).problems[:2]
    draft, draft_words = serve("draft", pair.draft, problems)
    target, target_words = serve("target", pair.target, problems)
    line = [
        benchmark,
        "--pair",
        pair.name,
        "--file",
        str(file),
        "--draft",
        draft_words,
        "--target",
        target_words,
    ]
    return [draft, target], [*line, "--limit", "2", "--samples", "2", "--chunk", "24"]


@pytest.mark.parametrize(("name", "benchmark"), [*zip(KINDS, BENCHMARKS, strict=True)])
def test_a_pair_of_every_kind_runs(
    name: str,
    benchmark: str,
    shared_data: Path,
    serve: Serve,
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
) -> None:
    """For each kind of pair and each benchmark, a target that knows the answers is graded correct
    over HTTP.
    """
    pair = find_pair(name)
    servers, line = words(pair, benchmark, file_of(shared_data, benchmark), serve)
    assert main([*line, "--out", str(tmp_path / "runs"), "--json"]) == 0
    found: dict[str, Any] = json.loads(capsys.readouterr().out)
    assert found["arms"].keys() == {"target", "marginal", "conditional"}
    assert found["arms"]["target"]["any"]["value"] == 1.0
    assert found["arms"]["target"]["usage"]["draft_tokens"] == 0
    assert found["dataset"]["problems"] == 2
    for arm in ("marginal", "conditional"):
        assert 0 <= found["arms"][arm]["rate"]["value"] <= 1
        assert found["arms"][arm]["usage"]["draft_tokens"] > 0
        assert len(found["arms"][arm]["speed_up"]) == 1
    assert all("/v1/completions" in server.calls for server in servers)
    assert (found["published"] is not None) == (benchmark in pair.published)


def without_times(record: dict[str, Any]) -> dict[str, Any]:
    """Return a record without the fields that depend on the machine."""
    for arm in record["arms"].values():
        arm.pop("seconds")
        arm.pop("speed_up")
    return record


def test_the_script_resumes_and_marks_arms_that_were_not_run(
    shared_data: Path, serve: Serve, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """A second call asks the servers only for their identity, and the result page has the columns
    of the published table.
    """
    pair = find_pair("qwen-7b/qwq-32b")
    servers, line = words(pair, "aime24", file_of(shared_data, "aime24"), serve)
    line += ["--out", str(tmp_path), "--repeats", "2"]
    assert main(line) == 0
    first = capsys.readouterr().out
    assert first.strip() == (tmp_path / "math.md").read_text().strip()
    kept = json.loads((tmp_path / "math.json").read_text())
    before = [len(server.calls) for server in servers]
    assert main([*line, "--json"]) == 0
    assert without_times(json.loads(capsys.readouterr().out)) == without_times(kept)
    probes = [len(server.calls) - count for server, count in zip(servers, before, strict=True)]
    assert max(probes) < min(before)
    for column in (
        "accuracy, marginal",
        "target accuracy",
        "speed-up, conditional",
        "rate, marginal (nominal 0.4)",
    ):
        assert column in first
    assert "| published, any of 16 | 0.467 |" in first
    assert "This project had no GPUs to run" in first
    assert "2 seeds" in first


def test_the_page_agrees_with_what_is_run() -> None:
    """The settings of the presets, the arms and the published rows are on the page
    docs/mathematics.md unchanged.
    """
    page = (Path(__file__).resolve().parents[2] / "docs/mathematics.md").read_text()
    for arm in ARMS:
        assert f"`{arm.name}`" in page or f"*{arm.name}*" in page or arm.what in page, arm.name
    usual = PUBLISHED
    words = f"{usual['samples']} samples, {usual['turns']} turns, {usual['max_tokens']:,} tokens"
    assert words in " ".join(page.split())
    assert f"rate {usual['rate']:g}" in page
    for pair in known_pairs().values():
        for row in pair.published.values():
            assert (
                f"| {100 * row.accuracy:.1f} % | {row.marginal:.2f}x | {row.conditional:.2f}x |"
                in page
            )


@pytest.mark.parametrize(
    ("line", "said"),
    [
        (["--pair", "qwen-7b/qwq-32"], "did you mean 'qwen-7b/qwq-32b'"),
        (["aime27"], "did you mean 'aime2"),
        (["arithmetic", "--pair", "embedded", "--arms", "target,drafft"], "did you mean 'draft'"),
        (["arithmetic", "--pair", "embedded", "--limit", "2", "--rate", "2"], "rate"),
        (["aime24", "--file", "nowhere.jsonl"], "nowhere.jsonl"),
    ],
)
def test_misuse_is_one_helpful_line(
    line: list[str], said: str, capsys: pytest.CaptureFixture[str]
) -> None:
    """A mistake in the arguments gives an error of one line and exit code 2, and stdout is
    empty.
    """
    assert main(line) == 2
    out, err = capsys.readouterr()
    assert out == ""
    assert said in err.splitlines()[-1]
