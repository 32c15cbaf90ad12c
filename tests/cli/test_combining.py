"""Tests of `atts eval --combine` and `atts combine`: if votes split, the target chooses or writes
the answer.
"""

from __future__ import annotations

import json
import tracemalloc
from pathlib import Path
from typing import Any

import anyio
import pytest

import atts as library
from atts.api import Setup
from atts.errors import OptionError
from atts.importers import FORMATS, import_rollouts
from atts.journal import JOURNAL, Sampled, open_run
from atts.pipelines import Policy
from atts.testing import ScriptedEngine, Selector, toy_problems

COUNT = 24
WORDS = ("--method", "draft-only", "--samples", "6", "--early-stop", "none")


@pytest.fixture
def dataset(tmp_path: Path) -> str:
    """Write toy problems to a file."""
    rows = [
        json.dumps({"id": one.id, "problem": one.text, "answer": one.answer})
        for one in toy_problems(COUNT, 5)
    ]
    (tmp_path / "sums.jsonl").write_text("\n".join(rows) + "\n")
    return "sums.jsonl"


def summary(said: Any) -> Any:
    """Return the summary of a command's JSON output."""
    assert said.code == 0, said.err
    return json.loads(said.out.splitlines()[-1])


def test_combining_a_recorded_run_equals_combining_during_the_run(
    atts: Any, scripted: tuple[str, ...], dataset: str
) -> None:
    """`atts combine` gives the answers and costs of `atts eval --combine`, but counts no draft
    tokens, because the recorded run already paid for them.
    """
    words = (dataset, *scripted, *WORDS, "--json")
    at_once = summary(
        atts("eval", *words, "--combine", "select", "--concurrency", "1", "--out", "once")
    )
    voted = summary(atts("eval", *words, "--concurrency", "1", "--out", "voted"))
    assert "combined" not in voted
    afterwards = summary(
        atts(
            *("combine", "voted", "--target", "scripted", "--combine", "select", "--json"),
            *("--report", "none", "--concurrency", "1", "--out", "after"),
        )
    )
    assert afterwards["combined"] == at_once["combined"]
    assert afterwards["combined"]["split"] > 0
    assert afterwards["answers"] == at_once["answers"]
    assert afterwards["usage"]["draft_tokens"] == voted["usage"]["draft_tokens"]
    entries = open_run(Path("after")).entries({Sampled})
    calls = [entry for entry in entries if isinstance(entry.event, Sampled)]
    assert len(calls) == afterwards["combined"]["usage"]["calls"]
    # the result is a run, so `compare` can read it
    report = atts("report", "after", "--format", "markdown")
    assert report.code == 0
    text = (Path("after") / "report.md").read_text()
    assert "Split votes: selection and synthesis" in text
    assert "| how answers were combined | select |" in text
    compared = atts("compare", "voted", "after", "--json")
    assert compared.code == 0


def test_the_same_combine_command_continues_and_others_are_refused(
    atts: Any, scripted: tuple[str, ...], dataset: str
) -> None:
    """Running a finished `combine` command again sends no request, and other settings in its
    directory are an error.
    """
    assert atts("eval", dataset, *scripted, *WORDS, "--out", "voted").code == 0
    words = ("combine", "voted", "--target", "scripted", "--report", "none", "--out", "after")
    first = atts(*words)
    assert "combined            select on" in first.out
    size = (Path("after") / "journal.jsonl").stat().st_size
    assert atts(*words).code == 0
    assert (
        Path("after") / "journal.jsonl"
    ).stat().st_size < size + 600  # the repeated command adds a session but no call
    other = atts(*words, "--combine", "synthesize")
    assert other.code == 2
    assert "combine" in other.err


def test_misused_combine_is_refused(atts: Any, scripted: tuple[str, ...], dataset: str) -> None:
    """Unfinished runs, the run's own directory and unusable prompts each get a message."""
    stopped = atts(
        "eval", dataset, *scripted, *WORDS, "--max-total-tokens", "4000", "--out", "part"
    )
    assert stopped.code == 130
    part = atts("combine", "part", "--target", "scripted", "--out", "after")
    assert part.code == 2
    assert "unfinished problem" in part.err
    same = atts("combine", "part", "--target", "scripted", "--out", "part")
    assert "name another directory" in same.err
    none = atts("eval", dataset, *scripted, "--set", "select_prompt=@missing.txt")
    assert none.code == 2
    assert "missing.txt cannot be read" in none.err
    Path("short.txt").write_text("Which one? {problem}")
    short = atts("eval", dataset, *scripted, "--set", "select_prompt=@short.txt")
    assert short.code == 2
    assert "{solutions}" in short.err


