"""Faults that other engines shipped, as edits of our source, each with the test that must find it."""

from __future__ import annotations

from tests.exactness.mutants.mutant import (
    CHANCE,
    COMMIT,
    COUNTS,
    DISTRIBUTION,
    END,
    GROWTH,
    INDEPENDENT,
    LOGPROBS,
    MATCH,
    PROPOSE,
    REJECTION,
    REQUESTS,
    SAMPLER,
    VERIFY,
    VOCABULARY,
    Mutant,
)
from tests.exactness.mutants.state import STATE
from tests.exactness.mutants.verifiers import RULES

STREAMS = "test_chance.py::test_rejection_on_keyed_streams[1-4000]"
UNRELATED = "test_chance.py::test_draft_acceptance_and_residual_are_unrelated[0]"
TRANSFORM = "test_distributions.py::test_every_transform_keeps_the_distribution[{}-rejection]"
SMALL = "test_distributions.py::test_every_kind_of_distributions_alone[{}]"
REPEATS = "test_seeds.py::test_a_seed_repeats_and_another_does_not[none]"
ROUNDS = "test_seeds.py::test_rounds_do_not_repeat[rejection]"

RANDOMNESS = [
    Mutant(
        "draft noise shared with acceptance",
        CHANCE,
        "(Purpose.ACCEPT, Purpose.DRAW)",
        "(Purpose.DRAFT, Purpose.DRAW)",
        STREAMS,
    ),
    Mutant(
        "draft noise shared with residual draws",
        CHANCE,
        "(Purpose.ACCEPT, Purpose.DRAW)",
        "(Purpose.ACCEPT, Purpose.DRAFT)",
        UNRELATED,
    ),
    Mutant(
        "acceptance uniform reused for the residual draw",
        CHANCE,
        'cumulative sum, in float64."""\n'
        "        return self._sampler.draw(weights, False, mix_in(*self.take_keys(1)))\n",
        'cumulative sum, in float64."""\n'
        "        self._count = max(self._count - 1, 0)\n"
        "        key = mix_in(self._accept_key, self.take_keys(1)[1])\n"
        "        return self._sampler.draw(weights, False, key)\n",
        STREAMS,
    ),
    Mutant(
        "u always 0",
        CHANCE,
        "return (mix_in(key, self._count) >> 11) * 2.0**-53",
        "return 0.0",
        "test_chance.py::test_accept_follows_its_probability[0.5]",
    ),
    Mutant(
        "acceptance always passes",
        CHANCE,
        "return self._uniform(self._accept_key) < probability",
        "return probability > 0",
        STREAMS,
    ),
    Mutant(
        "p = 0 accepted when u = 0",
        CHANCE,
        "return self._uniform(self._accept_key) < probability",
        "return self._uniform(self._accept_key) <= probability",
        "test_chance.py::test_accept_is_strict",
    ),
    Mutant(
        "token without weight drawn when u = 0",
        SAMPLER,
        "right=True",
        "right=False",
        "test_chance.py::test_no_draw_without_weight[0]",
    ),
    Mutant(
        "every round starts the streams anew",
        COMMIT,
        "    request.rounds += 1\n    outcome = ",
        "    outcome = ",
        ROUNDS,
    ),
    Mutant(
        "noise forgets the position",
        CHANCE,
        "mix_in(self._key, self._position - 1)",
        "mix_in(self._key, 0)",
        "test_chance.py::test_noise_draws_follow_their_weights[weights0]",
    ),
    Mutant(
        "coupled noise under a ratio rule",
        REQUESTS,
        "verifier.needs.shared_noise",
        "True",
        ROUNDS,
    ),
    Mutant(
        "per-request seed ignored",
        REQUESTS,
        "mix(self._rules.seed, Purpose.REQUEST, self._made) if seed is None else seed",
        "mix(self._rules.seed, Purpose.REQUEST, self._made)",
        REPEATS,
    ),
    Mutant(
        "requests without a seed share one",
        REQUESTS,
        "mix(self._rules.seed, Purpose.REQUEST, self._made) if",
        "self._rules.seed if",
        "test_seeds.py::test_without_a_seed_nothing_repeats[none]",
    ),
    Mutant(
        "samples share their seed",
        REQUESTS,
        "seed=mix(own_seed, Purpose.REQUEST, index)",
        "seed=own_seed",
        "test_seeds.py::test_samples_differ[4]",
    ),
    Mutant(
        "seeded requests verified by a ratio rule",
        VERIFY,
        "params.seed is not None or ",
        "",
        "test_drafters.py::test_no_drafter_changes_a_text[draft_model-blocks]",
    ),
    Mutant(
        "the root's noise after every node",
        VERIFY,
        "RowDraw(row, shared, keys[depth])",
        "RowDraw(row, shared, keys[0])",
        "test_drafters.py::test_no_drafter_changes_a_text[draft_model-blocks]",
    ),
]

