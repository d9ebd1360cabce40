"""What a body asks for: `SamplingParams` with the form of the calls that a `tool_choice` requires, and its prompts.

Texts and conversations become token ids outside the event loop.
"""

from __future__ import annotations

import asyncio
import dataclasses
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from types import MappingProxyType
from typing import Any, TypeVar

from speculant import plugins
from speculant.engine import AsyncEngine, PlainPrompt, Prompt as GivenPrompt, PromptPair, RenderedPrompt
from speculant.errors import ContextFullError
from speculant.params import SamplingParams
from speculant.serving.openai.messages import MessageReader, find_reasoning, with_tags
from speculant.serving.openai.protocol import (
    DEFAULT_COMPLETION_TOKENS,
    SETTINGS,
    ChatBody,
    CompletionBody,
    ConversationBody,
    GeneratingBody,
    InfillBody,
    Message,
    Prediction,
    TokenizeBody,
)
from speculant.serving.options import ServerOptions
from speculant.serving.state import TextLanes
from speculant.serving.tools import find_format
from speculant.serving.tools.base import TokenId, ToolParser, call_grammar, choose_tools, form_symbol, read_tools
from speculant.serving.wire import CONTEXT_FULL, refusal, timed_out
from speculant.structured import StructuredOutputs
from speculant.text import (
    FAMILIES,
    TAGS,
    FimMarks,
    Hole,
    Tokenizer,
    TokenOffsets,
    fim_prompt,
    find_fim,
    find_tags,
)

_WHITESPACE = frozenset({"disable_any_whitespace"})


def completion_params(engine: AsyncEngine, body: CompletionBody) -> SamplingParams:
    """Return the settings of a completion. Raises ApiError or ConfigError for invalid ones."""
    if body.suffix:
        _check_hole(body)
    if body.best_of is not None and body.best_of != (body.n or 1):
        raise refusal("best_of must be n: set only n.", "best_of", "unsupported_parameter")
    given = {"max_tokens": DEFAULT_COMPLETION_TOKENS, **_given(engine, body)}
    if ends := marks_of(engine, "suffix").ends if body.suffix else _ends_among(engine, given):
        given["stop_token_ids"] = [*given.get("stop_token_ids", ()), *ends]
    if body.echo:
        given |= _echoing(body)
    return _merge(engine, given, body.logprobs)


def _check_hole(body: CompletionBody) -> None:
    """Raise ApiError (400) for fields that a completion with a suffix can't honour."""
    for name in ("echo", "truncate_prompt_tokens"):
        if getattr(body, name):
            raise refusal(f"{name} can't be combined with suffix: keep one.", name, "unsupported_parameter")


def marks_of(engine: AsyncEngine, param: str) -> FimMarks:
    """Return the model's marks for filling in the middle. Raises ApiError (400) if it has none."""
    found = None if engine.has_source else find_fim(engine.tokenizer)
    if found is None:
        known = "; ".join(f"{names.prefix} ({family})" for family, names in FAMILIES.items())
        raise refusal(
            f"This model can't complete at the cursor: its tokenizer has no marks for it, such as {known}. "
            "Use a model that was trained to fill in the middle.",
            param,
            "unsupported_parameter",
        )
    return found


def _ends_among(engine: AsyncEngine, given: Mapping[str, Any]) -> Sequence[int]:
    """Return the special tokens among a completion's stop strings. Their text is left out, so no search finds them."""
    stops = given.get("stop")
    if not stops or given.get("skip_special_tokens") is False:
        return ()
    ids = map(engine.tokenizer.backend.token_to_id, [stops] if isinstance(stops, str) else stops)
    return [token for token in ids if token in engine.tokenizer.special_ids]


_SAMPLED: Mapping[str, Any] = MappingProxyType({"top_k": 0, "top_p": 1.0, "min_p": 0.0, "temperature": 1.0})
_INFILL = "infill"  # llama.cpp's sampler that leaves only likely tokens
_OTHER_SAMPLERS = frozenset({"penalties", "dry", "top_n_sigma", "typ_p", "typical_p", "xtc", _INFILL})


