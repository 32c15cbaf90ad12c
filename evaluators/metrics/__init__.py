"""Metrics: rates, intervals, votes and paired comparisons of runs."""
