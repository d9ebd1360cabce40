"""`speculant chat` and `speculant generate --chat`: conversations with a model in the process, and with a server."""

from __future__ import annotations

import builtins
import json
import re
import shutil
import signal
import threading
from collections.abc import Iterator, Sequence
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

import pytest

from speculant import LLM, SamplingParams
from speculant.cli import Answer, AnswerPiece, Conversation, LocalChatBackend, Messages, RemoteChatBackend, Summary
from speculant.errors import ConfigError, ModelError, RequestError, ServerError
from tests.commands import invoke, json_of
from tests.gguf_models import convert
from tests.models import END, Checkpoints

TEMPLATE = "{% for message in messages %}{{ message.role[0] + ':' + message.content + ';' }}{% endfor %}a:"
PARAMS = SamplingParams(seed=1, max_tokens=6, ignore_eos=True)
FLAGS = ("--seed", "1", "--max-tokens", "6", "--ignore-eos", "--dtype", "float64")
SYSTEM, HI, BYE = ({"role": role, "content": text} for role, text in (("system", "S"), ("user", "Hi"), ("user", "Bye")))


@pytest.fixture(scope="module")
def folder(checkpoints: Checkpoints, tmp_path_factory: pytest.TempPathFactory) -> str:
    """Write a checkpoint with a chat template."""
    path = tmp_path_factory.mktemp("chat") / "target"
    shutil.copytree(checkpoints.target, path)
    (path / "chat_template.jinja").write_text(TEMPLATE, encoding="utf-8")
    return str(path)


@pytest.fixture(scope="module")
def llm(folder: str, checkpoints: Checkpoints) -> LLM:
    config = {"model": checkpoints.near, "draft_length": "fixed"}
    return LLM(folder, speculative_config=config, dtype="float64", spec_length=3)


def answers(llm: LLM, *messages: Any) -> list[str]:
    """Send messages one after the other; return the answers."""
    turns: list[Any] = []
    for message in messages:
        turns.append(message)
        if message["role"] == "user":
            turns.append({"role": "assistant", "content": llm.chat(turns, PARAMS)[0].outputs[0].text})
    return [turn["content"] for turn in turns if turn["role"] == "assistant"]


def test_a_piped_conversation_is_answered(llm: LLM, folder: str, checkpoints: Checkpoints) -> None:
    models = ("--model", folder, "--draft-model", checkpoints.near)
    result = invoke("chat", *models, *FLAGS, "--system", "S", stdin="Hi\n\n Bye \n")
    assert result.stdout == "".join(f"{text}\n" for text in answers(llm, SYSTEM, HI, BYE))
    opening, *lines = (line for line in result.stderr.splitlines() if not line.startswith("Loading"))  # progress
    assert opening.startswith(f"{folder}; speculation is on: ")
    assert len(lines) == 2
    assert all("6 tokens in" in line for line in lines)
    assert all(line.endswith("cut at --max-tokens 6") for line in lines)


def test_an_answer_may_fill_the_context(folder: str) -> None:
    endless = ("chat", folder, "--ignore-eos", "--dtype", "float64")
    (last,) = (line for line in invoke(*endless, stdin="Hi\n").stderr.splitlines() if "tokens in" in line)
    assert f"{256 - len('u:Hi;a:')} tokens in" in last
    assert last.endswith("cut: the conversation fills the context of 256 tokens"), "an empty one has no more room"
    (last,) = (
        line
        for line in invoke(*endless, "--max-model-len", "64", stdin="Hi\n").stderr.splitlines()
        if "tokens in" in line
    )
    assert last.endswith("of 64 tokens; a higher --max-model-len gives up to 256 tokens")