def infill_params(engine: AsyncEngine, body: InfillBody) -> SamplingParams:
    """Return the settings of a completion at the cursor. Raises ApiError or ConfigError for invalid ones.

    Of a request that expects no token one is generated, and left out.
    """
    for name, off in (("n", 1), ("beam_width", None), ("prompt_logprobs", None), ("stream_options", None)):
        if getattr(body, name) not in (None, off):
            raise refusal(f"{name} is not supported here: leave it out.", name, "unsupported_parameter")
    given = {"max_tokens": None, **_given(engine, body), **_sampled(body)}
    if body.n_predict is not None:
        given["max_tokens"] = None if body.n_predict == -1 else body.n_predict or 1
    if given.get("seed") == -1:  # llama.cpp's way to ask for any seed
        del given["seed"]
    given["stop_token_ids"] = [*given.get("stop_token_ids", ()), *marks_of(engine, "input_prefix").ends]
    return _merge(engine, given, None)


def _sampled(body: InfillBody) -> dict[str, Any]:
    """Return the settings that a list of samplers changes: those that it leaves out have no effect.

    `infill` stands for temperature 0, unless `temperature` is in the list too.
    """
    if body.samplers is None:
        return {}
    for name in body.samplers:
        if name not in _SAMPLED and name not in _OTHER_SAMPLERS:
            known = ", ".join((*_SAMPLED, *sorted(_OTHER_SAMPLERS)))
            raise refusal(f"The sampler {name[:80]!r} is unknown: use {known}.", "samplers", "unsupported_value")
    off = {name: value for name, value in _SAMPLED.items() if name not in body.samplers}
    return off | ({"temperature": 0.0} if "temperature" in off and _INFILL in body.samplers else {})


def _echoing(body: CompletionBody) -> dict[str, Any]:
    """Return the settings of a completion that repeats its prompt. If max_tokens is 0, a token is made and left out."""
    if body.stream and body.logprobs is not None:
        raise refusal("echo with logprobs is not streamed: leave out stream, or logprobs.", "echo")
    given = {} if body.max_tokens != 0 else {"max_tokens": 1}
    if body.prompt_logprobs is None and body.logprobs is not None:
        given["prompt_logprobs"] = body.logprobs
    return given


def chat_params(engine: AsyncEngine, body: ChatBody) -> SamplingParams:
    """Return the settings of a chat; without a limit the answer may fill the context."""
    if body.modalities is not None and body.modalities != ["text"]:
        raise refusal("This server makes only text.", "modalities", "unsupported_value")
    if body.top_logprobs is not None and not body.logprobs:
        raise refusal("top_logprobs needs logprobs=true.", "top_logprobs")
    given = {"max_tokens": None, **_given(engine, body)}
    if body.max_completion_tokens is not None:
        given["max_tokens"] = body.max_completion_tokens
    return _merge(engine, given, (body.top_logprobs or 0) if body.logprobs else None)


def _given(engine: AsyncEngine, body: GeneratingBody) -> dict[str, Any]:
    """Return the settings that a body has."""
    if body.stream and body.prompt_logprobs is not None:
        raise refusal("prompt_logprobs are not streamed: leave out stream.", "prompt_logprobs")
    values = {name: value for name in SETTINGS if (value := getattr(body, name, None)) is not None}
    if (form := _form(body)) is not None:
        values["structured_outputs"] = form
    if body.prediction is not None:
        values["speculation"] = _with_prediction(engine, body.speculation, body.prediction)
    return values


def _merge(engine: AsyncEngine, given: Mapping[str, Any], logprobs: int | None) -> SamplingParams:
    """Return settings whose defaults are the checkpoint's; a beam search does not use sampling defaults."""
    defaults = SamplingParams() if "beam_width" in given else engine.default_params
    return dataclasses.replace(defaults, **given, logprobs=logprobs)


def with_bounded_drafts(params: SamplingParams, most: int) -> SamplingParams:
    """Return a client's settings with drafts of at most `most` tokens: a longer draft delays every other sequence."""
    wanted = params.speculation
    if not isinstance(wanted, Mapping) or wanted.get("num_speculative_tokens", 0) <= most:
        return params
    return dataclasses.replace(params, speculation={**wanted, "num_speculative_tokens": most})


def _with_prediction(
    engine: AsyncEngine, speculation: bool | Mapping[str, Any] | None, prediction: Prediction
) -> bool | Mapping[str, Any] | None:
    """Return the speculation of a request with a prediction.

    Its drafts come from the prediction alone unless it names a method. Without a method that drafts from predictions,
    the prediction is ignored, which changes only the speed.
    """
    if prediction.type != "content":
        raise refusal(f"A prediction of type {prediction.type!r} is unknown: use content.")
    if speculation is False or engine.prediction_method is None:
        return speculation
    own = dict(speculation) if isinstance(speculation, Mapping) else {}
    return {"method": engine.prediction_method, **own} | dict(prediction=_text_of(prediction.content))


