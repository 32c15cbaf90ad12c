"""Tests of each import format on hand-made files: recorded values are imported, and no value is
invented.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from atts.core import Outcome
from atts.errors import DatasetError, OptionError
from atts.importers import IMPORTED
from atts.journal import FinishedProblem, Measured, RecordedRun, open_run
from atts.ledger import PRICES, money_of, recorded_prices
from tests.importers.conftest import (
    Import,
    inspect_sample,
    pack_again,
    write_eval,
    write_lines,
)


def read(directory: Path) -> tuple[dict[str, FinishedProblem], dict[str, Outcome], RecordedRun]:
    """Return three views of an imported run: finished problems by id, full outcomes by id, and the
    run itself.
    """
    run = open_run(directory)
    return run.state().finished, {one.problem.id: one for one in run.outcomes()}, run


def measured(run: RecordedRun) -> dict[tuple[str, int], Measured]:
    """Return the measurements that the other tool recorded for each rollout."""
    events = [entry.event for entry in run.entries((Measured,))]
    return {(one.problem, one.sample): one for one in events if isinstance(one, Measured)}


def verdicts(problem: FinishedProblem) -> list[str | None]:
    """Return the verdicts on a problem's rollouts, in order."""
    return [sample.verdict for sample in problem.samples]


def check_inspect(directory: Path) -> None:
    """Check the run imported from the three samples below."""
    finished, outcomes, run = read(directory)
    assert list(finished) == ["1", "2"]
    assert finished["1"].answer == "2"
    assert verdicts(finished["1"]) == ["correct", "wrong"]
    assert outcomes["1"].problem.text == "What is 1 + 1?"
    assert outcomes["1"].problem.answer == "2"
    assert outcomes["1"].rollouts[0].text == "<think>\nadding\n</think>\n\nANSWER: 2"
    assert outcomes["1"].rollouts[0].usage.target_tokens == 8
    assert outcomes["1"].rollouts[0].usage.target_prefill_tokens == 25
    one = measured(run)["1", 1]
    assert (one.seconds, one.dollars, one.scores) == (3.0, 0.001, {"length": 3.5})
    assert finished["1"].seconds == 3.0
    assert finished["2"].status == "failed"
    assert finished["2"].samples[0].error == "the sandbox died"
    assert run.manifest.engines["target"]["model"] == "gpt-x"


SAMPLES = [
    inspect_sample(1, 1, "2", "C"),
    inspect_sample(1, 2, "3", "I"),
    inspect_sample(2, 1, "", "I", error={"message": "the sandbox died"}),
]


def test_an_eval_archive_is_imported(tmp_path: Path, run_import: Import) -> None:
    """Each epoch of a sample becomes a rollout with its answer, verdict, tokens, seconds, cost and
    error.
    """
    made = run_import("inspect", write_eval(tmp_path / "log.eval", SAMPLES))
    assert (made.problems, made.rollouts, made.with_seconds) == (2, 3, 3)
    assert made.dollars == pytest.approx(0.003)
    check_inspect(made.directory)


def test_an_inspect_log_in_json_is_imported(tmp_path: Path, run_import: Import) -> None:
    """An inspect_ai log in JSON is imported: the log is one object, and its list of samples is read
    one by one.
    """
    log = {"version": 2, "eval": {"samples": 3, "x": ["{", '"samples"', {}]}, "samples": SAMPLES}
    path = tmp_path / "log.json"
    path.write_text(json.dumps({**log, "reductions": [{"samples": [{"value": 1}]}]}, indent=2))
    check_inspect(run_import("inspect", path).directory)


def test_an_eval_archive_compressed_with_zstandard_is_imported(
    tmp_path: Path, run_import: Import
) -> None:
    """Logs whose entries are compressed in Zstandard frames, as inspect_ai writes now, are
    imported.

    A damaged frame is an error.
    """
    path = pack_again(write_eval(tmp_path / "log.eval", SAMPLES))
    made = run_import("inspect", path)
    assert (made.problems, made.rollouts, made.with_seconds) == (2, 3, 3)
    check_inspect(made.directory)
    data = path.read_bytes()
    place = data.index(b"samples/1_epoch_1.json") + len("samples/1_epoch_1.json")
    for offset in (1, 40):  # the damage is in the header of a frame, or in its text
        damaged = bytearray(data)
        damaged[place + offset] ^= 255
        path.write_bytes(damaged)
        with pytest.raises(
            DatasetError, match=r"samples/1_epoch_1.json is compressed with Zstandard"
        ):
            run_import("inspect", path, tmp_path / "damaged")


