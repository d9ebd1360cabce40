"""`speculant serve`: an HTTP server with OpenAI's API."""

from __future__ import annotations

import gc
import logging
import os
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from speculant.cli.flags import EngineFlags, FlagGroup, accepts_flags
from speculant.cli.generate import fetch
from speculant.cli.terminal import end_at_once, examples, messages
from speculant.config import EngineConfig
from speculant.errors import ConfigError
from speculant.lab.bench.server_process import LISTENING
from speculant.serving.options import ServerOptions

if TYPE_CHECKING:
    from speculant.engine.async_engine import AsyncEngine

EXAMPLES = examples(
    "speculant serve demo --draft-model demo",
    "speculant serve ./llama --draft-model ./llama-small --host 0.0.0.0 --api-key secret --served-model-name llama",
    "SPECULANT_API_KEY=secret speculant serve ./qwen --metrics-prefix vllm --port 9000",
    "curl http://127.0.0.1:8000/v1/completions -H 'Content-Type: application/json' -d '{\"prompt\": \"import os\"}'",
)


class ServerFlags(FlagGroup):
    """The server's options."""

    sets = ServerOptions

    host: Annotated[str, "Address to listen at; 0.0.0.0 = all of this machine's."]
    port: Annotated[int, "Port to listen at; 0 = any free one."]
    api_keys: Annotated[list[str], "Key that clients must send; can be repeated. [env: SPECULANT_API_KEY]"]
    served_model_names: Annotated[list[str], "Name of the model for clients; can be repeated."]
    allowed_origins: Annotated[list[str], "Other site whose pages may use the server (CORS); can be repeated."]
    metrics_prefix: Annotated[str, "Prefix of the metrics' names; vLLM's names are listed too."]
    per_request_spec_decode_metrics: Annotated[
        str, "What responses say about their speculation: none, summary or detailed."
    ]
    tool_parser: Annotated[str, "Format of tool calls; else that of the chat template."]
    max_body_bytes: Annotated[int, "Bytes of a body at most."]
    max_header_bytes: Annotated[int, "Bytes of the headers at most."]
    max_messages: Annotated[int, "Messages of a conversation at most."]
    max_prompts: Annotated[int, "Prompts of a completion at most."]
    max_samples: Annotated[int, "Answers to one request at most, over all its prompts."]
    max_prompt_characters: Annotated[int, "Characters of a prompt at most."]
    body_timeout: Annotated[float, "Seconds in which a body has to arrive."]
    text_timeout: Annotated[float, "Seconds for a prompt's template and tokens."]
    queue_timeout: Annotated[float, "Seconds that a request may wait for its first step."]
    first_token_timeout: Annotated[float, "Seconds until a request's first token at most."]
    request_timeout: Annotated[float, "Seconds until a request's end at most."]
    send_timeout: Annotated[float, "Seconds that a client may read nothing of what it is sent."]
    drain_timeout: Annotated[float, "Seconds that running requests get after SIGTERM."]

    renamed = {"api_keys": "api_key", "served_model_names": "served_model_name", "allowed_origins": "allowed_origin"}  # noqa: RUF012

    def options(self) -> ServerOptions:
        """Return the server's options."""
        values: dict[str, Any] = {
            name: tuple(value) if isinstance(value, list) else value for name, value in self.given.items()
        }
        if "api_keys" not in values and (key := os.environ.get("SPECULANT_API_KEY")):
            values["api_keys"] = (key,)
        return ServerOptions(**values)


@accepts_flags
def serve(
    target: Annotated[
        str | None, typer.Argument(metavar="MODEL", help="The target: a folder, a Hugging Face id, or demo.")
    ] = None,
    *,
    server: ServerFlags,
    engine: EngineFlags,
) -> None:
    """Serve a model over HTTP, in the shape of OpenAI's API.

    It answers /health while the model is loaded, and ends with SIGTERM or Ctrl-C once the running requests have.
    Ctrl-C while the model is loaded ends it at once.
    """
    engine.name_model(target)
    values, options = engine.values(), server.options()
    run(values, options, EngineConfig.from_arguments(**values))


def run(values: dict[str, Any], options: ServerOptions, config: EngineConfig) -> None:
    """Serve until a signal. Raises the error of a load that failed, and ConfigError for an address in use."""
    try:
        from speculant.serving.app import make_app
        from speculant.serving.server import Server
    except ImportError as error:
        raise ConfigError(
            f"the server's packages are not installed: {error}", 'pip install -c constraints.txt "speculant[serve]"'
        ) from error

    def load() -> AsyncEngine:
        from speculant.engine.async_engine import AsyncEngine

        loaded = AsyncEngine(**values)
        gc.collect()
        gc.freeze()  # what is loaded stays: to look at it in each collection would hold up all requests
        state = f"speculation is {'on' if loaded.speculating else 'off'}: {loaded.speculation}"
        messages().print(f"{name}: ready; {state}; context: {loaded.context}")
        return loaded

    logging.getLogger("asyncio").setLevel(logging.ERROR)  # it warns of each write to a client that has just gone
    short = _short(values["model"])
    name = (*options.served_model_names, short)[0]
    app = make_app(load, options, [short, values["model"]])
    server = Server(
        app,
        options,
        lambda address: messages().print(f"{LISTENING} {address} (also with a browser); loading {name}"),
        end_at_once,
    )
    fetch(config)
    server.run()
    if app.state.server.load_error is not None:
        raise app.state.server.load_error


def _short(model: str) -> str:
    """Return the name of a model without the path of its folder."""
    return Path(model).resolve().name if Path(model).is_dir() else model
