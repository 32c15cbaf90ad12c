"""Kernels for processors: compiled C, packed weights, and models that run on them."""
