"""Draft lengths: the costs of steps, estimates of acceptance, and one file for each policy."""
