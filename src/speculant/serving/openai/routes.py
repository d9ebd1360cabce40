"""The routes. Each reads its body, and answers in OpenAI's shape, or in vLLM's if OpenAI has none."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

from starlette.requests import Request
from starlette.responses import Response

from speculant import __version__
from speculant.engine import AsyncEngine
from speculant.serving.errors import ApiError, refusal
from speculant.serving.openai.answers import ChatAnswer, CompletionAnswer
from speculant.serving.openai.prompts import Prompt, Prompts, count_prompts
from speculant.serving.openai.protocol import ChatBody, CompletionBody, DetokenizeBody, TokenizeBody
from speculant.serving.openai.service import Job, Service
from speculant.serving.openai.settings import completion_params, finish_reason_of_calls, with_allowed_tools
from speculant.serving.wire import encode_in_parts, encode_long, json_response, while_connected


class Routes:
    """The handlers of one server's requests."""

    def __init__(self, service: Service) -> None:
        self._service = service
        self._tokenizer_info: bytes | None = None  # may have megabytes

    async def completions(self, request: Request) -> Response:
        """Complete one prompt or several."""
        service, engine = self._service, self._service.state.engine
        body = await service.read(CompletionBody, request)
        prompts, count = service.prompts(request), count_prompts(body, service.options)
        params = await service.apart(request, lambda: completion_params(engine, body))
        call, echo = service.call(engine, body, params, count), bool(body.echo)
        answer = CompletionAnswer(call, count, echo, answers=body.max_tokens != 0)
        job = Job(body, params, count, lambda: prompts.of_completion(engine, body), answer)
        return await service.answer(engine, request, job)

    async def chat(self, request: Request) -> Response:
        """Continue a conversation."""
        service, engine = self._service, self._service.state.engine
        body = await service.read(ChatBody, request)
        chat = await service.chat(engine, request, lambda: body)
        answer = ChatAnswer(chat.call, chat.make_reader, finish_reason_of_calls(chat.body))

        async def prompts() -> list[Prompt]:
            return [await service.prompts(request).of_chat(engine, chat.body)]

        return await service.answer(engine, request, Job(chat.body, chat.params, 1, prompts, answer))

    async def tokenize(self, request: Request) -> Response:
        """Return the token ids of a prompt or of messages."""
        service, engine = self._service, self._service.state.engine
        body = with_allowed_tools(await service.read(TokenizeBody, request))
        service.model(body)
        if (body.prompt is None) == (body.messages is None):
            raise refusal("Send either prompt or messages.", "prompt")
        prompts = service.prompts(request)
        made = prompts.of_chat(engine, body) if body.prompt is None else prompts.of_text(engine, body.prompt, body)
        prompt = await while_connected(request.receive, made)

        def document() -> dict[str, Any]:
            tokens, text_of_token = list(prompt.tokens), engine.tokenizer.backend.id_to_token
            value = {"count": len(tokens), "max_model_len": engine.limits.max_model_len, "tokens": tokens}
            return value | ({"token_strs": list(map(text_of_token, tokens))} if body.return_token_strs else {})

        return await _made_apart(request, prompts, document)

    async def detokenize(self, request: Request) -> Response:
        """Return the text of token ids."""
        service, engine = self._service, self._service.state.engine
        body = await service.read(DetokenizeBody, request)
        service.model(body)

        def document() -> dict[str, str]:
            if any(not 0 <= token < 2**31 for token in body.tokens):
                raise refusal("A token id is negative or too large.", "tokens")
            return {"prompt": engine.tokenizer.decode(body.tokens, bool(body.skip_special_tokens))}

        return await _made_apart(request, service.prompts(request), document)

    async def tokenizer_info(self) -> Response:
        """Return the settings in the tokenizer's folder, and the chat template."""
        tokenizer = self._service.state.engine.tokenizer
        if self._tokenizer_info is None:
            self._tokenizer_info = await encode_in_parts(dict(tokenizer.settings))
        return Response(self._tokenizer_info, media_type="application/json")

    async def models(self) -> Response:
        """List the names of the model."""
        engine = self._service.state.engine
        return json_response({"object": "list", "data": [self._model(engine, name) for name in self._service.names]})

    async def model(self, model: str) -> Response:
        """Describe the model."""
        engine = self._service.state.engine
        if not self._service.has_name(model):
            raise ApiError(404, f"The model {model!r} does not exist.", param="model", code="model_not_found")
        return json_response(self._model(engine, model))

    async def health(self) -> Response:
        """Return whether requests are served: 200, or 503 with the reason."""
        self._service.state.check()
        return json_response({"status": "ok"})

    async def load(self) -> Response:
        """Return the number of sequences that run or wait, as vLLM's server does."""
        return json_response({"server_load": self._service.state.admission.count})

    async def props(self) -> Response:
        """Return the server's properties as llama.cpp's does, with the model's name in place of its path."""
        engine, name = self._service.state.engine, self._service.names[0]
        settings = engine.default_params
        params = {
            "n_predict": -1,
            "temperature": settings.temperature,
            "top_k": settings.top_k,
            "top_p": settings.top_p,
            "min_p": settings.min_p,
            "repeat_penalty": settings.repetition_penalty,
            "presence_penalty": settings.presence_penalty,
            "frequency_penalty": settings.frequency_penalty,
        }
        general = {"n_ctx": engine.limits.max_model_len, "speculative": engine.speculating, "params": params}
        return json_response(
            {
                "default_generation_settings": general,
                "total_slots": engine.limits.max_num_seqs,
                "model_alias": name,
                "model_path": name,
                "chat_template": engine.tokenizer.chat_template or "",
                "modalities": {"vision": False, "audio": False},
                "build_info": f"speculant {__version__}",
                "is_sleeping": False,
            }
        )

    async def metrics(self) -> Response:
        """Return the metrics in Prometheus' text format."""
        page, kind = self._service.metrics.page()
        return Response(page, headers={"content-type": kind})

    async def version(self) -> Response:
        """Return the version of this package."""
        return json_response({"version": __version__})

    def _model(self, engine: AsyncEngine, name: str) -> dict[str, Any]:
        created = self._service.state.created
        return {
            "id": name,
            "object": "model",
            "created": created,
            "owned_by": "speculant",
            "root": self._service.names[0],
            "max_model_len": engine.limits.max_model_len,
            "chat": engine.tokenizer.chat_template is not None and not engine.has_source,
            "speculation": {"on": engine.speculating, "detail": engine.speculation},
        }


async def _made_apart(request: Request, prompts: Prompts, document: Callable[[], Mapping[str, Any]]) -> Response:
    """Return a response whose document is made and written in a text thread."""
    content = await while_connected(request.receive, prompts.in_thread(lambda: encode_long(document())))
    return Response(content, media_type="application/json")
