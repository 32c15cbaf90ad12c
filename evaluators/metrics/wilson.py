"""Compute Wilson's score interval without numpy, so that the commands for grading start fast."""

import math

# A normal variable is within this many standard deviations of its mean with probability 95 %.
NORMAL_95 = 1.959963984540054


def wilson_interval(mean: float, n: float, reach: float = NORMAL_95) -> tuple[float, float]:
    """Return Wilson's interval of a rate over `n` independent draws.

    `reach` is the half-width of the interval in standard deviations.
    """
    scale = 1 + reach * reach / n
    centre = (mean + reach * reach / (2 * n)) / scale
    half = reach / scale * math.sqrt(mean * (1 - mean) / n + reach * reach / (4 * n * n))
    return max(0.0, min(mean, centre - half)), min(1.0, max(mean, centre + half))
