"""The mathematics script: every preset end to end on real benchmark files, over servers that speak vLLM's dialect."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from atts.core import Problem, Role
from atts.evaluators import LoadOptions, load_dataset
from atts.testing.servers import DialectServer
from scripts.studies.mathematics import BENCHMARKS, main
from scripts.studies.pairs import PAIRS, Pair, find_pair

pytestmark = pytest.mark.checkout
Serve = Callable[[Role, str, tuple[Problem, ...]], tuple[DialectServer, str]]
REAL = [pair for pair in PAIRS if pair.name != "embedded"]


@pytest.fixture(autouse=True)
def plain_environment(monkeypatch: pytest.MonkeyPatch) -> None:
    """No key and no proxy of the machine's."""
    for name in ("ATTS_API_KEY", "HTTP_PROXY", "http_proxy", "ALL_PROXY", "all_proxy"):
        monkeypatch.delenv(name, raising=False)


def file_of(shared_data: Path, benchmark: str) -> Path:
    """MATH-100 is drawn from the whole of MATH-500."""
    return shared_data / "benchmarks" / f"{'math500' if benchmark == 'math100' else benchmark}.jsonl"


def words(pair: Pair, benchmark: str, file: Path, serve: Serve) -> tuple[list[DialectServer], list[str]]:
    """Two servers of the pair's models, and the command line that uses them."""
    problems = load_dataset(benchmark, options=LoadOptions(file=file)).problems[:2]
    draft, draft_words = serve("draft", pair.draft, problems)
    target, target_words = serve("target", pair.target, problems)
    line = [benchmark, "--pair", pair.name, "--file", str(file), "--draft", draft_words, "--target", target_words]
    return [draft, target], [*line, "--limit", "2", "--samples", "2", "--chunk", "24"]


@pytest.mark.parametrize("number", range(max(len(REAL), len(BENCHMARKS))))
def test_every_preset_runs(
    number: int, shared_data: Path, serve: Serve, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """Each pair, and each benchmark, over HTTP: a target that knows the answers is graded right, a rate is realised."""
    pair, benchmark = REAL[number % len(REAL)], BENCHMARKS[number % len(BENCHMARKS)]
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
    """A record as it would be on any machine."""
    for arm in record["arms"].values():
        arm.pop("seconds")
        arm.pop("speed_up")
    return record


def test_the_same_command_goes_on_and_the_table_says_what_nobody_ran(
    shared_data: Path, serve: Serve, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """A second run of the command asks the servers for nothing but who they are; the page has the paper's columns."""
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
    for column in ("accuracy, marginal", "target accuracy", "speed-up, conditional", "rate, marginal (nominal 0.4)"):
        assert column in first
    assert "| published, any of 16 | 0.467 |" in first
    assert "not run by this project" in first
    assert "2 seeds" in first


def test_the_listing_marks_every_real_pair_as_not_run(capsys: pytest.CaptureFixture[str]) -> None:
    """Published numbers are shown as published, ours as missing."""
    assert main(["--list"]) == 0
    page = capsys.readouterr().out
    assert page.count("not run by this project") == len(REAL)
    assert all(pair.draft in page and pair.target in page for pair in PAIRS)
    assert "published aime25: any of 16 40.0%, speed-up 14.5x marginal, 12.82x conditional" in page


@pytest.mark.parametrize(
    ("line", "said"),
    [
        (["--pair", "qwen-7b/qwq-32"], "did you mean 'qwen-7b/qwq-32b'"),
        (["aime26"], "did you mean 'aime2"),
        (["arithmetic", "--pair", "embedded", "--arms", "target,drafft"], "did you mean 'draft'"),
        (["arithmetic", "--pair", "embedded", "--limit", "2", "--rate", "2"], "rate"),
        (["aime24", "--file", "nowhere.jsonl"], "nowhere.jsonl"),
    ],
)
def test_misuse_is_one_helpful_line(line: list[str], said: str, capsys: pytest.CaptureFixture[str]) -> None:
    """Exit code 2, nothing on stdout."""
    assert main(line) == 2
    out, err = capsys.readouterr()
    assert out == ""
    assert said in err.splitlines()[-1]
