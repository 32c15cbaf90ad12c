"""Compute Wilson's score interval without numpy, so that the commands for grading start fast."""

import math

NORMAL_95 = 1.959963984540054  # this many standard deviations on each side of the mean contain 95 %


def wilson_interval(mean: float, n: float, reach: float = NORMAL_95) -> tuple[float, float]:
    """Return the interval of a rate over `n` independent draws, with `reach` standard deviations on
    each side.
    """
    scale = 1 + reach * reach / n
    centre = (mean + reach * reach / (2 * n)) / scale
    half = reach / scale * math.sqrt(mean * (1 - mean) / n + reach * reach / (4 * n * n))
    return max(0.0, min(mean, centre - half)), min(1.0, max(mean, centre + half))
