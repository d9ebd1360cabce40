"""Gives small models the cost of large ones, for measurements."""
