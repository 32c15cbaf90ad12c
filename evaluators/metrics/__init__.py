"""Metrics of runs: rates, intervals, votes and paired comparisons."""
