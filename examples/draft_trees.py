"""Draft trees, compared with a chain of the same depth: `python examples/draft_trees.py`.

A tree of [3, 2, 1] has three first tokens, each followed by two tokens, each followed by one: 15 nodes, 3 deep.
The target checks all of its paths in one pass, and one accepted path is kept.
"""

from speculant import LLM, SamplingParams
from speculant.tree import DraftTree

PROMPTS = ["def read_lines(path):\n", "import os\n\n\n", "class Stack:\n"]
PARAMS = SamplingParams(temperature=0.8, max_tokens=48, ignore_eos=True)
DRAFTS = {
    "chain": {"model": "demo", "num_speculative_tokens": 3},
    "tree": {"model": "demo", "tree": [3, 2, 1]},
    "three chains": {"method": "specinfer", "model": "demo", "draws": 3, "depth": 3},
}


def draw(tree: DraftTree) -> str:
    """Show a tree: a line per node, each below its parent."""
    return "\n".join(f"{'  ' * depth}{token}" for token, depth in zip(tree.token_list, tree.depths, strict=True))


if __name__ == "__main__":
    print(draw(DraftTree.of([5, 7, 9, 6, 7], [-1, 0, 0, -1, 3])), "\n")
    for name, config in DRAFTS.items():
        outputs = LLM("demo", speculative_config=config, seed=1).generate(PROMPTS, PARAMS)
        rule, passes = outputs[0].metrics.verification, sum(out.metrics.timing.sampled_passes for out in outputs)
        tokens = sum(len(out.outputs[0].token_ids) for out in outputs)
        print(f"{name:>12}: {tokens / passes:.2f} tokens per pass of the target, verified by {rule}")
