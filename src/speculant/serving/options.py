"""The configuration of a server; each option is a flag of `speculant serve`."""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from ipaddress import ip_network
from typing import Any
from urllib.parse import urlsplit

from speculant import plugins
from speculant.config import read_bytes
from speculant.errors import ConfigError, suggest
from speculant.params import MAX_N

MOST_MESSAGES = 16_384  # of max_messages; parsing one, or a file of a hole, takes longer than other entries of a body
METRIC_LEVELS = ("none", "summary", "detailed")
ACCESS_LOGS = ("none", "text", "json")
PROBED_PATHS = frozenset({"/health", "/ping"})  # answered without a key, under any name, and by a full server
_HOST = re.compile(r"\*|[\w.-]+")


@dataclass(frozen=True)
class ServerOptions:
    """Addresses, keys, names, limits and deadlines. Deadlines are in seconds, None = none; sizes in bytes.

    api_keys: keys for every route but /health, /ping and the page; none = open to all. Each key has its own prefix
    cache. metrics_without_key: /metrics needs none either, for gateways that send none.
    served_model_names: names of the model for clients, its own name first; none = the engine's.
    allowed_origins: other sites whose pages may use the server (CORS). allowed_hosts: further names of the server that
    requests may have in `Host` if there are no keys; "*" = any.
    max_samples: sequences of one request, over all its prompts.
    max_draft_tokens: a client's num_speculative_tokens counts as at most this; None = the engine's own number, or the
    most that its policy chooses.
    max_prompt_characters: longer prompts are refused before they are tokenised.
    max_large_texts: requests of one client with large bodies whose texts are being read, or wait to be read.
    header_timeout: from the beginning of a connection, or the end of an answer on it, until the headers of the next
    request are complete. body_timeout: for a body to arrive. text_timeout: for each piece of work on the texts of a
    request, including the wait for a thread. queue_timeout, first_token_timeout, request_timeout: after that, until a
    request's first step, its first token and its end. send_timeout: for a slow client to read one piece of a response.
    drain_timeout: for running requests to end after SIGTERM.
    max_connections: open ones; None = 4096, or as many as the process may open files for. max_connections_per_address:
    None = half of all; 0 = no bound. max_buffered_bytes: of the bodies of all requests at a time; a client may hold as
    many as stay free for others. trusted_proxies: addresses or networks whose X-Forwarded-For names the client.
    per_request_spec_decode_metrics: figures on speculation in responses: "none", "summary" or "detailed".
    tool_parser: the format of tool calls; None = the format of the chat template.
    root_path: the prefix of paths that a proxy adds and does not remove, such as "/llm"; requests without it are
    answered too. ssl_certfile, ssl_keyfile: files of a certificate and of its key, for HTTPS. ssl_keyfile_password: of
    the key. ssl_ca_certs: certificates that sign those of clients. ssl_cert_reqs: 0 = clients need no certificate, 1 =
    one that is sent is checked, 2 = one is needed. ssl_ciphers: in OpenSSL's form; None = Python's usual ones.
    max_stored_bytes: of stored responses, a quarter of them for one client; 0 = none is stored. response_ttl: until a
    stored response is deleted.
    access_log: the form of the lines for requests, which the logger `speculant.serving.access_log` gets: "none", "text"
    or "json". otlp_endpoint: the URL of an OpenTelemetry collector that gets traces, by OTLP over HTTP; None = nowhere.
    client_weights: a file with the weights of API keys, see `read_weights`; None = all have the weight 1.
    client_header: the header in which trusted proxies name their users, who then count as clients; None = no header.
    memory: bytes that the loaded ones of several models may take, or text such as "24GiB"; None = half of the memory
    that is free at the start.
    priority_range: the lowest and the highest `priority` of a request; None = priorities have no effect.
    turns_ahead: after the answer to a chat, read what the next prompt is certain to begin with, while nothing runs.
    """

    host: str = "127.0.0.1"
    port: int = 8000
    api_keys: tuple[str, ...] = ()
    served_model_names: tuple[str, ...] = ()
    allowed_origins: tuple[str, ...] = ()
    allowed_hosts: tuple[str, ...] = ()
    metrics_prefix: str = "speculant"
    metrics_without_key: bool = False
    per_request_spec_decode_metrics: str = "none"
    tool_parser: str | None = None
    root_path: str = ""
    ssl_certfile: str | None = None
    ssl_keyfile: str | None = None
    ssl_keyfile_password: str | None = None
    ssl_ca_certs: str | None = None
    ssl_cert_reqs: int = 0
    ssl_ciphers: str | None = None
    access_log: str = "none"
    otlp_endpoint: str | None = None
    max_body_bytes: int = 4 * 2**20
    max_header_bytes: int = 32 * 2**10
    max_messages: int = 2048
    max_prompts: int = 256
    max_samples: int = 2 * MAX_N
    max_draft_tokens: int | None = None
    max_prompt_characters: int = 1_000_000
    max_large_texts: int = 64
    body_timeout: float | None = 20.0
    text_timeout: float | None = 20.0
    queue_timeout: float | None = 60.0
    first_token_timeout: float | None = 300.0
    request_timeout: float | None = 1800.0
    send_timeout: float | None = 30.0
    drain_timeout: float = 30.0
    max_stored_bytes: int = 256 * 2**20
    response_ttl: float = 3600.0
    header_timeout: float | None = 10.0
    max_connections: int | None = None
    max_connections_per_address: int | None = None
    max_buffered_bytes: int = 256 * 2**20
    trusted_proxies: tuple[str, ...] = ()
    client_weights: str | None = None
    client_header: str | None = None
    priority_range: tuple[int, int] | None = None
    turns_ahead: bool = True
    memory: str | int | None = None

    def __post_init__(self) -> None:
        for name, (holds, problem, fix) in _RULES.items():
            value = getattr(self, name)
            if value is not None and not holds(value):
                raise ConfigError(f"{name}={value!r} {problem}", fix)
        for name, known in _CHOICES.items():
            if getattr(self, name) not in known:
                raise ConfigError(f"{name}={getattr(self, name)!r} is unknown", suggest(getattr(self, name), known))
        if not all(key and key.isascii() and key.isprintable() for key in self.api_keys):
            raise ConfigError("an API key is empty or has characters other than printable ASCII", "use another key.")
        if any(key != key.strip() for key in self.api_keys):
            raise ConfigError(
                "an API key begins or ends with a space, which HTTP removes from headers", "leave out the space."
            )
        formats = plugins.names("speculant.serving.tools")
        if self.tool_parser is not None and self.tool_parser not in formats:
            raise ConfigError(f"tool_parser={self.tool_parser!r} is unknown", suggest(self.tool_parser, formats))
        if self.priority_range is not None and self.priority_range[0] > self.priority_range[1]:
            low, high = self.priority_range
            raise ConfigError(f"priority_range={low}:{high} has no number", f'use "{high}:{low}".')
        if self.max_buffered_bytes < 2 * self.max_body_bytes:
            raise ConfigError(
                f"max_buffered_bytes={self.max_buffered_bytes} is less than two bodies of the largest size",
                f"use at least {2 * self.max_body_bytes}, or lower max_body_bytes.",
            )
        if self.memory is not None:
            read_bytes("memory", self.memory)
        _check_proxies(self.trusted_proxies)
        for name in ("ssl_keyfile", "ssl_keyfile_password", "ssl_ca_certs", "ssl_ciphers"):
            if getattr(self, name) is not None and self.ssl_certfile is None:
                raise ConfigError(f"{name} is given without a certificate", "give ssl_certfile (--ssl-certfile) too.")
        if self.client_header is not None and not self.trusted_proxies:
            raise ConfigError(
                f"client_header={self.client_header!r} names users, and no front end is trusted to name them",
                "give the front end's address as trusted_proxies (--trusted-proxy), or leave client_header out.",
            )
        for host in self.allowed_hosts:
            if not _HOST.fullmatch(host):
                raise ConfigError(f"allowed_hosts has {host!r}", "use a name without scheme and port, or *.")

    def memory_bytes(self) -> int:
        """Return the bytes that all loaded models may take."""
        if self.memory is not None:
            return read_bytes("memory", self.memory)
        import torch

        from speculant.engine import SHARE_OF_FREE, free_memory

        return int(SHARE_OF_FREE * free_memory(torch.device("cpu")))


