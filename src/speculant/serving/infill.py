"""Completion at the cursor, as llama.cpp's /infill: a request as a completion, and its answer in llama.cpp's shape."""

from __future__ import annotations

import re
import time
from collections.abc import Mapping, Sequence
from typing import Any
from weakref import WeakValueDictionary

from starlette.requests import Request
from starlette.responses import Response
from typing_extensions import override

from speculant.engine import AsyncEngine, StreamPiece
from speculant.serving.openai.answers import Answer, Call, Chunk
from speculant.serving.openai.protocol import InfillBody
from speculant.serving.openai.service import Job, Service
from speculant.serving.openai.settings import Prompt, infill_params

_LINE_START = re.compile(r"\n([ \t]*)(?=[^ \t\n])")
_BLANKS = " \t\n"
_NO_SLOT = -1
_NO_LIMIT = -1
_SHOWN = ("temperature", "top_k", "top_p", "min_p", "seed")  # settings
_ABSENT = object()


class IndentedLines:
    """Text up to the first line, after the first one, that is indented less than `least`.

    Line breaks and blanks are held back until the next character shows how far a line is indented. Empty lines belong
    to the line after them.
    """

    def __init__(self, least: int) -> None:
        """least: blanks or tabs before each line but the first."""
        self._least, self._held = least, list[str]()
        self.is_over = False

    def push(self, text: str) -> str:
        """Take more of the text; return what belongs to the answer for certain."""
        if self._least <= 0 or self.is_over:
            return "" if self.is_over else text
        if self._held and not text.strip(_BLANKS):
            self._held.append(text)
            return ""
        text = self.flush() + text
        for start in _LINE_START.finditer(text):
            if len(start[1]) < self._least:
                self.is_over = True
                return text[: _first_break(text, start.start() + 1)]
        place = _first_break(text, len(text))
        self._held = [text[place:]] if place < len(text) else []
        return text[:place]

    def flush(self) -> str:
        """At the end, return the text still held back."""
        held, self._held = "".join(self._held), []
        return "" if self.is_over else held


def _first_break(text: str, end: int) -> int:
    """Return the place of the first line break among the blanks and breaks that end text[:end]; `end` without one."""
    break_ = text.find("\n", len(text[:end].rstrip(_BLANKS)), end)
    return end if break_ < 0 else break_


