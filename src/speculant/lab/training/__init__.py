"""Training of small models: a tokenizer, a target, and drafts distilled from it."""
