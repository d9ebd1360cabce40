"""LiteLLM: a forced call, whole and streamed, and a schema."""

from __future__ import annotations

from importlib.metadata import version
from typing import Any

import litellm
from shared import MODEL, NAMED, QUESTION, TOOL, URL, Weather

settings: dict[str, Any] = {"model": f"openai/{MODEL}", "api_base": URL, "api_key": "none", "messages": QUESTION}

for choice in ("required", NAMED):
    calls: dict[str, Any] = {**settings, "tools": [TOOL], "tool_choice": choice, "parallel_tool_calls": False}
    (call,) = litellm.completion(**calls).choices[0].message.tool_calls
    Weather.model_validate_json(call.function.arguments)
    chunks = list(litellm.completion(**calls, stream=True))
    (call,) = litellm.stream_chunk_builder(chunks).choices[0].message.tool_calls
    assert call.function.name == "weather"
    Weather.model_validate_json(call.function.arguments)

answer = litellm.completion(**settings, response_format=Weather)
Weather.model_validate_json(answer.choices[0].message.content)
print(f"litellm {version('litellm')}: calls and a schema")
