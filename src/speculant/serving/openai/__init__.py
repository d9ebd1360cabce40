"""An API in OpenAI's shapes: chat is the one way; completions and responses are translated."""
