"""Draft-length policies, one file each: how many nodes the draft of each sequence may have."""
