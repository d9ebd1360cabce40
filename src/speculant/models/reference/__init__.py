"""Models in plain PyTorch: the definition of correct."""
