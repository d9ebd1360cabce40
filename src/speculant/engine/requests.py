"""From a tokenised prompt and its parameters to the sequences that an engine runs; everything is checked here.

The tokens that a checkpoint forces or bans in its outputs are a constraint of each sequence.
"""

from __future__ import annotations

import itertools
import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import lru_cache, partial

from torch import Tensor
from typing_extensions import override

from speculant.beams import Beams, BeamSearch
from speculant.checks import is_whole
from speculant.config import Limits
from speculant.constraints import Constraint
from speculant.drafting import DrafterNeeds, Drafters
from speculant.engine.runner import choose_verifier, verifier_for
from speculant.errors import ConfigError, ContextFullError, RequestError, suggest
from speculant.metrics import PassTotals, RequestMetrics, TimingMetrics
from speculant.models import NO_RULES, OutputRules
from speculant.params import SamplingParams
from speculant.sampling import Purpose, mix
from speculant.structured import JoinedConstraint, Vocabulary, constrain_all
from speculant.types import NO_WORK, NOBODY, Client, DraftRules, Request, Sender, StepWork, StopChecker, Stops, WorkRate
from speculant.verification import Verifier


class OutputVocabulary:
    """A checkpoint's `OutputRules` over a vocabulary, for any number of sequences of at most `max_model_len` tokens.

    As in transformers, a forced token may be a banned one. If the first token is forced, a request's own constraint
    holds for the tokens after it.
    """

    def __init__(self, rules: OutputRules, vocab_size: int, max_model_len: int) -> None:
        self._max_model_len, self._first = max_model_len, rules.first
        self.banned = Vocabulary(vocab_size, rules.bad_words, None)
        self.first = None if rules.first is None else Vocabulary(vocab_size, (), [rules.first])
        self.last = Vocabulary(vocab_size, (), rules.last) if rules.last else None

    def constrain(self, request: Request, own: Constraint | None, *, formed: bool) -> Constraint:
        """Return the constraint of one sequence, whose request has a constraint of its own or None.

        formed: the request's constraint decides which token may be the last one, as forms do.
        """
        rules = OutputConstraint(self, request, self._max_model_len - len(request.prompt), formed=formed)
        if own is None:
            return rules
        first = self.first_of(request)
        return JoinedConstraint(own if first is None else AfterFirst(own, request, first), rules)

    def first_of(self, request: Request) -> int | None:
        """Return the token that an output begins with; None = it is not forced."""
        return self._first if len(request.prompt) == 1 else None


class AfterFirst(Constraint):
    """Applies another constraint to the output after its first token, which is forced.

    The other constraint does not see that token. This one reads the output of its request, as `OutputConstraint` does.
    """

    def __init__(self, rest: Constraint, request: Request, first: int) -> None:
        self._rest, self._request, self._first = rest, request, first

    @property
    def _begins(self) -> bool:
        return self._request.num_output == 0

    @override
    def mask(self, tokens: Sequence[int]) -> Tensor | None:
        if self._begins and not tokens:
            return None
        return self._rest.mask(tokens[1:] if self._begins else tokens)

    @override
    def advance(self, tokens: Sequence[int]) -> None:
        """The request gets the tokens afterwards."""
        rest = tokens[1:] if self._begins else tokens
        if rest:
            self._rest.advance(rest)

    @override
    def rollback(self, n: int) -> None:
        """The request drops the tokens afterwards."""
        count = min(n, self._request.num_output - 1)
        if count > 0:
            self._rest.rollback(count)

    @property
    @override
    def is_done(self) -> bool:
        return not self._begins and self._rest.is_done

    @override
    def forced(self) -> list[int]:
        return [*([self._first] if self._begins else []), *self._rest.forced()]

    @override
    def prepare(self, paths: Iterable[Sequence[int]]) -> None:
        self._rest.prepare((path[1:] for path in paths if path) if self._begins else paths)


