"""The engine: requests come and go at every step. It knows tokens, not text."""

from __future__ import annotations

import time
import warnings
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass

from speculant.beams import Beams
from speculant.cache.base import KVCache
from speculant.config import Limits
from speculant.drafting.base import Drafter
from speculant.engine.commit import Committed, fail
from speculant.engine.profiling import Mark, unmarked
from speculant.engine.step import StepContext, step
from speculant.errors import ConfigError, RequestError, suggest
from speculant.kernels.native import Kernels
from speculant.metrics import EngineMetrics, RequestMetrics, TimingMetrics
from speculant.models.base import CausalLM
from speculant.params import SamplingParams
from speculant.sampling.chance import Chances, Purpose, mix
from speculant.scheduling.draft_length import DraftLength
from speculant.scheduling.scheduler import Schedule, Scheduler
from speculant.types import Request, StepOutput, StopChecker
from speculant.verification.auto import choose_verifier
from speculant.verification.base import Verifier, verifier_for


@dataclass(frozen=True)
class EngineOptions:
    """What the engine itself must know: sizes, seed, end tokens and the configured rule ("auto" or a name).

    kernels None = distributions are made by the reference ones.
    """

    limits: Limits
    seed: int
    end_token_ids: frozenset[int]
    verification: str = "auto"
    kernels: Kernels | None = None


