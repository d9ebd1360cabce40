"""Faults in state: caches, drafts, samples and the places of requests in a batch."""

from __future__ import annotations

from tests.exactness.mutants.mutant import (
    ATTENTION,
    CACHE,
    COMMIT,
    DRAFT_RUNNER,
    DRAFT_VOCABULARY,
    END,
    ENGINE,
    GROWTH,
    INDEPENDENT,
    OWN_TOKENS,
    PROPOSE,
    RUNNER,
    SCHEDULER,
    VERIFY,
    Mutant,
)

DRAFTS = "test_draft_cache.py::test_drafts_follow_the_committed_tokens[2-plain-{}]"
CASCADES = "test_cascades.py::test_a_cascade_drafts_the_tokens_of_its_model[reference-float64-paged-{}]"
KNOWN = "test_draft_cache.py::test_a_draft_goes_on_from_a_known_prefix[0]"
LEFT_BEHIND = "test_prefixes.py::test_an_earlier_text_leaves_only_committed_tokens[{}]"
READ = "test_other_vocabularies.py::test_a_draft_reads_its_own_tokens_of_the_text[{}-paged]"
SALTS = "test_prefixes.py::test_salts_keep_prompts_apart[{}]"
ASIDE = "test_preemption.py::test_a_preempted_request_writes_the_same_text[{}]"

ROLLBACK = [
    mutant
    for name in ("slotted", "paged")
    for mutant in (
        Mutant(
            f"rollback off by one, {name}",
            CACHE,
            "self.truncate_to(seq_id, base + len(path))",
            "self.truncate_to(seq_id, base + max(len(path) - 1, 0))",
            END.format(f"auto-right-5-{name}"),
        ),
        Mutant(
            f"rollback that does nothing, {name}",
            CACHE,
            "        self.truncate_to(seq_id, base + len(path))\n",
            "",
            END.format(f"auto-wrong-3-{name}"),
        ),
        Mutant(
            f"accepted nodes of a tree not moved together, {name}",
            CACHE,
            "if path and path[-1] >= len(path):",
            "if False:",
            OWN_TOKENS.format(f"greedy-tree-{name}"),
        ),
    )
]

BLOCKS = [
    Mutant(
        "rollback leaves blocks behind",
        CACHE,
        "            keep = -(-n // self.block_size)\n",
        "            keep = len(held.tables[0].blocks)\n",
        END.format("auto-wrong-3-paged"),
    ),
    Mutant(
        "shared blocks written to",
        CACHE,
        "return block not in self._indexed and self._holders[block] - others <= 1",
        "return True",
        "test_prefixes.py::test_samples_share_the_blocks_of_their_prompt[none]",
    ),
    Mutant(
        "copies on write not made",
        CACHE,
        "            self.storage.move(Moves(moves[0].sources, moves[0].targets, tuple(moves[1:])))\n",
        "            pass\n",
        "test_prefixes.py::test_samples_share_the_blocks_of_their_prompt[none]",
    ),
    Mutant(
        "the accepted path not moved",
        CACHE,
        "            self._move_path(seq_id, held, base, path)\n",
        "            pass\n",
        OWN_TOKENS.format("greedy-tree-paged"),
    ),
    Mutant(
        "a block is given back one position too early",
        CACHE,
        "first, before = first_seen(self.pool.window, length)",
        "first, before = first_seen(self.pool.window, length + 1)",
        "test_windows.py::test_what_was_given_back_is_never_read[full and 4-reference]",
    ),
    Mutant(
        "blocks are given back before a draft is verified",
        COMMIT,
        "        cache.compact(request.seq_id, base, kept)\n",
        "        cache.drop_unseen(request.seq_id)\n        cache.compact(request.seq_id, base, kept)\n",
        "test_windows.py::test_no_text_changes[full and 9-tree-reference]",
    ),
    Mutant(
        "a prefix is found although its window was evicted",
        CACHE,
        "                    return index * self.block_size\n",
        "                    return length\n",
        "test_windows.py::test_a_prefix_is_found_as_far_as_every_group_has_its_window",
    ),
    Mutant(
        "a known prompt's last token not fed",
        CACHE,
        "min(len(nodes) * size, most)",
        "len(nodes) * size",
        "test_prefixes.py::test_the_last_token_of_a_prompt_is_always_fed[8]",
    ),
    Mutant(
        "a block indexed before it is full",
        CACHE,
        "min(held.length, len(tokens)) // self.block_size",
        "-(-min(held.length, len(tokens)) // self.block_size)",
        LEFT_BEHIND.format("none"),
    ),
    Mutant(
        "state of rejected drafts indexed for reuse",
        COMMIT,
        "        cache.compact(request.seq_id, base, kept)\n",
        "        cache.insert_prefix(request.seq_id, request.tokens)\n"
        "        cache.compact(request.seq_id, base, kept)\n",
        LEFT_BEHIND.format("model"),
    ),
    Mutant(
        "prompt log-probabilities of a known prompt left out",
        SCHEDULER,
        "limit = 0 if request.wants_prompt_logits else most",
        "limit = most",
        "test_prefixes.py::test_prompt_logprobs_are_whole_on_a_prefix_hit[none]",
    ),
    Mutant(
        "prefix hits across tenants",
        SCHEDULER,
        "self._target.match_prefix(request.seq_id, request.tokens, salt, limit)",
        'self._target.match_prefix(request.seq_id, request.tokens, "", limit)',
        SALTS.format("None"),
    ),
    Mutant(
        "a tenant's prompt indexed for everyone",
        SCHEDULER,
        "            self._target.match_prefix(request.seq_id, request.tokens, salt, limit)",
        "            if limit:\n                self._target.match_prefix(request.seq_id, request.tokens, salt, limit)",
        SALTS.format("0"),
    ),
]