def test_a_users_prompt_is_sent_and_recorded(
    atts: Any, scripted: tuple[str, ...], dataset: str
) -> None:
    """The prompt's text is in the manifest, so a resume notices a changed file."""
    Path("mine.txt").write_text("{problem}\n\n{solutions}\n\nSay Correct: 1 or Correct: 2!")
    words = ("eval", dataset, *scripted, *WORDS, "--combine", "select", "--out", "mine")
    given = ("--set", "select_prompt=@mine.txt")
    assert atts(*words, *given).code == 0
    policy = open_run(Path("mine")).manifest.configuration["policy"].value
    assert isinstance(policy, dict)
    assert str(policy["select_prompt"]).endswith("Say Correct: 1 or Correct: 2!")
    Path("mine.txt").write_text("{problem}\n\n{solutions}\n\nWhich is better?")
    changed = atts(*words, *given)
    assert changed.code == 2
    assert "--set select_prompt" in changed.err


@pytest.mark.parametrize("combine", ["select", "synthesize"])
def test_a_chat_api_can_combine(combine: Any) -> None:
    """Selecting an answer needs no log-probabilities, so a hosted target can do it."""
    pytest.importorskip(
        "aiohttp", reason="aiohttp is not installed: pip install 'atts-llm[servers]'"
    )
    from atts.testing import DialectServer, ServerQuirks

    quirks = ServerQuirks(prefill="closed", ratings="off")

    def serve() -> ScriptedEngine:
        return ScriptedEngine("target", selector=Selector(1.0))

    async def main(url: str) -> None:
        setup = Setup(
            draft="scripted",
            target=f"openai:{url}/v1/toy?context=8192",
            method="draft-only",
            policy=Policy(samples=6, early_stop="none", combine=combine, finalists=6),
        )
        result = await library.evaluate(toy_problems(COUNT, 5), setup)
        found = result.combined
        assert result.status == "finished"
        assert found is not None
        assert found.split > 0
        assert found.lost == 0
        assert found.gained >= found.winnable > 0
        assert found.usage.target_tokens > 0
        assert found.consistent > 0

    with DialectServer(serve, "chat", model="toy", quirks=quirks) as server:
        anyio.run(main, server.url)


def test_the_python_verb_refuses_to_combine_a_run_into_itself(tmp_path: Path) -> None:
    """`atts.combine` makes the same checks as the command."""
    result = library.evaluate_sync(
        toy_problems(3), Setup(draft="scripted", target="scripted", method="draft-only"),
        directory=tmp_path / "run",
    )  # fmt: skip
    with pytest.raises(OptionError, match="name another directory"):
        library.combine_sync(tmp_path / "run", directory=tmp_path / "run")
    combined = library.combine_sync(
        tmp_path / "run", Setup(target="scripted"), directory=tmp_path / "other"
    )
    assert [one.problem for one in combined.problems] == [one.problem for one in result.problems]
    assert combined.combined is not None


def peak_of_combining(folder: Path, problems: int) -> tuple[int, int]:
    """Return the peak memory in bytes that Python used to combine a run, and the size of the run in
    bytes.
    """
    rows = [
        json.dumps({"question": f"1 + {number}?", "text": "x" * 40_000, "predicted_answer": "1"})
        for number in range(problems)
        for _ in range(3)
    ]
    folder.mkdir()
    (folder / "theirs.jsonl").write_text("\n".join(rows) + "\n")

    async def importing() -> None:
        await import_rollouts(FORMATS["jsonl"], folder / "theirs.jsonl", folder / "run")

    anyio.run(importing)
    setup = Setup(target="scripted", policy=Policy(combine="select"), concurrency=2)
    tracemalloc.start()
    result = library.combine_sync(folder / "run", setup, directory=folder / "combined")
    peak = tracemalloc.get_traced_memory()[1]
    tracemalloc.stop()
    assert len(result.problems) == problems
    again = library.combine_sync(folder / "run", setup, directory=folder / "combined")
    assert again.problems == result.problems
    return peak, (folder / "run" / JOURNAL).stat().st_size


def test_memory_does_not_grow_with_the_recorded_run(tmp_path: Path) -> None:
    """Eight times as many problems add little memory, because only open problems are kept in
    memory.
    """
    peak_of_combining(tmp_path / "warm", 1)
    few, small = peak_of_combining(tmp_path / "few", 4)
    many, large = peak_of_combining(tmp_path / "many", 32)
    assert many - few < (large - small) / 8, (few, many, small, large)
