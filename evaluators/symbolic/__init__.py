"""Symbolic equivalence by sympy or math-verify, in processes that can be killed."""