class OutputConstraint(Constraint):
    """A checkpoint's rules. It reads the output of its request, so that it holds for beam searches too.

    room: the most tokens of the output unless max_tokens is lower. The last one is forced unless end tokens are ignored
    or banned there. formed: the last one is not forced.
    """

    is_done = False

    def __init__(self, vocabulary: OutputVocabulary, request: Request, room: int, *, formed: bool) -> None:
        params, self._vocabulary, self._request = request.params, vocabulary, request
        longest = min(room, params.max_tokens or room)
        ends = not params.ignore_eos and params.min_tokens < longest and not formed
        self._last_place = longest - 1 if ends and vocabulary.last is not None else None
        self._first_place = None if vocabulary.first_of(request) is None else 0

    @override
    def mask(self, tokens: Sequence[int]) -> Tensor | None:
        request, vocabulary = self._request, self._vocabulary
        place, chosen = request.num_output + len(tokens), vocabulary.banned
        if place == self._last_place and vocabulary.last is not None:
            chosen = vocabulary.last
        elif place == self._first_place and vocabulary.first is not None:
            chosen = vocabulary.first
        known = request.tokens[max(len(request.prompt), len(request.tokens) - chosen.reach) :]
        return chosen.mask_after([*known, *tokens])

    @override
    def advance(self, tokens: Sequence[int]) -> None:
        """The request has the tokens."""

    @override
    def rollback(self, n: int) -> None:
        """The request drops the tokens."""


_VOCABULARIES = 8  # kept: prompts of a request, which come one after another, have the same


@dataclass(frozen=True)
class RequestRules:
    """The limits of requests: sizes, vocabulary and end tokens; and the engine's seed and verifier ("auto").

    has_source: the model is an encoder-decoder. start_tokens: begin the prompts of its decoder; () = any tokens do.
    takes_trees: the passes of the model have trees.
    """

    limits: Limits
    vocab_size: int
    seed: int
    end_token_ids: frozenset[int]
    verification: str = "auto"
    has_source: bool = False
    start_tokens: tuple[int, ...] = ()
    output_rules: OutputRules = NO_RULES
    takes_trees: bool = True


@dataclass(frozen=True)
class CheckedRequest:
    """A tokenised prompt and its settings, which an engine can serve. method: its drafting method; None = none.

    constraint: makes the constraint of a sequence; None = there is none. source: what the encoder reads.
    """

    prompt: Sequence[int]
    params: SamplingParams
    method: str | None
    sender: Sender = NOBODY
    constraint: Callable[[], Constraint] | None = None
    source: Sequence[int] = ()


