"""Tests of the embedded pair: ordinary model folders, one tokenizer, and documented skill."""

import json
import re
import shutil
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from atts.core import Message
from atts.errors import ModelLoadError, OptionError
from atts.evaluators.datasets.arithmetic import problems
from atts.local import model_config
from atts.local.model_config import read_model_config
from atts.models import EMBEDDED, Embedded, info, path
from atts.models.tokenizers import ModelTokenizer


@pytest.fixture(scope="module")
def tokenizer() -> Any:
    from transformers import AutoTokenizer

    return AutoTokenizer.from_pretrained(str(path("target")))


def _open(name: Embedded) -> Any:
    import torch
    from transformers import AutoModelForCausalLM

    return AutoModelForCausalLM.from_pretrained(str(path(name)), dtype=torch.float32).eval()


@pytest.mark.parametrize("name", EMBEDDED)
def test_configuration_and_tokenizer_equal_those_of_transformers(
    name: Embedded, monkeypatch: pytest.MonkeyPatch
) -> None:
    """atts reads configuration and tokenizer without torch, and the tokenizer's digest is in every
    journal.
    """
    folder = path(name)
    found = read_model_config(folder, name), ModelTokenizer(folder, name).digest
    assert "transformers" not in type(model_config.read_hf_config(folder, name)).__module__
    monkeypatch.setattr(model_config, "_whole_config", lambda *_: None)
    assert "transformers" in type(model_config.read_hf_config(folder, name)).__module__
    assert read_model_config(folder, name) == found[0]


TALKS = (
    [Message("user", "What is 2 + 2?")],
    [Message("system", "Be brief."), Message("user", " a  b \n")],
    [Message("user", "1 + 1?"), Message("assistant", "It is ")],
    [Message("user", "a"), Message("assistant", "b"), Message("user", "c")],
)
WORDS = ("Hello  world\n\n", "3 \u2264 x\u00b2, \u4e2d\u6587 \u2713", "<|end|> 12,345", "")


@pytest.mark.parametrize("name", EMBEDDED)
def test_tokenizers_encode_as_transformers_does(name: Embedded) -> None:
    """Ids, texts and rendered conversations equal those of AutoTokenizer, which atts does not need."""
    from transformers import AutoTokenizer

    ours = ModelTokenizer(path(name), name)
    theirs: Any = AutoTokenizer.from_pretrained(path(name))
    for text in WORDS:
        assert list(ours.encode(text)) == theirs.encode(text, add_special_tokens=False)
    for talk in TALKS:
        rows = [{"role": message.role, "content": message.content} for message in talk]
        is_open = rows[-1]["role"] == "assistant"
        wanted = theirs.apply_chat_template(
            rows, tokenize=False, add_generation_prompt=not is_open, continue_final_message=is_open
        )
        assert ours.render(talk) == ours.encode(wanted)


def test_a_parent_of_engines_loads_no_torch() -> None:
    """A parent process does not import torch, which takes seconds and is needed only by child
    processes that compute.
    """
    code = (
        "import sys, atts; from atts.local.model_config import check_model; from atts.models import path;"
        "check_model(path('draft'), 'it'); print(sys.modules.keys() & {'torch', 'sympy', 'pandas', "
        "'scipy'})"
    )
    told = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert told.stdout == "set()\n"


def test_both_share_one_tokenizer() -> None:
    for file in ("tokenizer.json", "tokenizer_config.json"):
        assert (path("draft") / file).read_bytes() == (path("target") / file).read_bytes()


def test_the_embedded_models_fit_servers_and_laptops() -> None:
    """The embedded models have head dimension 64, bf16 weights and at least 2,048 positions, and
    together take under 12 MB.
    """
    from safetensors import safe_open

    for name in EMBEDDED:
        config = json.loads((path(name) / "config.json").read_text())
        assert config["head_dim"] == 64
        assert info(name).context_length >= 2048
        with safe_open(str(path(name) / "model.safetensors"), "pt") as weights:
            assert {weights.get_slice(key).get_dtype() for key in weights.keys()} == {"BF16"}
    assert (
        sum(file.stat().st_size for name in EMBEDDED for file in path(name).iterdir()) < 12_000_000
    )