@pytest.mark.parametrize(
    ("typed", "flags", "fix"),
    [
        ("Hi\n" + "x" * 250, ("--max-tokens", "6"), "/reset begins a new conversation."),
        ("x" * 300, (), "shorten the message."),
        ("Hi\n" + "x" * 300, ("--max-tokens", "6"), "shorten the message."),
        ("x" * 100, ("--max-model-len", "64"), "a higher --max-model-len gives up to 256 tokens."),
    ],
    ids=["after others", "alone", "too long for an empty one too", "in a short context"],
)
def test_a_full_context_comes_with_what_helps(folder: str, typed: str, flags: tuple[str, ...], fix: str) -> None:
    with pytest.raises(RequestError, match="the conversation has .* tokens and the context") as caught:
        invoke("chat", folder, *flags, "--ignore-eos", "--dtype", "float64", stdin=typed + "\n")
    assert caught.value.fix == fix


@pytest.mark.parametrize("as_file", [True, False])
def test_a_template_may_be_given(checkpoints: Checkpoints, llm: LLM, tmp_path: Path, as_file: bool) -> None:
    given = tmp_path / "any.jinja"
    given.write_text(TEMPLATE, encoding="utf-8")
    flags = ("--chat-template", given if as_file else TEMPLATE)
    assert invoke("chat", checkpoints.target, *flags, *FLAGS, stdin="Hi\n").stdout == answers(llm, HI)[0] + "\n"
    shown = invoke("generate", "Hi", checkpoints.target, "--chat", *flags, *FLAGS).stdout
    assert shown == answers(llm, HI)[0] + "\n"


THINKING = "{% if enable_thinking is defined and enable_thinking is false %}<think>\n\n</think>\n\n{% endif %}"


@pytest.mark.parametrize("given", ["enable_thinking=false", '{"enable_thinking": false}'])
def test_variables_of_the_template_may_be_given(folder: str, llm: LLM, given: str) -> None:
    flags = ("--chat-template", TEMPLATE + THINKING, "--chat-template-kwargs", given, *FLAGS)
    (out,) = llm.generate(["u:Hi;a:<think>\n\n</think>\n\n"], PARAMS)
    assert invoke("chat", folder, *flags, stdin="Hi\n").stdout == f"{out.outputs[0].text}\n"
    value = json_of("generate", "Hi", folder, "--chat", *flags)
    assert value["usage"]["prompt_tokens"] == out.num_prompt_tokens


def test_a_gguf_file_without_template_is_mended(checkpoints: Checkpoints, tmp_path: Path) -> None:
    file = convert(checkpoints.target, tmp_path / "model.gguf", "F32")
    with pytest.raises(ModelError, match="chat_template.jinja"):
        invoke("chat", file, *FLAGS, stdin="Hi\n")
    (tmp_path / "chat_template.jinja").write_text(TEMPLATE, encoding="utf-8")
    assert "6 tokens in" in invoke("chat", file, *FLAGS, stdin="Hi\n").stderr


@pytest.mark.parametrize(("with_template", "chat"), [(True, False), (True, True), (False, False)])
def test_a_text_that_ends_at_once_is_explained(
    folder: str, checkpoints: Checkpoints, with_template: bool, chat: bool
) -> None:
    model = folder if with_template else checkpoints.target
    flags = ("--chat",) if chat else ()
    result = invoke("generate", "Hi", model, *flags, "--logit-bias", f"{END}=1000", "--temperature", "0")
    assert result.stdout == "\n"
    assert "1 token in" in result.stderr
    assert "the text ended at once: the model's first token was its end token; " in result.stderr
    assert ("add --chat" in result.stderr) == (with_template and not chat)


def test_a_text_that_a_stop_ends_at_once_is_explained(folder: str, llm: LLM) -> None:
    (letter,) = llm.tokenizer.encode("a")
    stopped = invoke("generate", "Hi", folder, "--allowed-token-ids", letter, "--stop", "a").stderr
    assert "the text ended at once, at 'a'; leave out that stop" in stopped


def test_verbose_adds_the_figures_of_speculation(folder: str, checkpoints: Checkpoints) -> None:
    models = ("--model", folder, "--draft-model", checkpoints.near)
    brief, full = (
        invoke("chat", *models, *FLAGS, *flags, stdin="Hi\n").stderr.splitlines()[-1] for flags in ((), ("--verbose",))
    )
    assert len(brief) < 80
    assert "speculation is on" not in brief
    assert "speculation is on" in full


