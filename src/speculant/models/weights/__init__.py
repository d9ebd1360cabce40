"""Weights: found, checked, read, packed and kept."""
