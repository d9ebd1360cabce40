"""Speculant and other engines with the same models, prompts and draft lengths: `python -m benchmarks.peers`."""