def _form(body: GeneratingBody) -> Mapping[str, Any] | None:
    """Return the fields of `StructuredOutputs` that a body sets, by response_format or as in vLLM."""
    given, own = body.response_format, body.structured_outputs
    kind = "text" if given is None else given.get("type")
    if given is None or kind == "text":
        return None if own is not None and requires_call(body) and own.keys() <= _WHITESPACE else own
    if own is not None and not own.keys() <= _WHITESPACE:
        raise refusal("response_format and structured_outputs are both given: keep one.", "response_format")
    compact = {"disable_any_whitespace": wants_compact(body)}
    if kind not in ("json_object", "json_schema"):
        raise refusal('response_format has no type "text", "json_object" or "json_schema".', "response_format")
    named = given.get("json_schema", given)  # in llama.cpp the schema is next to the type
    schema = named.get("schema") if isinstance(named, Mapping) else None
    if kind == "json_object" and schema is None:
        return {"json_object": True, **compact}
    if not isinstance(schema, Mapping):
        raise refusal('response_format needs {"json_schema": {"name": ..., "schema": {...}}}.', "response_format")
    return {"json": schema, **compact}


def requires_call(body: GeneratingBody) -> bool:
    """Whether a request requires a tool call."""
    return getattr(body, "tool_choice", None) not in (None, "none", "auto")


def wants_compact(body: GeneratingBody) -> bool:
    """Whether JSON has no white space between its parts, by response_format or in a required tool call.

    `structured_outputs={"disable_any_whitespace": false}` in the same request allows it.
    """
    compact = (body.structured_outputs or {}).get("disable_any_whitespace", True)
    if not isinstance(compact, bool):
        raise refusal("disable_any_whitespace must be true or false.", "structured_outputs")
    return compact


def predicts(engine: AsyncEngine, body: GeneratingBody, params: SamplingParams) -> bool:
    """Whether a request's drafts come from its prediction alone, so that their counts are those of the prediction.

    With a given form of the output, forced tokens are drafts too.
    """
    asked = params.speculation
    named = isinstance(asked, Mapping) and asked.get("method") == engine.prediction_method
    return named and body.prediction is not None and params.structured_outputs is None


def _text_of(content: str | Sequence[Mapping[str, Any]]) -> str:
    """Return the text of a content: itself, or its parts joined. Raises ApiError for parts that are not text."""
    return content if isinstance(content, str) else "".join(map(_part, content))


def _part(part: Mapping[str, Any]) -> str:
    text = part.get("text")
    if part.get("type", "text") != "text" or not isinstance(text, str):
        raise refusal("A content part is not text: only parts of type text are supported.")
    return text


C = TypeVar("C", bound=ConversationBody)
MOST_TOOLS = 128  # OpenAI's limit
_UNKNOWN = "json"  # the format of required calls if the model's own is unknown


def with_allowed_tools(body: C) -> C:
    """Return a body without the tools that a `tool_choice` of type "allowed_tools" leaves out; its mode is the choice.

    Raises ApiError (400) or RequestError for a choice that names tools that are not there.
    """
    choice = body.tool_choice
    if not isinstance(choice, Mapping) or choice.get("type") != "allowed_tools":
        return body
    allowed = choice.get("allowed_tools")
    mode, listed = (allowed.get("mode"), allowed.get("tools")) if isinstance(allowed, Mapping) else (None, None)
    if mode not in ("auto", "required") or not isinstance(listed, list) or not listed:
        raise refusal('allowed_tools needs a mode, "auto" or "required", and tools.', "tool_choice")
    _check_count(len(body.tools or ()), "tools")
    _check_count(len(listed), "tool_choice")
    tools = read_tools(body.tools or ())
    names = {tool.name for each in listed for tool in choose_tools(tools, each)}
    kept = [given for given, tool in zip(body.tools or (), tools, strict=True) if tool.name in names]
    return body.model_copy(update={"tools": kept, "tool_choice": mode})


def _check_count(tools: int, param: str) -> None:
    if tools > MOST_TOOLS:
        raise refusal(f"There are {tools} tools and at most {MOST_TOOLS} are allowed.", param)