DRAFTING = [
    Mutant(
        "draft cache not rolled back",
        DRAFT_RUNNER,
        "self.cache.truncate_to(request.seq_id, keep)",
        "pass",
        DRAFTS.format("slotted"),
    ),
    Mutant(
        "draft cache of blocks not rolled back",
        DRAFT_RUNNER,
        "            self.cache.truncate_to(request.seq_id, keep)\n",
        "            pass\n",
        DRAFTS.format("paged"),
    ),
    Mutant(
        "draft rollback off by one",
        DRAFT_RUNNER,
        "self.cache.truncate_to(request.seq_id, keep)",
        "self.cache.truncate_to(request.seq_id, keep + 1)",
        DRAFTS.format("paged"),
    ),
    Mutant(
        "draft model goes on from rejected tokens",
        DRAFT_RUNNER,
        " and cached.tokens[keep] == text[keep]",
        "",
        "test_draft_cache.py::test_rounds_between_two_drafts_are_caught_up",
    ),
    Mutant(
        "draft cache uninitialised on a prefix hit",
        DRAFT_RUNNER,
        "self.cache.match_prefix(request.seq_id, committed, salt)",
        "request.metrics.cached_tokens",
        KNOWN,
    ),
    Mutant(
        "draft state of rejected drafts indexed for reuse",
        DRAFT_RUNNER,
        "        keep, most = cached.agreed,",
        "        self.cache.insert_prefix(request.seq_id, text)\n        keep, most = cached.agreed,",
        KNOWN,
    ),
    Mutant(
        "draft prefixes across tenants",
        DRAFT_RUNNER,
        "match_prefix(request.seq_id, committed, salt)",
        "match_prefix(request.seq_id, committed)",
        SALTS.format("None"),
    ),
    Mutant(
        "stale draft after preemption",
        DRAFT_RUNNER,
        (
            "        self._cached[request.seq_id] = _CachedTokens()\n"
            "\n"
            "    def end(self, request: Request) -> None:\n"
            '        """Forget a sequence, and release its blocks and its source."""\n'
            "        self._cached.pop(request.seq_id, None)\n"
        ),
        (
            "        self._cached.setdefault(request.seq_id, _CachedTokens())\n"
            "\n"
            "    def end(self, request: Request) -> None:\n"
            '        """Forget a sequence, and release its blocks and its source."""\n'
        ),
        "test_draft_cache.py::test_a_resumed_request_is_drafted_from_its_own_tokens[40]",
    ),
    Mutant(
        "a drafter not told of a preemption",
        ENGINE,
        "for request in schedule.preempted:",
        "for request in ():",
        "test_preemption.py::test_a_drafter_begins_and_ends_every_request",
    ),
    Mutant(
        "drafts drawn from a neighbour's row",
        GROWTH,
        "model.logits(hidden.last[rows])",
        "model.logits(hidden.last[rows[::-1]])",
        DRAFTS.format("paged"),
    ),
    Mutant(
        "rejected guesses stay in a cascade's cache",
        GROWTH,
        "self._cache.length(seq_id) - guess.size, path[1:])",
        "self._cache.length(seq_id) - guess.size, range(guess.size))",
        CASCADES.format("lookup"),
    ),
    Mutant(
        "a cascade keeps another branch of a guess",
        GROWTH,
        "self._cache.length(seq_id) - guess.size, path[1:])",
        "self._cache.length(seq_id) - guess.size, range(len(path) - 1))",
        CASCADES.format("tree"),
    ),
    Mutant(
        "a cascade accepts what it was told",
        GROWTH,
        "child = tree.child(node, token)",
        "child = next(iter(tree.children(node)), None)",
        CASCADES.format("wrong"),
    ),
]

