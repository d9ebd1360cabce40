"""The same models, prompts and draft lengths through Speculant and other engines: `python -m benchmarks.peers`."""
