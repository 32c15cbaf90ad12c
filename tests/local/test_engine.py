"""Tests of the local engine as callers use it: conformance, cancellation, processes, bad input."""

from __future__ import annotations

import json
import math
import os
import shutil
import signal
import subprocess
import sys
import threading
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any, Literal

import anyio
import pytest
import torch

from atts.concurrency import task_group
from atts.core import Message, SampleRequest, Sampling, ScoreRequest
from atts.errors import (
    ATTSError,
    ContextOverflow,
    EngineError,
    EngineUnavailable,
    ModelLoadError,
    OptionError,
    OutOfMemory,
    UnsupportedByEngine,
)
from atts.local import LocalEngine, LocalOptions, builder
from atts.local.batch import new_sequence
from atts.local.messages import WorkerConfig
from atts.models.tokenizers import ModelTokenizer
from atts.sampling import Seed
from atts.testing import CheckOptions, check_engine

Make = Callable[..., Path]
HERE = LocalOptions(worker="thread")
"""Options of an engine that opens quickly, for tests that are not about processes."""
PATIENT = CheckOptions(
    timeout_seconds=600, settle_seconds=60
)  # a busy machine may be slow although the engine works


@pytest.mark.anyio
async def test_the_engine_passes_the_conformance_suite(
    make_model: Make, anyio_backend: str
) -> None:
    """The engine passes the conformance suite in processes with asyncio, as users run it, and in
    threads with trio.
    """
    folder = make_model("llama")
    options = LocalOptions(
        worker="process" if anyio_backend == "asyncio" else "thread", kv_tokens=8192
    )
    await check_engine(lambda: LocalEngine(folder, name="local", options=options), options=PATIENT)


