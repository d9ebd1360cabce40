"""Structured outputs: JSON schemas, regular expressions, choices and grammars as constraints on a request's tokens."""
