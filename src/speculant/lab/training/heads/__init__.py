"""Training of heads: on texts that the target writes, with the target's distributions as the goal.

A kind of head is a module in `kinds`, named after the method that drafts with it, with a function `make`.
"""
