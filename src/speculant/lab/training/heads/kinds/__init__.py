"""The kinds of heads: one module each, named after the method that drafts with it, with a `KIND`."""
