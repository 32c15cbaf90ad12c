"""Tests that the engine, under every schedule, writes and scores what a naive one-sequence loop
does.
"""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any, Literal

import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from atts.core import SampleRequest, Sampling, ScoreRequest, TokenIds
from atts.local.builder import MakeModel
from atts.local.cpu.compiling import Tuning, native_library, tunings
from atts.local.cpu.model import NativeModel
from atts.local.loader import Weights
from atts.local.messages import Cancel, Command, SampleReply, ScoreReply, Submit, WorkerConfig
from atts.local.model_config import read_model_config

FAMILIES = ("llama", "qwen2", "qwen3", "mistral")
GREEDY = Sampling(temperature=0)
CLOSE = 1e-4


def ids_of(seed: int, count: int) -> TokenIds:
    """Draw random token ids, none of which is a special token."""
    generator = torch.Generator().manual_seed(seed)
    return tuple(torch.randint(3, 300, (count,), generator=generator).tolist())


STEM = ids_of(0, 60)


@st.composite
def scripts(draw: st.DrawFn) -> list[list[Command]]:
    """Draw requests with shared prefixes that arrive at random steps, some of them cancelled."""
    steps: list[list[Command]] = [[] for _ in range(12)]
    for request_id in range(1, draw(st.integers(2, 9)) + 1):
        prefix = STEM[: draw(st.integers(1, 40))] + ids_of(request_id, draw(st.integers(0, 3)))
        at = draw(st.integers(0, 8))
        request: SampleRequest | ScoreRequest
        if draw(st.booleans()):
            request = SampleRequest(
                prefix, draw(st.integers(1, 12)), GREEDY, priority=draw(st.integers(-1, 1))
            )
        else:
            suffix = STEM[len(prefix) : len(prefix) + draw(st.integers(1, 12))] or (7,)
            request = ScoreRequest(prefix, suffix)
        steps[at].append(Submit(request_id, request))
        if draw(st.integers(0, 4)) == 0:
            steps[min(11, at + draw(st.integers(0, 4)))].append(Cancel(request_id))
    return steps


def check(naive: Any, request: SampleRequest | ScoreRequest, reply: object) -> None:
    """Check that a reply equals that of the naive loop, token for token and score for score."""
    if isinstance(request, SampleRequest):
        assert isinstance(reply, SampleReply)
        assert naive.agrees(request.ids, reply.ids)
        assert reply.logprobs == pytest.approx(naive.scores(request.ids, reply.ids), abs=CLOSE)
        assert len(reply.ids) == request.max_tokens or reply.ended == "end"
    else:
        assert isinstance(reply, ScoreReply)
        assert reply.logprobs == pytest.approx(
            naive.scores(request.prefix, request.suffix), abs=CLOSE
        )


@pytest.mark.parametrize("kernel", ["torch", "native"])
@pytest.mark.parametrize("family", FAMILIES)
@settings(
    max_examples=8, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture]
)
@given(script=scripts(), chunk=st.sampled_from([3, 17, 64]), room=st.sampled_from([60, 90, 4096]))
def test_any_schedule_equals_the_naive_loop(
    family: str,
    kernel: Literal["torch", "native"],
    script: list[list[Command]],
    chunk: int,
    room: int,
    make_model: Callable[..., Path],
    naive: Callable[..., Any],
    drive: Callable[..., Any],
) -> None:
    """The engine's replies equal those of the naive loop despite batches, chunked prefills, shared
    prefixes, cancellations, evictions and preemptions.
    """
    folder = make_model(family, max_position_embeddings=128)
    done = drive(folder, script, kernel=kernel, chunk_tokens=chunk, kv_tokens=room, max_batch=5)
    orders = [order for step in script for order in step]
    cancelled = {order.request_id for order in orders if isinstance(order, Cancel)}
    for order in orders:
        if isinstance(order, Submit):
            if order.request_id in done.replies:
                check(naive(folder), order.request, done.replies[order.request_id])
            else:
                assert order.request_id in cancelled, "an answer is missing"
    assert done.stats.kv_locked == 0, "slots stayed locked"
    assert done.stats.kv_used <= room


@pytest.mark.parametrize("kernel", ["torch", "native"])
@pytest.mark.parametrize(
    "changes",
    [
        {"num_key_value_heads": 4},
        {"num_key_value_heads": 1, "head_dim": 32},
        {"tie_word_embeddings": True, "head_dim": 64},
        {"attention_bias": True, "mlp_bias": True},
        {"rope_parameters": {"rope_type": "linear", "rope_theta": 10000.0, "factor": 2.0}},
        {
            "rope_parameters": {
                "rope_type": "llama3",
                "rope_theta": 10000.0,
                "factor": 8.0,
                "low_freq_factor": 1.0,
                "high_freq_factor": 4.0,
                "original_max_position_embeddings": 64,
            }
        },
    ],
    ids=["no groups", "one kv head", "tied", "biases", "linear rope", "llama3 rope"],
)
def test_variants_of_a_family_equal_the_naive_loop(
    kernel: str, changes: dict[str, Any], make_model: Callable[..., Path], naive: Any, drive: Any
) -> None:
    """The engine agrees with the naive loop for other head counts and sizes, tied embeddings,
    biases and rotary scalings.
    """
    compare_with_naive(make_model("llama", **changes), naive, drive, kernel)


