"""LangChain: tools that are bound with a choice, and structured output by each of its methods."""

from __future__ import annotations

from importlib.metadata import version

from langchain_openai import ChatOpenAI
from shared import MODEL, QUESTION, TOOL, URL, Weather

chat = ChatOpenAI(base_url=URL, api_key="none", model=MODEL, max_retries=0, max_tokens=400)

for choice in ("weather", "required", True):
    bound = chat.bind_tools([TOOL], tool_choice=choice, parallel_tool_calls=False)
    (call,) = bound.invoke(QUESTION).tool_calls
    assert call["name"] == "weather"
    Weather(**call["args"])
    chunks = list(bound.stream(QUESTION))
    whole = sum(chunks[1:], chunks[0])
    (call,) = whole.tool_calls
    Weather(**call["args"])

for method in ("function_calling", "json_schema"):
    structured = chat.with_structured_output(Weather, method=method)
    assert isinstance(structured.invoke(QUESTION), Weather)
    assert isinstance(list(structured.stream(QUESTION))[-1], Weather)

print(f"langchain-openai {version('langchain-openai')}: bound tools and structured output")
