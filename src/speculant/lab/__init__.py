"""The laboratory: it measures, proves and trains. Nothing in the library imports it."""
