"""Tests of token budgets: budgets depend on the models that a method uses, and every output reports
cut rollouts in the same words.
"""

from __future__ import annotations

import json
import re
from collections.abc import Iterator
from contextlib import ExitStack
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from atts.api import Setup, configure, diagnose, dry_run, evaluate
from atts.core import Role
from atts.errors import EngineUnavailable
from atts.journal import Truncation, open_run
from atts.methods import PRESETS, preset
from atts.pipelines import Chunking, CoinGate, FixedGate, Policy
from atts.testing import DialectServer, ScriptedEngine, toy_problems

R1 = {
    "draft": "vllm:http://a:8001/deepseek-ai/DeepSeek-R1-Distill-Qwen-1.5B",
    "target": "vllm:http://b:8000/Qwen/QwQ-32B",
}
LENGTHS = ("max_tokens", "turns", "chunking.draft_tokens", "chunking.target_tokens")


def lengths(engines: dict[str, str], *pairs: str, folder: Path) -> list[Any]:
    """Return the four lengths of a configuration: tokens of a rollout, turns, and tokens of a draft
    chunk and of a target chunk.
    """
    found = configure(engines, pairs, environment={}, folder=folder)
    assert list(found.setup().run_policy.bounds()[:4]) == [found[name] for name in LENGTHS]
    return [found[name] for name in LENGTHS]


@pytest.mark.parametrize(
    ("draft", "target", "tokens", "chunk"),
    [
        ("embedded", "embedded", 512, 64),
        ("scripted", "scripted", 512, 64),
        (R1["draft"], R1["target"], 16_000, 500),
        ("vllm:http://a:8001", "vllm:http://b:8000", 16_000, 500),
        ("hf:Qwen/Qwen2.5-7B-Instruct", "sglang:http://b:8000/Qwen/QwQ-32B", 16_000, 500),
        ("hf:Qwen/Qwen2.5-1.5B-Instruct", "ray:hf:Qwen/Qwen2.5-7B-Instruct", 4096, 128),
        ("hf:Qwen/Qwen3-1.7B?dtype=bfloat16", "hf:Qwen/Qwen3-14B", 16_000, 500),
        ("embedded:draft", "openai:https://api.openai.com/v1/o3", 16_000, 500),
    ],
)
def test_lengths_follow_the_models(
    draft: str, target: str, tokens: int, chunk: int, tmp_path: Path
) -> None:
    """A reasoning model gets a limit of thousands of tokens and long chunks. So does a model if its
    name does not show whether it reasons.
    """
    found = lengths({"draft": draft, "target": target}, folder=tmp_path)
    assert (found[0], found[2], found[3]) == (tokens, chunk, chunk)
    assert found[1] * chunk >= tokens
    settings = configure(
        {"draft": draft, "target": target}, environment={}, folder=tmp_path
    ).settings
    assert (settings["turns"].origin, settings["max_tokens"].origin != "default") == (
        "max_tokens",
        True,
    )


@pytest.mark.parametrize("engines", [{}, R1])
def test_more_tokens_make_more_turns(engines: dict[str, str], tmp_path: Path) -> None:
    """If the user does not set the number of turns, atts chooses a number large enough for the
    token limit.
    """
    found = [
        lengths(engines, f"max_tokens={n}", folder=tmp_path)[1]
        for n in (512, 8_000, 16_000, 64_000)
    ]
    assert sorted(set(found)) == found
    assert lengths(engines, "max_tokens=16000", "turns=7", folder=tmp_path)[1] == 7
    assert (
        lengths(engines, "chunking.draft_tokens=20", folder=tmp_path)[1]
        > lengths(engines, folder=tmp_path)[1]
    )


