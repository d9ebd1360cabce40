"""The KV cache: keys and values of the tokens that were computed."""
