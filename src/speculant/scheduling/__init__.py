"""Request scheduling and draft lengths."""
