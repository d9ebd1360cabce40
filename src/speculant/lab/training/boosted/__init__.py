"""Training of several drafts for one tree: each learns the tokens that the drafts before miss (arXiv 2305.09781, 3)."""
