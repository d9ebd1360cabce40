"""OpenAI's Predicted Outputs as drafts: start `speculant serve demo --draft-model demo` first."""

import os

from openai import OpenAI

URL = os.environ.get("OPENAI_BASE_URL", "http://127.0.0.1:8000/v1")
MESSAGES = [{"role": "user", "content": "class Stack:\n    def push(self, item):"}]


def main() -> None:
    """Predict an answer exactly, and then with one word changed. The answer stays the same, its cost changes."""
    client = OpenAI(base_url=URL, api_key=os.environ.get("OPENAI_API_KEY", "none"))
    model = client.models.list().data[0].id
    settings = {"model": model, "messages": MESSAGES, "temperature": 0.6, "seed": 3, "max_tokens": 64}
    first = client.chat.completions.create(**settings).choices[0].message.content
    print(first)
    middle = first[len(first) // 2 :].split(maxsplit=1)[0]
    for name, text in {"the answer": first, "a word changed": first.replace(middle, "something", 1)}.items():
        answer = client.chat.completions.create(prediction={"type": "content", "content": text}, **settings)
        details = answer.usage.completion_tokens_details
        print(
            f"\npredicted {name}: {details.accepted_prediction_tokens} tokens accepted,"
            f" {details.rejected_prediction_tokens} rejected, of {answer.usage.completion_tokens};"
            f" the same answer: {answer.choices[0].message.content == first}"
        )


if __name__ == "__main__":
    main()
