"""Instructor: classes from tool calls, from a schema, and from any JSON object."""

from __future__ import annotations

from importlib.metadata import version

import httpx
import instructor
import openai
from pydantic import BaseModel, ConfigDict
from shared import MODEL, QUESTION, URL, Weather


class Anything(BaseModel):
    """Any object: what a mode that sends no schema can promise."""

    model_config = ConfigDict(extra="allow")


# a model may go on with an object for ever: this one closes it as soon as it can
(closing,) = httpx.post(
    f"{URL.removesuffix('/v1')}/tokenize", json={"prompt": "}", "add_special_tokens": False}
).json()["tokens"]

for mode, kind in (
    (instructor.Mode.TOOLS, Weather),
    (instructor.Mode.JSON_SCHEMA, Weather),
    (instructor.Mode.JSON, Anything),
):
    client = instructor.from_openai(openai.OpenAI(base_url=URL, api_key="none", max_retries=0), mode=mode)
    answer = client.chat.completions.create(
        model=MODEL, messages=QUESTION, response_model=kind, max_retries=0, logit_bias={str(closing): 100}
    )
    assert isinstance(answer, kind), answer

print(f"instructor {version('instructor')}: TOOLS, JSON_SCHEMA and JSON")
