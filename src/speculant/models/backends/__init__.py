"""Backends compute models: one module per backend, found by name."""
