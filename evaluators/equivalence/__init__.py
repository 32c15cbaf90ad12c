"""Equivalence of two answers under the grading policy, in bounded time."""
