"""Likelihood ratios of a mixture of shifted and stretched normal distributions against the stored one."""

from __future__ import annotations

import numpy as np

from atts.calibration.samples import Floats

_COMPONENTS = 128  # of the mixture
_TOGETHER = 0.9  # correlation of the shifts: scores of another model are higher and spread wider at once
_STRETCH = 0.3  # SD of the logarithm of the change of width
_BEND = 0.5  # SD of the transformed correlation, in the half of the components that have another one
_AT_ONCE = 1024  # weightings whose ratios are in memory together
_FLAT = 0.1  # a column that hardly varies counts as if it varied this much


def mixture_ratios(scores: Floats, reference: Floats, weights: Floats, questions: int) -> Floats:
    """The log likelihood ratio of `questions` questions, for each row of weights over the rows of `scores`.

    The distribution of the rows of `reference`, read as a normal one, against a fixed mixture of normal ones with other
    means, widths and correlations. Normality decides how much is seen, not how often a clean run is accused: the ratios
    are only compared with one another.
    """
    centre, width = reference.mean(axis=0), np.maximum(reference.std(axis=0), _FLAT)
    size = reference.shape[1]
    known = (reference - centre) / width
    tie = float(np.clip(np.mean(known[:, 0] * known[:, -1]), -0.95, 0.95))
    means, spreads = _components(size, tie)
    same = _terms(np.zeros((1, size)), _spread(np.ones((1, size)), np.array(tie)))
    gain = questions * (_terms(means, spreads) - same)
    moments = weights @ _moments((scores - centre) / width)
    parts = [_log_mean_exp(moments[at : at + _AT_ONCE] @ gain.T) for at in range(0, len(moments), _AT_ONCE)]
    return np.concatenate(parts)


def _components(size: int, tie: float) -> tuple[Floats, Floats]:
    """Means and covariances of the mixture, around a standard normal with correlation `tie`; always the same."""
    draw = np.random.default_rng(0)
    common, own, widths = (draw.standard_normal((_COMPONENTS, columns)) for columns in (1, size, size))
    means = np.sqrt(_TOGETHER) * common + np.sqrt(1 - _TOGETHER) * own
    ties = np.where(np.arange(_COMPONENTS) % 2, np.tanh(_BEND * draw.standard_normal(_COMPONENTS)), tie)
    return means, _spread(np.exp(_STRETCH * widths), ties)


def _spread(widths: Floats, ties: Floats) -> Floats:
    """Covariances [components, size, size] of these widths and, between two columns, these correlations."""
    spread = widths[:, :, None] * widths[:, None, :]
    off = ~np.eye(widths.shape[1], dtype=bool)
    spread[:, off] *= np.reshape(ties, (-1, 1))
    return spread


def _terms(means: Floats, spreads: Floats) -> Floats:
    """The log density of each normal as weights of `_moments`, but for a constant all share."""
    precise = np.linalg.inv(spreads)
    pull = np.einsum("lij,lj->li", precise, means)
    constant = -0.5 * (np.linalg.slogdet(spreads)[1] + np.einsum("li,li->l", means, pull))
    terms = [constant[:, None], pull, -0.5 * precise.reshape(len(means), -1)]
    return np.asarray(np.concatenate(terms, axis=1), float)


def _moments(plain: Floats) -> Floats:
    """One, each column, and all products of two."""
    products = plain[:, :, None] * plain[:, None, :]
    return np.concatenate([np.ones((len(plain), 1)), plain, products.reshape(len(plain), -1)], axis=1)


def _log_mean_exp(logs: Floats) -> Floats:
    most = logs.max(axis=1)
    return np.asarray(most + np.log(np.exp(logs - most[:, None]).mean(axis=1)), float)
