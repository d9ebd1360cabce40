"""One target pass, from a flat batch to the logits of the rows that need them, and the verdict on each draft.

A row of logits may not give a distribution. After a committed token, this is an error of the request. After a drafted
node, the nodes below it are dropped. The node itself may be accepted, since its parent's row decides that; the verdict
then ends with it, and the next pass computes the same row after a committed token. So an output ends where it would end
without a draft.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import NamedTuple

import torch
from torch import Tensor

from speculant.beams import Beams
from speculant.cache import MEASURED, KVCache, ReservationPlan, Source
from speculant.constraints import checked_mask
from speculant.errors import ConstraintError, RequestError, SpeculantError
from speculant.kernels import NO_TOKEN, RowDraw, Sampler
from speculant.models import CausalLM, Hidden, SequenceInput, build_batch, encode_sources
from speculant.params import SamplingParams
from speculant.sampling import (
    Chance,
    Chances,
    KeyedNoise,
    Node,
    Noise,
    Stream,
    distribution,
    foresee,
    most_likely,
    rank,
    row_maxima,
    take_rows,
    top_tokens,
)
from speculant.scheduling import NO_DRAFT, Scheduled
from speculant.types import CommittedRows, DraftTree, Request, Successors, Verdict, state_rows
from speculant.verification import CheckedVerifier, Verifier, Verifiers, follow

_NO_REQUEST = 0  # a sequence id; requests' ids count from 1


class TargetOutput(NamedTuple):
    """One sequence's share of a pass.

    pass_logits: all sequences' logits; None while some of this sequence's tokens are not processed. Its own rows begin
    at `first_logits`: one after each of `nodes`, which are the root and all draft nodes unless it is a beam search.
    prompt_hidden [m, hidden] are the hidden states after prompt tokens whose successor's log-probability is requested.
    nodes: see `open_nodes`. hidden: the states of all sequences, with the states of layers that drafters announce; its
    own rows begin at `first`: the processed tokens, the draft nodes and the look-ahead rows. successors: for each of
    `nodes`, see `CommittedRows`; none unless the drafter announces it. What few sequences need is cut out when it is
    read, which takes microseconds.
    """

    item: Scheduled
    tree: DraftTree
    pass_logits: Tensor | None
    prompt_hidden: Tensor | None
    hidden: Hidden | None = None
    nodes: Sequence[int] = ()
    successors: Successors = ()
    first: int = 0
    first_logits: int = 0

    @property
    def logits(self) -> Tensor | None:
        """Its own logits [len(nodes), V], a view."""
        first, logits = self.first_logits, self.pass_logits
        return None if logits is None else logits[first : first + len(self.nodes)]

    @property
    def num_results(self) -> int:
        """The number of rows whose results are used: for a next token, or for a log-probability of the prompt."""
        nodes = 0 if self.pass_logits is None else len(self.nodes)
        return nodes if self.prompt_hidden is None else nodes + len(self.prompt_hidden)

    def committed_rows(self, kept: Sequence[int], gained: Sequence[int]) -> CommittedRows:
        """Return the rows that were committed: the tokens' rows and the `kept` nodes'. gained: the new tokens."""
        assert self.hidden is not None, "there was no pass"
        item, tree, first, states = self.item, self.tree, self.first, self.hidden.taps
        tokens = [*item.tokens, *map(tree.token_list.__getitem__, kept)]
        observed = kept if tree.num_rows == tree.size else tree.observed(kept)
        if not states or tuple(observed) == tuple(range(len(observed))):
            states = state_rows(states, first, first + item.count + len(observed))
        else:
            rows = [first + row for row in (*range(item.count), *[item.count + node for node in observed])]
            states = tuple(own[rows] for own in states)
        return CommittedRows(item.start, tokens, gained, states, self.successors)


@torch.inference_mode()
def check_target(model: CausalLM, cache: KVCache) -> None:
    """Compute one token that belongs to no request, after a source of one; raises the model's own error.

    If sequences hold all of the cache, nothing is computed: their own next passes show whether the model can compute.
    """
    source, plan = Source(MEASURED, (0,)) if model.needs.source else None, ReservationPlan(cache)
    if not all(plan.take(seq_id, 1) for seq_id in (_NO_REQUEST, *((MEASURED,) if source else ()))):
        return
    try:
        if source is not None:
            encode_sources(model, cache, [source])
        inputs = SequenceInput(_NO_REQUEST, [0], NO_DRAFT, source=MEASURED if source else None)
        model.logits(model.forward(build_batch([inputs], cache, model.cache_shape.device), cache.storage).last)
    finally:
        cache.release(_NO_REQUEST)
        cache.release(MEASURED)


def open_nodes(request: Request, tree: DraftTree) -> Sequence[int]:
    """Return the nodes of a tree that a next token may follow, -1 = the root.

    In a beam search they are as deep as the live hypotheses, or deeper.
    """
    ahead = 0 if request.search is None else request.num_positions - len(request.tokens)
    if not ahead:
        return range(-1, tree.size)
    return [node for node, depth in enumerate(tree.depths) if depth >= ahead]


def forward_target(
    model: CausalLM,
    cache: KVCache,
    scheduled: Sequence[Scheduled],
    trees: Iterable[DraftTree],
    layers: Sequence[int] = (),
) -> tuple[list[TargetOutput], Tensor]:
    """Process every sequence's tokens and draft in one pass; logits are computed for the rows that need them.

    layers: those whose input hidden states are needed, ascending: see `DrafterNeeds.hidden_layers`. Returns the
    outputs, and the logits of all of them in order. Sources are encoded already.
    """
    if not scheduled:
        return [], torch.empty(0)
    inputs, wanted, first = list[SequenceInput](), list[int](), 0
    shares = list[tuple[Scheduled, DraftTree, Sequence[int], int, int]]()
    for item, tree in zip(scheduled, trees, strict=True):
        inputs.append(_input(item, tree))
        nodes: Sequence[int] = range(-1, tree.size)
        if item.request.search is not None:
            nodes = open_nodes(item.request, tree)
        root = first + item.count
        shares.append((item, tree, nodes, first, len(wanted)))
        if item.completes:
            wanted += map(root.__add__, nodes)
        first = root + inputs[-1].tree.size  # which has the look-ahead rows too
    taps = layers if not layers or layers[-1] <= model.num_layers else layers[:-1]
    hidden = model.forward(build_batch(inputs, cache, model.cache_shape.device), cache.storage, taps)
    if len(taps) < len(layers):  # the states after the final norm are not a tap
        hidden = hidden._replace(taps=(*hidden.taps, hidden.last))
    chosen = hidden.last if len(wanted) == hidden.last.shape[0] else take_rows(hidden.last, wanted)
    logits = model.logits(chosen) if wanted else chosen
    outputs = list[TargetOutput]()
    for item, tree, nodes, first, first_logits in shares:
        own, prompt = logits if item.completes else None, None
        if item.request.params.prompt_logprobs is not None and (rows := _prompt_rows(item)):
            prompt = hidden.last[first + rows.start : first + rows.stop]
        outputs.append(TargetOutput(item, tree, own, prompt, hidden, nodes, (), first, first_logits))
    return outputs, logits


def _input(item: Scheduled, tree: DraftTree) -> SequenceInput:
    """Return the rows of a sequence: its tokens, its draft, and the draft's rows that are no nodes."""
    length, source = item.request.num_positions, None if item.source is None else item.source.seq_id
    if tree.num_rows == tree.size:
        return SequenceInput(item.request.seq_id, item.tokens, tree, length=length, source=source)
    whole, embeddings = tree.pass_rows()
    own = dict(enumerate(embeddings, item.count + tree.size))
    return SequenceInput(item.request.seq_id, item.tokens, whole, own, None, length, source)