def test_without_a_reader_of_zstandard_the_fix_is_named(
    tmp_path: Path, run_import: Import, monkeypatch: pytest.MonkeyPatch
) -> None:
    """If no installed package reads Zstandard, the error names a package to install, and a command
    that converts the log.
    """
    path = pack_again(write_eval(tmp_path / "log.eval", SAMPLES))

    def missing(data: bytes) -> bytes:
        raise ImportError("zstandard")

    monkeypatch.setattr("atts.importers.records._unpacked", missing)
    with pytest.raises(DatasetError, match="or convert the log: inspect log"):
        run_import("inspect", path)


def test_an_answer_that_is_the_whole_text_is_extracted(tmp_path: Path, run_import: Import) -> None:
    """If a log gives a rollout's full text as its answer, atts extracts the answer from the text
    before it votes.

    inspect_ai's scorers that search the text record it like this, some of them in lower case.
    """
    texts = ["Say\nANSWER: 2", "say\nANSWER: 2", "2", "no idea of what this could be about " * 3]
    samples = [inspect_sample(1, number, text.lower(), "C") for number, text in enumerate(texts, 1)]
    for sample, text in zip(samples, texts, strict=True):
        sample["output"]["choices"][0]["message"]["content"] = text
    made = run_import("inspect", write_eval(tmp_path / "log.eval", samples))
    assert made.with_answer == 0
    finished, _, _ = read(made.directory)
    assert [one.answer for one in finished["1"].samples] == ["2", "2", "2", None]
    assert finished["1"].answer == "2"


def test_a_short_text_is_its_own_answer(tmp_path: Path, run_import: Import) -> None:
    """If a log gives a rollout's full text as its answer and the text is short, such as a name, the
    text is the answer.
    """
    sample = inspect_sample(1, 1, "paris", "C")
    sample["output"]["choices"][0]["message"]["content"] = "Paris"
    made = run_import("inspect", write_eval(tmp_path / "log.eval", [sample]))
    finished, _, _ = read(made.directory)
    assert [one.answer for one in finished["1"].samples] == ["paris"]


def test_an_inspect_score_can_be_chosen(tmp_path: Path, run_import: Import) -> None:
    """If the score that the user chose is not a verdict, atts grades the answers itself.

    For an unknown score, the error lists the scores of the record.
    """
    path = write_eval(tmp_path / "log.eval", SAMPLES[:2])
    finished, _, _ = read(run_import("inspect", path, metric="length").directory)
    assert [sample.rule for sample in finished["1"].samples] == ["same text", "value"]
    with pytest.raises(
        DatasetError, match=r"entry 1: the record has no score 'f1'; its scores are match, length"
    ):
        run_import("inspect", path, tmp_path / "other", metric="f1")


def test_inspect_attachments_and_choices_are_read(tmp_path: Path, run_import: Import) -> None:
    """Long texts that a log stores separately are inserted again, and a problem with choices
    becomes multiple choice.
    """
    sample = inspect_sample(
        1, 1, "B", "C", choices=["1", "2"], target="B", input="attachment://abc",
        attachments={"abc": "Which is 1 + 1?"},
    )  # fmt: skip
    finished, outcomes, _ = read(
        run_import("inspect", write_eval(tmp_path / "a.eval", [sample])).directory
    )
    assert outcomes["1"].problem.text == "Which is 1 + 1?"
    assert outcomes["1"].problem.kind == "choice"
    assert outcomes["1"].problem.choices == ("1", "2")
    assert finished["1"].verdict == "correct"


def lm_eval_row(name: int, replies: list[str], answer: Any, grade: float, filter: str) -> Any:
    """Return one line of `--log_samples`."""
    return {
        "doc_id": name, "doc": {"question": f"What is {name} + 1?"}, "target": f"easy #### {name + 1}",
        "arguments": [["prompt", {}]], "resps": [replies], "filtered_resps": [answer],
        "filter": filter, "metrics": ["bleu", "exact_match"], "bleu": 0.3, "exact_match": grade,
        "doc_hash": "x",
    }  # fmt: skip


