"""Datasets: benchmarks by name, the Hugging Face hub, files, and generated arithmetic."""
