"""Drafters without a model: they look continuations up in texts and tables."""
