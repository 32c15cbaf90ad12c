"""Equivalence of two answers under the written policy, in bounded time."""
