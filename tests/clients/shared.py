"""What the Python clients ask for, and how they reach the server."""

from __future__ import annotations

import os
from typing import Any, Literal

from pydantic import BaseModel, ConfigDict

URL, MODEL = os.environ["CLIENT_URL"], os.environ["CLIENT_MODEL"]
KNOWS_CALLS = bool(os.environ["CLIENT_CALLS"])  # whether the template's format of calls is known
QUESTION: list[Any] = [{"role": "user", "content": "How is the weather in Oslo?"}]


class Weather(BaseModel):
    """The weather of a city, and nothing else: a random model would go on with properties of its own."""

    model_config = ConfigDict(extra="forbid")
    city: Literal["Oslo", "Rome"]
    warm: bool


TOOL: dict[str, Any] = {
    "type": "function",
    "function": {"name": "weather", "parameters": Weather.model_json_schema()},
}
NAMED: dict[str, Any] = {"type": "function", "function": {"name": "weather"}}
