"""HTTP/1.1: connections and their bounds, limits of requests, and the server around an application."""