def test_unset_lengths_of_a_policy_follow_the_models() -> None:
    """Setting one field of a policy changes that field alone, in code and in files."""
    plain = Setup(R1["draft"], R1["target"]).run_policy
    some = Setup(R1["draft"], R1["target"], policy=Policy(samples=4)).run_policy
    assert (some.bounds(), some.score, some.samples) == (plain.bounds(), plain.score, 4)
    assert (
        Setup().run_policy
        == Policy().filled()
        == configure(environment={}, folder="/").setup().run_policy
    )
    made = Setup(draft=ScriptedEngine("draft"), target=ScriptedEngine("target"))
    assert made.run_policy.bounds() == Setup().run_policy.bounds()


def test_the_context_limits_lengths_before_models_load(tmp_path: Path) -> None:
    """A folder's configuration and a server's `context` limit the lengths before anything is
    loaded.
    """
    (tmp_path / "config.json").write_text('{"max_position_embeddings": 2048}')
    found = lengths({"draft": f"hf:{tmp_path}", "target": R1["target"]}, folder=tmp_path / "none")
    assert 1024 <= found[0] < 2048
    found = lengths({**R1, "target": "openai:http://b/v1/m?context=8192"}, folder=tmp_path / "none")
    assert 4096 <= found[0] < 8192


def test_a_dry_run_says_what_set_each_length(atts: Any) -> None:
    """The dry run names the model or flag that set each length, and warns of small lengths in the
    same words as a real run.
    """
    words = [
        "eval",
        "arithmetic[:2]",
        "--draft",
        R1["draft"],
        "--target",
        R1["target"],
        "--dry-run",
    ]
    said = atts(*words)
    assert said.code == 0
    for line in (
        "16,000 tokens per rollout",
        "500 tokens per chunk (draft)",
        "by reasoning models",
        "by max_tokens",
    ):
        assert line in said.out
    assert "warning" not in said.out
    small = atts(*words, "--max-tokens", "512", "--turns", "4", "--set", "chunking.draft_tokens=64")
    assert "by --max-tokens" in small.out
    assert "--max-tokens 512 looks too small for reasoning models" in small.out
    assert "--turns 4 ends a rollout after at most 256 of its 512 tokens" in small.out
    found = json.loads(atts(*words, "--max-tokens", "512", "--json").out)
    assert found["budget"]["max_tokens"] == {"value": 512, "origin": "--max-tokens"}
    assert [text.partition(" tokens")[0] for text in found["warnings"]] == [
        "--max-tokens 512 looks too small for reasoning models, whose default is 16,000: many "
        "rollouts would be cut before they answer; leave --max-tokens out (atts reduces the "
        "default to the models' contexts), or raise it",
        "--max-tokens 512 allows at most 2 chunks of 500",
    ]


@pytest.mark.parametrize(
    "words", ["openai:localhost:8000", "vllm:Qwen/QwQ-32B", "ray:vllm:QwQ", "hf:a/b?devise=cpu"]
)
def test_a_dry_run_refuses_what_a_run_would_refuse(atts: Any, words: str) -> None:
    """A misspelt engine ends the dry run with the same error as a real run."""
    said = atts("eval", "arithmetic[:1]", "--draft", words, "--dry-run")
    assert (said.code, said.out) == (2, "")