class InfillAnswer(Answer):
    """The text of a hole. It may end early: by its lines' indentation, by its time, or by a newer request.

    requests: the ids of the engine's requests for it.
    """

    def __init__(self, call: Call, body: InfillBody) -> None:
        super().__init__(call, 1)
        self.is_cut = self.is_over = self.superseded = False
        self._body, self._lines = body, IndentedLines(body.n_indent or 0)
        self._is_empty = body.n_predict == 0
        self._text: list[str] = []
        self._shown = 0  # tokens
        self._first: float | None = None  # when the first token came
        self._stop: int | str | None = None
        self._reason: str | None = None

    def supersede(self, engine: AsyncEngine) -> None:
        """End the answer with the text that it has, as a newer request takes its place."""
        self.superseded = self.is_over = True
        for name in self.requests:
            engine.end(name)

    @override
    def read(self, index: int, piece: StreamPiece) -> list[Chunk]:
        text = "" if self.is_over or self._is_empty else self._take(piece)
        if piece.finish_reason is not None:
            text += "" if self._is_empty or (self.is_over and not self.superseded) else self._lines.flush()
            self._reason, self._stop = piece.finish_reason, piece.stop_reason
        self._text.append(text)
        if not text and not self.call.lists_tokens:
            return []
        shown = {"index": 0, "content": text, "id_slot": self._slot, "stop": False, "tokens_predicted": self._shown}
        return [{**shown, "tokens_evaluated": self._evaluated, **self.tokens_of(piece)}]

    @override
    def end(self) -> list[Chunk]:
        return [self._document("")]

    @override
    def document(self) -> dict[str, Any]:
        return self._document("".join(self._text))

    def _take(self, piece: StreamPiece) -> str:
        """Return the text of a piece that belongs to the answer, and notice its end."""
        now = time.perf_counter()
        if piece.token is not None:
            self._shown += 1
            self._first = now if self._first is None else self._first
        text, limit = self._lines.push(piece.text), self._body.t_max_predict_ms or 0
        late = limit > 0 and self._first is not None and (now - self._first) * 1000 > limit
        self.is_over = self._lines.is_over or (late and "\n" in piece.text)
        return text

    @property
    def _slot(self) -> int:
        return _NO_SLOT if self._body.id_slot is None else self._body.id_slot

    @property
    def _evaluated(self) -> int:
        return sum(prompt.num_tokens for prompt in self.prompts)

    def _document(self, content: str) -> dict[str, Any]:
        params, [output] = self.call.params, self.results
        ended = self._reason == "stop" and not self.is_over
        by_word = ended and isinstance(self._stop, str)
        whole = {
            "index": 0,
            "content": content,
            "id_slot": self._slot,
            "stop": True,
            "model": self.call.model,
            "tokens_predicted": self._shown,
            "tokens_evaluated": self._evaluated,
            "tokens_cached": output.metrics.cached_tokens,
            "truncated": self.is_cut,
            "has_new_line": "\n" in "".join(self._text),
            "stop_type": "word" if by_word else "eos" if ended else "limit",
            "stopping_word": self._stop if by_word else "",
            "timings": self._timings(),
            "generation_settings": {
                "n_predict": 0 if self._is_empty else _NO_LIMIT if params.max_tokens is None else params.max_tokens,
                **{name: getattr(params, name) for name in _SHOWN},
            },
            **({"superseded": True} if self.superseded else {}),
            **self.speculation(),
        }
        return whole if self._body.response_fields is None else _chosen(whole, self._body.response_fields)

    def _timings(self) -> dict[str, Any]:
        """Return llama.cpp's figures; those of a part that did not happen are 0."""
        metrics = self.results[0].metrics
        timing, drafts = metrics.timing, metrics.speculative_decoding
        parts = {
            "prompt": (self._evaluated - metrics.cached_tokens, timing.prompt_s or 0.0),
            "predicted": (self._shown, timing.decode_s if timing.first_token is not None else 0.0),
        }
        found: dict[str, Any] = {"cache_n": metrics.cached_tokens}
        for name, (count, seconds) in parts.items():
            found |= {
                f"{name}_n": count,
                f"{name}_ms": seconds * 1000,
                f"{name}_per_token_ms": seconds * 1000 / count if count else 0.0,
                f"{name}_per_second": count / seconds if seconds else 0.0,
            }
        return found | {"draft_n": drafts.num_draft_tokens, "draft_n_accepted": drafts.num_accepted_draft_tokens}


def _chosen(document: Mapping[str, Any], fields: Sequence[str]) -> dict[str, Any]:
    """Return the named fields of a document; "a/b" names an inner field, which is returned under that name."""
    found = {}
    for name in fields:
        value: Any = document
        for key in name.split("/"):
            value = value.get(key, _ABSENT) if isinstance(value, Mapping) else _ABSENT
        if value is not _ABSENT:
            found[name] = value
    return found


class InfillRoute:
    """The handler of /infill. A new request ends the same client's previous request in that slot."""

    def __init__(self, service: Service) -> None:
        self._service = service
        self._running = WeakValueDictionary[tuple[str, str, int], InfillAnswer]()  # as long as they are generated

    async def infill(self, request: Request) -> Response:
        """Fill in the text at the cursor."""
        service = self._service
        body = await service.read(InfillBody, request)
        model = await service.use(request, body.model)
        engine = model.engine
        params = await service.apart(request, lambda: infill_params(engine, body))
        answer = InfillAnswer(service.call(model, body, params), body)

        async def prompts() -> list[Prompt]:
            prompt, answer.is_cut = await service.prompts(request).of_hole(engine, body)
            sender = model.names[0], service.client(request).name
            self._supersede(engine, sender, answer, body)  # now that it will be answered
            return [prompt]

        return await service.answer(model, request, Job(body, prompts, answer, done=b""))

    def _supersede(self, engine: AsyncEngine, sender: tuple[str, str], answer: InfillAnswer, body: InfillBody) -> None:
        """End the request whose place an answer takes. A request for no tokens replaces none.

        sender: the model's name, and the client's.
        """
        slot = _NO_SLOT if body.id_slot is None or body.n_predict == 0 else body.id_slot
        if slot < 0:
            return
        older = self._running.get((*sender, slot))
        self._running[*sender, slot] = answer
        if older is not None:
            older.supersede(engine)