def test_lm_eval_samples_are_imported(tmp_path: Path, run_import: Import) -> None:
    """A single reply in lm_eval's log has its recorded verdict.

    Of several replies, lm_eval graded only the one that its filter returned.
    """
    path = write_lines(
        tmp_path / "out" / "m" / "samples_gsm8k_2026-01-02T03-04-05.678901.jsonl",
        [
            lm_eval_row(0, ["So #### 1"], "1", 1.0, "strict"),
            lm_eval_row(1, ["So #### 2", "So #### 3", "So #### 2"], "2", 1.0, "strict"),
            lm_eval_row(2, ["So #### 4"], "[invalid]", 0.0, "strict"),
        ],
    )
    made = run_import("lm-eval", path.parent.parent)
    finished, outcomes, run = read(made.directory)
    assert list(finished) == ["gsm8k/0", "gsm8k/1", "gsm8k/2"]
    assert outcomes["gsm8k/0"].problem.answer == "1"
    assert finished["gsm8k/0"].samples[0].rule == "recorded by lm-eval"
    assert verdicts(finished["gsm8k/1"]) == ["correct", "wrong", "correct"]
    assert not any("recorded" in sample.rule for sample in finished["gsm8k/1"].samples)
    assert verdicts(finished["gsm8k/2"]) == ["wrong"]
    assert measured(run)["gsm8k/0", 0].scores == {"bleu": 0.3, "exact_match": 1.0}


def test_lm_eval_needs_one_filter(tmp_path: Path, run_import: Import) -> None:
    """If lm_eval's log has replies under two filters, the user must choose one filter, because each
    filter gives its own answers.
    """
    rows = [
        lm_eval_row(0, ["1 or 2"], answer, float(answer == "1"), filter)
        for filter, answer in (("strict", "1"), ("flexible", "2"))
    ]
    path = write_lines(tmp_path / "samples_t.jsonl", rows)
    with pytest.raises(OptionError, match=r"--filter: .* 2 answer filters.*'strict' \(1\)"):
        run_import("lm-eval", path)
    finished, _, _ = read(run_import("lm-eval", path, filter="flexible").directory)
    assert finished["t/0"].answer == "2"


def test_lm_eval_likelihoods_are_refused(tmp_path: Path, run_import: Import) -> None:
    """A task that compares likelihoods has no rollouts to import."""
    row = {**lm_eval_row(0, ["a"], "a", 1, ""), "resps": [[[-1.0, True]], [[-2.0, False]]]}
    with pytest.raises(DatasetError, match="line 1: the record has 2 requests; .* likelih"):
        run_import("lm-eval", write_lines(tmp_path / "samples_t.jsonl", [row]))


def nemo_row(name: int, answer: str | None, **more: Any) -> dict[str, Any]:
    """Return one line of output-rs*.jsonl."""
    return {
        "problem": f"What is {name} + 1?", "expected_answer": str(name + 1), "generation": "...",
        "predicted_answer": answer, "num_generated_tokens": 10 + name, **more,
    }  # fmt: skip


def test_nemo_skills_numbers_rollouts_by_seed(tmp_path: Path, run_import: Import) -> None:
    """The number of a rollout is the seed in the name of its file. The alphabetical order of the
    files, with "10" before "2", does not matter.
    """
    folder = tmp_path / "eval-results" / "aime"
    for seed, grade in ((2, {"symbolic_correct": True}), (10, {"judgement": "Judgement: No"})):
        rows = [nemo_row(n, str(n + 1), **grade, reward_model_score=0.5) for n in range(2)]
        write_lines(folder / f"output-rs{seed}.jsonl", rows)
    # a file with other rollouts, which the import must ignore
    write_lines(folder / "output.jsonl", [nemo_row(9, "0")])
    made = run_import("nemo-skills", tmp_path)
    finished, outcomes, run = read(made.directory)
    assert made.scores == ("reward",)
    assert [sample.sample for sample in finished["problem-1"].samples] == [2, 10]
    assert verdicts(finished["problem-2"]) == ["correct", "wrong"]
    assert outcomes["problem-2"].problem.text == "What is 1 + 1?"
    assert outcomes["problem-2"].usage.target_tokens == 22
    assert run.manifest.problems == 2