PREEMPTION = [
    Mutant(
        "drafts take memory that was promised to others",
        PROPOSE,
        "min(self._left, self._plan.room(request.seq_id))",
        "self._left",
        ASIDE.format("model-decode-first"),
    ),
    Mutant(
        "a preempted request keeps its memory",
        SCHEDULER,
        "        self._stop(request)\n        self.waiting.add(request)\n",
        "        self.waiting.add(request)\n",
        ASIDE.format("none-decode-first"),
    ),
    Mutant(
        "prompt log-probabilities twice after preemption",
        RUNNER,
        "range(known - item.start,",
        "range(0,",
        "test_preemption.py::test_preemption_within_a_prompt_is_reported_once[none]",
    ),
]

BATCH = [
    Mutant(
        "draft nodes see their cousins",
        ATTENTION,
        "mask[chain:, start + chain :] = ancestors_of(segment.parents).to(device)",
        "pass",
        OWN_TOKENS.format("greedy-tree-paged"),
    ),
    Mutant(
        "a sample takes over more than the prompt",
        SCHEDULER,
        "            self._target.truncate_to(request.seq_id, start)\n",
        "            pass\n",
        "test_batches.py::test_samples_share_a_prompt_and_nothing_else[model-paged]",
    ),
    Mutant(
        "results handed out in the wrong order",
        RUNNER,
        "wanted += map(root.__add__, nodes)",
        "wanted[:0] = map(root.__add__, nodes)",
        OWN_TOKENS.format("greedy-none-paged"),
    ),
    Mutant(
        "trees fed to the wrong requests",
        RUNNER,
        "inputs.append(_input(item, tree))",
        "inputs.append(_input(item, trees[-1 - len(inputs)]))",
        OWN_TOKENS.format("greedy-script-paged"),
    ),
    Mutant(
        "draft rows not counted in the batch",
        RUNNER,
        "first = root + inputs[-1].tree.size",
        "first = root",
        OWN_TOKENS.format("greedy-script-slotted"),
    ),
    Mutant(
        "verdicts reached on a neighbour's laws",
        VERIFY,
        "output.tree, output.first_logits\n",
        "output.tree, 0\n",
        INDEPENDENT.format("equal"),
    ),
]

OTHER_TOKENS = [
    Mutant(
        "a draft of another tokenizer reads the target's ids",
        DRAFT_RUNNER,
        "cached.text += self.vocabulary.read(own[cached.num_read :])",
        "cached.text += request.tokens[cached.num_read :]",
        READ.format("some are shared"),
    ),
    Mutant(
        "a draft's mark before a text is left out",
        DRAFT_RUNNER,
        "cached.text = self.vocabulary.begin(own)",
        "cached.text = []",
        READ.format("a mark before every text"),
    ),
    Mutant(
        "a draft of another tokenizer draws by the target's ids",
        DRAFT_VOCABULARY,
        "[self.shared[each] for each in drawn]",
        "list(drawn)",
        "test_other_vocabularies.py::test_drafts_have_the_target_s_ids[other ids-reference]",
    ),
    Mutant(
        "a draft of another tokenizer goes beyond its context",
        DRAFT_RUNNER,
        "drawn = min(limit, left - len(missing) + 1)",
        "drawn = limit",
        "test_other_vocabularies.py::test_a_draft_ends_with_its_own_context",
    ),
]

STATE = [*ROLLBACK, *BLOCKS, *DRAFTING, *PREEMPTION, *BATCH, *OTHER_TOKENS]