def _prompt_rows(item: Scheduled) -> range:
    """Return which rows are prompt tokens whose successor's log-probability is requested and not recorded yet."""
    known, num_prompt = len(item.request.prompt_logprobs), len(item.request.prompt)
    if not item.request.wants_prompt_logits:
        return range(0)
    return range(known - item.start, min(item.count, num_prompt - 1 - item.start))


def with_successors(outputs: Sequence[TargetOutput], target_top_k: Callable[[Request], int]) -> list[TargetOutput]:
    """Add the target's most likely next tokens to the outputs of sequences for which `target_top_k` is above 0."""
    return [_with_successors(output, target_top_k(output.item.request)) for output in outputs]


def _with_successors(output: TargetOutput, count: int) -> TargetOutput:
    logits = output.logits
    if not count or logits is None:
        return output
    inputs = [output.item.tokens[-1] if node < 0 else output.tree.token_list[node] for node in output.nodes]
    best: list[list[int]] = top_tokens(logits, count).tolist()
    return output._replace(successors=list(zip(inputs, best, strict=True)))


_Chosen = tuple[TargetOutput, CheckedVerifier]  # an output with logits, and the verifier of its draft
Decision = Verdict | Beams | SpeculantError  # `Beams` of an advanced search; an error ends that request alone


