"""Files of requests in OpenAI's batch format: read, answered by anything, and written so that a kill loses nothing."""
