"""Three prompts at once, each streamed by a task of its own: `python examples/async_streams.py`."""

import asyncio

from speculant import AsyncEngine, SamplingParams

PROMPTS = ["def read_lines(path):\n", "import os\n\n\n", "class Stack:\n"]
PARAMS = SamplingParams(temperature=0.6, seed=1, max_tokens=48)


async def tell(engine: AsyncEngine, prompt: str) -> str:
    """Read one stream; the marks show which tokens were drafted, and that the streams grow side by side."""
    text = prompt
    async for piece in engine.stream(prompt, PARAMS):
        text += piece.text
        print("+" if piece.drafted else ".", end="", flush=True)
    return text


async def main() -> None:
    """Leaving the block finishes what still runs and ends the engine's thread."""
    async with AsyncEngine("demo", draft_model="demo") as engine:
        print(f"Speculation: {engine.speculation}. Each mark is a token, + one that was drafted.")
        texts = await asyncio.gather(*(tell(engine, prompt) for prompt in PROMPTS))
        print(f"\n{engine.metrics.tokens} tokens in {engine.metrics.steps} steps")
    print(*texts, sep="\n---\n")


if __name__ == "__main__":
    asyncio.run(main())