def test_a_nemo_skills_text_at_the_limit_is_cut(tmp_path: Path, run_import: Import) -> None:
    """A text that ended at the token limit becomes a cut rollout, not a rollout without an answer."""
    path = write_lines(
        tmp_path / "output-rs0.jsonl", [nemo_row(1, None, finish_reason="length", is_correct=0)]
    )
    finished, _, _ = read(run_import("nemo-skills", path).directory)
    assert finished["problem-1"].samples[0].is_cut
    assert verdicts(finished["problem-1"]) == ["wrong"]


def arena_row(model: str, problem: int, sample: int, answer: str, **more: Any) -> dict[str, Any]:
    """Return one row of a MathArena data set."""
    return {
        "problem_idx": problem, "problem": f"P{problem}", "model_name": model, "idx_answer": sample,
        "answer": f"\\boxed{{{answer}}}", "input_tokens": 50, "output_tokens": 1000, "cost": 0.02,
        "input_cost_per_tokens": 1.0, "output_cost_per_tokens": 20.0, "gold_answer": "7",
        "parsed_answer": answer, "correct": answer == "7", **more,
    }  # fmt: skip


def test_matharena_rows_are_imported_by_model(tmp_path: Path, run_import: Import) -> None:
    """The rows of one model become a run with costs. If the file has rows of several models, the
    user must choose a model.
    """
    rows = [arena_row(model, 3, n, "7" if n else "None") for model in "ab" for n in range(2)]
    path = write_lines(tmp_path / "rows.jsonl", rows)
    with pytest.raises(
        OptionError, match=r"--model: .* 2 models; choose one of 'a' \(2\), 'b' \(2\)"
    ):
        run_import("matharena", path)
    made = run_import("matharena", path, model="b")
    assert made.dollars == pytest.approx(0.04)
    finished, outcomes, run = read(made.directory)
    assert verdicts(finished["3"]) == ["wrong", "correct"]
    assert outcomes["3"].usage.target_tokens == 2000
    (first, _) = outcomes["3"].rollouts
    assert money_of(first.usage, recorded_prices(run.manifest.settings[PRICES].value)) == (
        pytest.approx(50e-6 + 0.02)
    )
    # the box of the first text contains None, which MathArena counted as no answer
    assert outcomes["3"].rollouts[0].answer == "None"


def test_matharena_messages_replace_a_missing_text(tmp_path: Path, run_import: Import) -> None:
    """If a row has no answer text, the import reads the text from the row's messages. Points of
    judges become scores between 0 and 1.
    """
    messages = [{"role": "user", "content": "P1"}, {"role": "assistant", "content": "so"}]
    row = arena_row("a", 1, 0, "7", points_judge_1=3, max_points_judge_1=4, source="imo")
    row |= {"answer": None, "all_messages": json.dumps(messages)}
    _, outcomes, run = read(
        run_import("matharena", write_lines(tmp_path / "r.jsonl", [row])).directory
    )
    assert outcomes["imo/1"].rollouts[0].text == "so"
    assert measured(run)["imo/1", 0].scores == {"judge 1": 0.75}


def test_monkey_business_samples_are_imported(tmp_path: Path, run_import: Import) -> None:
    """Each problem is imported with all its samples and their verdicts. The reference answer is
    extracted from the worked solution.
    """
    problem = {
        "question": "What is 6 x 7?", "samples": ["It is \\boxed{42}", "\\boxed{41}", "?"],
        "gt_answer": "Multiply. " * 30 + "The answer is $\\boxed{42}$.",
        "is_corrects": [True, False, False], "orig_dset_split": "test", "orig_dset_idx": 17,
    }  # fmt: skip
    path = tmp_path / "MATH_Llama-3-8B-Instruct.json"
    path.write_text(json.dumps([problem, {**problem, "orig_dset_idx": 18}]))
    finished, outcomes, _ = read(run_import("monkey-business", path).directory)
    assert list(finished) == ["test/17", "test/18"]
    assert outcomes["test/17"].problem.answer == "42"
    assert verdicts(finished["test/17"]) == ["correct", "wrong", "wrong"]
    assert finished["test/17"].samples[2].finish == "end"
    path.write_text(json.dumps([{**problem, "is_corrects": [True]}]))
    with pytest.raises(DatasetError, match="item 1: the record has 3 samples but 1 grade"):
        run_import("monkey-business", path, tmp_path / "bad")