def _is_url(text: str) -> bool:
    try:
        parts = urlsplit(text)
    except ValueError:
        return False
    return parts.scheme in ("http", "https") and bool(parts.hostname)


def _check_proxies(addresses: Sequence[str]) -> None:
    for address in addresses:
        try:
            ip_network(address)
        except ValueError as error:
            raise ConfigError(
                f"trusted_proxies has {address!r}: {error}", "use for example 10.0.0.7 or 10.0.0.0/8."
            ) from error


_CHOICES = {"per_request_spec_decode_metrics": METRIC_LEVELS, "access_log": ACCESS_LOGS}
_POSITIVE = (
    *("max_body_bytes", "max_header_bytes", "max_prompts", "max_samples", "max_prompt_characters", "max_large_texts"),
    "max_draft_tokens",
    *("body_timeout", "text_timeout", "queue_timeout", "first_token_timeout", "request_timeout", "send_timeout"),
    *("drain_timeout", "response_ttl", "header_timeout", "max_connections", "max_buffered_bytes"),
)
_Rule = tuple[Callable[[Any], bool], str, str]  # whether a value is valid, the problem if it is not, and the fix
_RULES: Mapping[str, _Rule] = {  # by option; None is always valid
    **{name: (lambda value: value > 0, "is not above 0", f"raise {name}.") for name in _POSITIVE},
    "root_path": (
        lambda path: not path or re.fullmatch(r"(/[\w.~-]+)+", path) is not None,
        "is not a prefix of paths",
        'use for example "/llm": it begins with a slash and ends without one.',
    ),
    "ssl_cert_reqs": (lambda level: level in (0, 1, 2), "is unknown", "use 0 (none), 1 (optional) or 2 (required)."),
    "port": (lambda port: 0 <= port <= 65535, "is not a port", "use a number from 1 to 65535, or 0 for any free one."),
    "otlp_endpoint": (_is_url, "is not a URL of a collector", 'use "http://localhost:4318".'),
    "metrics_prefix": (
        lambda prefix: prefix.isidentifier() and prefix.isascii(),
        "is not a prefix of metrics",
        'use for example "vllm".',
    ),
    "max_messages": (
        lambda most: 0 < most <= MOST_MESSAGES,
        f"is not a number from 1 to {MOST_MESSAGES}",
        "raise or lower max_messages.",
    ),
    "client_header": (
        lambda name: re.fullmatch(r"[A-Za-z0-9_-]+", name) is not None,
        "is not the name of a header",
        "use the name that the front end sends, such as X-OpenWebUI-User-Id.",
    ),
    "max_stored_bytes": (lambda most: most >= 0, "is below 0", "use 0 to store nothing, or a number of bytes."),
    "max_connections_per_address": (lambda most: most >= 0, "is below 0", "use 0 for no bound."),
}