def with_tools(tokenizer: Tokenizer, params: SamplingParams, body: ChatBody, name: str | None) -> SamplingParams:
    """Return settings under which reasoning and calls can be read, and must be made if the request requires a call.

    name: the format of calls; None = the template's. JSON of a given form may be written in place of calls that the
    model may make. Raises RequestError for invalid tools or an invalid choice.
    """
    calls, required = _has_calls(body), requires_call(body)
    form = None if required and body.call_replaces_form else params.structured_outputs
    if not calls and required:
        raise refusal("tool_choice needs tools.", "tool_choice")
    _check_count(len(body.tools or ()) if calls else 0, "tools")
    template, found = tokenizer.template_for(bool(body.tools)), _format_of(tokenizer, body, name)
    params = with_tags(tokenizer, params, (*(find_tags(template) or ()), *(found.markers() if found else ())))
    if found is None:
        return params
    if required and form is not None:
        raise refusal("tool_choice and the form of the answer are both given: keep one.", "tool_choice")
    choice, token_id = (body.tool_choice if required else None) or "required", partial(_added_id, tokenizer)
    chosen = choose_tools(read_tools(body.tools or ()), choice) if calls else []
    shapes = [found.shape(tool, template) for tool in chosen]
    instead = None if form is None or body.continue_final_message else _symbols_of(form, found, token_id)
    if not required and instead is None:
        return params
    several = body.tool_choice in (None, "auto", "required") and body.parallel_tool_calls is not False
    separator = found.separator(template) if several else None
    compact = wants_compact(body) if form is None else form.disable_any_whitespace
    grammar = call_grammar(shapes, token_id, separator, compact, instead, found.thought(token_id))
    return dataclasses.replace(params, structured_outputs={"grammar": grammar})  # type: ignore[arg-type]


def _has_calls(body: ChatBody) -> bool:
    return bool(body.tools) and body.tool_choice != "none"


def _symbols_of(form: StructuredOutputs, found: type[ToolParser], token_id: TokenId) -> str | None:
    """Return the symbols of a form in the grammar of calls; None for forms other than JSON, which leave no calls.

    In a format that reads all, the symbols of every form begin with the header of a message.
    """
    if not found.reads_all:
        return form_symbol(form.source) if form.source.kind == "json" else None
    symbol = form_symbol(form.source)
    if symbol is None:
        raise refusal("This model's answers have channels, so a grammar can't be their form.", "structured_outputs")
    return f"{found.opening(token_id)} {symbol}"


def reader_for(
    tokenizer: Tokenizer, body: ChatBody, name: str | None, has_form: bool
) -> Callable[[Prompt], MessageReader]:
    """Return a function that makes the reader of an answer from its prompt. has_form: the answer has a given form."""

    def make(prompt: Prompt) -> MessageReader:
        found = _format_of(tokenizer, body, name)
        callable_tools = read_tools(body.tools or ()) if _has_calls(body) else []
        tools = None if found is None else found().after(prompt.text or "", callable_tools)
        reasoning = None if found is not None and found.reads_all else find_reasoning(prompt.rendered, has_form)
        return MessageReader(reasoning, tools, requires_call(body))

    return make


def finish_reason_of_calls(body: ChatBody) -> str:
    """Return the finish_reason of an answer that ends with calls: as in OpenAI, "stop" if one function was named."""
    return "tool_calls" if body.tool_choice in (None, "auto", "required") else "stop"


def _format_of(tokenizer: Tokenizer, body: ChatBody, name: str | None) -> type[ToolParser] | None:
    """Return the format in which calls are read, and written if the request requires one.

    None: the request allows no calls, and nothing else needs the format. Raises ApiError (400) if the model decides
    whether it makes calls, and its format is unknown.
    """
    found = find_format(tokenizer.template_for(tools=_has_calls(body)), name)
    if not _has_calls(body):
        return found if found is not None and found.reads_all else None
    if found is None and requires_call(body):
        found = find_format(None, _UNKNOWN)
    if found is None:
        known = ", ".join(plugins.names("speculant.serving.tools"))
        raise refusal(
            "The format of this model's tool calls is unknown, so they can't be separated from text. "
            f"Start the server with --tool-parser ({known}), or require a call by tool_choice.",
            "tool_choice",
        )
    return found