DISTRIBUTIONS = [
    Mutant(
        "q reported raw while drafts are drawn after top-k",
        GROWTH,
        "drawn = own[[1 + node for node in path]]",
        "drawn = torch.softmax(own[[1 + node for node in path]].log().clamp(min=-2), -1)",
        TRANSFORM.format("top_k"),
    ),
    Mutant(
        "unlikely drafts thrown away before a ratio test",
        GROWTH,
        "        path.append(node)\n",
        (
            "        if probs[1 + node][chain.tokens[-1]] < 0.4:\n"
            "            chain.tokens = chain.tokens[:-1]\n"
            "            return path, False\n"
            "        path.append(node)\n"
        ),
        "test_distributions.py::test_chains_keep_the_distribution[3-1-rejection-1]",
    ),
    Mutant(
        "sampling parameters not applied to p",
        VERIFY,
        "probs = distribution(logits, nodes, sampler)",
        "probs = torch.softmax(logits.double(), -1)",
        TRANSFORM.format("temperature"),
    ),
    Mutant(
        "draft distribution blind to drafted ancestors",
        GROWTH,
        "Node(chain.request, [*chain.tokens, *guess.tokens_to(node)], chain.softened)",
        "Node(chain.request, [], chain.softened)",
        TRANSFORM.format("frequency"),
    ),
    Mutant(
        "logit_bias ignored under speculation",
        DISTRIBUTION,
        "biased=params.biased if params.logit_bias else None",
        "biased=params.biased if params.logit_bias and not node.drafted else None",
        TRANSFORM.format("bias"),
    ),
    Mutant(
        "constraint blind to drafted ancestors",
        DISTRIBUTION,
        "checked_mask(request.constraint, node.drafted)",
        "checked_mask(request.constraint, ())",
        "test_constraints.py::test_speculation_changes_no_constrained_text[settings0-model]",
    ),
    Mutant(
        "banned words blind to drafted ancestors",
        VOCABULARY,
        "reduce(Beginning.after, tokens, self._nodes[-1])",
        "self._nodes[-1]",
        "test_allowed_words.py::test_chains_of_a_draft_model[rejection-words]",
    ),
    Mutant(
        "banned words blind to the output",
        VOCABULARY,
        "reduce(Beginning.after, tokens, self._nodes[-1])",
        "reduce(Beginning.after, tokens, self._vocabulary.root)",
        "test_allowed_words.py::test_speculation_changes_no_text[settings0-words-none]",
    ),
    Mutant(
        "a word is banned one token too late",
        VOCABULARY,
        "beginnings_of(word[:-1] for word in words)",
        "beginnings_of(words)",
        "test_allowed_words.py::test_rules_come_before_other_settings[match-plain]",
    ),
    Mutant(
        "constraint not advanced",
        COMMIT,
        "                constraint.advance([token])\n",
        "                pass\n",
        "test_constraints.py::test_speculation_changes_no_constrained_text[settings0-none]",
    ),
    Mutant(
        "last token counted twice in penalties",
        VERIFY,
        "Node(request, tree.tokens_to(node), verifier",
        "Node(request, [request.tokens[-1], *tree.tokens_to(node)], verifier",
        TRANSFORM.format("frequency"),
    ),
    Mutant(
        "penalties blind to drafted ancestors",
        SAMPLER,
        "with_drafted(edits.drafted)",
        "with_drafted(())",
        TRANSFORM.format("penalties"),
    ),
    Mutant(
        "prompt counted by presence and frequency",
        COUNTS,
        "        self._counts = np.zeros(len(self._tokens), dtype=np.int64)\n",
        "        self._counts = np.ones(len(self._tokens), dtype=np.int64)\n",
        TRANSFORM.format("presence"),
    ),
    Mutant(
        "min_tokens ignored behind drafted ancestors",
        DISTRIBUTION,
        "ban_below=params.min_tokens - request.num_output,",
        "ban_below=0 if node.drafted else params.min_tokens - request.num_output,",
        TRANSFORM.format("min_tokens"),
    ),
    Mutant(
        "greedy and sampling rows mixed",
        SAMPLER,
        "if len(indices) == len(settings):",
        "if indices:",
        INDEPENDENT.format("plain, greedy"),
    ),
    Mutant(
        "rows of one kind with another's parameters",
        SAMPLER,
        "[settings[i] for i in indices]",
        "settings[: len(indices)]",
        INDEPENDENT.format("greedy, cold"),
    ),
    Mutant(
        "bonus drawn from the wrong row",
        REJECTION,
        "chance.draw(p[-1])",
        "chance.draw(p[-2])",
        SMALL.format("dense-rejection"),
    ),
    Mutant(
        "residual one row late",
        REJECTION,
        "residual(p[node], q[node])",
        "residual(p[node + 1], q[node])",
        SMALL.format("dense-rejection"),
    ),
    Mutant(
        "acceptance one row late",
        REJECTION,
        "likelihood_ratios(tree, p[:-1], q)",
        "likelihood_ratios(tree, p[1:], q)",
        SMALL.format("dense-rejection"),
    ),
    Mutant(
        "residual without the draft's law",
        REJECTION,
        "rest = (weight * p - q).clamp(min=0)",
        "rest = p.clone()",
        SMALL.format("dense-rejection"),
    ),
    Mutant(
        "empty residual",
        REJECTION,
        "return rest if float(rest.sum()) > 0 else p",
        "return rest",
        "test_rules.py::test_an_empty_residual_falls_back_to_the_target[0.0]",
    ),
    Mutant(
        "matching against the parent's row",
        MATCH,
        "chance.draw(p[1 + node])",
        "chance.draw(p[max(node, 0)])",
        SMALL.format("dense-match"),
    ),
]

