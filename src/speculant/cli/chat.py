"""`speculant chat`: a conversation in the terminal."""

from __future__ import annotations

import json
import re
import signal
import sys
import threading
import time
import urllib.error
import urllib.request
from collections.abc import Generator, Iterator, Mapping, Sequence
from contextlib import closing, contextmanager, suppress
from dataclasses import dataclass, field, replace
from http.client import HTTPException, HTTPResponse
from types import FrameType
from typing import TYPE_CHECKING, Annotated, Any, ClassVar, Protocol

import typer
from typing_extensions import override

from speculant.cli.demo import ACCEPTED
from speculant.cli.flags import ChatTemplate, ChatVariables, EngineFlags, Model, SamplingFlags, accepts_flags
from speculant.cli.generate import fetch, figures, given_template, given_variables, load, speed
from speculant.cli.terminal import VerbatimConsole, examples, messages, notice, progress, results, show_error
from speculant.config import EngineConfig
from speculant.errors import ConfigError, ContextFullError, RequestError, ServerError, SpeculantError, suggest

if TYPE_CHECKING:
    from speculant.engine import LLM, RenderedPrompt
    from speculant.params import SamplingParams


Messages = Sequence[Mapping[str, Any]]
_PATIENCE = 300.0  # seconds without data from a server
_LONGEST_LINE = 2**22  # bytes of an event
_LONGEST_ERROR = 2**16


@dataclass(frozen=True)
class AnswerPiece:
    """A part of an answer. drafted: an accepted draft token; None = unknown. reasoning: it precedes the answer."""

    text: str
    drafted: bool | None = None
    reasoning: bool = False


@dataclass(frozen=True)
class Summary:
    """brief: the speed of an answer. full: the same with figures on speculation.

    cut: the limit that ended the answer. filled: this limit is the context.
    """

    brief: str
    full: str
    cut: str = ""
    filled: bool = False


Answer = Generator[AnswerPiece, None, Summary]


class ChatBackend(Protocol):
    """Answers conversations. waits: an exception may interrupt the call that waits for the next piece."""

    waits: bool

    @property
    def growth(self) -> str:
        """What gives the model a longer context; "" = nothing, or it is unknown."""
        ...

    @property
    def introduction(self) -> str:
        """The model's name, and whether speculation is on."""
        ...

    @property
    def can_switch(self) -> bool:
        """Whether speculation can be switched."""
        ...

    def answer(self, messages: Messages, speculating: bool | None) -> Answer:
        """Yield the next answer; closing the generator ends it early. speculating: None = as the settings define.

        Raises ContextFullError for messages that leave no room for an answer.
        """
        ...

    def fits(self, messages: Messages) -> bool:
        """Whether the context has room for an answer to these messages; True if that is unknown."""
        ...


@dataclass
class LocalChatBackend(ChatBackend):
    """A model in this process. variables: of its chat template."""

    llm: LLM
    params: SamplingParams
    variables: Mapping[str, Any] = field(default_factory=dict)
    waits = False

    @property
    @override
    def introduction(self) -> str:
        state = f"speculation is {'on' if self.llm.speculating else 'off'}: {self.llm.speculation}"
        return f"{self.llm.config.model}; {state}; context: {self.llm.context}"

    @property
    @override
    def can_switch(self) -> bool:
        return self.llm.speculating

    @override
    def answer(self, messages: Messages, speculating: bool | None) -> Answer:
        params = self.params
        if speculating is not None and speculating != (params.speculation is not False):
            params = replace(params, speculation=None if speculating else False)
        drafting, output = self.llm.speculating and params.speculation is not False, None
        prompt, longest = self._prompt(messages), self.llm.limits.max_model_len
        number = len(prompt.tokens or ())
        if number >= longest and params.truncate_prompt_tokens is None:
            problem = f"the conversation has {number} tokens and the context {longest}, which leaves none to generate"
            raise ContextFullError(problem, "shorten the message.")
        with closing(self.llm.stream(prompt, params)) as pieces:  # type: ignore[type-var]
            for piece in pieces:
                yield AnswerPiece(piece.text, piece.drafted if drafting else None)
                output = piece.output
        assert output is not None, "a stream ends with its output"
        number, timing = len(output.outputs[0].token_ids), output.metrics.timing
        brief = speed(number, (timing.ttft_s or 0.0) + timing.decode_s)
        is_cut, total = output.outputs[0].finish_reason == "length", output.num_prompt_tokens + number
        cut, filled = _limit(number, params.max_tokens, total, longest) if is_cut else ("", False)
        return Summary(brief, figures(self.llm, output), cut, filled)

    @property
    @override
    def growth(self) -> str:
        most, now = self.llm.checkpoint.model.max_positions, self.llm.limits.max_model_len
        if now >= most:
            return ""
        flag = "--max-model-len" if self.llm.config.max_model_len is not None else "--kv-memory"
        return f"a higher {flag} gives up to {most} tokens"

    @override
    def fits(self, messages: Messages) -> bool:
        return len(self._prompt(messages).tokens or ()) < self.llm.limits.max_model_len

    def _prompt(self, messages: Messages) -> RenderedPrompt:
        prompt = self.llm.render_chat(messages, chat_template_kwargs=self.variables)
        return replace(prompt, tokens=self.llm.tokenizer.encode(prompt.text, add_special_tokens=False))


