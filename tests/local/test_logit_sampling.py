"""Tests of sampling from logits: the distribution, exact log-probabilities, and stop strings across
tokens.
"""

from __future__ import annotations

import math
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from scipy.stats import chisquare

from atts.core import Sampling
from atts.local.logit_sampling import (
    batch_sampling,
    inverse_cdf,
    probabilities,
    raw_logprobs,
    sample,
)
from atts.models.tokenizers import StopMatcher


def naive_distribution(logits: list[float], sampling: Sampling) -> list[float]:
    """Compute the distribution by its definition, token by token."""
    weights = [math.exp((x - max(logits)) / sampling.temperature) for x in logits]
    order = sorted(range(len(weights)), key=lambda i: -weights[i])
    if 0 < sampling.top_k < len(weights):
        weights = [w if w >= weights[order[sampling.top_k - 1]] else 0.0 for w in weights]
    if sampling.top_p < 1:
        total = sum(weights)
        mass = 0.0
        kept = set[int]()
        for i in order:
            if mass / total >= sampling.top_p:
                break
            kept.add(i)
            mass += weights[i]
        weights = [w if i in kept else 0.0 for i, w in enumerate(weights)]
    weights = [w if w >= sampling.min_p * max(weights) else 0.0 for w in weights]
    return [w / sum(weights) for w in weights]


settings_of_a_row = st.builds(
    Sampling,
    temperature=st.floats(0.2, 2.0),
    top_k=st.integers(0, 9),
    top_p=st.sampled_from([1.0, 0.99, 0.7, 0.31]),
    min_p=st.sampled_from([0.0, 0.05, 0.4]),
)
rows = st.lists(st.floats(-6, 6), min_size=8, max_size=8, unique_by=lambda x: round(x, 3))


@settings(max_examples=150, deadline=None)
@given(st.lists(st.tuples(rows, settings_of_a_row), min_size=1, max_size=4))
def test_each_row_of_a_batch_has_its_own_distribution(
    batch: list[tuple[list[float], Sampling]],
) -> None:
    """The rows of one batch may have different values of temperature, top-k, top-p and min-p."""
    logits = torch.tensor([row for row, _ in batch], dtype=torch.float64)
    found = probabilities(logits, batch_sampling([sampling for _, sampling in batch], 8))
    expected = torch.tensor(
        [naive_distribution(row, sampling) for row, sampling in batch], dtype=torch.float64
    )
    torch.testing.assert_close(found, expected, atol=1e-9, rtol=0)


def by_sorting(logits: torch.Tensor, laws: list[Sampling]) -> torch.Tensor:
    """Compute the distribution by sorting the vocabulary in float64, once for each filter."""
    batch = batch_sampling(laws, logits.shape[-1])
    scaled = logits.double() / batch.temperature.unsqueeze(-1)
    if batch.top_k is not None:
        last = scaled.sort(-1, descending=True).values.gather(-1, batch.top_k.unsqueeze(-1) - 1)
        scaled = scaled.masked_fill(scaled < last, -torch.inf)
    if batch.top_p is not None:
        values, order = scaled.sort(stable=True, dim=-1, descending=True)
        probs = values.softmax(-1)
        dropped = probs.cumsum(-1) - probs >= batch.top_p.unsqueeze(-1)
        dropped[..., 0] = False
        places = torch.zeros_like(dropped).scatter_(-1, order, dropped)
        scaled = scaled.masked_fill(places, -torch.inf)
    return scaled.softmax(-1)


