"""Texts of the user's pair: scored by the target alone, and compared with and without speculation, token by token."""

from __future__ import annotations

import itertools
import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from statistics import NormalDist
from typing import Any

import torch
from torch import Tensor

from speculant.cache import CacheShape, KVCache, Source, Sources, slotted_cache
from speculant.config import EngineConfig
from speculant.engine import Runtime, build_drafters, forward_target
from speculant.errors import SpeculantError
from speculant.kernels import gumbel
from speculant.models import encode_sources
from speculant.params import SamplingParams
from speculant.sampling import KeyedNoise, Node, distribution, mix_in
from speculant.scheduling import NO_DRAFT, Scheduled
from speculant.text import TextStream, compile_stops
from speculant.types import NOT_ENDED, CommittedRows, DraftTree, Request

FALSE_ALARM = 1e-3  # probability that a correct sampler fails any of the tests of one check
POWER = 0.95  # probability that a test finds a shift of the reported size
LOWEST_LOGPROB = -12.0  # lower ones are raised to it, so that one token can't decide a test


@dataclass
class Score:
    """One f, summed over tokens, tests without a second sample whether tokens follow given distributions.

    Let p_t be the target's distribution at token t, f_t any function of the tokens that is fixed before x_t is drawn.
    If x_t ~ p_t, the sum of f_t(x_t) - E f_t is a martingale, and over many tokens nearly normal:

        Z = sum_t (f_t(x_t) - E f_t) / sqrt(sum_t Var f_t)
    """

    name: str
    what: str  # the expectation that would shift
    unit: str
    num_tokens: int = 0
    observed: float = 0.0  # sum of f(x)
    expected: float = 0.0  # sum of E f
    variance: float = 0.0  # sum of Var f

    def add(self, p: Tensor, f: Tensor, tokens: Tensor) -> None:
        """Count tokens [r] under distributions p [r, V]; f is [r, V]."""
        means = (p * f).sum(-1, keepdim=True)
        self.num_tokens += len(tokens)
        self.observed += float(f.gather(1, tokens[:, None]).sum())
        self.expected += float(means.sum())
        self.variance += float((p * (f - means) ** 2).sum())

    @property
    def z(self) -> float:
        """Z; 0 where all distributions are point masses."""
        return (self.observed - self.expected) / math.sqrt(self.variance) if self.variance else 0.0

    @property
    def p_value(self) -> float:
        """The two-sided probability of a Z at least as far from 0 if every token follows its distribution."""
        return math.erfc(abs(self.z) / math.sqrt(2))

    def detectable(self, level: float, power: float = POWER) -> float | None:
        """Return the smallest shift of E f, the same at every token, that a test at `level` finds with `power`.

        None where all distributions are point masses.
        """
        if not self.variance:
            return None
        normal = NormalDist()
        return (normal.inv_cdf(1 - level / 2) + normal.inv_cdf(power)) * math.sqrt(self.variance) / self.num_tokens

    def to_dict(self, level: float) -> dict[str, Any]:
        """Return the figures as plain values for JSON, and whether the test passes at `level`."""
        count = max(1, self.num_tokens)
        return {
            "test": self.name,
            "what": self.what,
            "unit": self.unit,
            "tokens": self.num_tokens,
            "observed": self.observed / count,
            "expected": self.expected / count,
            "z": self.z,
            "p_value": self.p_value,
            "level": level,
            "detectable_shift": self.detectable(level),
            "power": POWER,
            "passed": self.p_value >= level,
        }


@dataclass
class Scores:
    """The tests of one check, with f = whether a token is the target's likeliest, log p, and whether q > p."""

    favourite: Score = field(
        default_factory=lambda: Score("favourite", "the probability of the target's likeliest token", "probability")
    )
    logprob: Score = field(default_factory=lambda: Score("log p", "the mean log-probability under the target", "nats"))
    drafted: Score = field(
        default_factory=lambda: Score("q > p", "the probability of the tokens with q > p", "probability")
    )
    impossible: int = 0  # tokens whose probability is 0

    def add(self, p: Tensor, tokens: Tensor, q: Tensor, drafted: Sequence[int]) -> None:
        """Count tokens [r] under the target's probs p [r, V]; q [k, V] are the draft's, of the rows `drafted`."""
        self.impossible += int((p.gather(1, tokens[:, None]) <= 0).sum())
        likeliest = torch.zeros_like(p).scatter_(1, p.argmax(-1, keepdim=True), 1.0)
        self.favourite.add(p, likeliest, tokens)
        self.logprob.add(p, p.log().clamp(min=LOWEST_LOGPROB), tokens)
        if drafted:
            rows = list(drafted)
            self.drafted.add(p[rows], (q > p[rows]).to(p), tokens[rows])

    @property
    def made(self) -> list[Score]:
        """The tests that have tokens."""
        return [score for score in (self.favourite, self.logprob, self.drafted) if score.num_tokens]

    @property
    def level(self) -> float:
        """The level of each test, by Bonferroni's bound."""
        return FALSE_ALARM / max(1, len(self.made))