@dataclass
class RemoteChatBackend(ChatBackend):
    """A server with OpenAI's API. `model`: None = the first one that it lists; `settings` are added to each request.

    served: the model as the server lists it.

    Raises ServerError if it can't be reached, RequestError for a model that it does not have.
    """

    url: str
    model: str | None = None
    api_key: str | None = None
    settings: Mapping[str, Any] = field(default_factory=dict)
    waits = True

    def __post_init__(self) -> None:
        if not self.url.startswith(("http://", "https://")):
            raise RequestError(f"{self.url!r} is not the address of a server", "write it like http://127.0.0.1:8000.")
        base = self.url.rstrip("/")
        self._base = base if base.endswith("/v1") else base + "/v1"
        self.served = self._find_model()

    @property
    @override
    def introduction(self) -> str:
        speculation = self.served.get("speculation")
        if not isinstance(speculation, dict):
            return f"{self.served['id']} at {self._base}"
        state = "on" if speculation.get("on") else "off"
        return f"{self.served['id']} at {self._base}; speculation is {state}: {speculation.get('detail')}"

    @property
    @override
    def can_switch(self) -> bool:  # only this package's server has a switch
        return self.served.get("owned_by") == "speculant"

    @override
    def answer(self, messages: Messages, speculating: bool | None) -> Answer:
        asked = {"model": self.served["id"], "messages": list(messages), "stream": True, **self.settings}
        asked["stream_options"] = {"include_usage": True}
        if self.can_switch:
            asked["speculant"] = {"tokens": True}
            asked |= {} if speculating is None else {"speculation": speculating}
        count = _Count(self.settings.get("max_tokens"), self.served.get("max_model_len"))
        with self._send("/chat/completions", asked) as response:
            for chunk in _events(response):
                yield from count.read(chunk)
        return count.summary()

    @property
    @override
    def growth(self) -> str:
        return ""

    @override
    def fits(self, messages: Messages) -> bool:
        return True

    def _find_model(self) -> Mapping[str, Any]:
        with self._send("/models") as response:
            listed = _parsed(response.read(_LONGEST_LINE)).get("data")
        models = {
            each["id"]: each for each in listed or () if isinstance(each, dict) and isinstance(each.get("id"), str)
        }
        if not models:
            raise ServerError(f"{self._base} lists no models", "name a server with OpenAI's API.")
        if self.model is not None and self.model not in models:
            raise RequestError(f"the server has no model {self.model!r}", f"it has: {', '.join(models)}.")
        return models[self.model or next(iter(models))]

    def _send(self, path: str, body: Mapping[str, Any] | None = None) -> HTTPResponse:
        headers = {"Content-Type": "application/json", "Accept": "application/json, text/event-stream"}
        if self.api_key is not None:
            headers["Authorization"] = f"Bearer {self.api_key}"
        data = None if body is None else json.dumps(body).encode("ascii")
        request = urllib.request.Request(self._base + path, data, headers)
        try:
            response: HTTPResponse = urllib.request.urlopen(request, timeout=_PATIENCE)
        except urllib.error.HTTPError as error:
            with error:
                raise _refused(error.code, _parsed(error.read(_LONGEST_ERROR))) from None
        except (OSError, HTTPException) as error:
            reason = getattr(error, "reason", error)
            raise ServerError(
                f"{self._base} can't be reached: {reason}", "start the server, or correct --url."
            ) from error
        return response