def test_commands_change_the_following_answers(llm: LLM, folder: str, checkpoints: Checkpoints) -> None:
    typed = (
        "Hi\n/reset\n/system S\n/speculation off\nHi\n/speculation on\nBye\n/system\n/reset\nHi\n/exit\nnever read\n"
    )
    models = ("--model", folder, "--draft-model", checkpoints.near)
    result = invoke("chat", *models, *FLAGS, "--verbose", stdin=typed)
    expected = [*answers(llm, HI), *answers(llm, SYSTEM, HI, BYE), *answers(llm, HI)]
    assert result.stdout == "".join(f"{text}\n" for text in expected)
    lines = [line for line in result.stderr.splitlines() if "tokens in" in line]
    assert ["speculation is on" in line for line in lines] == [True, False, True, True]
    assert "switched off for this request" in lines[1]


def test_generate_answers_one_message(llm: LLM, folder: str) -> None:
    result = invoke("generate", "Hi", "--chat", "--system", "S", "--model", folder, *FLAGS)
    assert result.stdout == answers(llm, SYSTEM, HI)[0] + "\n"
    value = json_of("generate", "Hi", "--chat", "--model", folder, *FLAGS)
    assert value["text"] == answers(llm, HI)[0]
    assert value["usage"]["prompt_tokens"] == len("u:Hi;a:")


@pytest.mark.parametrize(
    ("arguments", "stdin", "kind", "reason"),
    [
        (["generate", "Hi", "--system", "S", "--model", "demo"], "", RequestError, "--system needs --chat"),
        (["generate", "Hi", "demo", "--chat-template", "{{ 1 }}"], "", RequestError, "--chat-template needs --chat"),
        (["chat", "demo", "--chat-template", "{% if %}"], "", ConfigError, "not valid"),
        (["generate", "Hi", "demo", "--chat-template-kwargs", "a=1"], "", RequestError, "kwargs needs --chat"),
        (["chat", "demo", "--chat-template-kwargs", "thinking"], "", ConfigError, "is not KEY=VALUE"),
        (["chat", "demo", "--chat-template-kwargs", "tools=1"], "", RequestError, "can't set tools"),
        (["chat", "--url", "http://x", "--chat-template", "{{ 1 }}"], "", ConfigError, "no meaning with --url"),
        (["chat", "--model", "demo", "--n", "2"], "", ConfigError, "--n has no meaning"),
        (
            ["chat", "--url", "http://x", "--spec-length", "2"],
            "",
            ConfigError,
            "--spec-length has no meaning with --url",
        ),
        (["chat", "--url", "ftp://x"], "", RequestError, "not the address of a server"),
        (["chat", "--url", "http://127.0.0.1:9"], "", ServerError, "can't be reached"),
        (["chat"], "", ConfigError, "no model was given"),
    ],
)
def test_senseless_settings_are_refused(arguments: list[str], stdin: str, kind: type[Exception], reason: str) -> None:
    with pytest.raises(kind, match=reason):
        invoke(*arguments, stdin=stdin)


@pytest.mark.parametrize(
    ("typed", "reason"),
    [
        ("/sistem S", "did you mean '/system'"),
        ("/speculation maybe", "can't be set to 'maybe'"),
    ],
)
def test_wrong_input_ends_a_pipe(folder: str, typed: str, reason: str) -> None:
    with pytest.raises(RequestError, match=reason):
        invoke("chat", "--model", folder, *FLAGS, stdin=typed)


def test_a_model_without_template_is_refused(checkpoints: Checkpoints) -> None:
    with pytest.raises(ModelError, match="no chat template"):
        invoke("chat", "--model", checkpoints.target, *FLAGS)


def typing(monkeypatch: pytest.MonkeyPatch, *lines: str | type[BaseException]) -> None:
    """Type these lines; an exception stands for Ctrl-C or Ctrl-D."""
    given = iter(lines)

    def read(prompt: str = "") -> str:
        line = next(given)
        if isinstance(line, str):
            return line
        raise line

    monkeypatch.setattr(builtins, "input", read)