def complete(
    runtime: Runtime, prompts: Sequence[Sequence[int]], params: Sequence[SamplingParams], alone: bool = False
) -> list[Request]:
    """Run tokenised prompts to their ends, together up to the engine's limit, or one by one if `alone`.

    Raises the first error that ended a request, as a SpeculantError.
    """
    runtime.engine.measurement.finish()  # nothing is drafted before it ends
    requests: list[Request] = []
    for number, (prompt, each) in enumerate(zip(prompts, params, strict=True)):
        while runtime.engine.has_unfinished() and (alone or not runtime.engine.accepts(1)):
            runtime.engine.step()
        checker = partial(TextStream, runtime.tokenizer, each, compile_stops(each.stop))
        decoded, source = runtime.prompt_and_source(prompt)
        requests += runtime.engine.add_request(decoded, each, f"check-{number}", checker, source=source)
    while runtime.engine.has_unfinished():
        runtime.engine.step()
    for request in requests:
        _raise_error(request)
    return requests


def _raise_error(request: Request) -> None:
    """Raise the error that ended a request, if any."""
    error = request.ending.error
    if isinstance(error, SpeculantError):
        raise error
    if error is not None:
        raise SpeculantError(
            f"a text broke off by {type(error).__name__}: {error}", "correct its drafter or verifier."
        ) from error


class TargetReader:
    """The target without scheduler and drafter, with a cache of its own.

    longest: the most tokens of a text, and of its source if it has one (`longest_of`). layers: those whose hidden
    states are kept for `take_rows`: see `forward_target`.
    """

    def __init__(self, runtime: Runtime, num_seqs: int, longest: int, layers: Sequence[int] = ()) -> None:
        self._model, self._sampler = runtime.checkpoint.model, runtime.checkpoint.backend.sampler
        num_texts = num_seqs * (2 if self._model.needs.source else 1)  # a source is one more sequence
        self._cache = slotted_cache(self._model.cache_shape, num_texts, longest)
        self._sources = Sources(self._cache)
        self._most_rows = runtime.limits.max_num_batched_tokens
        self._layers, self._rows = layers, list[tuple[Request, CommittedRows]]()

    @torch.inference_mode()
    def distributions(self, nodes: Sequence[Node], draft: DraftTree = NO_DRAFT) -> Tensor:
        """Return probs [r, V] after each request's tokens, which may have grown since the last call.

        draft: without nodes; it may have rows after the newest tokens.
        """
        for node in nodes:
            self._catch_up(node.request)
        newest = [self._scheduled(node.request, len(node.request.tokens) - 1, 1) for node in nodes]
        return distribution(self._forward(newest, draft), nodes, self._sampler)

    def take_rows(self) -> list[tuple[Request, CommittedRows]]:
        """Return the rows since the last call, in order; none without layers."""
        taken, self._rows = self._rows, []
        return taken

    def end(self, request: Request) -> None:
        """Forget a request."""
        self._cache.release(request.seq_id)
        self._sources.release(request.seq_id)
        self._rows = [pair for pair in self._rows if pair[0] is not request]

    def _catch_up(self, request: Request) -> None:
        """Compute all tokens but the newest."""
        last = len(request.tokens) - 1
        while (start := self._cache.length(request.seq_id)) < last:
            self._forward([self._scheduled(request, start, min(self._most_rows, last - start))])

    def _scheduled(self, request: Request, start: int, count: int) -> Scheduled:
        return Scheduled(request, start, count, source=self.source_of(request))

    @torch.inference_mode()
    def source_of(self, request: Request) -> Source | None:
        """Return a request's source, which is encoded now if it was not yet; None if it has none."""
        if not request.source:
            return None
        source = self._sources.hold(request.seq_id, request.source)
        if not self._sources.is_encoded(source):
            encode_sources(self._model, self._cache, [source], keeps_states=True)
        return source

    def _forward(self, scheduled: Sequence[Scheduled], draft: DraftTree = NO_DRAFT) -> Tensor:
        """Run a pass; return the logits [r, V] of the requests' newest tokens."""
        trees = [draft] * len(scheduled)
        outputs, logits = forward_target(self._model, self._cache, scheduled, trees, self._layers)
        if self._layers:
            for item, output in zip(scheduled, outputs, strict=True):
                self._rows.append((item.request, output.committed_rows((), ())))
                self._cache.truncate_to(item.request.seq_id, item.start + item.count)
        return logits