@dataclass
class _Count:
    """Figures from the chunks of an answer. most: its max_tokens. context: the server's. None = unknown."""

    most: int | None = None
    context: int | None = None
    started: float = field(default_factory=time.perf_counter)
    pieces: int = 0
    usage: Mapping[str, Any] = field(default_factory=dict)
    speculation: Mapping[str, Any] = field(default_factory=dict)
    cut: bool = False

    def read(self, chunk: Mapping[str, Any]) -> Iterator[AnswerPiece]:
        """Yield the text of a chunk."""
        self.usage = chunk.get("usage") or self.usage
        self.speculation = (chunk.get("metrics") or {}).get("speculative_decoding") or self.speculation
        tokens = chunk.get("speculant_tokens")
        drafted = bool(tokens[-1].get("drafted")) if tokens else None
        for choice in chunk.get("choices") or ():
            self.cut = self.cut or choice.get("finish_reason") == "length"
            delta = choice.get("delta") or {}
            for name, reasoning in (("reasoning_content", True), ("reasoning", True), ("content", False)):
                if text := delta.get(name):
                    self.pieces += 1
                    yield AnswerPiece(text, drafted, reasoning)

    def summary(self) -> Summary:
        """Return the speed, and figures on speculation if the server sent them."""
        tokens = self.usage.get("completion_tokens") or self.pieces
        made = speed(tokens, time.perf_counter() - self.started)
        total = tokens + (self.usage.get("prompt_tokens") or 0)
        cut, filled = _limit(tokens, self.most, total, self.context) if self.cut else ("", False)
        if not self.speculation:
            return Summary(made, made, cut, filled)
        per_pass, length, rate = (
            float(self.speculation.get(name) or 0)
            for name in ("tokens_per_pass", "mean_acceptance_length", "acceptance_rate")
        )
        figure = f"{per_pass:.2f} tokens per pass" if per_pass else f"mean acceptance length {length:.2f}"
        return Summary(made, f"{made}; {figure}, acceptance rate {rate:.2f}", cut, filled)


def _limit(tokens: int, most: int | None, total: int, context: int | None) -> tuple[str, bool]:
    """Return the limit that cut an answer, and whether it is the context. total: with the conversation's tokens."""
    if tokens == most:
        return f"cut at --max-tokens {most}", False
    if context is not None and total >= context:
        return f"cut: the conversation fills the context of {context} tokens", True
    return "cut at a limit of the server", False


def _events(response: HTTPResponse) -> Iterator[Mapping[str, Any]]:
    """Yield the chunks of a stream of server-sent events. Raises ServerError for an error event, or an early end."""
    try:
        while line := response.readline(_LONGEST_LINE):
            if not line.startswith(b"data:"):
                continue
            data = line.removeprefix(b"data:").strip()
            if data == b"[DONE]":
                return
            chunk = _parsed(data)
            if "error" in chunk:
                raise ServerError(f"the server ended the answer: {_message(chunk)}", "ask again.")
            yield chunk
    except (OSError, HTTPException) as error:
        raise ServerError(f"the connection was lost: {error}", "ask again.") from error
    raise ServerError("the server ended the answer early", "ask again.")


def _parsed(data: bytes) -> Mapping[str, Any]:
    """Return a JSON object; an empty one for anything else."""
    try:
        value = json.loads(data)
    except (ValueError, RecursionError):
        return {}
    return value if isinstance(value, dict) else {}


def _refused(status: int, body: Mapping[str, Any]) -> RequestError | ServerError:
    reason = f"the server refused the request: {_message(body)} ({status})"
    if status == 400 and re.search(r"max_model_len|\bcontext\b", reason):
        return ContextFullError(reason, "shorten the message.")
    if status == 401:
        return RequestError(reason, "give --api-key.")
    if status < 500 and status not in (408, 429):
        return RequestError(reason, "correct the request, or --url.")
    return ServerError(reason, "ask again later.")


def _message(body: Mapping[str, Any]) -> str:
    error = body.get("error")
    return str(error.get("message") if isinstance(error, dict) else error or "no reason given")


EXAMPLES = examples(
    "speculant chat demo --draft-model demo",
    'speculant chat ./qwen --draft-model ./qwen-small --system "Answer in one sentence."',
    "speculant chat model-Q4_K_M.gguf --chat-template template.jinja",
    "speculant chat --url http://127.0.0.1:8000 --temperature 0",
    "printf 'Hi\\n/speculation off\\nHi again\\n' | speculant chat demo --max-tokens 40",
)
COMMANDS = {
    "/exit": "end the program (Ctrl-D too)",
    "/help": "show the commands",
    "/reset": "forget the conversation",
    "/speculation": "on or off: switch speculation",
    "/system": "TEXT: set the system message; without TEXT, remove it",
}
_UNFIT = ("n", "beam_width", "logprobs", "prompt_logprobs")  # settings that make no sense in a conversation


