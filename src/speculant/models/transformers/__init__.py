"""Models that the package transformers computes: slower than kernels, but any causal language model that it has."""
