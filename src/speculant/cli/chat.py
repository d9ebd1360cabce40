"""`speculant chat`: a conversation in the terminal."""

from __future__ import annotations

import signal
import sys
import threading
from collections.abc import Iterator
from contextlib import closing, contextmanager, suppress
from dataclasses import dataclass, field
from types import FrameType
from typing import Annotated, Any

import typer

from speculant.cli.chat_backends import AnswerPiece, ChatBackend, LocalChatBackend, RemoteChatBackend
from speculant.cli.demo import ACCEPTED
from speculant.cli.flags import EngineFlags, SamplingFlags, accepts_flags
from speculant.cli.generate import fetch, load
from speculant.cli.terminal import VerbatimConsole, examples, messages, progress, results, show_error
from speculant.config import EngineConfig
from speculant.errors import ConfigError, RequestError, SpeculantError, suggest

EXAMPLES = examples(
    "speculant chat --model demo --draft-model demo",
    'speculant chat --model ./qwen --draft-model ./qwen-small --system "Answer in one sentence."',
    "speculant chat --url http://127.0.0.1:8000 --temperature 0",
    "printf 'Hi\\n/speculation off\\nHi again\\n' | speculant chat --model demo --max-tokens 40",
)
COMMANDS = {
    "/exit": "end the program (Ctrl-D too)",
    "/help": "show the commands",
    "/reset": "forget the conversation",
    "/speculation": "on or off: switch speculation",
    "/system": "TEXT: set the system message; without TEXT, remove it",
}
_UNFIT = ("n", "beam_width", "logprobs", "prompt_logprobs")  # settings that make no sense in a conversation


@accepts_flags
def chat(
    url: Annotated[
        str | None, typer.Option(help="Talk to this server, by OpenAI's API; --model names its model.")
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
    *,
    sampling: SamplingFlags,
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
    backend = _local(sampling, engine) if url is None else _remote(url, api_key, sampling, engine)
    Conversation(backend, system, sys.stdin.isatty(), verbose).run()


def _local(sampling: SamplingFlags, engine: EngineFlags) -> ChatBackend:
    values = engine.values()
    fetch(EngineConfig.from_arguments(**values))
    with progress("Loading the models"):
        llm = load(values)
    llm.render_chat(
        [{"role": "user", "content": "Hi"}]
    )  # a model without a template is refused before anything is typed
    return LocalChatBackend(llm, sampling.params(llm.default_params))


def _remote(url: str, api_key: str | None, sampling: SamplingFlags, engine: EngineFlags) -> ChatBackend:
    return RemoteChatBackend(url, engine.remote_model(), api_key, sampling.fields())


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
        _notify(self.backend.introduction + ("; /help lists the commands" if self.interactive else ""))
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
                _notify("the conversation is empty")
            case "/system":
                self.system = value.strip() or None
                _notify("the system message is set" if self.system else "there is no system message")
            case "/speculation":
                self._switch(value.strip())
            case "/help":
                _notify("\n".join(f"{name:14}{meaning}" for name, meaning in COMMANDS.items()))
            case _:
                raise RequestError(f"there is no command {command}", suggest(command, COMMANDS))

    def _switch(self, value: str) -> None:
        if value not in ("on", "off"):
            raise RequestError(f"speculation can't be set to {value!r}", "write /speculation on, or /speculation off.")
        if not self.backend.can_switch:
            raise RequestError("speculation can't be switched here", "give a draft model, or a server that has one.")
        self.speculating = value == "on"
        _notify(f"speculation is {value}")

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
                summary = end.value.full if self.verbose else end.value.brief
            except KeyboardInterrupt:
                if not self.backend.waits:
                    raise
            finally:
                console.write("\n")
        if text := "".join(said):
            self.turns += [message, {"role": "assistant", "content": text}]
        _notify(summary)


def _notify(text: str) -> None:
    messages().print(text, style="dim")


def _show(console: VerbatimConsole, piece: AnswerPiece) -> None:
    """Print a piece at once, in colour on a terminal that has colours."""
    style = "dim" if piece.reasoning else ACCEPTED if piece.drafted else ""
    if style and console.is_terminal and not console.no_color:
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