@pytest.mark.parametrize(
    ("heads", "shared", "dim"), [(6, 2, 16), (6, 1, 16), (6, 6, 32), (6, 3, 96), (4, 2, 128)]
)
def test_every_sharing_of_keys_equals_the_naive_loop(
    heads: int, shared: int, dim: int, make_model: Callable[..., Path], naive: Any, drive: Any
) -> None:
    """The engine agrees with the naive loop for any number of query heads per key-value head.

    The native kernels process up to four query heads together, so the cases include numbers that
    are not divisible by four.
    """
    changes = {
        "num_attention_heads": heads,
        "num_key_value_heads": shared,
        "head_dim": dim,
        "hidden_size": 24 * heads,
    }
    compare_with_naive(make_model("llama", **changes), naive, drive, "native")


@pytest.mark.parametrize("kernel", ["torch", "native"])
@pytest.mark.parametrize("spread", [0.1, 0.25], ids=["calm", "wild"])
@pytest.mark.parametrize(("heads", "shared", "dim"), [(6, 3, 96), (4, 4, 64), (3, 1, 16)])
def test_long_chunks_equal_the_naive_loop(
    heads: int,
    shared: int,
    dim: int,
    spread: float,
    kernel: str,
    make_model: Callable[..., Path],
    naive: Any,
    drive: Any,
) -> None:
    """Scores of chunks that span several blocks agree with float64 within 1e-4, or within twice the
    rounding error of float32.

    The second limit is needed because for some random weights, even a plain float32 forward pass
    differs from float64 by more than 1e-4.
    """
    changes = {
        "num_attention_heads": heads,
        "num_key_value_heads": shared,
        "head_dim": dim,
        "hidden_size": 24 * heads,
    }
    folder = make_model("llama", **changes, initializer_range=spread)
    request = ScoreRequest(ids_of(10, 90), ids_of(11, 70))
    ours = (
        drive(folder, [[Submit(1, request)]], kernel=kernel, chunk_tokens=512).replies[1].logprobs
    )
    exact = torch.tensor(naive(folder).exact_scores(request.prefix, request.suffix))
    plain = torch.tensor(naive(folder).scores(request.prefix, request.suffix))
    noise = float((plain - exact).abs().max())
    assert float((torch.tensor(ours) - exact).abs().max()) <= max(CLOSE, 2 * noise)
    assert noise < (CLOSE if spread == 0.1 else 3 * CLOSE), (
        "float32 itself must stay within the assumed error"
    )


@pytest.mark.parametrize("family", ["llama", "qwen3"])
def test_the_number_of_threads_changes_no_bit(
    family: str, make_model: Callable[..., Path], drive: Any
) -> None:
    """The number of threads changes no bit.

    Threads divide columns, rows and sequences, and a single thread computes each sum.
    """
    folder = make_model(family)
    score = ScoreRequest(ids_of(2, 40), ids_of(3, 120))
    orders: list[Command] = [
        Submit(1, SampleRequest(ids_of(1, 90), 3)),
        Submit(2, score),
        Submit(3, SampleRequest((5,), 3)),
    ]
    one, two = (
        drive(folder, [orders], kernel="native", chunk_tokens=200, threads=threads)
        for threads in (1, 2)
    )
    assert one.replies == two.replies


def tuned(tuning: Tuning) -> MakeModel:
    """Return a function that makes native models whose kernels use only some of this processor's
    instructions.
    """

    def make(config: WorkerConfig, weights: Weights, cache: torch.Tensor) -> NativeModel:
        return NativeModel(
            native_library(config.name, config.model, tuning)[0],
            config.model,
            weights,
            cache,
            threads=1,
        )

    return make


