"""Tests of a model that judges unscored answers: it judges no other answers, and its verdicts are
marked.
"""

import json
from functools import partial
from pathlib import Path
from typing import Any

import anyio
import pytest

from atts.api import judge_unscored, read_judge_prompt
from atts.cli.app import run
from atts.core import Completion, Message, SampleRequest
from atts.engine import EngineSpec
from atts.errors import OptionError
from atts.evaluators import GradedRecord, GradeTally, grade

SUM = r"\sum_{p \text{ prime}} \frac{1}{p^2}"
OPEN = {"gold": "5", "answer": SUM}
CLOSED = {"gold": "5", "answer": "6"}


class Letters:
    """A stand-in for a tokenizer: the ids of messages are the code points of their letters."""

    def render(self, messages: list[Message]) -> tuple[int, ...]:
        """Return the letters of all messages."""
        return tuple(ord(letter) for message in messages for letter in message.content)


class Judge:
    """An engine that always gives the same reply and records its prompts."""

    def __init__(self, reply: str, *, ended: str = "end", context_length: int = 100_000) -> None:
        self.reply = reply
        self.ended: Any = ended
        self.prompts: list[str] = []
        self.tokenizer = Letters()
        self.spec = EngineSpec("judge", "judge", "letters", context_length, (), 1 << 20)

    async def sample(self, request: SampleRequest) -> Completion:
        """Record the prompt and return the reply."""
        self.prompts.append("".join(map(chr, request.ids)))
        return Completion((), self.reply, self.ended, ())

    async def __aenter__(self) -> "Judge":
        return self

    async def __aexit__(self, *error: object) -> None:
        return None


def judged(engine: Judge, *records: dict[str, Any], prompt: str = "") -> list[GradedRecord]:
    """Return the records after the engine has judged them."""

    async def ask() -> list[GradedRecord]:
        model: Any = engine
        return await judge_unscored(grade(records), model, prompt or read_judge_prompt(None))

    return anyio.run(ask)


@pytest.mark.parametrize(
    ("reply", "status"),
    [
        ("Both are the same.\nEQUAL", "equal"),
        ("<think>EQUAL?</think>\nNo.\n**DIFFERENT**\n", "different"),
    ],
)
def test_a_verdict_of_the_model_is_marked(reply: str, status: str) -> None:
    """A verdict of the model has the rule `judged`, and its detail names the model and the earlier
    rule that could not decide.
    """
    engine = Judge(reply)
    one, two = judged(engine, OPEN, CLOSED)
    assert (one.verdict.status, one.verdict.rule) == (status, "judged")
    assert one.verdict.detail.startswith("judged by judge: ")
    assert "(undecided)" in one.verdict.detail
    assert (two.verdict.status, two.verdict.rule) == ("different", "value")
    assert len(engine.prompts) == 1
    assert f"<answer>\n{SUM}\n</answer>" in engine.prompts[0]
    assert "<reference>\n5\n</reference>" in engine.prompts[0]
    tally = GradeTally()
    tally.add(one)
    tally.add(two)
    assert tally.as_json()["judged"] == 1


@pytest.mark.parametrize(
    ("engine", "reason"),
    [
        (Judge("UNSURE"), "the judge is unsure"),
        (Judge("EQUAL or DIFFERENT"), "states no verdict"),
        (Judge("EQUAL\nbecause of this"), "states no verdict"),
        (Judge("NOT EQUALLY"), "states no verdict"),
        (Judge(""), "states no verdict"),
        (Judge("EQUAL", ended="length"), "was cut"),
        (Judge("EQUAL", context_length=10), "together are too long for the judge's context"),
    ],
)
def test_a_reply_without_a_verdict_leaves_the_answer_unscored(engine: Judge, reason: str) -> None:
    """If the model's reply has no verdict, the answer stays unscored with the rule "undecided", and
    the detail says why the model gave no verdict.
    """
    (one,) = judged(engine, OPEN)
    assert (one.verdict.status, one.verdict.rule) == ("unscored", "undecided")
    assert reason in one.verdict.detail


def test_no_model_is_asked_without_an_answer_or_a_reference() -> None:
    """If the answer or the reference is empty, atts asks no model."""
    engine = Judge("EQUAL")
    judged(engine, {"gold": "", "answer": "5"}, {"gold": "5", "answer": None})
    assert engine.prompts == []


def test_a_users_judge_prompt_is_filled_in_once(tmp_path: Path) -> None:
    """Filling in a user's judge prompt does not fill in braces inside an answer."""
    file = tmp_path / "prompt.txt"
    file.write_text("{answer} against {reference}: {x}")
    engine = Judge("EQUAL")
    answer = SUM + r" \text{ {reference} }"
    judged(engine, {"gold": "5", "answer": answer}, prompt=read_judge_prompt(file))
    assert engine.prompts == [f"{answer} against 5: {{x}}"]


@pytest.mark.parametrize("text", ["{answer} alone", None])
def test_a_judge_prompt_without_its_fields_is_refused(tmp_path: Path, text: str | None) -> None:
    """A judge prompt without a needed field is refused with an error that names the file and the
    field.
    """
    file = tmp_path / "prompt.txt"
    if text is not None:
        file.write_text(text)
    with pytest.raises(OptionError, match=r"prompt\.txt (lacks \{reference\}|cannot be read)"):
        read_judge_prompt(file)


def test_the_grade_command_can_ask_a_model(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """The reply of the toy model has no verdict, so the record stays unscored and the summary says
    so.
    """
    file = tmp_path / "answers.jsonl"
    file.write_text("".join(json.dumps(each) + "\n" for each in (OPEN, {}, CLOSED)))
    assert run(["grade", str(file), "--json", "--judge", "scripted"]) == 0
    one, bad, two, summary = map(json.loads, capsys.readouterr().out.splitlines())
    assert one["status"] == "unscored"
    assert "the judge" in one["detail"]
    assert [bad["type"], two["status"]] == ["bad_record", "different"]
    assert [summary["judged"], summary["bad_records"]] == [0, 1]


def test_the_detail_names_the_model_as_the_user_wrote_it(monkeypatch: pytest.MonkeyPatch) -> None:
    """The detail has the user's name for the judge, because the engine's internal name would mean
    nothing to the user.
    """
    from atts.api import answer_judge

    engine = Judge("EQUAL")
    monkeypatch.setattr(answer_judge, "build_engine", lambda *args, **options: engine)
    ask = partial(
        judge_unscored, grade([OPEN]), "hf:models/Big?dtype=bfloat16", "{reference}{answer}"
    )
    (one,) = anyio.run(ask)
    assert one.verdict.detail.startswith("judged by hf:models/Big: EQUAL")


@pytest.mark.parametrize(
    "words",
    [
        ["--judge-prompt", "prompt.txt"],
        ["--judge", "vlm:http://a:1/M"],
        ["--judge", "local:models/Big"],
    ],
)
def test_misused_judge_options_are_usage_errors(
    words: list[str], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """A judge prompt without a judge, and a missing model, are usage errors."""
    file = tmp_path / "answers.jsonl"
    file.write_text(json.dumps(OPEN) + "\n")
    assert run(["grade", str(file), *words]) == 2
    assert "Traceback" not in capsys.readouterr().err
