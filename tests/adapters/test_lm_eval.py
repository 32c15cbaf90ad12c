"""Tests of the lm_eval adapter on the embedded models; they are skipped where lm_eval is missing."""
# pyright: reportMissingImports=false, reportUntypedFunctionDecorator=false

from __future__ import annotations

import json
import math
from pathlib import Path
from typing import Any

import pytest

from atts.core import Problem
from atts.evaluators import load_dataset

lm_eval: Any = pytest.importorskip(
    "lm_eval", reason="lm_eval is not installed: pip install 'atts-llm[lm-eval]'"
)
pytest.importorskip("datasets", reason="lm_eval's datasets are not installed")
# lm_eval and its dependencies raise warnings, which must not fail the tests
pytestmark = pytest.mark.filterwarnings("default")


def task_of(folder: Path, problems: tuple[Problem, ...]) -> Any:
    """Make an lm_eval task from problems of atts; the task compares the number in a reply's last
    `boxed` command with the answer.
    """
    from lm_eval.tasks import TaskManager

    rows = [json.dumps({"question": it.text, "answer": it.answer}) for it in problems]
    (folder / "rows.jsonl").write_text("\n".join(rows))
    (folder / "ours.yaml").write_text(
        f"""
task: ours
dataset_path: json
dataset_kwargs: {{data_files: {{test: {folder / "rows.jsonl"}}}}}
output_type: generate_until
test_split: test
doc_to_text: "{{{{question}}}}"
doc_to_target: "{{{{answer}}}}"
generation_kwargs: {{until: ["</never>"], max_gen_toks: 400}}
filter_list:
  - name: boxed
    filter:
      - {{function: regex, regex_pattern: 'boxed\\{{(-?\\d+)\\}}', group_select: -1}}
      - {{function: take_first}}
metric_list:
  - {{metric: exact_match, aggregation: mean, higher_is_better: true}}
"""
    )
    return TaskManager(include_path=str(folder), include_defaults=False)


def requests(*arguments: tuple[Any, ...]) -> list[Any]:
    """Make requests in the form that lm_eval's tasks use."""
    from lm_eval.api.instance import Instance

    kind = "generate_until"
    return [
        Instance(request_type=kind, doc={}, arguments=each, idx=n)
        for n, each in enumerate(arguments)
    ]


def test_simple_evaluate_runs_the_embedded_benchmark(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """lm_eval's `simple_evaluate` scores the answers of atts by exact match; the run is recorded in
    a run directory.
    """
    import atts.adapters.lm_eval

    monkeypatch.setenv("HF_DATASETS_CACHE", str(tmp_path / "cache"))
    problems = load_dataset("arithmetic[:6]").problems
    found = lm_eval.simple_evaluate(
        model="atts",
        model_args=f"pretrained=embedded,samples=4,rate=0.3,directory={tmp_path / 'runs'}",
        tasks=["ours"],
        task_manager=task_of(tmp_path, problems),
        bootstrap_iters=0,
    )
    assert found["results"]["ours"]["exact_match,boxed"] >= 0.5
    assert len(found["samples"]["ours"]) == len(problems)
    assert (tmp_path / "runs" / "generate-1" / "journal.jsonl").exists()
    assert atts.adapters.lm_eval.ATTSLM is not None


def test_generation_stops_at_until_and_at_the_token_limit() -> None:
    """A reply ends at the strings in `until`, `max_gen_toks` limits the tokens of a rollout, and
    replies are in the order of the requests.
    """
    from atts.adapters.lm_eval import ATTSLM

    model = ATTSLM("scripted", samples=2)
    question = "Start at 4. +3, -2. What is the result?"
    whole, cut, short = model.generate_until(
        requests(
            (question, {"until": []}),
            (question, {"until": ["\n\n"]}),
            (question, {"until": [], "max_gen_toks": 5}),
        )
    )
    assert "\n\n" in whole
    assert "\n\n" not in cut
    assert len(short) < len(whole)
    chat = [{"role": "system", "content": "Be brief."}, {"role": "user", "content": question}]
    assert model.apply_chat_template(chat) == f"Be brief.\n\n{question}"


def test_loglikelihood_is_the_targets() -> None:
    """The log-likelihoods come from the target, so a correct continuation is likelier than a wrong
    one. A rolling log-likelihood is the sum over all tokens of the text.
    """
    from atts.adapters.lm_eval import ATTSLM

    model = ATTSLM("embedded")
    asked = "Zoe has 16 nuts. Zoe buys 23 more. How many nuts does Zoe have now?"
    context = f"<|user|>{asked}<|end|><|assistant|>Zoe buys 23 more, so Zoe has 16 + 23 ="
    right, wrong, bare = model.loglikelihood(
        requests((context, " 39"), (context, " 52"), ("", "Zoe"))
    )
    assert wrong[0] < right[0] <= 0
    assert not wrong[1]
    assert bare[0] < 0
    text = "Zoe has 16 + 23 = 39 nuts.\n\n"
    [rolled] = model.loglikelihood_rolling(requests((text,)))
    assert math.isclose(rolled, model.loglikelihood(requests(("", text)))[0][0], rel_tol=1e-4)


def test_misspelt_arguments_are_refused() -> None:
    """lm_eval refuses a misspelt model argument with the same hint as the command line."""
    from atts.adapters.lm_eval import ATTSLM

    with pytest.raises(Exception, match="did you mean 'samples'"):
        ATTSLM("scripted", sampels=2)
