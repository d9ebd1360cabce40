"""Request scheduling."""
