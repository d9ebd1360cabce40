"""Serving over HTTP: an API in OpenAI's shape, and what it makes of a model's text."""
