"""Datasets: known benchmarks, datasets of the Hugging Face hub, files, and generated arithmetic."""
