"""The kinds of heads: one module each, with `make(config, target) -> HeadInTraining`."""
