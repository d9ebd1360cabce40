"""What computes models: one module a backend, found by name."""
