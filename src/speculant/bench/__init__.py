"""Benchmarks of a whole engine: what is run, how it is measured, how it is told."""
