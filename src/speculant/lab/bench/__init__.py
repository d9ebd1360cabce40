"""Benchmarks of a whole engine: workloads, measurements, reports."""