def unknown_formats(tokenizer: Tokenizer, name: str | None) -> list[str]:
    """Return what can't be separated from a model's text, for the server's operator: calls, or reasoning."""
    template, found = tokenizer.template_for(tools=True) or "", []
    if "tools" in template and find_format(template, name) is None:
        known = ", ".join(plugins.names("speculant.serving.tools"))
        found.append(f"the format of this model's tool calls is unknown; --tool-parser sets one of {known}")
    plain = tokenizer.chat_template or ""
    if any(tags.end in plain for tags in TAGS) and find_tags(plain) is None:
        found.append("the format of this model's reasoning is unknown, so it stays in the content of answers")
    return found


def _added_id(tokenizer: Tokenizer, text: str) -> int | None:
    """Return the id of a text that is one added token, special or like `<tag>`: a grammar can't write it as text."""
    token: int | None = tokenizer.backend.token_to_id(text)
    added = None if token is None else tokenizer.backend.get_added_tokens_decoder().get(token)
    return token if added is not None and (added.special or (text[0] == "<" and text[-1] == ">")) else None


T = TypeVar("T")


@dataclass(frozen=True)
class Prompt:
    """Token ids, and their text if they were made from one. rendered: set for a conversation.

    source: what the encoder of an encoder-decoder model reads; the prompt is its decoder's. offsets: where the text of
    each token begins, if the answer repeats the prompt with its log-probabilities. conversation: the body with all
    messages, from which it was rendered.
    """

    tokens: Sequence[int]
    text: str | None = None
    rendered: RenderedPrompt | None = None
    conversation: ConversationBody | None = None
    offsets: Sequence[int] = ()
    source: Sequence[int] | None = None

    @property
    def given(self) -> GivenPrompt:
        """The prompt in the form for an engine."""
        if self.source is not None:
            return {"encoder_prompt": self.source, "decoder_prompt": self.tokens}
        return self.tokens if self.rendered is None else self.rendered

    @property
    def num_tokens(self) -> int:
        """The number of tokens, those of the source included."""
        return len(self.source or ()) + len(self.tokens)