def test_the_draft_costs_a_twentieth_of_the_target() -> None:
    """The draft needs at most a twentieth of the target's operations per token, also with attention
    over 128 tokens.
    """
    draft = info("draft")
    target = info("target")
    assert target.flops_per_token() >= 20 * draft.flops_per_token()
    assert target.flops_per_token(128) >= 20 * draft.flops_per_token(128)


def test_the_stated_cost_counts_every_matrix() -> None:
    for name in EMBEDDED:
        matrices = sum(weight.numel() for weight in _open(name).parameters() if weight.ndim == 2)
        assert info(name).weights_per_token == matrices


@given(text=st.text(st.characters(exclude_categories=["Cs"]), max_size=60))
@settings(max_examples=100, deadline=None)
def test_any_text_survives_the_tokenizer(tokenizer: Any, text: str) -> None:
    assert tokenizer.decode(tokenizer.encode(text, add_special_tokens=False)) == text


@given(number=st.integers(0, 10**6))
@settings(max_examples=50, deadline=None)
def test_every_digit_is_a_token(tokenizer: Any, number: int) -> None:
    ids = tokenizer.encode(str(number), add_special_tokens=False)
    assert [tokenizer.decode([one]) for one in ids] == list(str(number))


def test_the_step_delimiter_is_one_token(tokenizer: Any) -> None:
    ids = tokenizer.encode("1 + 1 = 2.\n\nSo", add_special_tokens=False)
    assert [tokenizer.decode([one]) for one in ids].count("\n\n") == 1


def test_the_chat_template_opens_the_assistants_turn(tokenizer: Any) -> None:
    messages = [
        {"role": "system", "content": "Be brief."},
        {"role": "user", "content": "What is 1 + 1?"},
    ]
    text = tokenizer.apply_chat_template(messages, tokenize=False, add_generation_prompt=True)
    assert text == "<|system|>Be brief.<|end|><|user|>What is 1 + 1?<|end|><|assistant|>"
    ids = tokenizer.apply_chat_template(messages, add_generation_prompt=True, return_dict=False)
    assert ids == tokenizer.encode(text, add_special_tokens=False)
    assert tokenizer.eos_token == "<|end|>"
    assert (
        tokenizer.eos_token_id
        == json.loads((path("target") / "config.json").read_text())["eos_token_id"]
    )


def _solved(name: Embedded, tokenizer: Any, count: int) -> float:
    """Return the share of problems for which the model's greedy solution has the correct answer in
    the box.
    """
    model = _open(name)
    right = 0
    for problem in problems("test", count, seed=2024, levels=(1, 2, 3)):
        messages = [{"role": "user", "content": problem.text}]
        ids = tokenizer.apply_chat_template(
            messages, add_generation_prompt=True, return_tensors="pt", return_dict=False
        )
        made = model.generate(ids, do_sample=False, temperature=None, max_new_tokens=240)[
            0, ids.shape[1] :
        ]
        found = re.findall(r"\\boxed\{(\d+)\}", tokenizer.decode(made, skip_special_tokens=True))
        right += bool(found) and found[-1] == problem.answer
    return right / count


def test_the_target_solves_and_the_draft_often_fails(tokenizer: Any) -> None:
    """In `transformers`, the target solves most problems and the draft often fails.

    A study measures the documented accuracies; this check is quick.
    """
    assert _solved("target", tokenizer, 5) >= 0.8
    assert _solved("draft", tokenizer, 5) >= 0.2


def test_an_unknown_model_is_refused_with_the_known_ones() -> None:
    with pytest.raises(OptionError, match="did you mean 'draft'"):
        path("drift")  # type: ignore[arg-type]


def test_missing_files_say_what_to_do(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setattr("atts.models.embedded.resources.files", lambda _: tmp_path)
    with pytest.raises(ModelLoadError, match="scripts/train"):
        path("draft")


def test_a_pair_whose_templates_differ_still_shares_its_tokenizer(tmp_path: Path) -> None:
    """Real pairs often differ only in their chat templates, so their ids can still be exchanged."""
    folder = tmp_path / "other"
    shutil.copytree(path("target"), folder)
    settings = json.loads((folder / "tokenizer_config.json").read_text(encoding="utf-8"))
    (folder / "chat_template.jinja").write_text(settings["chat_template"] + "{# a comment #}")
    one = ModelTokenizer(path("draft"), "draft")
    other = ModelTokenizer(folder, "other")
    assert one.digest == other.digest
    assert one.template_digest != other.template_digest
