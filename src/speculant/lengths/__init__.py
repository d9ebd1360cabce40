"""Draft lengths: what steps cost, what is accepted, and one file for each policy."""
