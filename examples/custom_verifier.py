"""A verification rule of one's own, used by its name: `python examples/custom_verifier.py`.

It is announced by an entry point of the group "speculant.verification", as custom_drafter.py says.
"""

from math import exp

from torch import Tensor

from speculant import LLM, SamplingParams
from speculant.sampling.chance import Chance
from speculant.types import DraftTree, Verdict
from speculant.verification.base import VerifierNeeds


class Typical:
    """Typical acceptance (Medusa, arXiv 2401.10774): keep what is likely enough for the entropy of the target."""

    lossless = False  # results, metrics and `llm.speculation` say so
    needs = VerifierNeeds(shared_noise=False, branches=True)

    def verify(self, tree: DraftTree, p: Tensor, chance: Chance) -> Verdict:
        """Follow the likeliest child while it is typical; p is [n + 1, V], its row 1 + i the probs after node i."""
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
