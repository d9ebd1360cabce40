"""Faults in the rules for blocks and trees, and in how trees are drawn."""

from __future__ import annotations

from tests.exactness.mutants.mutant import BLOCK, GROWTH, MULTI_DRAFT, TOPOLOGY, TRAVERSAL, Mutant

CHAIN = "test_rules.py::test_sampled_chains[{}-3-2]"
TREE = "test_drafters.py::test_trees_keep_the_distribution[{}]"

RULES = [
    Mutant(
        "block verification with the token-wise formula",
        BLOCK,
        "weights = path_weights(likelihood_ratios(tree, p[:-1], q))",
        "weights = [1.0, *(min(1.0, ratio) for ratio in likelihood_ratios(tree, p[:-1], q))]",
        CHAIN.format("block"),
    ),
    Mutant(
        "block residual without P_tau",
        BLOCK,
        "residual(p[accepted], q[accepted], weights[accepted])",
        "residual(p[accepted], q[accepted])",
        CHAIN.format("block"),
    ),
    Mutant(
        "block stops at its first failure",
        BLOCK,
        "                accepted = length\n",
        "                accepted = length\n            else:\n                break\n",
        CHAIN.format("block"),
    ),
    Mutant(
        "block owes nothing behind a token",
        BLOCK,
        "return [*map(share, owed, weights[1:-1]), weights[-1]]",
        "return weights[1:]",
        CHAIN.format("block"),
    ),
    Mutant(
        "a sibling tried against the whole target",
        MULTI_DRAFT,
        "        rest = residual(rest, q[index])\n        rest = rest / rest.sum()\n",
        "",
        TREE.format("pair-multi_draft"),
    ),
    Mutant(
        "a residual that is not normalised before the next sibling",
        MULTI_DRAFT,
        "        rest = rest / rest.sum()\n",
        "",
        TREE.format("pair-multi_draft"),
    ),
    Mutant(
        "a rejected leaf's share kept from its parent",
        TRAVERSAL,
        "        self._weights[parent] = share(owed, weight)\n",
        "",
        TREE.format("two deep-traversal"),
    ),
    Mutant(
        "the parent's law as it was before a leaf was rejected",
        TRAVERSAL,
        "            self.probs[parent] = rest / owed\n",
        "            pass\n",
        TREE.format("pair-traversal"),
    ),
    Mutant(
        "siblings drawn without replacement, told as drawn with it",
        TOPOLOGY,
        ("            children.append((pick(token_probs), place, token_probs))\n"),
        (
            "            own = probs[0] if probs[0] is not None else token_probs\n"
            "            children.append((pick(token_probs), place, own))\n"
        ),
        TREE.format("pair-multi_draft"),
    ),
    Mutant(
        "a merged draw told as a free one",
        TOPOLOGY,
        "drawn[token], own[token] = [], sampler.normalise(rest)",
        "drawn[token], own[token] = [], token_probs",
        TREE.format("three draws-multi_draft"),
    ),
    Mutant(
        "a chain of one model told with the law of another",
        TOPOLOGY,
        "rest = without(token_probs, *drawn)",
        "rest = without(next(each for each in probs if each is not None), *drawn)",
        "test_tree_distributions.py::test_chains_of_different_models_keep_the_distribution[multi_draft]",
    ),
    Mutant(
        "unlikely nodes of a sampled tree pruned before a ratio test",
        GROWTH,
        "            if len(self.tokens) < self.limit:\n",
        "            if len(self.tokens) < self.limit and float(own[token]) > 0.3:\n",
        TREE.format("pair-traversal"),
    ),
]
