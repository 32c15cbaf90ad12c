"""Tests of packages that use OpenAI's API, with the embedded pair or scripted engines; all packages
are optional.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Generator
from importlib.util import find_spec
from pathlib import Path

import pytest

from tests.serving.conftest import started_server
from tests.serving.test_clients import serve_embedded

pytest.importorskip("starlette", reason="starlette is not installed: pip install 'atts-llm[serve]'")
pytest.importorskip("torch", reason="torch is not installed: pip install 'atts-llm[local]'")
EXTRA = os.environ.get("ATTS_CLIENT_PACKAGES", "")
"""Folders with packages that are not installed in this environment, joined as in PYTHONPATH."""


@pytest.fixture(scope="module")
def address() -> Generator[str]:
    """Serve the embedded pair, with a folder for background responses."""
    with serve_embedded() as served:
        yield served


def run_client(package: str, program: str, address: str, folder: Path) -> str:
    """Run a program in a Python that has the package; skip the test if there is no such Python."""
    path = os.pathsep.join(filter(None, (EXTRA, os.environ.get("PYTHONPATH"))))
    environment = {
        **os.environ,
        "PYTHONPATH": path,
        "OPENAI_API_KEY": "none",
        "OPENAI_BASE_URL": address,
        "HOME": str(folder),
    }
    if find_spec(package) is None:
        found = subprocess.run(
            [sys.executable, "-c", f"import {package}"], env=environment, capture_output=True
        )
        if found.returncode:
            pytest.skip(f"needs the package {package}")
    done = subprocess.run(
        [sys.executable, "-c", program],
        env=environment,
        cwd=folder,
        capture_output=True,
        text=True,
        timeout=240,
    )
    assert done.returncode == 0, done.stderr[-2_000:]
    return done.stdout


OPENAI = """
import asyncio, time
from openai import AsyncOpenAI, OpenAI, NotFoundError

ask = [{"role": "user", "content": "What is 3 + 4?"}]
one = dict(model="atts/embedded:fast", input="What is 3 + 4?", extra_body={"atts": {"seed": 1}})
client = OpenAI()
chat = client.chat.completions.create(model="atts/embedded:fast", messages=ask, seed=1)
answer = chat.choices[0].message.content
text = client.chat.completions.create(model="draft", messages=ask, seed=1).choices[0].message.content
stop = text[4:6]
cut = client.chat.completions.create(model="draft", messages=ask, seed=1, stop=stop).choices[0]
assert cut.message.content == text[: text.index(stop)] and cut.finish_reason == "stop", (cut, text)
whole = client.responses.create(**one)
assert whole.output_text == answer, (whole.output_text, answer)
assert whole.usage.total_tokens == whole.usage.input_tokens + whole.usage.output_tokens
assert client.responses.retrieve(whole.id).output_text == answer

kinds = []
text = ""
for event in client.responses.create(stream=True, **one):
    kinds.append(event.type)
    if event.type == "response.output_text.delta":
        text += event.delta
assert text == answer and kinds[0] == "response.created" and kinds[-1] == "response.completed", kinds
assert event.response.output_text == answer
with client.responses.stream(**one) as stream:
    assert stream.get_final_response().output_text == answer

later = client.responses.create(background=True, **one)
while later.status in ("queued", "in_progress"):
    time.sleep(0.05)
    later = client.responses.retrieve(later.id)
assert later.status == "completed" and later.output_text == answer
assert client.responses.cancel(later.id).status == "completed"
client.responses.delete(later.id)
try:
    client.responses.retrieve(later.id)
    raise SystemExit("a deleted response was found")
except NotFoundError:
    pass


async def main():
    client = AsyncOpenAI()
    got = await asyncio.gather(
        *(client.chat.completions.create(model="atts/embedded:fast", messages=ask, seed=1) for _ in range(4)),
        client.responses.create(**one),
    )
    assert {one.choices[0].message.content for one in got[:-1]} == {got[-1].output_text} == {answer}
    text = ""
    async for chunk in await client.chat.completions.create(model="draft", messages=ask, stream=True):
        text += chunk.choices[0].delta.content or ""
    assert text


asyncio.run(main())
print("openai", answer)
"""


def test_the_openai_package_chats_and_responds(address: str, tmp_path: Path) -> None:
    """The sync and async clients of the package `openai` agree on chats, responses, streams and
    background work.
    """
    assert run_client("openai", OPENAI, address, tmp_path).startswith("openai ")


LITELLM = """
import litellm

