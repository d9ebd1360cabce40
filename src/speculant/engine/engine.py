"""The engine: requests come and go at every step. It knows tokens, not text."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass

from speculant.cache.base import KVCache
from speculant.config import Limits
from speculant.drafting.base import Drafter
from speculant.engine.step import Parts, step
from speculant.errors import ConfigError, RequestError, suggest
from speculant.metrics import EngineMetrics, RequestMetrics, TimingMetrics
from speculant.models.base import CausalLM
from speculant.params import SamplingParams
from speculant.sampling.chance import Chances, Purpose, mix
from speculant.scheduling.draft_length import DraftLength
from speculant.scheduling.scheduler import Scheduler
from speculant.types import Request, StepOutput, StopWatch
from speculant.verification.auto import choose_rule
from speculant.verification.base import Verifier


@dataclass(frozen=True)
class EngineOptions:
    """What the engine itself must know: sizes, seed, end tokens and the configured rule ("auto" or a name)."""

    limits: Limits
    seed: int
    end_token_ids: frozenset[int]
    verification: str = "auto"


class Engine:
    """Runs requests to their end, `step` by `step`."""

    def __init__(
        self,
        options: EngineOptions,
        target: CausalLM,
        cache: KVCache,
        chances: Chances,
        rules: dict[str, Verifier],
        draft_length: DraftLength,
        drafter: Drafter | None = None,
    ) -> None:
        self._options = options
        scheduler = Scheduler(options.limits)
        self._parts = Parts(options.limits, scheduler, target, cache, drafter, draft_length, rules, chances)
        self._requests: dict[int, Request] = {}
        self._next_seq = 0
        self.metrics = EngineMetrics()
        self._check_rule(options.verification)

    def add_request(
        self,
        prompt: Sequence[int],
        params: SamplingParams,
        request_id: str,
        watch: Callable[[], StopWatch] | None = None,
    ) -> list[Request]:
        """Queue a tokenised prompt and return its `params.n` sequences; `watch` makes one stop watch for each.

        Raises RequestError for a prompt or parameters that can't be served, or an id in use; nothing is queued then.
        """
        if any(request.request_id == request_id for request in self._requests.values()):
            raise RequestError(f"the request id {request_id!r} is in use", "give each request an id of its own.")
        self._check_request(prompt, params)
        first = [self._make_request(prompt, params, request_id, index, watch) for index in range(params.n)]
        for request in first:
            self._requests[request.seq] = request
            self._parts.scheduler.add(request)
        return first

    def has_unfinished(self) -> bool:
        """Whether any request still waits or runs."""
        return bool(self._requests)

    def step(self) -> list[StepOutput]:
        """Admit, draft, check, commit; return every committed token in order, none if nothing is left to do."""
        if not self.has_unfinished():
            return []
        started = time.perf_counter()
        self._admit()
        result = step(self._parts)
        outputs = [output for each in result.committed for output in each.outputs]
        for each in result.committed:
            if each.request.finished:
                self._end(each.request)
        self._count(time.perf_counter() - started, result.draft_s, result.verify_s, len(outputs))
        return outputs

    def abort(self, request_id: str) -> None:
        """End every sequence of a request at once and free what it holds; an unknown id is ignored."""
        for request in [r for r in self._requests.values() if r.request_id == request_id]:
            request.finish_reason = "abort"
            self._end(request)

    def check(self) -> None:
        """Assert the invariants that hold between steps; for tests."""
        cache = self._parts.cache
        cache.check()
        for request in self._parts.scheduler.running:
            assert cache.length(request.seq) < len(request.tokens), "the newest token was fed already"
            assert len(request.tokens) <= self._options.limits.max_model_len, "a context overflowed"

    def _admit(self) -> None:
        """Start waiting requests; one whose sibling runs takes over the common prompt from its cache."""
        parts = self._parts
        for request in parts.scheduler.admit(parts.cache):
            donors = (r for r in parts.scheduler.running if r.request_id == request.request_id and r is not request)
            donor = next((r for r in donors if parts.cache.length(r.seq) >= len(request.prompt)), None)
            if donor is not None:
                parts.cache.fork(donor.seq, request.seq)
                parts.cache.truncate_to(request.seq, len(request.prompt) - 1)
            if parts.drafter is not None:
                parts.drafter.begin(request)

    def _end(self, request: Request) -> None:
        parts = self._parts
        if parts.drafter is not None and request in parts.scheduler.running:
            parts.drafter.end(request)
        parts.scheduler.remove(request)
        parts.cache.release(request.seq)
        del self._requests[request.seq]

    def _make_request(
        self,
        prompt: Sequence[int],
        params: SamplingParams,
        request_id: str,
        index: int,
        watch: Callable[[], StopWatch] | None,
    ) -> Request:
        self._next_seq += 1
        own_seed = mix(self._options.seed, Purpose.REQUEST, self._next_seq) if params.seed is None else params.seed
        ends = frozenset() if params.ignore_eos else self._options.end_token_ids
        request = Request(
            seq=self._next_seq,
            request_id=request_id,
            index=index,
            prompt=tuple(prompt),
            params=params,
            seed=mix(own_seed, Purpose.REQUEST, index),
            end_token_ids=ends | frozenset(params.stop_token_ids),
            metrics=RequestMetrics(TimingMetrics(arrival=time.perf_counter())),
            watch=watch() if watch else None,
            tokens=list(prompt),
        )
        self._set_rule(request)
        return request

    def _set_rule(self, request: Request) -> None:
        """Choose how the request's drafts will be checked; without drafting, `match` is plain sampling."""
        drafter, wanted = self._parts.drafter, request.params.speculation
        if drafter is None or wanted is False:
            return
        named = wanted.get("verification") if not isinstance(wanted, bool) and wanted else None
        rule = named or self._options.verification
        if rule == "auto" or request.params.seed is not None:
            rule = choose_rule(request, deterministic=not drafter.needs.emits_probs)
        request.rule = request.metrics.verification = rule
        request.coupled = self._parts.rules[rule].needs.coupled

    def _check_request(self, prompt: Sequence[int], params: SamplingParams) -> None:
        vocab_size, longest = self._parts.target.vocab_size, self._options.limits.max_model_len
        if not prompt:
            raise RequestError("the prompt has no tokens", "send at least one token.")
        if len(prompt) >= longest:
            raise RequestError(
                f"the prompt has {len(prompt)} tokens and max_model_len is {longest}, which leaves none to generate",
                "shorten the prompt or raise max_model_len.",
            )
        named = {"prompt": prompt, "logit_bias": params.logit_bias, "stop_token_ids": params.stop_token_ids}
        for name, tokens in named.items():
            _check_tokens(name, tokens, vocab_size)
        if isinstance(params.speculation, dict) and "verification" in params.speculation:
            self._check_rule(params.speculation["verification"])

    def _check_rule(self, name: str) -> None:
        rules, drafter = self._parts.rules, self._parts.drafter
        if name != "auto" and name not in rules:
            raise ConfigError(f"verification {name!r} is unknown", suggest(name, ["auto", *rules]))
        if drafter is not None and drafter.needs.emits_tree and name != "auto" and not rules[name].needs.branches:
            raise ConfigError(
                f"verification {name!r} understands chains and this drafter emits trees", 'use "auto" or "match".'
            )

    def _count(self, total_s: float, draft_s: float, verify_s: float, tokens: int) -> None:
        self.metrics.steps += 1
        self.metrics.tokens += tokens
        self.metrics.draft_s += draft_s
        self.metrics.verify_s += verify_s
        self.metrics.other_s += total_s - draft_s - verify_s


def _check_tokens(name: str, tokens: Iterable[object], vocab_size: int) -> None:
    for token in tokens:
        if not isinstance(token, int) or not 0 <= token < vocab_size:
            raise RequestError(
                f"{name} has {token!r}, which is not a token id from 0 to {vocab_size - 1}", "check the ids."
            )