def test_truncation_is_one_sentence_everywhere(atts: Any, scripted: tuple[str, ...]) -> None:
    """Every output reports truncated rollouts once and in the same sentence: the terminal, the JSON
    summary, the report and `solve`.
    """
    run = (
        "eval",
        "arithmetic[:4]",
        "--samples",
        "2",
        *scripted,
        "--max-tokens",
        "12",
        "--out",
        "cut",
    )
    table = atts(*run).out
    summary = json.loads(atts(*run, "--json").out.splitlines()[-1])["truncation"]
    sentence = summary["warning"]
    assert summary["cut"] > 0.05 * summary["rollouts"]
    assert f"{summary['cut']} of {summary['rollouts']} rollouts" in sentence
    assert sentence.endswith("raise --max-tokens")
    assert sentence in table
    report = json.loads(atts("report", "cut", "--format", "json", "--out", "-").out)
    first_screen = [text for _, text in report["verdict"]["points"]]
    assert sentence in first_screen, "the count must be printed once"
    told = [caveat for caveat in report["caveats"] if caveat["code"] == "cut"]
    assert [(caveat["text"], caveat["standing"], caveat["count"]) for caveat in told] == [
        (sentence, "bad", summary["cut"])
    ]
    assert not [caveat for caveat in report["caveats"] if caveat["code"] == "no answer"]
    said = atts(
        "solve",
        "Start at 4. +3, -2. What is the result?",
        "--max-tokens",
        "3",
        *scripted[:4],
        "--samples",
        "2",
    )
    assert (
        "2 of 2 rollouts (100.0 %) reached a limit before an answer: 2 at --max-tokens 3"
        in said.err
    )
    whole = json.loads(
        atts(
            "eval", "arithmetic[:2]", "--samples", "2", *scripted, "--out", "whole", "--json"
        ).out.splitlines()[-1]
    )
    assert whole["truncation"]["warning"] == ""


def test_flags_evaluate_a_users_file(atts: Any, scripted: tuple[str, ...]) -> None:
    """Flags name the columns of a user's file, use the file in place of a benchmark, and allow
    problems without a reference answer.
    """
    Path("mine.csv").write_text(
        "Q,A\nStart at 4. +3. What is the result?,7\nStart at 1. +1. What is the result?,\n"
    )
    run = ("eval", "mine.csv", "--samples", "1", *scripted)
    assert "--column text=NAME" in atts(*run).err
    named = (*run, "--column", "text=Q", "--column", "answer=A")
    assert "--answers optional" in atts(*run, "--column", "text=Q").err
    assert atts(*named).code == 2
    done = atts(*named, "--answers", "optional", "--json")
    assert done.code == 0
    assert json.loads(done.out.splitlines()[-1])["problems"] == 2
    Path("rows.jsonl").write_text(
        json.dumps({"problem": "Start at 4. +3. What is the result?", "answer": "7"}) + "\n"
    )
    assert atts("eval", "math500", "--file", "rows.jsonl", "--samples", "1", *scripted).code == 0
    assert "FIELD=COLUMN" in atts(*run, "--column", "text").err


def test_problems_without_references_get_answers_instead_of_an_accuracy(
    atts: Any, scripted: tuple[str, ...]
) -> None:
    """If no problem has a reference answer, the summary shows the first answers and no accuracy."""
    lines = [json.dumps({"problem": f"Start at {k}. +1. What is the result?"}) for k in range(7)]
    Path("open.jsonl").write_text("\n".join(lines) + "\n")
    run = ("eval", "open.jsonl", "--answers", "optional", "--samples", "1", *scripted)
    said = atts(*run, "--out", "runs/open")
    assert said.code == 0
    assert "no reference answers" in said.out
    assert "pass@1" not in said.out
    finished = [
        json.loads(line) for line in atts(*run, "--out", "runs/open", "--json").out.splitlines()
    ]
    for problem in finished[:5]:
        assert f"{problem['problem']}: {problem['answer'] or 'none'}" in said.out
    assert "and 2 more" in said.out


def test_exact_says_why_the_target_wrote_nearly_everything(
    atts: Any, scripted: tuple[str, ...]
) -> None:
    """The summary of method `exact` explains why drafts were hardly used. Other methods print no
    such line.
    """
    run = ("eval", "arithmetic[:3]", "--samples", "4", *scripted)
    for method in ("exact", "target-only", "atts"):
        said = atts(*run, "--method", method, "--out", f"runs/{method}").out
        written = re.search(r"tokens written +([\d,]+) by the draft, ([\d,]+) by the target", said)
        assert written
        draft, target = (int(number.replace(",", "")) for number in written.groups())
        is_explained = "exact drafts only while this is measured to save time" in said
        assert is_explained == (method == "exact" and 20 * draft <= target)


