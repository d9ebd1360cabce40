"""An answer in JSON of a schema, with OpenAI's client: start `speculant serve demo --draft-model demo` first.

OpenAI's response_format accepts the schema too. This server's own field can forbid white space between the parts: then
more tokens are forced, and forced tokens are free drafts.
"""

import json
import os

from openai import OpenAI

URL = os.environ.get("OPENAI_BASE_URL", "http://127.0.0.1:8000/v1")
MESSAGES = [{"role": "user", "content": "Describe a function that reads a file."}]
SCHEMA = {
    "type": "object",
    "properties": {
        "name": {"type": "string", "pattern": "^[a-z_]{3,12}$"},
        "arguments": {"type": "array", "items": {"enum": ["path", "text", "size"]}, "minItems": 1, "maxItems": 3},
        "is_method": {"type": "boolean"},
    },
    "required": ["name", "arguments", "is_method"],
}


def main() -> None:
    """Send the request twice with the same seed: speculation changes the speed, but neither form nor content."""
    client = OpenAI(base_url=URL, api_key=os.environ.get("OPENAI_API_KEY", "none"))
    settings = {"model": client.models.list().data[0].id, "messages": MESSAGES, "seed": 1, "max_tokens": 100}
    form = {"json": SCHEMA, "disable_any_whitespace": True}
    first, second = (
        client.chat.completions.create(extra_body={"structured_outputs": form, "speculation": speculating}, **settings)
        for speculating in (True, False)
    )
    print(json.dumps(json.loads(first.choices[0].message.content), indent=2))
    print("the same without speculation:", first.choices[0].message.content == second.choices[0].message.content)


if __name__ == "__main__":
    main()