class RequestFactory:
    """Checks requests and makes the `n` sequences of a prompt. seq_ids: counts up; None = from 1."""

    def __init__(
        self,
        rules: RequestRules,
        verifiers: Mapping[str, Verifier],
        drafters: Drafters,
        seq_ids: Iterator[int] | None = None,
    ) -> None:
        self._rules, self._verifiers, self._drafters = rules, verifiers, drafters
        self._seq_ids, self._made = itertools.count(1) if seq_ids is None else seq_ids, 0
        self._output_rules = (
            None
            if rules.output_rules == NO_RULES
            else OutputVocabulary(rules.output_rules, rules.vocab_size, rules.limits.max_model_len)
        )
        self._vocabulary = lru_cache(_VOCABULARIES)(partial(Vocabulary, rules.vocab_size))
        self._rates = dict[tuple[bool, ...], WorkRate]()
        default = drafters.default
        self._check_verifier(rules.verification, drafters.find(default).needs if default is not None else None)

    def check(
        self,
        prompt: Sequence[int],
        params: SamplingParams,
        sender: Sender,
        constraint: Callable[[], Constraint] | None,
        source: Sequence[int],
    ) -> CheckedRequest:
        """Raise RequestError or ConfigError for a request that can't be served."""
        self._check_source(source)
        self._check_prompt(prompt)
        self._check_numbers(params)
        given: tuple[object, object] = sender.priority, sender.cache_salt
        if not (is_whole(given[0]) and isinstance(given[1], str)):
            raise RequestError(
                f"priority={given[0]!r}, cache_salt={given[1]!r}", "give priority as int and cache_salt as str."
            )
        if "\0" in sender.cache_salt:  # salts of the engine's own have one (ModelNeeds.salt, Request.full_salt)
            raise RequestError("cache_salt has a character of code 0", "leave it out.")
        check_client(sender.client)
        if params.beam_width is not None and not self._rules.takes_trees:
            raise RequestError(
                "a beam search computes trees, and this model has layers with a state, which take chains alone",
                "leave out beam_width; n texts can be sampled.",
            )
        if constraint is not None and params.beam_width is not None:
            raise RequestError("a beam search takes no constraint", "leave out beam_width, or the constraint.")
        method = self._method(params)
        self._check_speculation(params, method)
        return CheckedRequest(prompt, params.clone(), method, sender, constraint, source)  # the caller keeps its own

    def make(
        self, checked: CheckedRequest, request_id: str, stop_checker: Callable[[], StopChecker] | None
    ) -> list[Request]:
        """Return the sequences of a request."""
        params, constraint = checked.params, checked.constraint
        if params.bad_words or params.allowed_token_ids is not None:
            rules = self._vocabulary(tuple(_banned(params)), params.allowed_token_ids)
            constraint = constrain_all(constraint, rules)
        samples = [self._sample(checked, request_id, index, stop_checker) for index in range(params.n)]
        for sample in samples:
            sample.constraint = constraint() if constraint else None
            if self._output_rules is not None:
                formed = checked.constraint is not None or params.allowed_token_ids is not None
                sample.constraint = self._output_rules.constrain(sample, sample.constraint, formed=formed)
            sample.work = self._work_of(sample)
        if params.n > 1:
            totals = PassTotals()
            for sample in samples:
                sample.metrics.timing.together = totals
        if params.beam_width is not None:
            self._begin_search(samples, params.beam_width)
        return samples

    def _sample(
        self, checked: CheckedRequest, request_id: str, index: int, stop_checker: Callable[[], StopChecker] | None
    ) -> Request:
        self._made += 1
        params, seed = checked.params, checked.params.seed
        own_seed = mix(self._rules.seed, Purpose.REQUEST, self._made) if seed is None else seed
        ends, stops = frozenset() if params.ignore_eos else self._rules.end_token_ids, frozenset(params.stop_token_ids)
        metrics = RequestMetrics(TimingMetrics(arrival=time.perf_counter()))
        return Request(
            seq_id=next(self._seq_ids),
            request_id=request_id,
            index=index,
            prompt=tuple(checked.prompt),
            params=params,
            seed=mix(own_seed, Purpose.REQUEST, index),
            metrics=metrics,
            sender=checked.sender,
            drafts=self._draft_rules(checked, metrics),
            stops=Stops(ends | stops, stops - ends, stop_checker() if stop_checker else None),
            source=tuple(checked.source),
            tokens=list(checked.prompt),
        )

    def _work_of(self, request: Request) -> StepWork:
        """Return the measurement of a sequence's work, which starts from sequences with the same settings."""
        params = request.params
        alike = (
            request.constraint is not None, params.edits, params.logprobs is not None, bool(params.stop),
            params.prompt_logprobs is not None and not request.index, params.beam_width is not None,
        )  # fmt: skip
        return StepWork(self._rates.setdefault(alike, WorkRate())) if any(alike) else NO_WORK

    def _method(self, params: SamplingParams) -> str | None:
        """Return the drafting method of a request; None = it has none."""
        wanted = params.speculation
        if wanted is False:
            return None
        method = wanted.get("method") if isinstance(wanted, Mapping) else None
        return self._drafters.default if method is None else str(method)

    def _begin_search(self, samples: list[Request], width: int) -> None:
        """Give samples a beam search, which runs on the first one."""
        first, limits = samples[0], self._rules.limits
        longest = limits.max_model_len - len(first.prompt)
        beams = Beams(
            width,
            first.params.length_penalty,
            first.stops.end_token_ids,
            longest=min(longest, first.params.max_tokens or longest),
            reach=limits.max_num_batched_tokens - limits.max_num_seqs,  # leaves a row for each other sequence
        )
        search = BeamSearch(beams, samples)
        for sample in samples:
            sample.search = search

    def _draft_rules(self, checked: CheckedRequest, metrics: RequestMetrics) -> DraftRules:
        """Choose verifier and draft length of a sequence; without drafts the default, `match`, is plain sampling."""
        params, needs = checked.params, self._drafters.needs_by_method.get(checked.method)
        rules = DraftRules(checked.method, prediction=_prediction(params))
        if needs is None:
            return rules
        own = params.speculation if isinstance(params.speculation, Mapping) else {}
        rules = replace(rules, num_tokens=own.get("num_speculative_tokens", self._usual_length(checked.method)))
        if params.beam_width is not None:
            metrics.verification = "beam" if needs.nodes_per_beam else None
            return rules
        name = self._named_rule(params)
        if name == "auto":
            name = choose_verifier(params, not needs.emits_probs, needs.emits_tree)
        verifier = verifier_for(self._verifiers[name], params)
        metrics.verification, metrics.lossless = name, verifier.lossless
        return replace(rules, verifier=name, shared_noise=verifier.needs.shared_noise)

    def _named_rule(self, params: SamplingParams) -> str:
        """Return the verification rule that a request or the engine names; "auto" = it is chosen, as for every seed."""
        own = params.speculation.get("verification") if isinstance(params.speculation, Mapping) else None
        return "auto" if params.seed is not None else own or self._rules.verification

    def _usual_length(self, method: str | None) -> int | None:
        """Return the draft length of a method that the request chose; None = the engine's, which is the default's."""
        return None if method is None or method == self._drafters.default else self._drafters.usual_length(method)

    def _check_source(self, source: Sequence[int]) -> None:
        """Check that an encoder-decoder model gets a source that it can encode, and another model none."""
        rules, limits = self._rules, self._rules.limits
        if not rules.has_source:
            if source:
                raise RequestError(
                    "the request has a source, and the model has no encoder",
                    "leave it out, or put its text in the prompt.",
                )
            return
        if not source:
            raise RequestError(
                "the source has no tokens: the encoder has nothing to read",
                "give a text as the prompt, or as encoder_prompt; a request of token ids needs at least one.",
            )
        if len(source) > limits.max_source_len:
            raise RequestError(
                f"the source has {len(source)} tokens and at most {limits.max_source_len} are encoded in one pass: "
                f"max_model_len is {limits.max_model_len}, and max_num_batched_tokens - max_num_seqs + 1 is "
                f"{limits.max_num_batched_tokens - limits.max_num_seqs + 1}",
                "shorten the source, or raise the lower of the two.",
            )
        _check_tokens("the source", source, rules.vocab_size)

    def _check_prompt(self, prompt: Sequence[int]) -> None:
        longest, start = self._rules.limits.max_model_len, self._rules.start_tokens
        if not prompt:
            raise RequestError("the prompt has no tokens", "send at least one token.")
        if len(prompt) >= longest:
            raise ContextFullError(
                f"the prompt is too long: {len(prompt)} tokens > {longest - 1} maximum; this model's maximum context "
                f"length is {longest} tokens (max_model_len)",
                "shorten the prompt or raise max_model_len.",
            )
        if (begin := tuple(prompt[: len(start)])) != start:
            raise RequestError(
                f"the decoder's prompt begins with {list(begin)}, and the model's outputs with {list(start)}",
                f"put {list(start)} before it.",
            )
        _check_tokens("prompt", prompt, self._rules.vocab_size)

    def _check_numbers(self, params: SamplingParams) -> None:
        """Check token ids and numbers of log-probabilities against the model and the engine's bounds."""
        named: dict[str, Iterable[object]] = {
            "logit_bias": params.logit_bias,
            "stop_token_ids": params.stop_token_ids,
            "bad_words": (token for word in _banned(params) for token in word),
            "allowed_token_ids": params.allowed_token_ids or (),
        }
        for name, tokens in named.items():
            _check_tokens(name, tokens, self._rules.vocab_size)
        for name in ("logprobs", "prompt_logprobs"):
            _check_logprobs(name, getattr(params, name), self._rules.limits.max_logprobs)

    def _check_speculation(self, params: SamplingParams, method: str | None) -> None:
        """Check a request's settings of drafts against its drafter; method: None = it has none."""
        wanted = params.speculation
        own = wanted.get("verification") if isinstance(wanted, Mapping) else None
        if own is not None:
            self._check_verifier(own, None)
        needs = None if method is None else self._drafters.find(method).needs
        if wanted is True:
            self._check_drafting(needs, params.beam_width is not None)
        if params.prediction is not None:
            self._check_prediction(params.prediction, method, needs)
        if needs is not None and params.beam_width is None:
            self._check_verifier(self._named_rule(params), needs, params)

    def _check_drafting(self, needs: DrafterNeeds | None, searches: bool) -> None:
        """Refuse a request with speculation=True if nothing can be drafted for it."""
        if needs is None:
            raise RequestError(
                f"the request has speculation=True and the engine drafts nothing: {self._drafters.absence}",
                "leave speculation out of the request, or make the engine with use_speculative_decoding=True.",
            )
        if searches and needs.nodes_per_beam is None:
            raise RequestError(
                "the request has speculation=True and the engine's drafter does not draft for beam searches",
                "leave out speculation, or beam_width.",
            )

    def _check_prediction(self, given: str | Sequence[int], method: str | None, needs: DrafterNeeds | None) -> None:
        if needs is None or not needs.reads.prediction:
            drafter = "no drafter" if method is None else f"the drafter {method!r}, which does not read it"
            raise RequestError(
                f"the request has a prediction and {drafter}",
                "leave the prediction out, or set a method that reads predictions beside it (docs/drafters.md).",
            )
        if isinstance(given, str):
            raise RequestError("the prediction is text and the engine handles tokens", "give its token ids.")
        _check_tokens("the prediction", given, self._rules.vocab_size)

    def _check_verifier(self, name: str, needs: DrafterNeeds | None, params: SamplingParams | None = None) -> None:
        """Refuse an unknown rule, and one that can't verify the drafts of these parameters; needs: the drafter's."""
        if name != "auto" and name not in self._verifiers:
            raise ConfigError(f"verification {name!r} is unknown", suggest(name, ["auto", *self._verifiers]))
        if needs is None or not needs.emits_tree or name == "auto":
            return
        verifier = self._verifiers[name]
        if not (verifier if params is None else verifier_for(verifier, params)).needs.branches:
            raise ConfigError(
                f"verification {name!r} understands chains and this drafter emits trees", 'use "auto" or "match".'
            )