def verify(
    outputs: Sequence[TargetOutput],
    logits: Tensor,
    verifiers: Verifiers,
    chances: Chances,
    sampler: Sampler,
) -> dict[int, Decision]:
    """Return the decision on each output that has logits, by sequence id.

    logits: of all outputs in order. Their distributions are made at once, then each draft is verified. Where a
    verdict follows from one token drawn after each node, all these tokens are drawn at once. If every next token is
    simply the one with the largest logit, no distribution is made.
    """
    chosen, takes_best = list[_Chosen](), True
    for output in outputs:
        if output.pass_logits is not None:
            request = output.item.request
            checked = verifiers[request.drafts.verifier, request.params.greedy]
            chosen.append((output, checked))
            takes_best = takes_best and _takes_best(request) and checked.draws_after(output.tree)
    if not chosen:
        return {}
    if takes_best:
        return _take_best(chosen, logits)
    nodes = list[Node]()
    for output, checked in chosen:
        nodes += _nodes(output, checked.verifier)
    probs = distribution(logits, nodes, sampler)
    drawn, decisions = _draw_ahead(chosen, probs, chances, sampler), dict[int, Decision]()
    maxima = row_maxima(probs) if len(drawn) < len(probs) else ()
    for output, checked in chosen:
        row = output.first_logits
        decisions[output.item.request.seq_id] = (
            _follow(output, drawn) or _failure(output.item.request, row_maxima(probs[row : row + 1])[0])
            if row in drawn
            else _decide(output, checked.verifier, probs, maxima, chances)
        )
    return decisions


def choose_verifier(params: SamplingParams, deterministic: bool, branches: bool = False) -> str:
    """Return a verifier's name: match for a seeded or greedy request or a deterministic draft.

    For sampled drafts it is the lossless verifier that accepts most: block for a chain, traversal for a tree.
    """
    if params.seed is not None or params.greedy or deterministic:
        return "match"
    return "traversal" if branches else "block"


def verifier_for(verifier: Verifier, params: SamplingParams) -> Verifier:
    """Return the verifier of a request's drafts where `verifier` was chosen."""
    return verifier.needs.greedy or verifier if params.greedy else verifier


def _takes_best(request: Request) -> bool:
    """Whether each next token is the one with the largest logit: a greedy sequence without edits."""
    params = request.params
    if not params.greedy or request.constraint is not None or request.search is not None:
        return False
    return not params.edits or not Node(request).edited  # after min_tokens


def _take_best(chosen: Sequence[_Chosen], logits: Tensor) -> dict[int, Decision]:
    """Decide by the token with the largest logit of each row [V]."""
    tokens, largest = most_likely(logits)
    drawn = tokens
    if not all(map(math.isfinite, largest)):
        drawn = [token if math.isfinite(logit) else NO_TOKEN for token, logit in zip(tokens, largest, strict=True)]
    decisions = dict[int, Decision]()
    for output, _ in chosen:
        none = 0.0 if largest[output.first_logits] == -math.inf else math.nan
        decisions[output.item.request.seq_id] = _follow(output, drawn) or failure_of(none)
    return decisions


def _draw_ahead(chosen: Sequence[_Chosen], probs: Tensor, chances: Chances, sampler: Sampler) -> dict[int, int]:
    """Draw a token from each row of the sequences whose verdict follows from these draws; return the tokens by row."""
    draws = list[RowDraw]()
    for output, checked in chosen:
        request, tree = output.item.request, output.tree
        if request.search is not None or not checked.draws_after(tree):
            continue
        chance = chances.verify(request)
        if isinstance(chance, (Stream, KeyedNoise)):
            keys, shared = foresee(chance, max(tree.depths, default=0) + 1), chance.noise is Noise.SHARED
            for row, depth in enumerate((0, *tree.depths), output.first_logits):
                draws.append(RowDraw(row, shared, keys[depth]))
    tokens = sampler.draw_rows(probs, draws) if draws else ()
    return {draw.row: token for draw, token in zip(draws, tokens, strict=True)}


def _follow(output: TargetOutput, drawn: Sequence[int] | Mapping[int, int]) -> Verdict | None:
    """Return the verdict of a draft by the tokens drawn from each row; None if its root has no distribution."""
    tree, first = output.tree, output.first_logits + 1
    if not tree.size:
        return Verdict((), drawn[first - 1]) if drawn[first - 1] >= 0 else None
    tokens = [*map(drawn.__getitem__, range(first, first + tree.size)), drawn[first - 1]]  # the root's is tokens[-1]
    return follow(tree, tokens.__getitem__)


