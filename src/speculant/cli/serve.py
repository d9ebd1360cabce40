"""`speculant serve`: an HTTP server with OpenAI's API."""

from __future__ import annotations

import inspect
import logging
import os
import re
import sys
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from dataclasses import replace
from functools import partial
from typing import TYPE_CHECKING, Annotated, Any, ClassVar, TextIO

import typer
from typing_extensions import override

from speculant.cli.flags import ChatTemplate, EngineFlags, FlagGroup, accepts_flags, parse_value
from speculant.cli.generate import fetch, given_template
from speculant.cli.terminal import end_at_once, examples, messages
from speculant.config import EngineConfig
from speculant.engine import (
    RENAMED,
    RULES,
    SERVER_RULES,
    SHORT,
    SWITCHES,
    TOOL_PARSERS,
    configured,
    read_arguments,
)
from speculant.errors import ConfigError
from speculant.gguf_file import name_of
from speculant.scale import REPLICA_FIELDS, ReplicaOptions, check_ray, replica_range
from speculant.serving import ServerOptions

if TYPE_CHECKING:
    from fastapi import FastAPI

    from speculant.engine import AsyncEngine
    from speculant.serving import ModelSource


LISTENING = "Listening at"  # the address follows
EXAMPLES = examples(
    "speculant serve demo --draft-model demo",
    "speculant serve ./llama --draft-model ./llama-small --host 0.0.0.0 --api-key secret --served-model-name llama",
    "SPECULANT_API_KEY=secret speculant serve ./qwen --metrics-prefix vllm --port 9000",
    "speculant serve ./llama --draft-model ./llama-small --replicas 1:4 --replica-cores 8",
    "speculant serve ./qwen small=./smollm.gguf --memory 24GiB",
    "curl http://127.0.0.1:8000/v1/completions -H 'Content-Type: application/json' -d '{\"prompt\": \"import os\"}'",
)


class ServerFlags(FlagGroup):
    """The server's options."""

    sets = ServerOptions

    host: Annotated[str, "Address to listen on; 0.0.0.0 = all addresses of this machine."]
    port: Annotated[int, "Port to listen on; 0 = any free one."]
    api_keys: Annotated[list[str], "Key that clients must send; can be repeated. [env: SPECULANT_API_KEY]"]
    served_model_names: Annotated[list[str], "Name of the model for clients; can be repeated."]
    allowed_origins: Annotated[list[str], "Another site whose pages may use the server (CORS); can be repeated."]
    allowed_hosts: Annotated[list[str], "Another name of the server, if it has no keys; * = any; can be repeated."]
    metrics_prefix: Annotated[str, "Prefix of the metrics' names, beside vLLM's; vllm = that one alone."]
    metrics_without_key: Annotated[bool, "Answer /metrics to clients without a key, for gateways that send none."]
    per_request_spec_decode_metrics: Annotated[str, "Figures on speculation in responses: none, summary or detailed."]
    tool_parser: Annotated[str, "Format of tool calls [default: that of the chat template]."]
    root_path: Annotated[str, "Prefix of paths that a proxy leaves in its requests, such as /llm."]
    ssl_certfile: Annotated[str, "Certificate in PEM, for HTTPS."]
    ssl_keyfile: Annotated[str, "Its key in PEM [default: in the certificate's file]."]
    ssl_keyfile_password: Annotated[str, "Password of the key."]
    ssl_ca_certs: Annotated[str, "Certificates in PEM that sign those of clients."]
    ssl_cert_reqs: Annotated[int, "Certificates of clients: 0 = none, 1 = checked if sent, 2 = needed."]
    ssl_ciphers: Annotated[str, "Ciphers of HTTPS, in OpenSSL's form."]
    access_log: Annotated[str, "Print a line for each request: none, text or json."]
    otlp_endpoint: Annotated[str, "OpenTelemetry collector that gets traces, such as http://localhost:4318."]
    max_body_bytes: Annotated[int, "The most bytes of a body."]
    max_header_bytes: Annotated[int, "The most bytes of the headers."]
    max_messages: Annotated[int, "The most messages of a conversation."]
    max_prompts: Annotated[int, "The most prompts of a completion."]
    max_samples: Annotated[int, "The most answers to one request, over all its prompts."]
    max_draft_tokens: Annotated[int, "The most tokens of a client's draft [default: the engine's own number]."]
    max_prompt_characters: Annotated[int, "The most characters of a prompt."]
    max_large_texts: Annotated[int, "The most requests of one client with large texts that may wait to be read."]
    body_timeout: Annotated[float, "Seconds for a body to arrive."]
    text_timeout: Annotated[float, "Seconds for rendering and tokenising a prompt."]
    queue_timeout: Annotated[float, "Seconds that a request may wait for its first step."]
    first_token_timeout: Annotated[float, "Seconds until a request's first token."]
    request_timeout: Annotated[float, "Seconds until a request's end."]
    send_timeout: Annotated[float, "Seconds that a client may leave data unread."]
    drain_timeout: Annotated[float, "Seconds that running requests get after SIGTERM."]
    max_stored_bytes: Annotated[int, "The most bytes of stored responses; 0 = store none."]
    response_ttl: Annotated[float, "Seconds until a stored response is deleted."]
    header_timeout: Annotated[float, "Seconds for a request's headers, from the connection's beginning or last answer."]
    max_connections: Annotated[int, "The most open connections [default: 4096, or as many as ulimit -n leaves room]."]
    max_connections_per_address: Annotated[int, "The most of one address [default: half of all]; 0 = no bound."]
    max_buffered_bytes: Annotated[int, "The most bytes of the bodies of all requests at a time."]
    trusted_proxies: Annotated[list[str], "Proxy (address or network) whose X-Forwarded-For counts; can be repeated."]
    client_weights: Annotated[str, 'File with the weights of API keys: {"KEY": 2.0, ...} [default: all have 1].']
    client_header: Annotated[str, "Header in which a trusted proxy names its users, such as X-OpenWebUI-User-Id."]
    turns_ahead: Annotated[bool, "Read the certain beginning of a chat's next prompt while nothing runs."]
    priority_range: Annotated[str, "LOW:HIGH, the priorities that requests may have [default: they have no effect]."]
    memory: Annotated[str, "Memory that the loaded models share, if there are several [default: half of what is free]."]

    aliases: ClassVar[Mapping[str, str]] = {  # vLLM's names
        "otlp_endpoint": "--otlp-traces-endpoint",
        "tool_parser": "--tool-call-parser",
    }
    renamed: ClassVar[Mapping[str, str]] = {
        "api_keys": "api_key",
        "served_model_names": "served_model_name",
        "allowed_origins": "allowed_origin",
        "allowed_hosts": "allowed_host",
        "trusted_proxies": "trusted_proxy",
    }

    def options(self) -> ServerOptions:
        """Return the server's options."""
        values: dict[str, Any] = {
            name: tuple(value) if isinstance(value, list) else value for name, value in self.given.items()
        }
        if "api_keys" not in values and (key := os.environ.get("SPECULANT_API_KEY")):
            values["api_keys"] = (key,)
        if "priority_range" in values:
            values["priority_range"] = _range(values["priority_range"])
        if "tool_parser" in values:
            values["tool_parser"] = TOOL_PARSERS.get(values["tool_parser"], values["tool_parser"])
        return ServerOptions(**values)


