"""Your own verifier, used by its name: `python examples/custom_verifier.py`.

It has an entry point in the group "speculant.verification"; custom_drafter.py explains how.
"""

from math import exp

from torch import Tensor

from speculant import LLM, SamplingParams
from speculant.sampling import Chance
from speculant.types import DraftTree, Verdict
from speculant.verification import VerifierNeeds


class Typical:
    """Typical acceptance (Medusa, arXiv 2401.10774): accept tokens that are likely enough for the target's entropy."""

    lossless = False  # shown by results, metrics and `llm.speculation`
    needs = VerifierNeeds(shared_noise=False, branches=True)

    def verify(self, tree: DraftTree, p: Tensor, chance: Chance) -> Verdict:
        """Follow the likeliest child while it is typical. p is [n + 1, V]; its row 1 + i has the probs after node i."""
        path, node = list[int](), -1
        while children := tree.children(node):
            probs = p[1 + node]
            best = max(children, key=lambda child: float(probs[tree.token_list[child]]))
            entropy = -float(probs.xlogy(probs).sum())
            if float(probs[tree.token_list[best]]) < min(0.09, 0.3 * exp(-entropy)):
                break
            path.append(node := best)
        return Verdict(tuple(path), chance.draw(p[1 + node]))


build = Typical

if __name__ == "__main__":
    llm = LLM("demo", "demo", speculative_config={"verification": "typical"})
    [out] = llm.generate(["def split_path(path):"], SamplingParams(temperature=0.7, max_tokens=48))
    print(out.outputs[0].text, llm.speculation, out.metrics.tokens_per_pass, sep="\n")
