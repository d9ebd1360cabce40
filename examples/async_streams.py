"""Three prompts at once, each streamed by its own task: `python examples/async_streams.py`."""

import asyncio

from speculant import AsyncEngine, SamplingParams

PROMPTS = ["def read_lines(path):\n", "import os\n\n\n", "class Stack:\n"]
PARAMS = SamplingParams(temperature=0.6, seed=1, max_tokens=48)


async def follow(engine: AsyncEngine, prompt: str) -> str:
    """Read one stream. The marks show drafted tokens, and that the streams grow together."""
    text = prompt
    async for piece in engine.stream(prompt, PARAMS):
        text += piece.text
        print("+" if piece.drafted else ".", end="", flush=True)
    return text


async def main() -> None:
    """Leaving the block waits for running requests and ends the engine's thread."""
    async with AsyncEngine("demo", draft_model="demo") as engine:
        print(f"Speculation: {engine.speculation}. Each mark is a token, each + a drafted one.")
        texts = await asyncio.gather(*(follow(engine, prompt) for prompt in PROMPTS))
        print(f"\n{engine.metrics.tokens} tokens in {engine.metrics.steps} steps")
    print(*texts, sep="\n---\n")


if __name__ == "__main__":
    asyncio.run(main())
