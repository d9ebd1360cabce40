"""More than one server: replicas on a Ray cluster (extra `ray`), and files of requests in OpenAI's batch format."""