def test_deepconf_traces_are_imported(tmp_path: Path, run_import: Import) -> None:
    """Mean confidences are imported as scores and token ids are kept. A trace that was stopped
    early is neither correct nor wrong.
    """
    trace = {
        "text": "\\boxed{4}", "token_ids": [5, 6, 7], "num_tokens": 3, "confs": [1.0, 2.0, 6.0],
        "extracted_answer": "4", "stop_reason": "stop",
    }  # fmt: skip
    stopped = {**trace, "stop_reason": "gconf_threshold", "extracted_answer": None, "text": "so"}
    log = {"question": "2 + 2?", "ground_truth": "4", "qid": 3, "all_traces": [trace, stopped]}
    path = tmp_path / "deepthink_offline_qid3.json"
    path.write_text(json.dumps(log))
    finished, outcomes, run = read(run_import("deepconf", path).directory)
    assert verdicts(finished["3"]) == ["correct", "spared"]
    assert outcomes["3"].rollouts[0].turns[0].chunks[0].target_ids == (5, 6, 7)
    assert measured(run)["3", 0].scores["mean confidence"] == 3.0


def test_a_pickle_is_refused(tmp_path: Path, run_import: Import) -> None:
    """Reading a pickle runs code, so a pickle is refused even if the folder has no other file."""
    path = tmp_path / "logs" / "deepthink_offline_qid3.pkl"
    path.parent.mkdir()
    path.write_bytes(b"\x80\x04.")
    for given in (path, path.parent):
        with pytest.raises(DatasetError, match="is a pickle, and reading a pickle runs the code"):
            run_import("deepconf", given)


def test_columns_are_mapped_or_guessed(tmp_path: Path, run_import: Import) -> None:
    """The user may map columns, and atts guesses the others. A line has either one rollout or a
    list with all rollouts of a problem.
    """
    rows = [
        {"Q": "1 + 1?", "out": ["\\boxed{2}", "\\boxed{3}"], "gold": 2, "rm": [0.9, 0.1]},
        {"Q": "1 + 2?", "out": "\\boxed{3}", "gold": "3", "rm": 0.4},
        {"Q": "1  + 2?", "out": "\\boxed{4}", "gold": "3", "rm": 0.3},
    ]
    path = write_lines(tmp_path / "mine.jsonl", rows)
    columns = {"question": "Q", "text": "out", "score.reward": "rm"}
    finished, _, run = read(run_import("jsonl", path, columns=columns).directory)
    assert verdicts(finished["problem-1"]) == ["correct", "wrong"]
    assert verdicts(finished["problem-2"]) == ["correct", "wrong"]
    assert measured(run)["problem-1", 1].scores == {"reward": 0.1}
    assert run.setting(IMPORTED)["columns"] == columns


@pytest.mark.parametrize(
    ("columns", "problem"),
    [
        (
            {"question": "Q", "text": "out"},
            "line 1: the record has no column 'out'; its columns are Q, a, b",
        ),
        (
            {"question": "Q"},
            "line 1: the record has no known column for the text; name one with --column text=NAME",
        ),
        (
            {"question": "Q", "text": "a", "answer": "b"},
            r"lists of the record have different lengths \(a: 2, b: 1\)",
        ),
        (
            {"question": "Q", "text": "a", "score.x": "Q"},
            "line 1: the column 'Q' does not contain a number",
        ),
    ],
)
def test_a_missing_column_is_refused(
    tmp_path: Path, run_import: Import, columns: dict[str, str], problem: str
) -> None:
    """The error about a missing column names it and lists the existing columns."""
    path = write_lines(tmp_path / "mine.jsonl", [{"Q": "1?", "a": ["x", "y"], "b": ["z"]}])
    with pytest.raises(DatasetError, match=problem):
        run_import("jsonl", path, columns=columns)


def test_an_unknown_field_is_refused(run_import: Import, tmp_path: Path) -> None:
    """An unknown field in a column mapping is refused before anything is read."""
    with pytest.raises(OptionError, match="there is no field 'txt'; did you mean 'text'"):
        run_import("jsonl", tmp_path, columns={"txt": "a"})