def test_a_finished_run_says_that_it_is_finished(atts: Any, scripted: tuple[str, ...]) -> None:
    """The same command after the end of a run says that the run is finished. After an interrupt it
    says that the run continues.
    """
    run = ("eval", "arithmetic[:2]", "--samples", "1", *scripted, "--out", "runs/end")
    assert atts(*run).code == 0
    said = atts(*run)
    assert "is finished" in said.err
    assert "continuing" not in said.err
    journal = Path("runs/end/journal.jsonl")
    journal.write_bytes(b"".join(journal.read_bytes().splitlines(keepends=True)[:-30]))
    assert "continuing the run" in atts(*run).err


LONG, SHORT = 8192, 700
ONE_MODEL: dict[str, Role] = {
    "target-only": "target",
    "draft-only": "draft",
    "deep-conf": "draft",
}


class WatchedEngine(ScriptedEngine):
    """A scripted engine that counts how often it was opened."""

    def __init__(self, role: Role, context_length: int) -> None:
        super().__init__(role, context_length=context_length)
        self.num_opened = 0

    async def __aenter__(self) -> WatchedEngine:
        self.num_opened += 1
        await super().__aenter__()
        return self


def engines(used: Role) -> dict[Role, WatchedEngine]:
    """Make an engine with a long context for the role that the method uses, and one with a short
    context for the other role.
    """
    return {
        role: WatchedEngine(role, LONG if role == used else SHORT) for role in ("draft", "target")
    }


@pytest.fixture
def served() -> Iterator[DialectServer]:
    """Start a server with a long context."""
    with ExitStack() as stack:
        yield stack.enter_context(
            DialectServer(lambda: ScriptedEngine("target", context_length=40_000), "chat")
        )


@pytest.mark.parametrize(("method", "used"), ONE_MODEL.items())
@pytest.mark.anyio
async def test_only_the_model_that_is_asked_is_opened(method: str, used: Role) -> None:
    """If a method uses one model, atts opens that model alone; the run, its budget and its manifest
    name no other model.
    """
    made = engines(used)
    policy = Policy(samples=2, max_tokens=2000)
    setup = Setup(draft=made["draft"], target=made["target"], method=method, policy=policy)
    result = await evaluate(toy_problems(2), setup)
    assert result.status == "finished"
    assert {role for role, engine in made.items() if engine.num_opened} == {used}
    assert [*result.manifest.engines] == [used]
    for rollout in (one for outcome in result.outcomes() for one in outcome.rollouts):
        assert rollout.finish == "answer"


@pytest.mark.parametrize(("method", "used"), ONE_MODEL.items())
@pytest.mark.anyio
async def test_an_unused_models_context_sets_no_budget(method: str, used: Role) -> None:
    """The context of an unused model sets no length: unset lengths come from the model that is
    used, before and after it is opened.
    """
    words = {used: "openai:http://a/v1/m", "draft" if used == "target" else "target": "embedded"}
    setup = Setup(**words, method=method)  # type: ignore[arg-type]  # engines by role
    assert setup.run_policy.bounds().max_tokens == 16_000
    alone = configure({**words, "method": method}, environment={}, folder="/")
    assert alone["max_tokens"] == 16_000
    assert alone["turns"] * alone["chunking.draft_tokens"] >= 16_000
    made = engines(used)
    plan = setup.plan(made["draft"], made["target"])
    bounds = plan.resolved().policy.bounds()
    assert bounds.max_tokens == LONG - 512
    assert bounds.turns * bounds.draft_tokens >= LONG - 512


@pytest.mark.anyio
async def test_a_served_target_needs_no_draft(served: DialectServer, tmp_path: Path) -> None:
    """Without `--draft` the embedded draft neither cuts rollouts nor appears in the output."""
    target = f"chat:{served.url}/v1/toy?context=40000"
    for method, role in (("target-only", "target"), ("draft-only", "draft")):
        configuration = configure(
            {role: target, "method": method, "dataset": "arithmetic[:1]", "out": str(tmp_path)},
            environment={},
            folder="/",
        )
        planned = dry_run(configuration)
        assert planned.budget["max_tokens"].value == 16_000
        assert planned.proposes.startswith("nothing") or role == "target"
        seen = {check.name for check in (await diagnose(configuration)).checks}
        assert role in seen
        assert ({"draft", "target"} - {role}).isdisjoint(seen)