def _nodes(output: TargetOutput, verifier: Verifier) -> list[Node]:
    """Return the `Node` of each row; rows share one if drafted tokens before them have no effect."""
    request, tree = output.item.request, output.tree
    if request.constraint is None and not (request.params.edits and Node(request).edited):
        return [Node(request, (), verifier.needs.softened)] * len(output.nodes)
    return [Node(request, tree.tokens_to(node), verifier.needs.softened) for node in output.nodes]


def _decide(
    output: TargetOutput, verifier: Verifier, probs: Tensor, maxima: Sequence[float], chances: Chances
) -> Decision:
    """Decide by the output's rows of probs. Without a draft every rule draws from the root's row."""
    request, tree, first = output.item.request, output.tree, output.first_logits
    end = first + len(output.nodes)
    if request.search is not None:
        with request.work:
            return advance_sound(request.search.beams, tree, output.nodes, probs[first:end], maxima[first:end])
    if not 0 < maxima[first] < math.inf:
        return _failure(request, maxima[first])
    if not tree.size and not verifier.needs.softened:
        return Verdict((), chances.verify(request).draw(probs[first]))
    return verify_sound(verifier, tree, probs[first:end], maxima[first:end], chances.verify(request))


def _failure(request: Request, largest: float) -> SpeculantError:
    """Return the error of a request's row that is not a distribution: its constraint's own one if it has failed."""
    if largest == 0 and request.constraint is not None:
        try:
            checked_mask(request.constraint, ())
        except ConstraintError as error:
            return error
    return failure_of(largest)


def failure_of(largest: float) -> SpeculantError:
    """Return the error of a row that is not a distribution; its largest entry is 0 or NaN."""
    if largest == 0:
        return RequestError(
            "no token is possible: all are banned by the constraint, bad_words, allowed_token_ids, logit_bias or"
            " min_tokens, or by the model itself",
            "allow at least one token in every place.",
        )
    return not_finite()


def not_finite() -> SpeculantError:
    """Return the error of logits that are NaN or +infinity."""
    return SpeculantError(
        "the target model produced logits that are NaN or infinite", "check the checkpoint, or load it in float32."
    )


def verify_sound(verifier: Verifier, tree: DraftTree, p: Tensor, maxima: Sequence[float], chance: Chance) -> Verdict:
    """Verify a tree by the rows of p [n + 1, V] that are distributions, as the root's is; see `row_maxima`."""
    sound = min(maxima) > 0 and math.isfinite(sum(maxima))
    failed = set() if sound else {node for node in range(tree.size) if not 0 < maxima[1 + node] < math.inf}
    if not failed:
        return verifier.verify(tree, p, chance)
    nodes = _not_below(tree, failed)
    p = p[[0, *(1 + node for node in nodes)]]
    for place, node in enumerate(nodes):
        if node in failed:  # it is a leaf now, and the draw from its row is not used
            p[1 + place] = 0.0
            p[1 + place, 0] = 1.0
    verdict = verifier.verify(tree.only(nodes), p, chance)
    path = tuple(nodes[node] for node in verdict.path)
    if path and path[-1] in failed:
        return Verdict(path[:-1], tree.token_list[path[-1]])
    return Verdict(path, verdict.token)


def _not_below(tree: DraftTree, failed: set[int]) -> list[int]:
    """Return the nodes that have no ancestor among the failed ones."""
    below: set[int] = set()
    for node, parent in enumerate(tree.parent_list):
        if parent in failed or parent in below:
            below.add(node)
    return [node for node in range(tree.size) if node not in below]


def advance_sound(
    beams: Beams, tree: DraftTree, nodes: Sequence[int], probs: Tensor, maxima: Sequence[float]
) -> Beams | SpeculantError:
    """Advance a search by the probs [len(nodes), V] after nodes of a tree, -1 = the root.

    A text without a possible token has no continuations. A live hypothesis whose row is NaN is an error; a drafted one
    waits for the next pass.
    """
    ranked = dict(zip(nodes, rank(probs, beams.width, beams.end_token_ids), strict=True))
    finite = {node: ranked[node] for node, largest in zip(nodes, maxima, strict=True) if math.isfinite(largest)}
    scored = beams.scored_by(tree, finite)
    if len(finite) < len(ranked) and beams.scored_by(tree, ranked).keys() - scored.keys():
        return not_finite()
    return beams.advance(scored)
