"""Asks sympy or math-verify what the fast path leaves open, in processes that can be killed."""
