"""The configuration of a server; each option is a flag of `speculant serve`."""

from __future__ import annotations

from dataclasses import dataclass

from speculant.errors import ConfigError, suggest
from speculant.params import MAX_N

METRIC_LEVELS = ("none", "summary", "detailed")


@dataclass(frozen=True)
class ServerOptions:
    """Addresses, keys, names, limits and deadlines. Deadlines are in seconds, None = none; sizes in bytes.

    api_keys: keys for every route but /health and the page; none = open to all. Each key has its own prefix cache.
    served_model_names: names of the model for clients, its own name first; none = the engine's.
    allowed_origins: other sites whose pages may use the server (CORS).
    max_samples: sequences of one request, over all its prompts.
    max_prompt_characters: longer prompts are refused before they are tokenised.
    queue_timeout: until a request's first step. first_token_timeout: until its first token. request_timeout: until its
    end. body_timeout: for a body to arrive. send_timeout: for a slow client to read one piece of a response.
    drain_timeout: for running requests to end after SIGTERM.
    per_request_spec_decode_metrics: figures on speculation in responses: "none", "summary" or "detailed".
    tool_parser: the format of tool calls; None = the format of the chat template.
    client_weights: a file with the weights of API keys, see `read_weights`; None = all have the weight 1.
    priority_range: the lowest and the highest `priority` of a request; None = priorities have no effect.
    """

    host: str = "127.0.0.1"
    port: int = 8000
    api_keys: tuple[str, ...] = ()
    served_model_names: tuple[str, ...] = ()
    allowed_origins: tuple[str, ...] = ()
    metrics_prefix: str = "speculant"
    per_request_spec_decode_metrics: str = "none"
    tool_parser: str | None = None
    max_body_bytes: int = 4 * 2**20
    max_header_bytes: int = 32 * 2**10
    max_messages: int = 2048
    max_prompts: int = 256
    max_samples: int = 2 * MAX_N
    max_prompt_characters: int = 1_000_000
    body_timeout: float | None = 20.0
    text_timeout: float | None = 20.0
    queue_timeout: float | None = 60.0
    first_token_timeout: float | None = 300.0
    request_timeout: float | None = 1800.0
    send_timeout: float | None = 30.0
    drain_timeout: float = 30.0
    client_weights: str | None = None
    priority_range: tuple[int, int] | None = None

    def __post_init__(self) -> None:
        if not 0 <= self.port <= 65535:
            raise ConfigError(f"port={self.port} is not a port", "use a number from 1 to 65535, or 0 for any free one.")
        if self.per_request_spec_decode_metrics not in METRIC_LEVELS:
            given = self.per_request_spec_decode_metrics
            raise ConfigError(f"per_request_spec_decode_metrics={given!r} is unknown", suggest(given, METRIC_LEVELS))
        if not (self.metrics_prefix.isidentifier() and self.metrics_prefix.isascii()):
            raise ConfigError(
                f"metrics_prefix={self.metrics_prefix!r} is not a prefix of metrics", 'use for example "vllm".'
            )
        if not all(key and key.isascii() and key.isprintable() for key in self.api_keys):
            raise ConfigError("an API key is empty or has characters other than printable ASCII", "use another key.")
        if self.priority_range is not None and self.priority_range[0] > self.priority_range[1]:
            low, high = self.priority_range
            raise ConfigError(f"priority_range={low}:{high} has no number", f'use "{high}:{low}".')
        for name in _POSITIVE:
            value = getattr(self, name)
            if value is not None and not value > 0:
                raise ConfigError(f"{name}={value!r} is not above 0", f"raise {name}.")


_POSITIVE = (
    *("max_body_bytes", "max_header_bytes", "max_messages", "max_prompts", "max_samples", "max_prompt_characters"),
    *("body_timeout", "text_timeout", "queue_timeout", "first_token_timeout", "request_timeout", "send_timeout"),
    "drain_timeout",
)
