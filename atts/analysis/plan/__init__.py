"""Advice from recorded runs: what to spend on a problem under a cap, and how far that can be
trusted.
"""