class ChatSampling(SamplingFlags):
    """The same flags; an answer ends where the model ends it. If prompts are cut to make room, the room is small."""

    defaults: ClassVar[Mapping[str, object]] = {"max_tokens": "as the context allows"}

    @property
    @override
    def new_tokens(self) -> int | None:
        return super().new_tokens if "truncate_prompt_tokens" in self.given else None


@accepts_flags
def chat(
    target: Model = None,
    url: Annotated[
        str | None, typer.Option(help="Talk to this server, by OpenAI's API; MODEL is its name for a model.")
    ] = None,
    api_key: Annotated[
        str | None,
        typer.Option(envvar="SPECULANT_API_KEY", help="The server's key. [env: SPECULANT_API_KEY]", show_envvar=False),
    ] = None,
    system: Annotated[str | None, typer.Option(help="The system message.")] = None,
    verbose: Annotated[
        bool,
        typer.Option("--verbose", help="After each answer, show figures on speculation and the weights in use."),
    ] = False,
    chat_template: ChatTemplate = None,
    chat_variables: ChatVariables = None,
    *,
    sampling: ChatSampling,
    engine: EngineFlags,
) -> None:
    """Talk to a model.

    Each line is a message; piped input works too. Accepted draft tokens are green where the terminal has colours.
    The speed follows each answer on standard error. Ctrl-C ends an answer. /help lists the commands.
    """
    if unfit := [name for name in _UNFIT if name in sampling.given]:
        flag = unfit[0].replace("_", "-")
        raise ConfigError(
            f"--{flag} has no meaning in a conversation", "leave it out, or use speculant generate --chat."
        )
    sampling.params()  # checks ranges before anything is loaded
    engine.name_model(target)
    variables = given_variables(chat_variables)
    if url is None:
        backend: ChatBackend = _local(sampling, engine, given_template(chat_template), variables)
    elif chat_template is not None:
        raise ConfigError("--chat-template has no meaning with --url", "give it to speculant serve.")
    else:
        named = engine.remote_model()  # leaves out a name from the environment
        asked = {"chat_template_kwargs": variables} if variables else {}
        backend = RemoteChatBackend(url, target or named, api_key, {**sampling.fields(), **asked})
    Conversation(backend, system, sys.stdin.isatty(), verbose).run()


def _local(
    sampling: SamplingFlags, engine: EngineFlags, chat_template: str | None, variables: Mapping[str, Any]
) -> ChatBackend:
    values = engine.values()
    fetch(EngineConfig.from_arguments(**values))
    with progress("Loading the models"):
        llm = load(values, chat_template)
    llm.render_chat([{"role": "user", "content": "Hi"}])  # refuses a model without a template before anything is typed
    return LocalChatBackend(llm, sampling.params(llm.default_params), variables)


