"""`atts eval --combine` and `atts combine`: where votes split the target is asked, also afterwards
and over a chat API.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import anyio
import pytest

import atts as library
from atts.api import Setup
from atts.errors import OptionError
from atts.journal import Sampled, open_run
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


def test_a_recorded_run_combines_as_the_run_itself_would(
    atts: Any, scripted: tuple[str, ...], dataset: str
) -> None:
    """The comparisons of `atts combine` are those of `atts eval --combine`: same answers and costs,
    but for the draft's tokens, which were paid before.
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
    # it is a run like any other
    report = atts("report", "after", "--format", "markdown")
    assert report.code == 0
    text = (Path("after") / "report.md").read_text()
    assert "Where votes split" in text
    assert "| what combined | select |" in text
    compared = atts("compare", "voted", "after", "--json")
    assert compared.code == 0


def test_the_same_command_continues_and_another_is_refused(
    atts: Any, scripted: tuple[str, ...], dataset: str
) -> None:
    """A finished combination is not asked again; other settings in its directory are an error."""
    assert atts("eval", dataset, *scripted, *WORDS, "--out", "voted").code == 0
    words = ("combine", "voted", "--target", "scripted", "--report", "none", "--out", "after")
    first = atts(*words)
    assert "combined            select on" in first.out
    size = (Path("after") / "journal.jsonl").stat().st_size
    assert atts(*words).code == 0
    assert (Path("after") / "journal.jsonl").stat().st_size < size + 600  # a session, no call
    other = atts(*words, "--combine", "synthesize")
    assert other.code == 2
    assert "combine" in other.err


def test_misuse_is_explained(atts: Any, scripted: tuple[str, ...], dataset: str) -> None:
    """A run that is not over, its own directory, and prompts that cannot be used."""
    stopped = atts(
        "eval", dataset, *scripted, *WORDS, "--max-total-tokens", "4000", "--out", "part"
    )
    assert stopped.code == 130
    part = atts("combine", "part", "--target", "scripted", "--out", "after")
    assert part.code == 2
    assert "are not complete; run its command again first" in part.err
    same = atts("combine", "part", "--target", "scripted", "--out", "part")
    assert "name another directory" in same.err
    none = atts("eval", dataset, *scripted, "--set", "select_prompt=@missing.txt")
    assert none.code == 2
    assert "missing.txt cannot be read" in none.err
    Path("short.txt").write_text("Which one? {problem}")
    short = atts("eval", dataset, *scripted, "--set", "select_prompt=@short.txt")
    assert short.code == 2
    assert "lacks {solutions}" in short.err


def test_a_prompt_of_ones_own_is_asked_and_recorded(
    atts: Any, scripted: tuple[str, ...], dataset: str
) -> None:
    """The file's text stands in the manifest, so that a resume finds a changed file."""
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
def test_a_chat_api_without_log_probabilities_combines(combine: Any) -> None:
    """Selection needs neither scores nor likely tokens: a hosted target gains what its skill
    allows.
    """
    pytest.importorskip("aiohttp", reason="needs the extra servers")
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


def test_a_run_cannot_combine_itself_in_a_program(tmp_path: Path) -> None:
    """The Python verb has the command's checks."""
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