def test_errors_are_shown_in_the_chat(
    llm: LLM, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    typing(monkeypatch, "/bogus", "x" * 300, KeyboardInterrupt, "", "Hi", EOFError)
    Conversation(LocalChatBackend(llm, PARAMS), None, interactive=True).run()
    out, err = capsys.readouterr()
    assert out.split() == [text.strip() for text in answers(llm, HI)]
    assert err.count("error:") == 2
    assert "there is no command /bogus" in err
    assert "Ctrl-D ends the program" in err


class Interrupted:
    """A chat backend that gets Ctrl-C after the first two tokens."""

    introduction, can_switch = "a test", False

    def __init__(self, inner: LocalChatBackend, waits: bool) -> None:
        self.inner, self.waits = inner, waits

    def answer(self, messages: Messages, speculating: bool | None) -> Answer:
        pieces = self.inner.answer(messages, speculating)
        yield next(pieces)
        yield next(pieces)
        signal.raise_signal(signal.SIGINT)
        return (yield from pieces)


@pytest.mark.parametrize("waits", [False, True])
def test_ctrl_c_ends_only_the_answer(llm: LLM, waits: bool, capsys: pytest.CaptureFixture[str]) -> None:
    inner, before = (
        LocalChatBackend(llm, SamplingParams(seed=1, max_tokens=60, ignore_eos=True)),
        signal.getsignal(signal.SIGINT),
    )
    conversation = Conversation(Interrupted(inner, waits), None, interactive=False)
    conversation.read("Hi")
    out, err = capsys.readouterr()
    assert err == "stopped\n"
    assert conversation.turns == [HI, {"role": "assistant", "content": out.removesuffix("\n")}]
    whole = "".join(piece.text for piece in inner.answer([HI], None))
    assert whole.startswith(out.removesuffix("\n"))
    assert 0 < len(out) - 1 < len(whole)
    assert signal.getsignal(signal.SIGINT) is before
    assert not llm.engine.has_unfinished()


@pytest.mark.parametrize(
    ("names", "coloured"),
    [({"FORCE_COLOR": "1", "TERM": "xterm"}, True), ({"FORCE_COLOR": "1", "NO_COLOR": "1"}, False), ({}, False)],
)
def test_accepted_tokens_are_coloured(
    llm: LLM,
    names: dict[str, str],
    coloured: bool,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    for name in ("FORCE_COLOR", "NO_COLOR"):
        monkeypatch.delenv(name, raising=False)
    for name, value in names.items():
        monkeypatch.setenv(name, value)
    backend = LocalChatBackend(llm, PARAMS)
    pieces = list(backend.answer([HI], None))
    assert {piece.drafted for piece in pieces} == {True, False}
    Conversation(backend, None, interactive=False).read("Hi")
    shown = "".join(f"\x1b[32m{piece.text}\x1b[0m" if piece.drafted and coloured else piece.text for piece in pieces)
    assert capsys.readouterr().out == shown + "\n"
    assert {piece.drafted for piece in backend.answer([HI], False)} == {None}


def test_a_terminal_gets_no_control_characters(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    class Hostile:
        introduction, can_switch, waits = "a test", False, True

        def answer(self, messages: Messages, speculating: bool | None) -> Answer:
            yield AnswerPiece("a\x1b]0;title\x07b\n\tc\x9b")
            return Summary("done", "done")

    monkeypatch.setenv("FORCE_COLOR", "1")
    Conversation(Hostile(), None, interactive=False).read("Hi")
    assert capsys.readouterr().out == "a]0;titleb\n\tc\n"


def event(**chunk: Any) -> bytes:
    return b"data: " + json.dumps(chunk).encode() + b"\n\n"


def delta(**values: Any) -> dict[str, Any]:
    return {"choices": [{"index": 0, "delta": values, "finish_reason": None}]}


SPECULATION = {"tokens_per_pass": 1.75, "mean_acceptance_length": 2.25, "acceptance_rate": 0.5}
DONE = b"data: [DONE]\n\n"
GOOD = [
    event(**delta(role="assistant", content="")),
    event(**delta(reasoning_content="Hm.")),
    b": a comment\n\n",
    event(**delta(content="Yes"), speculant_tokens=[{"text": "Yes", "drafted": True}]),
    event(**delta(content="!"), usage=None),
    event(choices=[{"index": 0, "delta": {}, "finish_reason": "length"}]),
    event(choices=[], usage={"completion_tokens": 8}, metrics={"speculative_decoding": SPECULATION}),
    DONE,
]


class FakeServer:
    """A server that answers with scripted events, and keeps its requests."""

    def __init__(self, events: Sequence[bytes], status: int = 200, owner: str = "speculant") -> None:
        self.events, self.status, self.owner = events, status, owner
        self.asked: list[dict[str, Any]] = []
        self.keys: list[str | None] = []
        self._server = ThreadingHTTPServer(("127.0.0.1", 0), self._handler())
        self.url = f"http://127.0.0.1:{self._server.server_port}"
        threading.Thread(target=self._server.serve_forever, args=(0.01,), daemon=True).start()

    def close(self) -> None:
        self._server.shutdown()
        self._server.server_close()

    def _handler(self) -> type[BaseHTTPRequestHandler]:
        outer = self

        class Handler(BaseHTTPRequestHandler):
            def do_GET(self) -> None:
                listed = {"data": [{"id": "one", "owned_by": outer.owner}, {"id": "two", "owned_by": outer.owner}]}
                self._send(200, [json.dumps(listed).encode()])

            def do_POST(self) -> None:
                assert self.path == "/v1/chat/completions"
                outer.asked.append(json.loads(self.rfile.read(int(self.headers["Content-Length"]))))
                outer.keys.append(self.headers["Authorization"])
                self._send(outer.status, outer.events)

            def _send(self, status: int, pieces: Sequence[bytes]) -> None:
                self.send_response(status)
                self.end_headers()
                self.wfile.write(b"".join(pieces))

            def log_message(self, *_: Any) -> None:
                """Log nothing."""

        return Handler


@pytest.fixture
def serve() -> Iterator[Any]:
    """Start servers, and end them after the test."""
    made: list[FakeServer] = []

    def start(*arguments: Any, **named: Any) -> FakeServer:
        made.append(FakeServer(*arguments, **named))
        return made[-1]

    yield start
    for server in made:
        server.close()


def test_a_server_answers_in_the_chat(serve: Any) -> None:
    server = serve(GOOD)
    flags = "--temperature 0 --logit-bias 3=1.5 --api-key secret --system S --max-tokens 8 --verbose"
    flags += " --chat-template-kwargs enable_thinking=false"
    result = invoke("chat", "--url", server.url + "/v1/", "two", *flags.split(), stdin="Hi\n/speculation off\nBye\n")
    assert result.stdout == "Hm.Yes!\n" * 2
    assert result.stderr.splitlines()[0] == f"two at {server.url}/v1"
    assert "8 tokens in" in result.stderr
    assert "; 1.75 tokens per pass, acceptance rate 0.50; cut at --max-tokens 8" in result.stderr
    first, second = server.asked
    assert first == {
        "model": "two",
        "messages": [SYSTEM, HI],
        "stream": True,
        "stream_options": {"include_usage": True},
        "temperature": 0.0,
        "max_tokens": 8,
        "logit_bias": {"3": 1.5},
        "chat_template_kwargs": {"enable_thinking": False},
        "speculant": {"tokens": True},
    }
    assert second["messages"] == [SYSTEM, HI, {"role": "assistant", "content": "Yes!"}, BYE], "without the reasoning"
    assert second["speculation"] is False
    assert server.keys == ["Bearer secret"] * 2


def test_another_server_gets_only_openai_fields(serve: Any) -> None:
    server = serve(GOOD, owner="somebody")
    invoke("chat", "--url", server.url, stdin="Hi\n")
    assert server.asked == [
        {"model": "one", "messages": [HI], "stream": True, "stream_options": {"include_usage": True}}
    ]
    with pytest.raises(RequestError, match="can't be switched"):
        invoke("chat", "--url", server.url, stdin="/speculation off\n")


def test_pieces_of_a_server_mark_drafted_tokens(serve: Any) -> None:
    pieces = list(RemoteChatBackend(serve(GOOD).url).answer([HI], None))
    assert pieces == [AnswerPiece("Hm.", None, reasoning=True), AnswerPiece("Yes", True), AnswerPiece("!", None)]


@pytest.mark.parametrize(
    ("events", "status", "kind", "reason"),
    [
        ([*GOOD[:4]], 200, ServerError, "ended the answer early"),
        ([GOOD[3], event(error={"message": "too slow"})], 200, ServerError, "ended the answer: too slow"),
        (
            [b'{"error": {"message": "unknown"}}'],
            400,
            RequestError,
            r"refused the request: unknown \(400\)",
        ),
        ([b'{"error": {"message": "who?"}}'], 401, RequestError, "give --api-key"),
        ([b'{"error": {"message": "full"}}'], 429, ServerError, "full"),
        ([b"<html>" + b"x" * 100_000], 502, ServerError, "no reason given"),
        ([b"data: [[[\n\ndata: 3\n\n"], 200, ServerError, "early"),
    ],
)
def test_failures_of_a_server_are_shown(
    serve: Any, events: list[bytes], status: int, kind: type[Exception], reason: str
) -> None:
    with pytest.raises(kind, match=reason):
        invoke("chat", "--url", serve(events, status).url, stdin="Hi\n")


def test_a_full_context_of_a_server_comes_with_what_helps(serve: Any) -> None:
    full = b'{"error": {"message": "the prompt has 300 tokens and max_model_len is 256"}}'
    with pytest.raises(RequestError, match="shorten the message"):
        invoke("chat", "--url", serve([full], 400).url, stdin="Hi\n")
    conversation = Conversation(RemoteChatBackend(serve([full], 400).url), None, interactive=False, turns=[HI])
    with pytest.raises(RequestError, match="/reset begins a new conversation"):
        conversation.read("Hi")


@pytest.mark.parametrize("owner", ["speculant", "somebody"])
def test_a_narrow_terminal_gets_whole_words(
    serve: Any, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], owner: str
) -> None:
    """It also gets the meaning of the colour, where answers have one."""
    for name, value in (("FORCE_COLOR", "1"), ("COLUMNS", "40")):
        monkeypatch.setenv(name, value)
    lines = iter(["/help", "/exit"])
    monkeypatch.setattr("builtins.input", lambda _: next(lines))
    Conversation(RemoteChatBackend(serve(GOOD, owner=owner).url), None, interactive=True).run()
    shown = re.sub(r"\x1b\[\d*m", "", capsys.readouterr().err)
    assert max(map(len, shown.splitlines())) <= 40
    assert ("accepted draft tokens are green" in " ".join(shown.split())) == (owner == "speculant")
    assert "without TEXT, remove it" in " ".join(shown.split())


def test_a_model_that_a_server_lacks_is_refused(serve: Any) -> None:
    with pytest.raises(RequestError, match="it has: one, two"):
        invoke("chat", "--url", serve(GOOD).url, "--model", "three")


def test_our_own_server_gives_the_same_answer(llm: LLM, folder: str) -> None:
    pytest.importorskip("fastapi")
    from speculant import AsyncEngine
    from tests.servers import LiveServer

    server = LiveServer(lambda: AsyncEngine(folder, dtype="float64")).ready()
    try:
        backend = RemoteChatBackend(server.url, settings={"seed": 1, "max_tokens": 6, "ignore_eos": True})
        assert backend.can_switch
        for speculating in (None, False):
            text = "".join(piece.text for piece in backend.answer([HI], speculating))
            assert text.strip() == answers(llm, HI)[0].strip()
    finally:
        server.stop()


def test_a_message_may_have_many_lines(tmp_path: Path, folder: str) -> None:
    file = tmp_path / "prompt.txt"
    file.write_text("Hi\nthere", encoding="utf-8")
    value = json_of("generate", "--prompt-file", file, "--chat", "--model", folder, *FLAGS)
    assert value["usage"]["prompt_tokens"] == len("u:Hi\nthere;a:")