ENDS = [
    Mutant(
        "end of sequence inside a draft ignored",
        COMMIT,
        "            if request.ending.reason is not None:\n                break",
        "            if request.ending.reason is not None and len(committed) == len(tokens):\n                break",
        END.format("auto-right-5-paged"),
    ),
    Mutant(
        "max_tokens overshot",
        COMMIT,
        "params.max_tokens - before)",
        "params.max_tokens - before + 1)",
        "test_ends.py::test_max_tokens_is_met_exactly[right-3]",
    ),
    Mutant(
        "drafts beyond max_tokens",
        PROPOSE,
        "max_tokens - (num_positions - len(request.prompt)) - 1",
        "max_tokens - (num_positions - len(request.prompt))",
        "test_ends.py::test_no_draft_is_longer_than_the_rest_of_the_text[5]",
    ),
    Mutant(
        "length cap hides an earlier stop",
        COMMIT,
        "if may_stop and token in request.stops.end_token_ids:",
        "if may_stop and token in request.stops.end_token_ids and len(committed) < room:",
        "test_ends.py::test_an_end_token_wins_over_the_length[right-5]",
    ),
    Mutant(
        "context overflow at K + 1",
        PROPOSE,
        "left = max_len - num_positions - 1",
        "left = max_len",
        "test_ends.py::test_the_context_is_filled_and_never_overflows[right-5-paged]",
    ),
    Mutant(
        "one token too many at the context's end",
        COMMIT,
        "room = max_model_len - len(request.tokens)",
        "room = max_model_len - len(request.tokens) + 1",
        "test_ends.py::test_the_context_is_filled_and_never_overflows[none-1-paged]",
    ),
    Mutant(
        "tokens behind the end kept in the cache",
        COMMIT,
        "path[: len(tokens) - 1]",
        "path",
        END.format("auto-right-5-paged"),
    ),
    Mutant(
        "log-probability of the wrong row",
        LOGPROBS,
        "rows = [0, *(1 + node for node in path)]",
        "rows = [*(1 + node for node in path), 0]",
        "test_logprobs.py::test_output_tokens[target-2]",
    ),
    Mutant(
        "prompt log-probability of the wrong row",
        LOGPROBS,
        "first = len(request.prompt_logprobs) + 1",
        "first = len(request.prompt_logprobs)",
        "test_logprobs.py::test_prompt_tokens[none-48-paged]",
    ),
]

MUTANTS = [*RANDOMNESS, *DISTRIBUTIONS, *RULES, *ENDS, *STATE]