@pytest.mark.anyio
async def test_an_engine_that_is_not_asked_may_be_down() -> None:
    """A run of the target alone works although the draft's server is down."""
    dead = "vllm:http://127.0.0.1:9/none"
    result = await evaluate(
        toy_problems(1), Setup(draft=dead, target="scripted", method="target-only")
    )
    assert result.status == "finished"
    with pytest.raises(EngineUnavailable):
        await evaluate(toy_problems(1), Setup(draft=dead, target="scripted"))


def test_each_method_says_which_models_it_asks() -> None:
    """A method that needs a single model lists this model as used; methods with a gate or a merged
    stream list both models.
    """
    both = ("draft", "target")
    for row in PRESETS:
        policy = row.policy(Policy())
        expected = (ONE_MODEL[row.name],) if row.name in ONE_MODEL else both
        assert row.roles(policy) == expected, row.name
    assert preset("atts").roles(Policy(drafter="target")) == ("target",)
    alone = Setup(draft="scripted", target="scripted", method="draft-only")
    assert alone.roles == ("draft",)
    assert replace(alone, gate=CoinGate(0.5, 0)).roles == both
    assert replace(alone, method="atts", gate=FixedGate("accept")).roles == ("draft",)


def test_a_rollout_without_a_gate_is_one_request() -> None:
    """If no gate judges chunks, the whole rollout is one request, unless the user sets chunk
    lengths.
    """
    model = "openai:http://a/v1/{}"
    for name, request, chunk in (("o-large", 4096, 500), ("Small-Instruct", 4096, 128)):
        words = model.format(name)
        for method in ("target-only", "draft-only"):
            alone = Setup(draft=words, target=words, method=method).run_policy.bounds()
            assert (alone.draft_tokens, alone.target_tokens) == (request, request)
            made = configure({"draft": words, "target": words, "method": method}, environment={})
            assert made["chunking.draft_tokens"] == request
        for method in ("atts", "deep-conf", "exact"):
            cut = Setup(draft=words, target=words, method=method).run_policy.bounds()
            assert (cut.draft_tokens, cut.target_tokens) == (chunk, chunk)
    base = Setup(target=model.format("Big-base"), method="target-only").run_policy.bounds()
    assert base.target_tokens == 128
    given = Policy(chunking=Chunking(target_tokens=100))
    assert Setup(target=words, method="target-only", policy=given).run_policy.bounds()[3] == 100
    assert Setup(method="target-only").run_policy.bounds().target_tokens == 64


def test_the_report_names_the_unused_model(atts: Any) -> None:
    """The report and the list of runs say which model was not used."""
    run = ("eval", "arithmetic[:2]", "--samples", "1", "--target", "scripted", "--out", "alone")
    assert atts(*run, "--method", "target-only", "--report", "none").code == 0
    assert [*open_run(Path("alone")).manifest.engines] == ["target"]
    report = json.loads(atts("report", "alone", "--format", "json", "--out", "-").out)
    assert report["run"]["draft"] == "not used"
    assert "embedded" not in atts("runs", ".").out


def test_a_dry_run_of_one_model_names_no_other(atts: Any) -> None:
    """No line names the unused model or the length of its chunks."""
    run = ("eval", "arithmetic[:1]", "--dry-run")
    alone = atts(*run, "--method", "target-only", "--target", "scripted").out
    assert "  target    scripted" in alone
    assert "  draft  " not in alone
    assert "chunk of the draft" not in alone
    drafted = atts(*run, "--method", "draft-only", "--draft", "scripted").out
    assert "  draft     scripted" in drafted
    assert "  target  " not in drafted
    assert "proposed" not in drafted


