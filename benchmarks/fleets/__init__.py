"""The parts of `benchmarks/fleet.py`."""