@pytest.mark.parametrize("tuning", ["avx2", pytest.param("generic", marks=pytest.mark.slow)])
def test_kernels_for_other_processors_equal_the_naive_loop(
    tuning: Tuning, make_model: Callable[..., Path], naive: Any, drive: Any
) -> None:
    """Kernels built for older processors agree with the naive loop, although their vector widths
    and tile sizes differ.
    """
    if tuning not in tunings():
        pytest.skip(f"this processor cannot run {tuning} code")
    rows = native_library("tiny", read_model_config(make_model("llama"), "tiny"), tuning)[
        0
    ].atts_row_block()
    assert rows == {"avx2": 48, "generic": 64}[tuning], (
        "the kernels were built for another processor"
    )
    heads = [(6, 3, 96), (4, 4, 64), (6, 2, 16), (3, 1, 32), (4, 2, 128)]
    wild = SampleRequest(ids_of(12, 20), 12, Sampling(0.9))
    requests: list[SampleRequest | ScoreRequest] = [
        ScoreRequest(ids_of(10, 90), ids_of(11, 70)),
        ScoreRequest(ids_of(9, 5), ids_of(8, 1)),
        *[SampleRequest(ids_of(n, 3 * n + 1), 10, GREEDY) for n in range(4)],
    ]
    orders: list[Command] = [
        Submit(1, wild),
        *[Submit(n, request) for n, request in enumerate(requests, start=2)],
    ]
    for count, shared, dim in heads:
        size = {
            "num_attention_heads": count,
            "num_key_value_heads": shared,
            "head_dim": dim,
            "hidden_size": 24 * count,
        }
        folder = make_model("llama", **size, initializer_range=0.1)
        done = drive(folder, [orders], tuned(tuning), chunk_tokens=512)
        assert done.replies[1].ids == drive(folder, [orders[:1]], kernel="torch").replies[1].ids
        assert done.replies[1].logprobs == pytest.approx(
            naive(folder).scores(wild.ids, done.replies[1].ids), abs=CLOSE
        )
        for request_id, request in enumerate(requests, start=2):
            check(naive(folder), request, done.replies[request_id])


def compare_with_naive(folder: Path, naive: Any, drive: Any, kernel: str) -> None:
    """Check that samples and scores of several lengths, computed in one batch, equal those of the
    naive loop.
    """
    requests: list[SampleRequest | ScoreRequest] = [
        *[SampleRequest(ids_of(n, 3 * n + 1), 10, GREEDY) for n in range(6)],
        *[ScoreRequest(ids_of(9, 5), ids_of(8, n + 1)) for n in range(4)],
    ]
    orders: list[Command] = [Submit(n, request) for n, request in enumerate(requests, start=1)]
    done = drive(folder, [orders], kernel=kernel)
    for order in orders:
        assert isinstance(order, Submit)
        check(naive(folder), order.request, done.replies[order.request_id])


@pytest.mark.parametrize("family", FAMILIES)
def test_greedy_text_is_that_of_transformers_generate(
    family: str, make_model: Callable[..., Path], naive: Any, drive: Any
) -> None:
    """Greedy text equals that of transformers' `generate` token for token, up to the first near
    tie.
    """
    folder = make_model(family)
    prompt = ids_of(5, 20)
    ours = drive(folder, [[Submit(1, SampleRequest(prompt, 40, GREEDY))]]).replies[1].ids
    theirs = naive(folder).model.generate(
        torch.tensor([prompt]), max_new_tokens=40, do_sample=False, pad_token_id=1
    )
    theirs = tuple(theirs[0, len(prompt) :].tolist())
    same = next(
        (i for i, (a, b) in enumerate(zip(ours, theirs, strict=False)) if a != b), len(ours)
    )
    if same < len(ours):
        top = naive(folder).logits(prompt + ours[:same])[-1].topk(2).values
        assert float(top[0] - top[1]) <= CLOSE
    assert naive(folder).agrees(prompt, ours)


def test_half_precision_runs_and_stays_near(
    make_model: Callable[..., Path], naive: Any, drive: Any
) -> None:
    """In bfloat16, scores equal those in float32 within the precision of bfloat16."""
    folder = make_model("llama", initializer_range=0.05)
    request = ScoreRequest(ids_of(1, 20), ids_of(2, 20))
    reply = drive(folder, [[Submit(1, request)]], dtype="bfloat16").replies[1]
    assert reply.logprobs == pytest.approx(
        naive(folder).scores(request.prefix, request.suffix), abs=0.15
    )


def test_weights_that_are_bfloat16_numbers_lose_nothing(
    make_model: Callable[..., Path], tmp_path: Path, drive: Any
) -> None:
    """The native kernels store bfloat16 weights in half the memory of float32, and each score
    equals that of torch.
    """
    from transformers import AutoModelForCausalLM, AutoTokenizer

    source = make_model("llama")
    AutoModelForCausalLM.from_pretrained(source, dtype=torch.bfloat16).save_pretrained(tmp_path)
    AutoTokenizer.from_pretrained(source).save_pretrained(tmp_path)
    request = ScoreRequest(ids_of(1, 30), ids_of(2, 40))
    scores = [
        drive(tmp_path, [[Submit(1, request)]], kernel=kernel).replies[1].logprobs
        for kernel in ("torch", "native")
    ]
    assert scores[1] == pytest.approx(scores[0], abs=2e-5)
