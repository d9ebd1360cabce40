"""Training of encoder-decoder models in T5's format on pairs of texts: a target, and drafts for it."""
