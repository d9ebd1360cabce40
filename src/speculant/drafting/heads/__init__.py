"""Files of heads, and drafters whose heads look at one hidden state alone."""
