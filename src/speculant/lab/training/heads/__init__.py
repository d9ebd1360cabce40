"""Training of heads: on texts that the target writes, with the target's distributions as the goal."""
