"""A conversation of two messages, with the share of drafted tokens in each answer: `python examples/chat.py`."""

from speculant import LLM, SamplingParams

MESSAGES = ["class Stack:\n    def push(self, item):", "    def pop(self):"]
PARAMS = SamplingParams(temperature=0.8, top_p=0.9, seed=3, max_tokens=40, stop=["# user:", "\n\n"])


def main() -> None:
    """Stream each answer. Earlier messages are part of the next prompt."""
    llm = LLM("demo", draft_model="demo")  # a tiny model of code; a model that was trained to chat answers better
    conversation: list[dict[str, str]] = []
    for message in MESSAGES:
        print(f"\n>>> {message}")
        conversation.append({"role": "user", "content": message})
        drafted: list[bool] = []
        for piece in llm.stream_chat(conversation, PARAMS):
            print(piece.text, end="", flush=True)
            drafted.append(piece.drafted)
            if piece.output is not None:
                conversation.append({"role": "assistant", "content": piece.output.outputs[0].text})
        print(f"\n    {sum(drafted)} of {len(drafted)} tokens were drafted")
    print(f"\n{len(llm.render_chat(conversation).text)} characters of conversation so far")


if __name__ == "__main__":
    main()
