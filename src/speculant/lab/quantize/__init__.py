"""Writes quantised checkpoints that other programs read too: GGUF files and compressed-tensors folders."""