def test_flags_of_an_unused_model_are_still_checked(atts: Any) -> None:
    """A misspelt engine in a flag is refused even if the method does not use that model."""
    run = ("eval", "arithmetic[:1]", "--method", "target-only", "--target", "scripted", "--dry-run")
    assert atts(*run, "--draft", "vlm:http://a/m").code == 2


TEMPLATES = {
    "{% for m in messages %}<|im_start|>{{ m.role }}\n{{ m.content }}<|im_end|>{% endfor %}": 4096,
    "{{ messages[0].content.split('</think>')[-1] }}": 16_000,
    "{% if enable_thinking %}{% endif %}{{ messages[0].content }}": 16_000,
    "<|start|>assistant<|channel|>analysis{{ messages[0].content }}": 16_000,
}


@pytest.mark.parametrize("template", TEMPLATES)
@pytest.mark.parametrize("place", ["chat_template.jinja", "tokenizer_config.json"])
def test_a_chat_template_shows_whether_a_model_reasons(
    template: str, place: str, tmp_path: Path
) -> None:
    """A folder's name does not show whether its model reasons, so atts reads the chat template. If
    the model does not reason, chunks end at blank lines.
    """
    (tmp_path / "config.json").write_text(json.dumps({"max_position_embeddings": 32_768}))
    text = template if place.endswith("jinja") else json.dumps({"chat_template": template})
    (tmp_path / place).write_text(text)
    model = f"hf:{tmp_path}"
    bounds = Setup(draft=model, target=model).run_policy.bounds()
    assert bounds.max_tokens == TEMPLATES[template]
    answers_at_once = bounds.max_tokens == 4096
    assert bounds.stop == (("\n\n",) if answers_at_once else ())
    assert bounds.draft_tokens == (128 if answers_at_once else 500)
    whole = Setup(draft=model, target=model, method="draft-only").run_policy.bounds()
    assert (whole.draft_tokens, whole.stop) == (4096, ())


@pytest.mark.parametrize("template", TEMPLATES)
def test_the_folder_of_a_servers_tokenizer_shows_whether_its_model_reasons(
    template: str, tmp_path: Path
) -> None:
    """If the served name does not show whether the model reasons, the chat template in the
    tokenizer's folder decides.
    """
    (tmp_path / "chat_template.jinja").write_text(template)
    model = f"vllm:http://gpu:8000/target?in_flight=8&tokenizer={tmp_path}"
    bounds = Setup(draft=model, target=model).run_policy.bounds()
    assert bounds.max_tokens == TEMPLATES[template]
    other = "vllm:http://gpu:8000/target?tokenizer=owner/model"
    assert Setup(draft=other, target=other).run_policy.bounds().max_tokens == 16_000


@pytest.mark.parametrize(
    ("target", "is_unknown"),
    [
        ("vllm:http://127.0.0.1:9", True),
        ("vllm:http://127.0.0.1:9/target?context=4096", True),
        ("vllm:http://127.0.0.1:9/Qwen/QwQ-32B", False),
        ("vllm:http://127.0.0.1:9/Qwen/Qwen2.5-7B-Instruct", False),
    ],
)
def test_the_lengths_of_models_of_unknown_kind_say_so(
    atts: Any, target: str, is_unknown: bool
) -> None:
    """If atts cannot know whether a model reasons, the dry run and the doctor say so, and name the
    settings that change the lengths.
    """
    words = ("--draft", "vllm:http://127.0.0.1:9/Qwen/Qwen2.5-1.5B-Instruct", "--target", target)
    dry = ("eval", "arithmetic[:1]", *words, "--dry-run")
    outputs = [atts(*dry).out, atts("doctor", *words).out]
    for text in outputs:
        assert ("models of unknown kind, treated as reasoning models" in text) == is_unknown
        assert ("?tokenizer=FOLDER to the servers" in text) == is_unknown
    lengths = ("--max-tokens", "4096", "--set", "chunking.draft_tokens=128")
    assert "?tokenizer=FOLDER" not in atts(*dry, *lengths).out


