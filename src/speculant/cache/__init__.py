"""Keys and values of the tokens that were fed."""
