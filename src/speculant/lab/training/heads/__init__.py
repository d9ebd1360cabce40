"""Training of heads: on the target's own output, by the target's distributions.

A kind of head is a module in `kinds`, of the name of the method that drafts with it, with a function `make`.
"""
