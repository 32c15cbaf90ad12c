"""Majority votes: how often a vote of k samples is right, over all subsets, by equivalence class, ties split."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Hashable, Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from atts.distributions import binomial_pmf
from atts.errors import OptionError
from atts.evaluators.metrics.intervals import Floats, Ints

Label = Hashable


@dataclass(frozen=True, slots=True)
class Votes:
    """One problem's samples as a vote sees them: sizes of the classes, how right each is, and the silent ones."""

    sizes: tuple[int, ...]
    values: tuple[float, ...]
    blanks: int = 0

    @property
    def samples(self) -> int:
        """Samples, silent ones included."""
        return sum(self.sizes) + self.blanks


def votes(labels: Sequence[Label | None], correct: Sequence[bool | float | None]) -> Votes:
    """Classes with their value: the share of their members judged right (None counts as wrong); no label, no vote.

    >>> votes(["a", "b", "a", None], [True, False, True, False])
    Votes(sizes=(2, 1), values=(1.0, 0.0), blanks=1)
    """
    if len(labels) != len(correct):
        raise OptionError("labels", f"there are {len(labels)} labels for {len(correct)} verdicts")
    members: defaultdict[Label, list[float]] = defaultdict(list)
    silent = 0
    for label, one in zip(labels, correct, strict=True):
        if label is None:
            silent += 1
        else:
            members[label].append(float(one or 0))
    sizes = tuple(len(held) for held in members.values())
    return Votes(sizes, tuple(sum(held) / len(held) for held in members.values()), silent)


def maj_at_k(problems: Sequence[Votes], k: int) -> Floats:
    """P(the majority of k samples drawn without replacement is right) per problem; NaN where there are fewer than k.

    A tie goes to each of the tied with equal chance; a draw without any answer is wrong. The order in which samples
    finished does not matter.
    """
    if k < 1:
        raise OptionError("k", f"{k} is not at least 1")
    result = np.full(len(problems), np.nan)
    by_samples: defaultdict[int, list[int]] = defaultdict(list)
    for index, problem in enumerate(problems):
        by_samples[problem.samples].append(index)
    for samples, indices in by_samples.items():
        if samples >= k:
            group = [problems[index] for index in indices]
            result[indices] = [_whole(votes) for votes in group] if samples == k else _expected(group, samples, k)
    return result


def _whole(problem: Votes) -> float:
    """k = n: the vote itself."""
    most = max(problem.sizes, default=0)
    winners = [value for size, value in zip(problem.sizes, problem.values, strict=True) if size == most]
    return sum(winners) / len(winners) if winners else 0.0


def _expected(group: Sequence[Votes], n: int, k: int) -> Floats:
    """Sum over classes of value times P(win share), for problems that all have n > k samples."""
    rows = [
        (at, value, size, [*problem.sizes[:own], *problem.sizes[own + 1 :]], problem.blanks)
        for at, problem in enumerate(group)
        for own, (size, value) in enumerate(zip(problem.sizes, problem.values, strict=True))
        if value > 0
    ]
    rivals = np.zeros((len(rows), n + 1))  # how many rival classes have each size
    for row, (_, _, _, others, _) in enumerate(rows):
        for size in others:
            rivals[row, size] += 1
    own = np.array([row[2] for row in rows], dtype=np.int64)
    silent = np.array([row[4] for row in rows], dtype=np.int64)
    shares = _win_shares(own, rivals, silent, n, k)
    total = np.zeros(len(group))
    np.add.at(total, [row[0] for row in rows], shares * np.array([row[1] for row in rows]))
    return np.clip(total, 0.0, 1.0)


def _win_shares(own: Ints, rivals: Floats, silent: Ints, n: int, k: int) -> Floats:
    """Per row, E[1/(1 + rivals tied) if none has more] over k of n samples, the row's class having `own` of them.

    Exact, and no subset is enumerated: for the row's class drawn j times, the rivals' generating function is taken at
    roots of unity; 1/(ties + 1) is the integral of w^ties over [0, 1], which Gauss-Legendre nodes give exactly. Draws
    are binomial with chance k/n per sample, conditioned on k in all: the same law, and no number overflows.
    """
    chance = k / n
    # a real polynomial of degree <= n is known from half of the n + 1 roots; the rest are conjugates
    roots = np.exp(-2j * np.pi * np.arange((n + 1) // 2 + 1) / (n + 1))
    sizes = np.flatnonzero(rivals.any(axis=0))
    below = np.zeros((sizes.size, roots.size), dtype=np.complex128)  # per rival size, of fewer than j draws
    quiet = silent[:, None] * np.log(1 - chance + chance * roots)[None, :]
    result = np.zeros(own.size)
    for j in range(1, min(k, int(own.max(initial=0))) + 1):
        below += binomial_pmf(j - 1, sizes, chance)[:, None] * roots ** (j - 1)
        exactly = binomial_pmf(j, sizes, chance)[:, None] * roots**j
        rows = np.flatnonzero(own >= j)
        nodes, weights = _unit_nodes((k - j) // j)
        spectrum = np.zeros((rows.size, roots.size), dtype=np.complex128)
        for node, weight in zip(nodes, weights, strict=True):
            logs = _log(below + node * exactly)
            spectrum += weight * np.exp(rivals[np.ix_(rows, sizes)] @ logs + quiet[rows])
        others = np.fft.irfft(spectrum, n + 1, axis=1)[:, k - j]
        result[rows] += binomial_pmf(j, own[rows], chance) * others
    return result / float(binomial_pmf(k, n, chance))


def _unit_nodes(degree: int) -> tuple[Floats, Floats]:
    """Gauss-Legendre on [0, 1], exact for polynomials of that degree."""
    nodes, weights = np.polynomial.legendre.leggauss(degree // 2 + 1)
    return (nodes + 1) / 2, weights / 2


def _log(values: NDArray[np.complex128]) -> NDArray[np.complex128]:
    """Where a factor is 0 its product must be 0, but 0 of such factors must be 1: so not minus infinity."""
    return np.log(np.where(np.abs(values) < 1e-200, 1e-200, values))
