"""OpenAI's Responses: items in, events and items out, and the responses that are stored for a while."""