class Second:
    """A second instance of the engine's drafter, without state from the texts that it drafts for.

    Its drafts depend only on the tokens so far, so that a test may use them.
    """

    def __init__(self, config: EngineConfig, runtime: Runtime, num_seqs: int, longest: int) -> None:
        num_texts = num_seqs * (2 if runtime.checkpoint.model.needs.source else 1)

        def make_cache(shape: CacheShape) -> KVCache:
            return slotted_cache(shape, num_texts, longest + 1)

        drafters, _ = build_drafters(config, config.speculative(), runtime.checkpoint, runtime.tokenizer, make_cache)
        assert drafters.default is not None, "nothing drafts"
        drafter = self._drafter = drafters.find(drafters.default)
        self.layers = drafters.needs.hidden_layers  # layers whose states the observed rows must have
        self.num_look_ahead_rows = drafter.needs.target_inputs
        self.rows = NO_DRAFT  # those that its last drafts have beside their nodes
        self._longest = min(drafter.needs.max_positions or longest, longest)

    def begin(self, request: Request, source: Source | None = None) -> None:
        """Start a text. source: the encoded one of an encoder-decoder model."""
        self._drafter.begin(request)
        needs = self._drafter.needs
        if source is not None and (needs.reads.encoder or needs.reads.target_cache):
            self._drafter.observe_source(request, source)

    @torch.inference_mode()
    def observe(self, computed: Sequence[tuple[Request, CommittedRows]]) -> None:
        """Pass on rows of the target: see `Drafter.observe`."""
        for request, rows in computed:
            own = tuple(rows.hidden[self.layers.index(layer)] for layer in self._drafter.needs.hidden_layers)
            self._drafter.observe(request, rows._replace(hidden=own))

    @torch.inference_mode()
    def distributions(self, requests: Sequence[Request], p: Tensor) -> tuple[Tensor, list[int]]:
        """Return the next drafted tokens' distributions [k, V], and the rows of p [r, V] that have one."""
        limits = [int(len(request.tokens) < self._longest) for request in requests]
        trees = self._drafter.propose(requests, limits)
        self.rows = next((tree.first(0) for tree in trees if tree.num_rows > tree.size), NO_DRAFT)
        rows = [row for row, tree in enumerate(trees) if tree.size]
        distributions = torch.zeros(len(rows), p.shape[-1], dtype=p.dtype, device=p.device)
        for row_probs, row in zip(distributions, rows, strict=True):
            tree = trees[row]
            if tree.probs is None:
                row_probs[tree.token_list[0]] = 1.0
            else:
                row_probs.copy_(tree.probs[0])
        return distributions, rows

    def end(self, request: Request) -> None:
        """Forget a text."""
        self._drafter.end(request)


def score_texts(config: EngineConfig, runtime: Runtime, texts: Sequence[Request]) -> Scores:
    """Score every token of finished requests by the target's own distribution at its position."""
    scores, width = Scores(), runtime.limits.max_num_seqs
    longest = max(map(longest_of, texts))
    second = Second(config, runtime, width, longest)
    reader = TargetReader(runtime, width, longest + second.num_look_ahead_rows, second.layers)
    for first in range(0, len(texts), width):
        _score(scores, reader, second, texts[first : first + width])
    return scores


def _score(scores: Scores, reader: TargetReader, second: Second, texts: Sequence[Request]) -> None:
    again = {text: reread(text) for text in texts}
    for copy in again.values():
        second.begin(copy, reader.source_of(copy))
    for growing in _in_step(again):
        second.observe(reader.take_rows())
        p = reader.distributions([Node(copy) for copy in growing.values()], second.rows)
        q, rows = second.distributions(list(growing.values()), p)
        chosen = torch.tensor([text.tokens[len(copy.tokens)] for text, copy in growing.items()], device=p.device)
        scores.add(p, chosen, q, rows)
    for copy in again.values():
        reader.end(copy)
        second.end(copy)


def _in_step(again: dict[Request, Request]) -> Iterator[dict[Request, Request]]:
    """Yield the texts that have a next token, with their copies so far; then extend the copies by it."""
    for _ in itertools.count():
        growing = {text: copy for text, copy in again.items() if len(copy.tokens) < len(text.tokens)}
        if not growing:
            return
        yield growing
        for text, copy in growing.items():
            copy.extend([text.tokens[len(copy.tokens)]])


def reread(text: Request, num_output: int = 0) -> Request:
    """Return a copy of a request after `num_output` output tokens, without stop checker and shared noise."""
    tokens = text.tokens[: len(text.prompt) + num_output]
    drafts, stops = replace(text.drafts, shared_noise=False), replace(text.stops, checker=None)
    return replace(text, tokens=tokens, drafts=drafts, stops=stops, ending=NOT_ENDED)