def test_a_run_warns_if_chunks_are_whole_rollouts(atts: Any, scripted: tuple[str, ...]) -> None:
    """If each chunk is a whole rollout, a warning names the setting to change; a run with several
    chunks per rollout has no warning.
    """
    run = ("eval", "arithmetic[:6]", *scripted, "--samples", "2", "--set", "early_stop=none")
    long = ("--set", "chunking.draft_tokens=500", "--set", "chunking.stop=[]")
    coarse = atts(*run, *long, "--report", "markdown", "--out", "coarse")
    assert coarse.code == 0
    assert "an escalation rewrites most of a solution" in coarse.out
    assert "chunking.draft_tokens" in coarse.out
    assert "an escalation rewrites most of a solution" in Path("coarse/report.md").read_text()
    fine = atts(*run, "--report", "none", "--out", "fine")
    assert "an escalation rewrites" not in fine.out


@pytest.mark.parametrize(
    ("options", "is_coarse"),
    [
        (("--max-tokens", "160"), True),
        (("--max-tokens", "1000"), True),
        (("--max-tokens", "1001"), False),
        (("--max-tokens", "160", "--set", "chunking.draft_tokens=40"), False),
        (("--max-tokens", "160", "--set", r'chunking.stop=["\n\n"]'), False),
        (("--max-tokens", "160", "--method", "target-only"), False),
        (("--max-tokens", "160", "--method", "exact"), False),
    ],
)
def test_a_limit_of_two_chunks_is_reported_before_a_run(
    atts: Any, options: tuple[str, ...], is_coarse: bool
) -> None:
    """If the token limit allows at most two judged chunks, the dry run and the doctor warn with the
    same advice as the finished run.
    """
    dead = "vllm:http://127.0.0.1:9/Qwen/QwQ-32B"
    words = ("--draft", dead, "--target", dead, *options)
    outputs = [atts("eval", "arithmetic[:1]", *words, "--dry-run").out, atts("doctor", *words).out]
    for text in outputs:
        assert ("an escalation rewrites most of a solution" in text) == is_coarse
        assert ("or shorter chunks use --set chunking.draft_tokens=N" in text) == is_coarse


@pytest.mark.anyio
@pytest.mark.parametrize("escalates", ["rest", "rollout"])
async def test_a_target_that_ends_rollouts_stays_within_the_limit(
    escalates: str, tmp_path: Path
) -> None:
    """If the target finishes each escalated rollout, it writes more than a chunk at once. The dry
    run's upper bound therefore counts whole rollouts.
    """
    pairs = ("turns=3", "chunking.draft_tokens=12", "chunking.target_tokens=12", "rate=0.9")
    engines = {"draft": "scripted", "target": "scripted", "dataset": "arithmetic[:6]"}
    configuration = configure(
        engines,
        (*pairs, f"escalates={escalates}", "early_stop=none"),
        environment={},
        folder=tmp_path,
    )
    most = dry_run(configuration).at_most
    run = await evaluate(toy_problems(6), configuration.setup())
    usage = [outcome.usage for outcome in run.outcomes()]
    assert sum(one.target_tokens for one in usage) <= most.target
    assert sum(one.draft_tokens for one in usage) <= most.draft
    assert sum(one.scored_tokens for one in usage) <= most.scored


def test_the_advice_on_a_turn_limit_depends_on_who_set_it() -> None:
    """If atts computed the limit on turns from the token limit, the advice names the token limit."""
    derived = Truncation(8, 0, 1, max_tokens=512, turns=15, is_derived=True, context=0)
    assert str(derived).endswith("raise --max-tokens, from which atts computes the limit on turns")
    assert str(replace(derived, is_derived=False)).endswith("leave --turns out, or raise it")
