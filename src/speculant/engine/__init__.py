"""The loop that turns requests into tokens."""