def longest_of(text: Request) -> int:
    """Return the length of a text or of its source, whichever is longer."""
    return max(len(text.tokens), len(text.source))


# Differences of log-probabilities, in nats, that rounding explains where a row's bits depend on other rows.
ROUNDING = {torch.float64: 1e-6, torch.float32: 1e-2, torch.bfloat16: 0.5}
WAYS = {"plain, together": (False, False), "speculative, alone": (True, True), "speculative, together": (True, False)}


@dataclass(frozen=True)
class TextComparison:
    """One way to run texts, compared with each text alone and without speculation.

    gap: the largest first difference, in nats between the two tokens' log-probabilities under the target; None if no
    text differs. bound: the largest gap that rounding explains; None = no gap is allowed, infinite = a filter may have
    cut one of the tokens, so that no bound exists.
    """

    kind: str
    way: str
    texts: int
    agreeing: int
    tokens: int
    gap: float | None
    bound: float | None

    @property
    def passed(self) -> bool:
        """Whether all texts agree, or differ as rounding may make them."""
        return self.gap is None or (self.bound is not None and self.gap <= self.bound)

    def to_dict(self) -> dict[str, Any]:
        """Return the figures as plain values for JSON; infinite ones become None."""
        return {
            "requests": self.kind,
            "way": self.way,
            "texts": self.texts,
            "agreeing": self.agreeing,
            "tokens": self.tokens,
            "bitwise": self.bound is None,
            "first_difference_gap_nats": _finite(self.gap),
            "explained_by_rounding_nats": _finite(self.bound),
            "passed": self.passed,
        }


def compare(
    runtime: Runtime, kind: str, prompts: Sequence[Sequence[int]], params: SamplingParams
) -> list[TextComparison]:
    """Run prompts in every way of `WAYS`, sampled ones with a seed each, and compare the texts."""
    settings = [params if params.greedy else replace(params, seed=seed) for seed in range(len(prompts))]
    plain = [replace(each, speculation=False) for each in settings]
    expected = complete(runtime, prompts, plain, alone=True)
    found = []
    for way, (speculating, alone) in WAYS.items():
        texts = complete(runtime, prompts, settings if speculating else plain, alone)
        gaps = [first_gap(runtime, *pair) for pair in zip(expected, texts, strict=True)]
        differing = [gap for gap in gaps if gap is not None]
        tokens = sum(text.num_output for text in expected)
        agreeing, gap = len(texts) - len(differing), max(differing, default=None)
        found.append(TextComparison(kind, way, len(texts), agreeing, tokens, gap, explained(runtime, params)))
    return found


def explained(runtime: Runtime, params: SamplingParams) -> float | None:
    """Return the largest gap that rounding explains; see `TextComparison`."""
    if runtime.checkpoint.backend.row_invariant:
        return None
    if not params.greedy and is_filtered(params):
        return math.inf
    return ROUNDING[runtime.checkpoint.dtype] / (1.0 if params.greedy else min(1.0, params.temperature))


def is_filtered(params: SamplingParams) -> bool:
    """Whether rounding at the border of a filter can make a token impossible."""
    return params.top_k > 0 or params.top_p < 1 or params.min_p > 0


def first_gap(runtime: Runtime, expected: Request, other: Request) -> float | None:
    """Return the gap in nats between two texts' tokens where they first differ; None if they don't."""
    pairs = list(zip(expected.output, other.output, strict=False))
    first = next((index for index, (mine, theirs) in enumerate(pairs) if mine != theirs), None)
    if first is None:
        return None if expected.num_output == other.num_output else math.inf
    prefix = reread(expected, first)
    mine, theirs = _preferences(runtime, prefix, torch.tensor(pairs[first])).tolist()
    return abs(mine - theirs) if math.isfinite(mine - theirs) else math.inf


def _preferences(runtime: Runtime, request: Request, tokens: Tensor) -> Tensor:
    """Return the target's scores of next tokens: log p, plus the position's noise if there is a seed."""
    unfiltered = replace(request, params=replace(request.params, top_k=0, top_p=1.0, min_p=0.0))
    reader = TargetReader(runtime, 1, longest_of(request))
    logs = reader.distributions([Node(unfiltered, softened=True)])[0, tokens].log().cpu()
    if request.params.greedy:
        return logs
    key = KeyedNoise(request.seed, len(request.tokens)).take_keys(1)
    return logs + gumbel(mix_in(*key), tokens)


def _finite(value: float | None) -> float | None:
    return value if value is not None and math.isfinite(value) else None
