"""The verifiers, one file each: which drafted tokens are accepted."""
