"""Brings problems in from benchmarks, the hub or files, saying exactly which ones they are."""
