"""Wilson's score interval in plain floats, so that commands that only grade load no numpy."""

import math

NORMAL_95 = 1.959963984540054  # standard deviations to either side that hold 95 %


def wilson_interval(mean: float, n: float, reach: float = NORMAL_95) -> tuple[float, float]:
    """Return the interval of a rate over `n` independent draws, `reach` deviations to a side."""
    scale = 1 + reach * reach / n
    centre = (mean + reach * reach / (2 * n)) / scale
    half = reach / scale * math.sqrt(mean * (1 - mean) / n + reach * reach / (4 * n * n))
    return max(0.0, min(mean, centre - half)), min(1.0, max(mean, centre + half))