@pytest.mark.anyio
async def test_a_loops_thread_loads_its_own_model(
    make_model: Make, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The thread that runs the step loop also loads the model.

    If another thread loaded it, that thread's OpenMP helpers would keep the loop's helpers from
    waiting actively.
    """
    threads = list[str]()
    build_loop = builder.build_loop

    def watched(config: WorkerConfig, deliver: Any) -> Any:
        threads.append(threading.current_thread().name)
        return build_loop(config, deliver)

    monkeypatch.setattr(builder, "build_loop", watched)
    async with LocalEngine(make_model("llama"), name="local", options=HERE) as engine:
        assert (await engine.sample(SampleRequest((5, 6, 7), 4, Sampling(0.0), Seed(1)))).ids
    assert threads == ["atts-local"]


@pytest.mark.slow
@pytest.mark.anyio
@pytest.mark.parametrize("kernel", ["torch", "native"])
@pytest.mark.parametrize("worker", ["thread", "process"])
async def test_each_worker_and_kernel_passes_the_conformance_suite(
    worker: Literal["thread", "process"], kernel: Literal["torch", "native"], make_model: Make
) -> None:
    """All four combinations of worker (thread, process) and kernel (native, torch) pass the
    conformance suite.
    """
    folder = make_model("qwen3")
    options = LocalOptions(worker=worker, kernel=kernel, kv_tokens=8192)
    await check_engine(lambda: LocalEngine(folder, options=options), options=PATIENT)


@pytest.mark.anyio
async def test_cancelling_frees_the_work(make_model: Make) -> None:
    """A cancelled call leaves no running request and no locked slot, and the engine continues."""
    folder = make_model("llama", eos_token_id=None, max_position_embeddings=100_000)
    async with LocalEngine(folder, options=replace(HERE, kv_tokens=100_000)) as engine:
        async with task_group() as group:
            group.start_soon(engine.sample, SampleRequest((5, 6, 7), 90_000))
            while not engine.loop_stats().kv_locked:  # noqa: ASYNC110  the loop's thread has begun
                await anyio.sleep(0.01)
            group.cancel_scope.cancel()
        await engine.sample(SampleRequest((5, 6, 7), 1))
        with anyio.fail_after(120):
            while engine.loop_stats().kv_locked or not engine.stats().cancelled:  # noqa: ASYNC110  no event reports it
                await anyio.sleep(0.01)
        assert engine.stats().in_flight == 0


@pytest.mark.anyio
@pytest.mark.parametrize("anyio_backend", ["asyncio"])
async def test_a_killed_process_engine_fails_only_its_own_callers(
    make_model: Make,
) -> None:
    """Two engines with different settings give the same answers. If the process of one engine is
    killed, only callers of this engine get EngineUnavailable.
    """
    folder = make_model("llama", eos_token_id=None, max_position_embeddings=100_000)
    apart = LocalEngine(folder, name="apart", options=LocalOptions(kv_tokens=100_000))
    beside = LocalEngine(folder, options=replace(HERE, chunk_tokens=5, kv_tokens=100_000))
    async with apart, beside:
        request = SampleRequest((5, 6, 7), 30, Sampling(0.8))
        assert (await apart.sample(request)).ids == (await beside.sample(request)).ids
        os.kill(loop_process(), signal.SIGKILL)
        with anyio.fail_after(60), pytest.raises(EngineUnavailable, match="-9"):
            await apart.sample(SampleRequest((5, 6), 90_000))
        with pytest.raises(EngineUnavailable):
            await apart.score(ScoreRequest((5,), (6,)))
        assert (await beside.score(ScoreRequest((5,), (6,)))).logprobs


def loop_process() -> int:
    """Return the only child of this process that runs a step loop."""
    lists = [task / "children" for task in Path("/proc/self/task").iterdir()]
    children = [int(pid) for path in lists if path.is_file() for pid in path.read_text().split()]
    return next(
        pid for pid in children if b"atts.local.child" in Path(f"/proc/{pid}/cmdline").read_bytes()
    )


@pytest.mark.anyio
async def test_a_process_that_cannot_be_started_is_an_error(
    make_model: Make, monkeypatch: pytest.MonkeyPatch
) -> None:
    """If the system refuses to start a process, the error suggests running the worker in a
    thread.
    """

    def refuse(*_: object, **__: object) -> None:
        raise BlockingIOError(11, "Resource temporarily unavailable")

    monkeypatch.setattr(subprocess, "Popen", refuse)
    with pytest.raises(EngineUnavailable, match=r"cannot be started .*worker=thread"):
        await LocalEngine(make_model("llama")).__aenter__()


SCRIPT = """
import signal

import anyio
from atts.core import SampleRequest
from atts.local import LocalEngine

async def main():
    async with LocalEngine({folder!r}) as engine:
        with anyio.open_signal_receiver(signal.SIGINT) as asked:
            print("open", flush=True)
            async for _ in asked:
                break
        print(len((await engine.sample(SampleRequest((5, 6), 3))).ids))

anyio.run(main)
"""


@pytest.mark.slow
def test_a_plain_script_may_use_a_process_engine(make_model: Make, tmp_path: Path) -> None:
    """A script without a `__main__` guard may open a process engine.

    Ctrl-C reaches every process of the terminal, but only the script handles it.
    """
    folder = make_model("llama", eos_token_id=None)
    script = tmp_path / "script.py"
    script.write_text(SCRIPT.format(folder=str(folder)))
    command = [sys.executable, str(script)]
    with subprocess.Popen(
        command, stdout=subprocess.PIPE, text=True, start_new_session=True
    ) as process:
        assert process.stdout is not None
        try:
            assert process.stdout.readline().strip() == "open"
            os.killpg(process.pid, signal.SIGINT)
            said, _ = process.communicate(timeout=120)
        finally:
            process.kill()
    assert (process.returncode, said.strip()) == (0, "3")


@pytest.mark.anyio
async def test_texts_join_and_templates_render(make_model: Make) -> None:
    """Decoding token by token gives the whole text, and a rendered conversation ends where the
    assistant's turn begins.
    """
    tokenizer = ModelTokenizer(make_model("llama"), "tiny")
    text = "the step \u00e9\U0001f600 is\n\n done"
    ids = tokenizer.encode(text)
    assert "".join(tokenizer.decode(ids[:n]) for n in (len(ids),)) == text
    assert tokenizer.decode(ids[:2]) + tokenizer.decode(ids[2:4]) == tokenizer.decode(ids[:4])
    user = Message("user", "the step")
    partial = Message("assistant", "is")
    assert tokenizer.render([user]) == tokenizer.encode("<|user|>the step<|end|><|assistant|>")
    assert tokenizer.render([user, partial])[-1:] == tokenizer.encode("is")[-1:]


@pytest.mark.anyio
async def test_any_byte_of_the_weights_changes_their_digest(
    make_model: Make, tmp_path: Path
) -> None:
    """Changing any byte of a small weights file changes its digest.

    The short digest in the model's name stays as in older runs.
    """
    folder = shutil.copytree(make_model("llama"), tmp_path / "model")
    path = folder / "model.safetensors"
    seen = set[str]()
    size = path.stat().st_size
    for place in (None, size - 1, size // 2, size // 3):
        if place is not None:
            with path.open("r+b") as file:
                file.seek(place)
                byte = file.read(1)[0]
                file.seek(place)
                file.write(bytes([byte ^ 1]))
        async with LocalEngine(folder, options=replace(HERE, kernel="torch")) as engine:
            assert len(engine.spec.weights) == 32
            assert len(engine.spec.model.rpartition("@")[2]) == 8
            seen.add(engine.spec.weights)
    assert len(seen) == 4


def test_a_template_without_system_messages_gets_them_before_the_question(
    make_model: Make, tmp_path: Path
) -> None:
    """Gemma 2's template refuses system messages, so the system text is put before the question.

    A template that also refuses other messages is refused.
    """
    folder = shutil.copytree(make_model("llama"), tmp_path / "model")
    path = folder / "chat_template.jinja"
    refuses = "{% if messages[0].role == 'system' %}{{ raise_exception('no system') }}{% endif %}"
    path.write_text(refuses + path.read_text())
    tokenizer = ModelTokenizer(folder, "tiny")
    system = Message("system", "is done")
    user = Message("user", "the step")
    assert tokenizer.render([system, user]) == tokenizer.render(
        [Message("user", "is done\n\nthe step")]
    )
    with pytest.raises(UnsupportedByEngine, match="no system"):
        tokenizer.render([system, Message("assistant", "the step")])


def _broken(folder: Path, source: Path, change: Callable[[Path], object]) -> Path:
    shutil.copytree(source, folder, dirs_exist_ok=True)
    change(folder)
    return folder


def _edit(**values: object) -> Callable[[Path], object]:
    def change(folder: Path) -> None:
        path = folder / "config.json"
        path.write_text(json.dumps({**json.loads(path.read_text()), **values}))

    return change


def _weights(change: Callable[[dict[str, Any]], object]) -> Callable[[Path], object]:
    def apply(folder: Path) -> None:
        from safetensors.torch import load_file, save_file

        path = folder / "model.safetensors"
        tensors = load_file(path)
        change(tensors)
        save_file(tensors, path, metadata={"format": "pt"})

    return apply


def _drop(name: str) -> Callable[[Path], object]:
    def change(folder: Path) -> None:
        for path in folder.glob(name):
            path.unlink()

    return change


BAD: dict[str, tuple[Callable[[Path], object], str]] = {
    "no config": (_drop("config.json"), "no config.json"),
    "broken config": (lambda f: (f / "config.json").write_text("{"), "cannot be read"),
    "no weights": (_drop("*.safetensors"), "no safetensors"),
    "cut weights": (lambda f: os.truncate(f / "model.safetensors", 1000), "damaged"),
    "missing weight": (
        _weights(lambda t: t.pop("model.norm.weight")),
        "lacks the weight 'norm.weight'",
    ),
    "other shape": (_edit(hidden_size=32), "has shape"),
    "no tokenizer": (_drop("tokenizer*"), "no tokenizer"),
    "foreign tokenizer": (_edit(vocab_size=100), "tokenizer has ids up to"),
    "other family": (_edit(model_type="gpt2"), "type 'gpt2'"),
    "other activation": (_edit(hidden_act="gelu"), "activation 'gelu'"),
    "other rope": (
        _edit(rope_parameters={"rope_type": "dynamic", "rope_theta": 1e4, "factor": 2.0}),
        "rotary",
    ),
    "other attention": (
        _edit(layer_types=["chunked_attention"] * 3),
        "attention type chunked_attention",
    ),
    "half a rotation": (
        _edit(
            rope_parameters={
                "rope_type": "default",
                "rope_theta": 1e4,
                "partial_rotary_factor": 0.5,
            }
        ),
        "rotates 0.5 of each head",
    ),
    "heads that do not divide": (
        _edit(num_key_value_heads=3),
        "not a multiple of the number of key-value heads (3)",
    ),
    "impossible config": (_edit(num_attention_heads=7), "cannot be read as a model configuration"),
    "broken index": (
        lambda f: (f / "model.safetensors.index.json").write_text("[]"),
        "index.json cannot be read",
    ),
    "broken ends": (
        lambda f: (f / "generation_config.json").write_text("{"),
        "generation_config.json cannot be read",
    ),
    "no heads": (_edit(num_attention_heads=0), "num_attention_heads is 0, expected a whole number"),
    "layers below none": (_edit(num_hidden_layers=-1), "num_hidden_layers is -1"),
    "unheard-of type": (
        _edit(dtype="float99", torch_dtype="float99"),
        "dtype is 'float99', expected one of",
    ),
    "whole numbers for weights": (
        _weights(lambda t: t.update({"model.norm.weight": t["model.norm.weight"].to(torch.int8)})),
        "is of type I8",
    ),
    "quantised": (_edit(quantization_config={"quant_method": "awq", "bits": 4}), "quantised"),
}


@pytest.mark.parametrize(
    ("what", "worker"),
    [*((what, "thread") for what in BAD), ("whole numbers for weights", "process")],
)
def test_an_unusable_model_is_refused_with_a_message(
    what: str, worker: Literal["thread", "process"], make_model: Make, tmp_path: Path
) -> None:
    """The error about an unusable model names the model, the fault and the remedy, and shows no
    traceback of a library.

    This also holds for an engine in another process.
    """
    change, words = BAD[what]
    folder = _broken(tmp_path / "model", make_model("llama"), change)

    async def enter() -> None:
        async with LocalEngine(folder, name="the model", options=LocalOptions(worker=worker)):
            pass

    with pytest.raises(ModelLoadError, match="engine the model: ") as caught:
        anyio.run(enter)
    assert words in str(caught.value)


def test_a_missing_model_is_refused_with_a_message(monkeypatch: pytest.MonkeyPatch) -> None:
    """A model name is refused if it is neither a folder nor a hub id, or if it is a hub id without
    network access.
    """
    monkeypatch.setenv("HF_HUB_OFFLINE", "1")

    async def enter(model: str) -> None:
        async with LocalEngine(model):
            pass

    with pytest.raises(ModelLoadError, match="neither a folder nor a hub id"):
        anyio.run(enter, "./not/there")
    with pytest.raises(ModelLoadError, match="Check the id and the network"):
        anyio.run(enter, "nobody/no-such-model-of-ours")


@pytest.mark.anyio
@pytest.mark.parametrize("kernel", ["torch", "native"])
async def test_logits_that_are_not_numbers_fail_the_request_alone(
    kernel: Literal["torch", "native"], make_model: Make, tmp_path: Path
) -> None:
    """If a token's embedding is NaN, only requests with this token fail, and the error gives
    advice. Other requests of the same batch are answered.
    """

    def poison(tensors: dict[str, Any]) -> None:
        tensors["model.embed_tokens.weight"][7] = torch.nan

    folder = _broken(
        tmp_path / "model", make_model("llama", tie_word_embeddings=False), _weights(poison)
    )
    async with LocalEngine(folder, options=replace(HERE, kernel=kernel)) as engine:
        with pytest.raises(EngineError, match="NaN"):
            await engine.score(ScoreRequest((5, 7, 8), (9, 10)))
        with pytest.raises(EngineError, match="NaN"):
            await engine.sample(SampleRequest((5, 7, 8), 3))
        assert len((await engine.score(ScoreRequest((5, 6, 8), (9, 10)))).logprobs) == 2
        assert engine.stats().failed == 2


GOOD = SampleRequest((5, 6, 8), 6, Sampling(1.0))
HALF: Any = (5.5, 6)
WORDS: Any = ("5", 6)
NOTHING: Any = (5, None)
WRONG = (
    replace(GOOD, stop=("\ud800",)), replace(GOOD, stop=("fine", "")), replace(GOOD, sampling=Sampling(math.nan)),
    replace(GOOD, sampling=Sampling(math.inf)), replace(GOOD, sampling=Sampling(1.0, 10**30)),
    replace(GOOD, sampling=Sampling(1.0, 0, math.nan)), replace(GOOD, sampling=Sampling(1.0, 0, 1.0, math.nan)),
    replace(GOOD, ids=HALF), replace(GOOD, ids=(True, 6)), replace(GOOD, ids=WORDS), replace(GOOD, ids=(10**30,)),
    replace(GOOD, ids=(-1,)), replace(GOOD, max_tokens=10**30), replace(GOOD, max_tokens=0),
    ScoreRequest((5, 6), HALF), ScoreRequest(NOTHING, (6,)), ScoreRequest((), (6,)),
)  # fmt: skip


@pytest.mark.anyio
async def test_a_bad_request_fails_alone(make_model: Make, monkeypatch: pytest.MonkeyPatch) -> None:
    """A bad request gives an error only to its own caller. Requests that run or arrive later are
    answered as usual.
    """

    def failing(request_id: int, request: SampleRequest | ScoreRequest, *rest: Any) -> Any:
        if request.rollout == "unforeseen":
            raise OverflowError("nothing foresaw this")
        return new_sequence(request_id, request, *rest)

    monkeypatch.setattr("atts.local.loop.new_sequence", failing)
    async with LocalEngine(make_model("llama"), options=HERE) as engine:
        expected = await engine.sample(GOOD)
        answers = list[Any]()

        async def ask() -> None:
            answers.append(await engine.sample(GOOD))

        for wrong in (*WRONG, replace(GOOD, rollout="unforeseen")):
            async with task_group() as group:
                group.start_soon(ask)
                with pytest.raises(ATTSError):
                    await (
                        engine.sample(wrong)
                        if isinstance(wrong, SampleRequest)
                        else engine.score(wrong)
                    )
        assert [answer.ids for answer in answers] == [expected.ids] * (len(WRONG) + 1)


def test_a_cache_that_does_not_fit_shrinks_or_says_so(make_model: Make) -> None:
    """The cache is halved until it fits into memory. If there is not even room for one context, the
    engine raises OutOfMemory with advice.
    """
    folder = make_model("llama")

    async def size(tokens: int) -> int:
        async with LocalEngine(folder, options=replace(HERE, kv_tokens=tokens)) as engine:
            await engine.sample(SampleRequest((5, 6), 2))
            return engine.kv_tokens

    assert anyio.run(size, 10**13) < 10**13
    huge = make_model("llama", max_position_embeddings=10**14)
    with pytest.raises((OutOfMemory, ModelLoadError)) as caught:
        anyio.run(_enter, huge)
    assert "fit" in str(caught.value)


@pytest.mark.anyio
async def test_a_request_larger_than_the_cache_gets_advice(make_model: Make) -> None:
    """The error about a request that exceeds the cache suggests raising kv_tokens only if the
    request fits into the model's context.
    """
    async with LocalEngine(make_model("llama"), options=replace(HERE, kv_tokens=10)) as engine:
        with pytest.raises(
            ContextOverflow,
            match=r"context has only 10\. The model supports 256 tokens, so raise .kv_tokens",
        ):
            await engine.sample(SampleRequest((5,) * 20, 4))
        with pytest.raises(ContextOverflow, match="Lower the token limit"):
            await engine.score(ScoreRequest((5,) * 250, (6,) * 50))
        assert len((await engine.sample(SampleRequest((5, 6), 4, Sampling(0)))).ids) <= 4


async def _enter(folder: Path) -> None:
    async with LocalEngine(folder, options=HERE):
        pass


def test_unknown_and_impossible_options_are_errors(make_model: Make) -> None:
    """The error about a misspelt option lists similar valid names, and the error about a missing
    CUDA device names that device.
    """
    folder = make_model("llama")
    with pytest.raises(OptionError, match="float32"):
        LocalEngine(folder, options=LocalOptions(dtype="float23"))  # type: ignore[arg-type]  # pyright: ignore[reportArgumentType]
    with pytest.raises(OptionError, match="max_batch"):
        LocalEngine(folder, options=LocalOptions(max_batch=0))
    if not torch.cuda.is_available():
        with pytest.raises(ATTSError, match="CUDA"):
            anyio.run(_enter_on_cuda, folder)


async def _enter_on_cuda(folder: Path) -> None:
    async with LocalEngine(folder, options=replace(HERE, device="cuda")):
        pass
