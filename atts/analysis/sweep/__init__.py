"""Scaling curves of a set of runs: what accuracy costs as one setting or several of them change."""
