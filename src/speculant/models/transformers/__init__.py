"""Models that the package transformers computes: slower than our kernels, but any of its causal language models."""
