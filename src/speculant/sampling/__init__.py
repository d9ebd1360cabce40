"""From logits to distributions, and from distributions to tokens."""
