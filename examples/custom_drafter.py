"""Your own drafter, used by its name: `python examples/custom_drafter.py`.

A package has `copycat = "custom_drafter"` under [project.entry-points."speculant.drafting"] in its pyproject.toml, and
pip writes it into the package's metadata. Here the metadata is the folder examples-1.0.dist-info next to this file.
"""

from collections.abc import Sequence

from speculant import LLM, SamplingParams
from speculant.drafting import DrafterContext, DrafterNeeds, Method
from speculant.types import DraftTree, Request

METHOD = Method(default_length=4)
PROMPT = "def remove(path):\n    try:\n        os.unlink(path)\n    except OSError"


class Copycat:
    """Proposes the tokens that followed the newest token at its last occurrence. It keeps no state."""

    needs = DrafterNeeds()
    begin = observe = end = lambda self, request, *_: None

    def propose(self, requests: Sequence[Request], limits: Sequence[int]) -> list[DraftTree]:
        """Return one chain per request, with at most `limits[i]` tokens. It may be empty."""
        after = [self._last_place(request.tokens) + 1 for request in requests]
        return [DraftTree.chain(r.tokens[i : i + n]) for r, i, n in zip(requests, after, limits, strict=True)]

    def _last_place(self, tokens: list[int]) -> int:
        return next((i for i in range(len(tokens) - 2, -1, -1) if tokens[i] == tokens[-1]), len(tokens))


def build(context: DrafterContext) -> Copycat:
    """Make the drafter. `context` has models, caches and options for drafters that need them."""
    return Copycat()


if __name__ == "__main__":
    llm = LLM("demo", speculative_config={"method": "copycat"})
    [out] = llm.generate([PROMPT], SamplingParams(temperature=0.8, top_p=0.9, seed=9, max_tokens=64))
    print(out.outputs[0].text, llm.speculation, out.metrics.tokens_per_pass, sep="\n")