def _range(text: str) -> tuple[int, int]:
    """Read LOW:HIGH."""
    low, _, high = text.partition(":")
    try:
        return int(low), int(high)
    except ValueError:
        raise ConfigError(f"--priority-range {text!r} is not LOW:HIGH", "write for example -10:10.") from None


class ReplicaFlags(FlagGroup):
    """Several engines on a Ray cluster."""

    sets = ReplicaOptions

    replicas: Annotated[str, "N engines on a Ray cluster (extra ray), or LOW:HIGH of them, as many as the load needs."]
    cores: Annotated[int, "Cores that each replica has for itself [default: an equal share of all]."]
    routing: Annotated[str, "Which replica answers: prefix (has seen a prompt that begins alike) or load."]
    imbalance: Annotated[int, "Requests that a replica may have more than another for the sake of a prefix."]
    address: Annotated[str, "The Ray cluster [env: RAY_ADDRESS; default: a new one on this machine]."]

    renamed: ClassVar[Mapping[str, str]] = {field: name for name, field in REPLICA_FIELDS.items()}

    def options(self) -> ReplicaOptions | None:
        """Return the replicas' options; None = one engine in this process, without Ray."""
        if not self.given:
            return None
        if "replicas" not in self.given:
            raise ConfigError("options of replicas are given, and no number of them", "add --replicas N.")
        return ReplicaOptions(**{**self.given, "replicas": replica_range(self.given["replicas"])})


