"""An answer that is JSON of a schema, by OpenAI's client: start `speculant serve demo --draft-model demo` first."""

import json
import os

from openai import OpenAI

URL = os.environ.get("OPENAI_BASE_URL", "http://127.0.0.1:8000/v1")
SCHEMA = {
    "type": "object",
    "properties": {
        "name": {"type": "string", "pattern": "^[a-z_]{3,12}$"},
        "arguments": {"type": "array", "items": {"enum": ["path", "text", "size"]}, "minItems": 1, "maxItems": 3},
        "is_method": {"type": "boolean"},
    },
    "required": ["name", "arguments", "is_method"],
    "additionalProperties": False,
}


def main() -> None:
    """Ask twice with the same seed: speculation changes the speed, and neither the form nor the content."""
    client = OpenAI(base_url=URL, api_key=os.environ.get("OPENAI_API_KEY", "none"))
    answers = [
        client.chat.completions.create(
            model=client.models.list().data[0].id,
            messages=[{"role": "user", "content": "Describe a function that reads a file."}],
            response_format={"type": "json_schema", "json_schema": {"name": "function", "schema": SCHEMA}},
            max_tokens=100,
            seed=1,
            extra_body={"speculation": speculating},
        ).choices[0].message.content
        for speculating in (True, False)
    ]  # fmt: skip
    print(json.dumps(json.loads(answers[0]), indent=2))
    print("the same without speculation:", answers[0] == answers[1])


if __name__ == "__main__":
    main()