def _prediction(params: SamplingParams) -> tuple[int, ...]:
    """Return the token ids of a request's guess of its output, which was checked; none if it has no guess."""
    given = params.prediction
    return () if given is None or isinstance(given, str) else tuple(given)


def _banned(params: SamplingParams) -> list[Sequence[int]]:
    """Return the words that are banned, as token ids. Raises RequestError if some are text."""
    words = [word for word in params.bad_words if not isinstance(word, str)]
    if len(words) < len(params.bad_words):
        raise RequestError("bad_words has text and the engine handles tokens", "give the token ids of each word.")
    return words


def _check_logprobs(name: str, count: int | None, most: int) -> None:
    """Check the requested number of log-probabilities; -1 = all of them. most: -1 = any number is allowed."""
    if count is not None and most != -1 and not 0 <= count <= most:
        raise ConfigError(
            f"{name}={count} is not a number from 0 to {most}", f"set max_logprobs={count} for the engine."
        )


def _check_tokens(name: str, tokens: Iterable[object], vocab_size: int) -> None:
    for token in tokens:
        if not (is_whole(token) and 0 <= token < vocab_size):
            raise RequestError(
                f"{name} has {token!r}, which is not a token id from 0 to {vocab_size - 1}", "check the ids."
            )


def check_client(client: object) -> None:
    """Raise RequestError for anything but a `Client`."""
    if not isinstance(client, Client):
        raise RequestError(f"client={client!r:.80} is a {type(client).__name__}", "give speculant.Client(name).")