class VllmFlags(FlagGroup):
    """vLLM's further arguments: those of `LLM`, and those of its server alone. The help does not list them."""

    switches: ClassVar[Collection[str]] = SWITCHES
    honoured: ClassVar[Collection[str]] = ("generation_config", "override_generation_config", "seed", *RENAMED)

    @classmethod
    @override
    def names(cls) -> list[str]:
        served = {*ServerFlags.names(), *ServerFlags.renamed.values()}
        return [name for name in (*cls.honoured, *RULES, *SERVER_RULES) if name not in served]

    @classmethod
    @override
    def parameters(cls) -> Iterator[inspect.Parameter]:
        for name in cls.names():
            flag = f"--{name.replace('_', '-')}"
            both = f"{flag}/--no-{flag[2:]}" if name in cls.switches else flag
            option = typer.Option(*filter(None, (both, SHORT.get(name))), hidden=True)
            kind = bool if name in cls.switches else str
            yield inspect.Parameter(
                name, inspect.Parameter.KEYWORD_ONLY, default=None, annotation=Annotated[kind | None, option]
            )

    def arguments(self) -> dict[str, Any]:
        """Return the arguments of `AsyncEngine`, and say which others have no effect. Raises ConfigError."""
        values = {name: parse_value(value) if isinstance(value, str) else value for name, value in self.given.items()}
        useless = [name for name in values if name not in self.honoured]
        for name in useless:
            {**RULES, **SERVER_RULES}[name].check(f"--{name.replace('_', '-')}", values.pop(name))
        if useless:
            shown = ", ".join(f"--{name.replace('_', '-')}" for name in useless)
            messages().print(f"without effect here (docs/vllm.md): {shown}", style="dim")
        return values


@accepts_flags
def serve(
    targets: Annotated[
        list[str] | None,
        typer.Argument(
            metavar="[NAME=]MODEL...",
            help="The target: a folder or GGUF file, a Hugging Face id, or demo. Of several, requests name one.",
        ),
    ] = None,
    chat_template: ChatTemplate = None,
    *,
    server: ServerFlags,
    engine: EngineFlags,
    replicas: ReplicaFlags,
    vllm: VllmFlags,
) -> None:
    """Serve a model, or several, over HTTP, in the shape of OpenAI's API.

    /health answers while the model loads. Of several models, each is loaded when a request first names it. After
    SIGTERM or Ctrl-C the server ends once the running requests have ended. Ctrl-C during loading ends it at once.

    vLLM's other flags are read too (docs/vllm.md).
    """
    models, options = named_models(targets or []), server.options()
    if len(models) > 1:
        given = {**engine.parsed(), **vllm.arguments()}
        if chat_template is not None:
            given["chat_template"] = chat_template
        if "SPECULANT_MODEL" in os.environ:
            given.pop("model", None)  # an empty variable names none
        run_several(models, given, options, replicas.options())
        return
    for name, model in models:
        engine.name_model(model)
        options = options if name is None else _with_name(options, name)
    values = read_arguments({**engine.values(), **vllm.arguments()})
    config, template = EngineConfig.from_arguments(**configured(values)), given_template(chat_template)
    values |= {} if template is None else {"chat_template": template}
    run(values, options, config, replicas.options())


def run(
    values: dict[str, Any], options: ServerOptions, config: EngineConfig, replicas: ReplicaOptions | None = None
) -> None:
    """Serve until a signal, with an engine of this process or with replicas.

    Raises the error of a load that failed, and ConfigError for an address in use.
    """
    make_app = _application_maker()
    short = name_of(values["model"])
    name = (*options.served_model_names, short)[0]

    described: list[str] = []

    def describe(speculating: bool, speculation: str, context: str, place: str = "") -> None:
        described.append(_ready(name, speculating, speculation, context, place))

    if replicas is None:
        app = make_app(partial(_load, values, describe), options, [short, values["model"]])
    else:
        check_ray()
        from speculant.scale import LocalReplicas, make_front

        app = make_front(LocalReplicas(values, options, replicas, describe), options)
    _serve(app, options, f"loading {name}", lambda: fetch(config), lambda: messages().print(*described))
    if app.state.server.load_error is not None:
        raise app.state.server.load_error


def _application_maker() -> Callable[..., FastAPI]:
    """Return `make_app`. Raises ConfigError if packages are missing."""
    try:
        from speculant.serving import make_app
    except ImportError as error:
        raise ConfigError(
            f"the server's packages are not installed: {error}", 'pip install -c constraints.txt "speculant[serve]"'
        ) from error
    return make_app


def _serve(
    app: FastAPI,
    options: ServerOptions,
    doing: str,
    prepare: Callable[[], object],
    on_ready: Callable[[], None] = lambda: None,
) -> None:
    """Serve until a signal. doing: follows the address in the message. prepare: is called once the address is free."""
    from speculant.serving import Server

    if options.access_log != "none":
        _print_access_log()
    logging.getLogger("asyncio").setLevel(logging.ERROR)  # it warns about each write to a client that has disconnected
    server = Server(
        app,
        options,
        lambda address: messages().print(f"{LISTENING} {address} (also with a browser); {doing}"),
        end_at_once,
        on_ready,
    )
    prepare()
    server.run()


