"""Turns verdicts into rates, intervals, comparisons of runs, and costs."""
