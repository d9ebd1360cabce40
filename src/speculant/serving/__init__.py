"""Serving over HTTP: an API in OpenAI's shape, with reasoning and tool calls read from a model's text."""
