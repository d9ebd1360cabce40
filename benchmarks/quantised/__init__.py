"""Quantisation methods that look at a model's inputs, to make checkpoints for `benchmarks/formats.py`."""
