"""Kernels of the local engine for CPUs: compiled C code, packed weights, and models that use
them.
"""