@dataclass(frozen=True)
class Prompts:
    """Makes the prompts of one request in a text thread. Each piece of work has `options.text_timeout` seconds.

    client: the sender, who takes turns with others. size: bytes of the body.
    """

    lanes: TextLanes
    options: ServerOptions
    client: str
    size: int

    async def in_thread(self, work: Callable[[], T]) -> T:
        """Return the result of `work`, which runs in a thread.

        Raises ApiError if it takes too long (504), or if the client has too much work in the lane (429).
        """
        working = asyncio.wrap_future(self.lanes.submit(self.client, self.size, work))
        try:
            async with asyncio.timeout(self.options.text_timeout):
                return await working
        except TimeoutError:
            raise timed_out("Reading the prompt took too long.") from None

    async def of_completion(self, engine: AsyncEngine, body: CompletionBody) -> list[Prompt]:
        """Return the prompts of a completion; see `count_prompts`."""
        return await self.in_thread(lambda: self._completed(engine, body))

    async def of_text(self, engine: AsyncEngine, text: str, body: TokenizeBody) -> Prompt:
        """Return the prompt of a text, which may be longer than the context."""
        self._check_text(text)
        return await self.in_thread(lambda: _of(engine, PlainPrompt(text), body))

    async def of_chat(self, engine: AsyncEngine, body: ConversationBody) -> Prompt:
        """Return the prompt of a conversation, by the template of the model's folder.

        Raises ApiError (400) or SpeculantError for messages that it can't render, RequestError without a template.
        """
        messages = body.messages or []
        if body.truncation_side == "right" and body.truncate_prompt_tokens is not None:
            raise refusal(
                "A conversation can only be cut on the left, as the answer follows its end.", "truncation_side"
            )
        if len(messages) > self.options.max_messages:
            raise refusal(
                f"There are {len(messages)} messages and at most {self.options.max_messages} are allowed.", "messages"
            )
        return await self.in_thread(lambda: self._rendered(engine, messages, body))

    def _completed(self, engine: AsyncEngine, body: CompletionBody) -> list[Prompt]:
        read = [engine.read_prompt(each) for each in _listed(body)]
        for prompt in read:
            self._check(engine, prompt, body)
        if body.suffix:  # it is encoded with each prompt
            self._check_size(len(body.suffix) * len(read))
            return [_with_hole(engine, each, body.suffix, body) for each in read]
        return [_of(engine, each, body) for each in read]

    async def of_hole(self, engine: AsyncEngine, body: InfillBody) -> tuple[Prompt, bool]:
        """Return the prompt of a completion at the cursor, and whether texts were cut to leave room for its answer.

        The answer gets as many tokens as its limit, but at most half of the context; without a limit a quarter of it.
        """
        return await self.in_thread(lambda: self._hole(engine, body))

    def _hole(self, engine: AsyncEngine, body: InfillBody) -> tuple[Prompt, bool]:
        files = [(each.filename or "", each.text) for each in body.input_extra or ()]
        hole = Hole(body.input_prefix + (body.prompt or ""), body.input_suffix, files)
        self._check_text("".join((hole.prefix, hole.suffix, *map("".join, hole.files))))
        longest, marks = engine.limits.max_model_len, marks_of(engine, "input_prefix")
        limit = body.max_tokens if body.n_predict is None else body.n_predict
        most = longest - max(1, min(limit if limit is not None and limit >= 0 else longest // 4, longest // 2))
        made = fim_prompt(engine.tokenizer, marks, hole, most, body.add_special_tokens is not False)
        return Prompt(made.tokens), made.is_cut

    def _check(self, engine: AsyncEngine, prompt: PlainPrompt | PromptPair, body: CompletionBody) -> None:
        """Raise ApiError (400) for a salt within a prompt, and for texts that are too long."""
        parts = [prompt] if isinstance(prompt, PlainPrompt) else [prompt.encoder, prompt.decoder or PlainPrompt()]
        if prompt.cache_salt or parts[-1].cache_salt:
            raise refusal("A prompt has a cache_salt: send it beside the prompt.", "prompt")
        texts = [text for part in parts if (text := _text(part)) is not None]
        self._check_text("".join(texts))
        for text in texts:
            _check_fits(engine, text, body)

    def _rendered(self, engine: AsyncEngine, messages: Sequence[Message], body: ConversationBody) -> Prompt:
        rendered = self.render(engine, messages, body)
        _check_fits(engine, rendered.text, body)
        tokens = _cut(engine, engine.tokenizer.encode(rendered.text, bool(body.add_special_tokens)), body)
        return Prompt(tokens, rendered.text, replace(rendered, tokens=tokens), body)

    def render(self, engine: AsyncEngine, messages: Sequence[Message], body: ConversationBody) -> RenderedPrompt:
        """Return the text of these messages, in the caller's thread; the other fields are those of a body."""
        variables = dict(body.chat_template_kwargs or {})
        for name in ("reasoning_effort", "documents"):
            if (value := getattr(body, name)) is not None:
                variables.setdefault(name, value)
        if body.reasoning_effort is not None:  # for templates with a switch in place of an effort
            variables.setdefault("enable_thinking", body.reasoning_effort != "none")
        tools = None if body.tool_choice == "none" else body.tools
        conversation = [message.model_dump(exclude_none=True) for message in messages]
        begins, continues = body.add_generation_prompt is not False, bool(body.continue_final_message)
        rendered = engine.render_chat(conversation, tools, begins, variables, continue_final_message=continues)
        self._check_text(rendered.text)
        return rendered

    async def of_params(self, engine: AsyncEngine, params: SamplingParams) -> SamplingParams:
        """Return the settings for an engine, see `prepare` there."""
        texts = params.prediction or params.bad_words or params.stop
        return await self.in_thread(lambda: engine.prepare(params)) if texts else params

    def _check_text(self, text: str) -> None:
        self._check_size(len(text))

    def _check_size(self, size: int) -> None:
        most = self.options.max_prompt_characters
        if size > most:
            problem = f"The prompt is too long: it has {size} characters and at most {most} are allowed."
            raise refusal(problem, "prompt", CONTEXT_FULL)


def _of(engine: AsyncEngine, given: PlainPrompt | PromptPair, body: CompletionBody | TokenizeBody) -> Prompt:
    """Return a prompt, cut as the request asks; for a pair it is the decoder's, and the source is cut."""
    if isinstance(given, PlainPrompt):
        return _echoed(engine, Prompt(_cut(engine, _tokens(engine, given, body), body), _text(given)), body)
    source = _cut(engine, _tokens(engine, given.encoder, body), body)
    text = None if given.decoder is None else _text(given.decoder)
    return _echoed(engine, Prompt(engine.decoder_tokens(given.decoder), text, source=source), body)


def _with_hole(engine: AsyncEngine, given: PlainPrompt | PromptPair, suffix: str, body: CompletionBody) -> Prompt:
    """Return the prompt of a text, its suffix and the hole between them."""
    text = _text(given) if isinstance(given, PlainPrompt) else None
    if text is None:
        raise refusal("suffix needs prompts that are texts.", "suffix", "unsupported_parameter")
    begins, hole = body.add_special_tokens is not False, Hole(text, suffix)
    return Prompt(fim_prompt(engine.tokenizer, marks_of(engine, "suffix"), hole, begins=begins).tokens)


def _text(given: PlainPrompt) -> str | None:
    """Return the text of a prompt; None if it has token ids, which take precedence."""
    return given.text if given.tokens is None else None


def _tokens(engine: AsyncEngine, given: PlainPrompt, body: CompletionBody | TokenizeBody) -> Sequence[int]:
    if given.tokens is not None:
        return given.tokens
    return engine.tokenizer.encode(given.text or "", body.add_special_tokens is not False)


def _check_fits(engine: AsyncEngine, text: str, body: CompletionBody | ConversationBody) -> None:
    """Raise ContextFullError for a text that is certain to have more tokens than the context, before it is tokenised.

    A text that is cut may be longer, and so may one of /tokenize, which generates nothing.
    """
    most, longest = engine.tokenizer.characters_per_token, engine.limits.max_model_len
    if most is None or body.truncate_prompt_tokens is not None or isinstance(body, TokenizeBody):
        return
    if len(text) > most * longest:
        raise ContextFullError(
            f"the prompt is too long: it has {len(text)} characters, which are over {longest} tokens; this model's "
            f"maximum context length is {longest} tokens (max_model_len)",
            "shorten the prompt or raise max_model_len.",
        )


def _echoed(engine: AsyncEngine, prompt: Prompt, body: CompletionBody | TokenizeBody) -> Prompt:
    """Return a prompt with its text and the offsets of its tokens, if an answer repeats it."""
    if not (isinstance(body, CompletionBody) and body.echo):
        return prompt
    if len(prompt.tokens) > engine.limits.max_model_len:
        return prompt  # which the engine refuses
    tokenizer = engine.tokenizer
    skip = body.skip_special_tokens is not False
    whole = prompt.text is not None and body.truncate_prompt_tokens is None
    text = prompt.text if whole else tokenizer.decode(prompt.tokens, skip)
    if body.logprobs is None:
        return replace(prompt, text=text)
    places = TokenOffsets(tokenizer, skip)
    return replace(prompt, text=text, offsets=[places.next(token) for token in prompt.tokens])


def _cut(engine: AsyncEngine, tokens: Sequence[int], body: CompletionBody | ConversationBody) -> Sequence[int]:
    """Return the tokens of a prompt that a request keeps: the last ones, unless it names the other side."""
    most = body.truncate_prompt_tokens
    if most is None:
        return tokens
    if most == -1:  # as many as fit into the context with the answer, or into the encoder
        room = engine.limits.max_model_len - _answer_tokens(body)
        most = engine.limits.max_source_len if engine.has_source else max(1, room)
    if most < 1:
        raise refusal(
            f"truncate_prompt_tokens={most} is neither a number of tokens above 0 nor -1.", "truncate_prompt_tokens"
        )
    return tokens[:most] if body.truncation_side == "right" else tokens[-most:]


def _answer_tokens(body: CompletionBody | ConversationBody) -> int:
    """Return the tokens to reserve for an answer: its limit, otherwise one."""
    if isinstance(body, CompletionBody):
        return DEFAULT_COMPLETION_TOKENS if body.max_tokens is None else max(1, body.max_tokens)
    return (body.max_completion_tokens or body.max_tokens or 1) if isinstance(body, ChatBody) else 1


def count_prompts(body: CompletionBody, options: ServerOptions) -> int:
    """Return how many prompts a completion has. Raises ApiError (400) if there are too many."""
    prompts = _listed(body)
    if len(prompts) > options.max_prompts:
        raise refusal(f"There are {len(prompts)} prompts and at most {options.max_prompts} are allowed.", "prompt")
    return len(prompts)


def _listed(body: CompletionBody) -> Sequence[str | Sequence[int] | Mapping[str, Any]]:
    prompt = body.prompt
    if isinstance(prompt, str | dict):
        return [prompt]
    return [prompt] if isinstance(prompt[0], int) else prompt