class Engine:
    """Runs requests to their end, `step` by `step`. `mark` shows the phases of a step to a profiler."""

    def __init__(
        self,
        options: EngineOptions,
        target: CausalLM,
        cache: KVCache,
        chances: Chances,
        verifiers: dict[str, Verifier],
        draft_length: DraftLength,
        drafter: Drafter | None = None,
        drafter_caches: Sequence[KVCache] = (),
    ) -> None:
        self._options = options
        self._caches = (cache, *drafter_caches)
        self._scheduler = Scheduler(options.limits, self._caches)
        self._context = StepContext(
            options.limits, target, cache, drafter, draft_length, verifiers, chances, options.kernels
        )
        self._requests: dict[int, Request] = {}
        self._next_seq_id = 0
        self.metrics = EngineMetrics(blocks_total=cache.num_blocks)
        self.mark: Mark = unmarked
        self._check_verifier(options.verification)

    def add_request(
        self,
        prompt: Sequence[int],
        params: SamplingParams,
        request_id: str,
        stop_checker: Callable[[], StopChecker] | None = None,
        *,
        priority: int = 0,
        cache_salt: str = "",
    ) -> list[Request]:
        """Queue a tokenised prompt and return its `params.n` sequences; `watch` makes one stop checker for each.

        A lower priority is served sooner. Prompts of different salts share no cache. Raises RequestError
        for a prompt or parameters that can't be served, or an id in use, and CapacityError if too many
        requests wait; nothing is queued then.
        """
        if any(request.request_id == request_id for request in self._requests.values()):
            raise RequestError(f"the request id {request_id!r} is in use", "give each request an id of its own.")
        self._check_request(prompt, params)
        given: tuple[object, object] = priority, cache_salt
        if not (isinstance(given[0], int) and isinstance(given[1], str)):
            raise RequestError(f"priority={priority!r}, salt={cache_salt!r}", "give priority as int and salt as str.")
        samples = [self._make_request(prompt, params, request_id, index, stop_checker) for index in range(params.n)]
        for sample in samples:
            sample.priority, sample.cache_salt = priority, cache_salt
        if params.beam_width is not None:
            self._begin_search(*samples)
        self._scheduler.add([sample for sample in samples if not sample.is_sibling])
        self._requests.update({sample.seq_id: sample for sample in samples})
        return samples

    def accepts(self, n: int) -> bool:
        """Whether a prompt with n samples would find room in the queue."""
        return self._scheduler.num_vacant >= n

    def has_unfinished(self) -> bool:
        """Whether any request still waits or runs."""
        return bool(self._requests)

    def step(self) -> list[StepOutput]:
        """Admit, draft, check, commit; return what was committed in order, nothing if nothing is left to do.

        An error ends the requests that cause it, with finish_reason "error", and leaves the others running.
        """
        if not self.has_unfinished():
            return []
        started = time.perf_counter()
        with self.mark("schedule"):
            schedule = self._scheduler.schedule()
        failed = self._notify_drafter(schedule)
        committed, draft_s, verify_s = self._run(schedule.without_finished())
        committed += failed
        for each in committed:
            for ended in each.request.outcomes if each.request.finished else ():
                self._end(ended)
        self._count(schedule, committed)
        self.metrics.draft_s += draft_s
        self.metrics.verify_s += verify_s
        self.metrics.other_s += time.perf_counter() - started - draft_s - verify_s
        return [output for each in committed for output in each.outputs]

    def abort(self, request_id: str) -> None:
        """End every sequence of a request at once and free what it holds; an unknown id is ignored."""
        for request in [r for r in self._requests.values() if r.request_id == request_id]:
            request.finish_reason = "abort"
            self._end(request)
        self._note_standing()

    def check(self) -> None:
        """Assert the invariants that hold between steps; for tests."""
        for cache in self._caches:
            cache.check()
        for request in self._scheduler.waiting:
            assert all(cache.length(request.seq_id) == 0 for cache in self._caches), "a waiting request holds memory"
        cache = self._context.cache
        for request in self._scheduler.running:
            assert cache.length(request.seq_id) < len(request.tokens), "the newest token was fed already"
            assert len(request.tokens) <= self._options.limits.max_model_len, "a context overflowed"

    def free_kv_tokens(self) -> int:
        """Return how many positions new sequences could take, in the fullest cache (docs/references.md, capacity)."""
        return min(cache.free_tokens() for cache in self._caches)

    def _run(self, schedule: Schedule) -> tuple[list[Committed], float, float]:
        """Step; if that fails, step for each sequence alone, so that only those end which can't be served."""
        if not schedule.items:
            return [], 0.0, 0.0
        try:
            committed, timing = step(self._context, schedule, self.mark)
            return committed, timing.draft_s, timing.verify_s
        except Exception as error:  # noqa: BLE001 - whatever it is, it must not harm the neighbours
            if len(schedule.items) == 1:
                return [fail(schedule.items[0].request, error)], 0.0, 0.0
            cause = error
        self.metrics.repeated_steps += 1
        runs = [self._run(alone) for alone in schedule.one_by_one(self._context.cache)]
        committed = [each for run in runs for each in run[0]]
        if not any(each.request.error for each in committed):
            warnings.warn(f"a step fails for all sequences together and for none alone: {cause!r}", stacklevel=2)
        return committed, sum(run[1] for run in runs), sum(run[2] for run in runs)

    def _notify_drafter(self, schedule: Schedule) -> list[Committed]:
        """Begin who came, and end who was set aside, for it will begin again; return those that could not begin."""
        drafter, failed = self._context.drafter, list[Committed]()
        if drafter is None:
            return failed
        for request in schedule.admitted:
            try:
                drafter.begin(request)
            except Exception as error:  # noqa: BLE001 - whatever it is, it must not harm the neighbours
                failed.append(fail(request, error))
        for request in schedule.preempted:
            drafter.end(request)
        return failed

    def _end(self, request: Request) -> None:
        if not request.is_sibling:
            self._release(request)
        del self._requests[request.seq_id]
        self.metrics.finished += request.finish_reason in ("stop", "length")
        self.metrics.aborted += request.finish_reason == "abort"
        self.metrics.failed += request.finish_reason == "error"
        self.metrics.lossy += not request.metrics.lossless

    def _release(self, request: Request) -> None:
        if self._context.drafter is not None and request in self._scheduler.running:
            self._context.drafter.end(request)
        self._scheduler.remove(request)
        self.metrics.prompt_tokens += len(request.prompt)
        self.metrics.prefix_hit_tokens += request.metrics.cached_tokens

    def _make_request(
        self,
        prompt: Sequence[int],
        params: SamplingParams,
        request_id: str,
        index: int,
        stop_checker: Callable[[], StopChecker] | None,
    ) -> Request:
        self._next_seq_id += 1
        own_seed = mix(self._options.seed, Purpose.REQUEST, self._next_seq_id) if params.seed is None else params.seed
        ends = frozenset() if params.ignore_eos else self._options.end_token_ids
        request = Request(
            seq_id=self._next_seq_id,
            request_id=request_id,
            index=index,
            prompt=tuple(prompt),
            params=params,
            seed=mix(own_seed, Purpose.REQUEST, index),
            end_token_ids=ends | frozenset(params.stop_token_ids),
            metrics=RequestMetrics(TimingMetrics(arrival=time.perf_counter())),
            stop_checker=stop_checker() if stop_checker else None,
            tokens=list(prompt),
        )
        self._choose_verifier(request)
        return request

    def _begin_search(self, first: Request, *others: Request) -> None:
        """Make the first of a prompt's samples the one that searches for all of them."""
        params, limits = first.params, self._options.limits
        assert params.beam_width is not None, "no beam search was asked for"
        longest = limits.max_model_len - len(first.prompt)
        first.beams = Beams(
            params.beam_width,
            params.length_penalty,
            first.end_token_ids,
            longest=min(longest, params.max_tokens or longest),
            reach=limits.max_num_batched_tokens - limits.max_num_seqs,  # the others find a row each beside it
        )
        first.siblings = others

    def _choose_verifier(self, request: Request) -> None:
        """Choose how the request's drafts will be checked; without drafting, `match` is plain sampling."""
        drafter, wanted = self._context.drafter, request.params.speculation
        if drafter is None or wanted is False:
            return
        if request.params.beam_width is not None:
            request.metrics.verification = "beam" if drafter.needs.nodes_per_beam else None
            return
        named = wanted.get("verification") if not isinstance(wanted, bool) and wanted else None
        name = named or self._options.verification
        if name == "auto" or request.params.seed is not None:
            name = choose_verifier(request, not drafter.needs.emits_probs, drafter.needs.emits_tree)
        verifier = verifier_for(self._context.verifiers[name], request)
        request.verifier = request.metrics.verification = name
        request.metrics.lossless, request.shared_noise = verifier.lossless, verifier.needs.shared_noise

    def _check_request(self, prompt: Sequence[int], params: SamplingParams) -> None:
        vocab_size, longest = self._context.target.vocab_size, self._options.limits.max_model_len
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
            self._check_verifier(params.speculation["verification"])

    def _check_verifier(self, name: str) -> None:
        verifiers, drafter = self._context.verifiers, self._context.drafter
        if name != "auto" and name not in verifiers:
            raise ConfigError(f"verification {name!r} is unknown", suggest(name, ["auto", *verifiers]))
        if drafter is not None and drafter.needs.emits_tree and name != "auto" and not verifiers[name].needs.branches:
            raise ConfigError(
                f"verification {name!r} understands chains and this drafter emits trees", 'use "auto" or "match".'
            )

    def _count(self, schedule: Schedule, committed: Sequence[Committed]) -> None:
        self.metrics.steps += 1
        self.metrics.tokens += sum(output.token is not None for each in committed for output in each.outputs)
        self.metrics.preemptions += len(schedule.preempted)
        self._note_standing()

    def _note_standing(self) -> None:
        metrics, cache = self.metrics, self._context.cache
        metrics.waiting, metrics.running = len(self._scheduler.waiting), len(self._scheduler.running)
        metrics.blocks_used = cache.num_blocks - cache.free_tokens() // cache.block_size


def _check_tokens(name: str, tokens: Iterable[object], vocab_size: int) -> None:
    for token in tokens:
        if not isinstance(token, int) or not 0 <= token < vocab_size:
            raise RequestError(
                f"{name} has {token!r}, which is not a token id from 0 to {vocab_size - 1}", "check the ids."
            )
