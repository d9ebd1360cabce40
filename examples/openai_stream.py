"""A streamed chat with OpenAI's client: start `speculant serve demo --draft-model demo` first."""

import os

from openai import OpenAI

URL = os.environ.get("OPENAI_BASE_URL", "http://127.0.0.1:8000/v1")
MESSAGES = [
    {"role": "system", "content": "You complete Python code."},
    {"role": "user", "content": "class Stack:\n    def push(self, item):"},
]


def main() -> None:
    """Print the text as it arrives. With the field `speculant`, chunks show which of their tokens were drafted."""
    client = OpenAI(base_url=URL, api_key=os.environ.get("OPENAI_API_KEY", "none"))
    stream = client.chat.completions.create(
        model=client.models.list().data[0].id,
        messages=MESSAGES,
        max_tokens=64,
        temperature=0.6,
        seed=1,
        stream=True,
        stream_options={"include_usage": True},
        extra_body={"speculant": {"tokens": True}},
    )
    drafted = 0
    for chunk in stream:
        for choice in chunk.choices:
            print(choice.delta.content or "", end="", flush=True)
        drafted += sum(token["drafted"] for token in (chunk.model_extra or {}).get("speculant_tokens", []))
        if chunk.usage is not None:  # the last chunk's
            print(f"\n\n{drafted} of {chunk.usage.completion_tokens} tokens were drafted")


if __name__ == "__main__":
    main()