def _ready(name: str, speculating: bool, speculation: str, context: str, place: str = "") -> str:
    state = f"speculation is {'on' if speculating else 'off'}: {speculation}"
    return f"{name}: ready{place}; {state}; context: {context}"


_NAME = re.compile(r"[\w./:@+-]+")
_OF_ONE_MODEL = ("model", "revision", "tokenizer", "tokenizer_revision", "chat_template")


def named_models(given: Sequence[str]) -> list[tuple[str | None, str]]:
    """Read arguments [NAME=]MODEL; None = no name is given. Raises ConfigError."""
    found = list[tuple[str | None, str]]()
    for each in given:
        name, equals, model = each.partition("=")
        if not equals or os.path.exists(each):
            found.append((None, each))
        elif model and _NAME.fullmatch(name):
            found.append((name, model))
        else:
            raise ConfigError(f"{each!r} is not NAME=MODEL", "write for example small=./smollm.gguf.")
    return found


def _with_name(options: ServerOptions, name: str) -> ServerOptions:
    if options.served_model_names:
        raise ConfigError("the model has a NAME, and --served-model-name", "leave out one of the two.")
    return replace(options, served_model_names=(name,))


def run_several(
    models: Sequence[tuple[str | None, str]],
    values: dict[str, Any],
    options: ServerOptions,
    replicas: ReplicaOptions | None = None,
) -> None:
    """Serve several models until a signal. values: the engines' arguments. Raises ConfigError."""
    named = [name for name in _OF_ONE_MODEL if name in values]
    flag = f"--{named[0].replace('_', '-')}" if named else "--served-model-name" if options.served_model_names else ""
    if flag:
        variable = f"SPECULANT_{named[0].upper()}" if named else ""
        raise ConfigError(
            f"{variable if variable in os.environ else flag} is about one model, and {len(models)} are served",
            "leave it out: a name is written NAME=MODEL, and drafts near a model are found.",
        )
    if replicas is not None:
        raise ConfigError(f"{len(models)} models are served, and replicas are of one", "leave out one of the two.")
    names = [(name or name_of(model), *([] if name else [model])) for name, model in models]
    for place, own in enumerate(names):
        if taken := [name for name in own if any(name in other for other in names[:place])]:
            raise ConfigError(f"two models are called {taken[0]!r}", "name one of them: NAME=MODEL.")
    make_app, arguments = _application_maker(), read_arguments(values)
    from speculant.serving import check_sizes

    share = 1 / (2 * len(models)) if arguments.get("kv_memory") in (None, "auto") else 0.0
    if share:
        arguments["kv_memory"] = max(1, int(share * options.memory_bytes()))
    configs = [EngineConfig.from_arguments(**configured({**arguments, "model": model})) for _, model in models]
    for config in configs:
        spec = config.speculative()
        if spec is not None and spec.model is not None:
            raise ConfigError("a draft is for one model, and several are served", "leave it out: drafts are found.")
    sources = _sources(names, configs, arguments)
    shown = ", ".join(own[0] for own in names)

    def prepare() -> None:
        for config in configs:
            fetch(config)
        check_sizes(sources, options.memory_bytes(), share)

    _serve(make_app(sources, options), options, f"{shown} are loaded when a request names them", prepare)


def _sources(
    names: Sequence[Sequence[str]], configs: Sequence[EngineConfig], arguments: Mapping[str, Any]
) -> list[ModelSource]:
    """Return how each model is loaded. Their engines step in turns."""
    from speculant.engine import FairSteps, expected_bytes
    from speculant.serving import ModelSource

    steps = FairSteps()

    def load(name: str, model: str) -> AsyncEngine:
        values = {**arguments, "model": model, "steps": steps}
        return _load(values, lambda *facts: messages().print(_ready(name, *facts)))

    return [
        ModelSource(own, partial(load, own[0], config.model), partial(expected_bytes, config))
        for own, config in zip(names, configs, strict=True)
    ]


def _load(values: dict[str, Any], describe: Callable[..., None]) -> AsyncEngine:
    """Load an engine in this process, and describe it."""
    from speculant.serving import load_engine

    engine = load_engine(values)
    describe(engine.speculating, engine.speculation, engine.context)
    return engine


class LinePrinter(logging.StreamHandler[TextIO]):
    """Prints lines as they come. If the program that reads them has ended, they are dropped."""

    @override
    def handleError(self, record: logging.LogRecord) -> None:
        pass  # the base class would print a traceback for each line


def _print_access_log() -> None:
    """Print the access log's lines to standard output."""
    from speculant.serving import logger

    handler = LinePrinter(sys.stdout)
    handler.setFormatter(logging.Formatter("%(message)s"))
    logger.addHandler(handler)
    logger.setLevel(logging.INFO)
    logger.propagate = False