@dataclass
class Conversation:
    """The conversation so far, and the settings of the next answers.

    interactive: input is typed, and errors are shown at once. verbose: each answer is followed by its speed and by
    figures on speculation.
    """

    backend: ChatBackend
    system: str | None
    interactive: bool
    verbose: bool = False
    turns: list[dict[str, Any]] = field(default_factory=list)
    speculating: bool | None = None  # None = as set by the flags

    def run(self) -> None:
        """Answer until the input ends. An interactive session shows a SpeculantError; otherwise it is raised."""
        marks = "; accepted draft tokens are green" if self.backend.can_switch and _is_coloured(results()) else ""
        notice(self.backend.introduction + (f"{marks}; /help lists the commands" if self.interactive else ""))
        for line in _lines(self.interactive):
            try:
                if line == "/exit":
                    return
                self.read(line)
            except SpeculantError as error:
                if not self.interactive:
                    raise
                show_error(error)

    def read(self, line: str) -> None:
        """Run a command, or answer a message."""
        if not line.startswith("/"):
            self._answer(line)
            return
        command, _, value = line.partition(" ")
        match command:
            case "/reset":
                self.turns.clear()
                notice("the conversation is empty")
            case "/system":
                self.system = value.strip() or None
                notice("the system message is set" if self.system else "there is no system message")
            case "/speculation":
                self._switch(value.strip())
            case "/help":
                notice("\n".join(f"{name:14}{meaning}" for name, meaning in COMMANDS.items()))
            case _:
                raise RequestError(f"there is no command {command}", suggest(command, COMMANDS))

    def _switch(self, value: str) -> None:
        if value not in ("on", "off"):
            raise RequestError(f"speculation can't be set to {value!r}", "write /speculation on, or /speculation off.")
        if not self.backend.can_switch:
            raise RequestError("speculation can't be switched here", "give a draft model, or a server that has one.")
        self.speculating = value == "on"
        notice(f"speculation is {value}")

    def _answer(self, line: str) -> None:
        """Show the answer to a message. Both become part of the conversation, unless the answer is empty."""
        message, said = {"role": "user", "content": line}, list[str]()
        opening = [{"role": "system", "content": self.system}] if self.system else []
        console, summary = results(), "stopped"
        with closing(self.backend.answer([*opening, *self.turns, message], self.speculating)) as pieces:
            try:
                with _stoppable(self.backend.waits) as stopped:
                    while not stopped.is_set():
                        piece = next(pieces)
                        said += [] if piece.reasoning else [piece.text]
                        _show(console, piece)
            except StopIteration as end:
                summary = self._summary(end.value)
            except ContextFullError as error:
                raise RequestError(error.problem, self._room(opening, message, error.fix)) from None
            except KeyboardInterrupt:
                if not self.backend.waits:
                    raise
            finally:
                console.write("\n")
        if text := "".join(said):
            self.turns += [message, {"role": "assistant", "content": text}]
        notice(summary)

    def _summary(self, of: Summary) -> str:
        """Return the figures of an answer, the limit that cut it, and what helps."""
        helps = [self.backend.growth, "/reset begins a new conversation" if self.turns else ""] if of.filled else []
        return "; ".join(filter(None, [of.full if self.verbose else of.brief, of.cut, *helps]))

    def _room(self, opening: Messages, message: Mapping[str, Any], otherwise: str) -> str:
        """Return what makes room for an answer: an empty conversation, if that is enough, or a longer context."""
        resets = self.turns and self.backend.fits([*opening, message])
        helps = ["/reset begins a new conversation" if resets else "", self.backend.growth]
        return "; ".join(filter(None, helps)) + "." if any(helps) else otherwise


def _is_coloured(console: VerbatimConsole) -> bool:
    return console.is_terminal and not console.no_color


def _show(console: VerbatimConsole, piece: AnswerPiece) -> None:
    """Print a piece at once, in colour on a terminal that has colours."""
    style = "dim" if piece.reasoning else ACCEPTED if piece.drafted else ""
    if style and _is_coloured(console):
        console.print(piece.text, style=style, end="")
    else:
        console.write(piece.text)


def _lines(interactive: bool) -> Iterator[str]:
    """Yield the typed or piped lines that are not empty. Ctrl-C empties the line, Ctrl-D ends the input."""
    if not interactive:
        yield from _piped_lines()
        return
    with suppress(ImportError):
        import readline  # noqa: F401 - gives `input` a history
    while True:
        try:
            line = input("> " if sys.stdout.isatty() else "").strip()
        except KeyboardInterrupt:
            messages().print("\n/exit or Ctrl-D ends the program", style="dim")
            continue
        except EOFError:
            return
        if line:
            yield line


def _piped_lines() -> Iterator[str]:
    try:
        for line in sys.stdin:
            if line.strip():
                yield line.strip()
    except UnicodeDecodeError as error:
        raise RequestError(f"the input is not valid text: {error}", f"write {sys.stdin.encoding}.") from error


@contextmanager
def _stoppable(at_once: bool) -> Iterator[threading.Event]:
    """Yield an event that Ctrl-C sets. With `at_once`, or the second time, Ctrl-C raises KeyboardInterrupt instead.

    Interrupting an engine's step would leave its state half changed. A call that waits for a server can be interrupted.
    """
    stopped = threading.Event()

    def stop(number: int, frame: FrameType | None) -> None:
        if at_once or stopped.is_set():
            raise KeyboardInterrupt
        stopped.set()

    if threading.current_thread() is not threading.main_thread():  # there are no signals
        yield stopped
        return
    before = signal.signal(signal.SIGINT, stop)
    try:
        yield stopped
    finally:
        signal.signal(signal.SIGINT, before)