@pytest.mark.parametrize("ties", [False, True])
def test_fast_filters_equal_sorting_in_float64(ties: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    """The fast filters give the same bits as sorting in float64: top-k, top-p, both, ties at the
    border, and rows without limits.
    """
    random = torch.Generator().manual_seed(5)
    logits = torch.randn(64, 3000, generator=random) * 4
    if ties:
        logits = (logits * 2).round() / 2
    laws = [
        Sampling(0.6 + number / 40, (0, 1, 20, 500)[number % 4], (1.0, 0.95, 0.5)[number % 3])
        for number in range(64)
    ]
    for chosen in (
        laws,
        [law for law in laws if law.top_k],
        [law for law in laws if not law.top_k],
    ):
        rows = logits[: len(chosen)]
        expected = by_sorting(rows, chosen)
        assert torch.equal(probabilities(rows, batch_sampling(chosen, 3000)), expected)

    def sort(self: torch.Tensor, *words: Any, **named: Any) -> Any:
        assert self.dtype != torch.float64, "a fast filter sorted the vocabulary in float64"
        return torch.sort(self, *words, **named)

    monkeypatch.setattr("torch.Tensor.sort", sort)
    probabilities(logits, batch_sampling(laws, 3000))


def test_temperature_zero_takes_the_first_best_token() -> None:
    """At temperature 0, the most likely token is chosen whatever the random number is, and of
    several such tokens the first. Other rows of the batch are sampled as usual.
    """
    logits = torch.tensor([[0.0, 3.0, 3.0], [0.0, 0.0, 0.0]])
    drawn = sample(
        logits, batch_sampling([Sampling(0.0), Sampling(1.0)], 3), torch.tensor([0.99, 0.99])
    )
    assert drawn.tokens.tolist() == [1, 2]


@settings(max_examples=100, deadline=None)
@given(rows, st.floats(0, 1, exclude_max=True))
def test_the_draw_is_the_inverse_cdf(row: list[float], uniform: float) -> None:
    """The random number lies between two cumulative probabilities: that of all tokens before the
    sampled one, and that which includes the sampled one.
    """
    probs = torch.tensor([row], dtype=torch.float64).softmax(-1)
    token = int(inverse_cdf(probs, torch.tensor([uniform])))
    before = float(probs[0, :token].sum())
    assert before <= uniform + 1e-12
    assert before + float(probs[0, token]) > uniform - 1e-12


def test_a_token_of_probability_zero_is_never_drawn() -> None:
    """A token of probability zero is drawn neither with the smallest nor with the largest random
    number.
    """
    probs = torch.tensor([[0.0, 0.5, 0.5, 0.0]])
    assert inverse_cdf(probs, torch.tensor([0.0])).item() == 1
    assert inverse_cdf(probs, torch.tensor([math.nextafter(1, 0)])).item() == 2


@pytest.mark.parametrize("shift", [0.0, 0.08])
def test_sampled_frequencies_follow_the_distribution_and_a_planted_bug_is_seen(
    shift: float,
) -> None:
    """A chi-square test over 40,000 draws passes. It fails if the random numbers are slightly
    biased, so the test has power.
    """
    sampling = Sampling(temperature=0.7, top_k=6)
    logits = torch.tensor([[0.3, 1.1, -0.4, 0.9, 0.0, -1.5, 0.2, 0.6]])
    uniforms = torch.from_numpy(np.random.default_rng(3).random(40_000)) ** (1 + shift)
    drawn = sample(
        logits.expand(40_000, -1), batch_sampling([sampling] * 40_000, 8), uniforms
    ).tokens
    expected = np.array(naive_distribution(logits[0].tolist(), sampling)) * 40_000
    seen = np.bincount(drawn.numpy(), minlength=8)
    assert seen[expected == 0].sum() == 0
    p = float(chisquare(seen[expected > 0], expected[expected > 0]).pvalue)
    assert p > 1e-3 if shift == 0 else p < 1e-6


def test_raw_logprobs_ignore_the_settings_and_keep_nan() -> None:
    """Raw log-probabilities are those of the model's unfiltered distribution, and a NaN among the
    logits stays visible.
    """
    logits = torch.tensor([[1.0, 2.0, 3.0], [1.0, math.nan, 3.0]])
    found = raw_logprobs(logits, torch.tensor([2, 2]))
    assert found[0].item() == pytest.approx(-0.40760596)
    assert math.isnan(found[1].item())


@settings(max_examples=200, deadline=None)
@given(
    st.text("ab\n\u00e9\U0001f600", max_size=30),
    st.lists(st.text("ab\n\u00e9", min_size=1, max_size=4), max_size=3),
    st.data(),
)
def test_a_stop_is_found_at_the_piece_that_completes_it(
    text: str, stops: list[str], data: st.DataObject
) -> None:
    """A stop string is found in the token that completes it, even if tokens cut the text within a
    character.
    """
    raw = text.encode()
    cuts = (
        sorted(data.draw(st.sets(st.integers(1, max(1, len(raw) - 1)), max_size=6))) if raw else []
    )
    pieces = [raw[a:b] for a, b in zip([0, *cuts], [*cuts, len(raw)], strict=True)]
    watch = StopMatcher(tuple(stops))
    found = next((i for i, piece in enumerate(pieces) if watch.feed(piece)), None)
    heads = [b"".join(pieces[: i + 1]) for i in range(len(pieces))]
    expected = next(
        (i for i, head in enumerate(heads) if any(stop.encode() in head for stop in stops)), None
    )
    assert found == expected