ask = [{"role": "user", "content": "What is 3 + 4?"}]
given = dict(model="openai/atts/embedded:fast", messages=ask, api_base=%r, api_key="none", seed=1)
whole = litellm.completion(**given, extra_body={"atts": {"max_calls": 500}})
answer = whole.choices[0].message.content
assert whole.usage.total_tokens > 0
assert whole.choices[0].message.reasoning_content
text = ""
for chunk in litellm.completion(stream=True, **given):
    text += chunk.choices[0].delta.content or ""
assert text == answer, (text, answer)
try:
    litellm.completion(**given, extra_body={"atts": {"sampels": 1}})
    raise SystemExit("a wrong key was taken")
except litellm.BadRequestError as error:
    assert "did you mean atts.samples" in str(error)
print("litellm", answer)
"""


def test_litellm_passes_atts_fields_through(address: str, tmp_path: Path) -> None:
    """litellm's OpenAI route returns the answers, reasoning, streams and refusals of atts."""
    printed = run_client("litellm", LITELLM % address, address, tmp_path)
    assert printed.splitlines()[-1].startswith("litellm ")


INSPECT = """
from inspect_ai import Task, eval
from inspect_ai.dataset import Sample
from inspect_ai.scorer import match
from inspect_ai.solver import generate

task = Task(
    dataset=[Sample(input="What is 3 + 4?", target="7"), Sample(input="What is 2 + 2?", target="4")],
    solver=generate(),
    scorer=match(numeric=True),
)
(log,) = eval(task, model="openai-api/atts/atts/embedded:fast", display="none", log_dir="logs")
assert log.status == "success", log.error
assert all(sample.output.completion for sample in log.samples)
assert sum(usage.total_tokens for usage in log.stats.model_usage.values()) > 0
print("inspect_ai", log.status)
"""


def test_inspect_evaluates_through_the_endpoint(
    address: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A task of inspect runs with the name of the served model, and its log has the answers and the
    usage.
    """
    monkeypatch.setenv("ATTS_API_KEY", "none")
    monkeypatch.setenv("ATTS_BASE_URL", address)
    assert run_client("inspect_ai", INSPECT, address, tmp_path).startswith("inspect_ai success")


LM_EVAL = """
import lm_eval

done = lm_eval.simple_evaluate(
    model="local-chat-completions",
    model_args={"model": "atts/toy:fast", "base_url": %r, "num_concurrent": 2},
    tasks=["sums"],
    task_manager=lm_eval.tasks.TaskManager(include_path=".", include_defaults=False),
    apply_chat_template=True,
    bootstrap_iters=0,
)
assert done["n-samples"]["sums"] == {"original": 2, "effective": 2}, done["n-samples"]
for sample in done["samples"]["sums"]:
    (given,), = sample["resps"]
    assert given == sample["target"], sample
print("lm_eval", done["results"]["sums"]["exact_match,none"])
"""
SUMS = """
task: sums
dataset_path: json
dataset_kwargs:
  data_files:
    test: sums.jsonl
test_split: test
output_type: generate_until
doc_to_text: "{{question}}"
doc_to_target: "{{answer}}"
generation_kwargs:
  until: ["Question:", "</s>", "\\n\\n", "So"]
  max_gen_toks: 256
metric_list:
  - metric: exact_match
"""


def test_lm_eval_evaluates_through_the_endpoint(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """An lm_eval task of two sums, sent as simultaneous chats, gets the voted answers of scripted
    engines.

    Every rollout writes two of the task's stop strings before its answer.
    """
    for name in ("HF_HUB_OFFLINE", "HF_DATASETS_OFFLINE"):
        monkeypatch.setenv(name, "1")
    questions = {
        "Start at 4. +3, -2. What is the result?": 5,
        "Start at 2. +6, -1. What is the result?": 7,
    }
    lines = [json.dumps({"question": text, "answer": str(n)}) for text, n in questions.items()]
    (tmp_path / "sums.jsonl").write_text("\n".join(lines))
    (tmp_path / "sums.yaml").write_text(SUMS)
    server, address = started_server(tmp_path / "state")
    try:
        program = LM_EVAL % f"{address}/chat/completions"
        printed = run_client("lm_eval", program, address, tmp_path)
    finally:
        server.terminate()
        server.communicate(timeout=60)
    assert printed.splitlines()[-1] == "lm_eval 1.0"
