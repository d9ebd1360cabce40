"""Training of several drafts for one tree: each learns what the ones before miss (arXiv 2305.09781, section 3)."""
