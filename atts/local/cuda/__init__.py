"""Kernels of the local engine for GPUs: captured steps, and attention over the paged cache."""
