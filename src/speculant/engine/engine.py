"""The engine: requests come and go at every step. It handles tokens, not text."""

from __future__ import annotations

import logging
import time
import weakref
from collections import Counter, defaultdict
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from operator import attrgetter
from typing import TYPE_CHECKING

from speculant.cache import KVCache
from speculant.config import Limits
from speculant.constraints import Constraint
from speculant.drafting import Drafters
from speculant.engine.commit import Committed, ending_with, fail
from speculant.engine.profiling import Mark, unmarked
from speculant.engine.requests import CheckedRequest, RequestFactory, RequestRules
from speculant.engine.runner import check_target
from speculant.engine.step import StepContext, step
from speculant.errors import RequestError, SpeculantError
from speculant.kernels import REFERENCE, Sampler
from speculant.lengths import SLICE_S, DraftLength, GuardedLength, Measurement
from speculant.metrics import EngineMetrics, StepTiming
from speculant.models import NO_RULES, CausalLM, OutputRules, check_taps
from speculant.params import SamplingParams
from speculant.sampling import Chances
from speculant.scheduling import PREPARED, Preparation, Preparations, Schedule, Scheduler
from speculant.types import ANYONE, NOBODY, Client, Ending, Request, Sender, StepOutput, StopChecker
from speculant.verification import Verifier, checked_verifiers

if TYPE_CHECKING:
    from speculant.engine.learning import Learning

logger = logging.getLogger(__name__)

MOST_DELAYS = 8  # steps in a row that a measurement gives way to new requests


@dataclass(frozen=True)
class EngineOptions:
    """The configuration of an engine: sizes, seed, end tokens and the verifier's name ("auto" or a name).

    sampler makes the distributions. start_tokens, output_rules: of an encoder-decoder model, see `RequestRules`.
    """

    limits: Limits
    seed: int
    end_token_ids: frozenset[int]
    verification: str = "auto"
    sampler: Sampler = REFERENCE
    start_tokens: tuple[int, ...] = ()
    output_rules: OutputRules = NO_RULES


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
        drafters: Drafters | None = None,
        measurement: Measurement | None = None,
        seq_ids: Iterator[int] | None = None,
        learning: Learning | None = None,
    ) -> None:
        """measurement: measures the costs that the policy compares, between steps. seq_ids: for its requests.

        learning: keeps what the drafters learn; None = nothing is kept.
        """
        self.measurement = measurement or Measurement()
        self._learning = learning
        if learning is not None:
            weakref.finalize(self, learning.close)
        self._last_s, self._is_new, self._delays = 0.0, False, 0  # of the last step; see `_measure`
        self._drafters = Drafters() if drafters is None else drafters
        taps = [layer for layer in self._drafters.needs.hidden_layers if layer != target.num_layers + 1]
        check_taps(taps, target.num_layers)
        salt = attrgetter("full_salt") if target.needs.restart_at is None else target.needs.salt
        self._preparations = Preparations(cache, options.limits.max_num_batched_tokens, salt)
        prepared = self._preparations.prefixes
        self._scheduler = Scheduler(options.limits, cache, self._drafters.match_prefix, salt, prepared)
        self._context = StepContext(
            options.limits,
            target,
            cache,
            self._drafters,
            GuardedLength(draft_length, self.measurement),
            checked_verifiers(verifiers),
            chances,
            options.sampler,
        )
        self._plain = replace(self._context, drafters=Drafters())  # no drafter and no policy takes part
        rules = RequestRules(
            options.limits, target.vocab_size, options.seed, options.end_token_ids, options.verification,
            target.needs.source, options.start_tokens, options.output_rules, target.needs.most_nodes is None,
        )  # fmt: skip
        self._factory = RequestFactory(rules, verifiers, self._drafters, seq_ids)
        self._by_id: dict[str, list[Request]] = {}
        self.metrics = EngineMetrics(blocks_total=cache.num_blocks, block_size=cache.block_size)
        self._drafters.attach(target.vocab_size, self.metrics)
        self.mark: Mark = unmarked
        self.stored_prefixes = cache.stored  # the target's prompt cache on disk, if it has one
        self.doubtful = False  # in the last step every sequence failed, and no request caused the error

    def add_request(
        self,
        prompt: Sequence[int],
        params: SamplingParams,
        request_id: str,
        stop_checker: Callable[[], StopChecker] | None = None,
        *,
        priority: int = 0,
        cache_salt: str = "",
        constraint: Callable[[], Constraint] | None = None,
        client: Client = ANYONE,
        source: Sequence[int] = (),
    ) -> list[Request]:
        """Queue a tokenised prompt and return its `params.n` sequences, with a stop checker and a constraint each.

        Clients have fair shares of the engine; of one client's requests, a lower priority is served sooner. Prompts of
        different salts share no cache. source: what the encoder of an encoder-decoder model reads; the prompt is then
        the decoder's, which begins with the model's start tokens.

        Raises RequestError or ConfigError for a prompt or parameters that can't be served, or an id in use, and
        CapacityError if too many requests wait; nothing is queued then.
        """
        checked = self.check_request(prompt, params, Sender(client, priority, cache_salt), constraint, source)
        return self.add_checked(checked, request_id, stop_checker)

    def add_checked(
        self, checked: CheckedRequest, request_id: str, stop_checker: Callable[[], StopChecker] | None = None
    ) -> list[Request]:
        """Queue a request that `check_request` returned; see `add_request`."""
        if request_id in self._by_id:
            raise RequestError(f"the request id {request_id!r} is in use", "give each request an id of its own.")
        samples = self._factory.make(checked, request_id, stop_checker)
        self._is_new = True
        if self._preparations.holds:
            self._preparations.pause()
        sequences = samples[: _num_sequences(checked.params)]
        self._scheduler.add(sequences)
        self._by_id[request_id] = list(sequences)
        if self._learning is not None:
            self._learning.meet(samples[0].sender.cache_salt)
        return samples

    def check_request(
        self,
        prompt: Sequence[int],
        params: SamplingParams,
        sender: Sender = NOBODY,
        constraint: Callable[[], Constraint] | None = None,
        source: Sequence[int] = (),
    ) -> CheckedRequest:
        """Return a request for `add_checked`; raise errors of `add_request` that do not depend on other requests."""
        checked = self._factory.check(prompt, params, sender, constraint, source)
        self._scheduler.check_size(_num_sequences(params))
        return checked

    def accepts(self, n: int, client: Client = ANYONE) -> bool:
        """Whether a client's prompt with n samples would find room in the queue."""
        return self._scheduler.num_vacant(client) >= n

    def has_unfinished(self) -> bool:
        """Whether any request still waits or runs."""
        return bool(self._by_id)

    def prepare(self, prompt: Sequence[int], sender: Sender = NOBODY) -> Preparation:
        """Queue a prompt that is read ahead of requests that begin with it, in steps in which none waits or runs.

        Raises RequestError for a prompt that no request could have, and for a model or an engine that keeps no prompts.
        """
        if self._context.target.needs.source or not self._context.cache.keeps_prefixes:
            why = "what an encoder-decoder model has read ends with its request"
            why = why if self._context.target.needs.source else "prefix caching is off"
            raise RequestError(f"prompts can't be prepared: {why}", "send the prompt with its request.")
        self._factory.check(prompt, SamplingParams(max_tokens=1), sender, None, ())
        return self._preparations.add(tuple(prompt), sender)

    @property
    def prepares(self) -> bool:
        """Whether a prompt is being prepared, so that a step without requests has work."""
        return len(self._preparations) > 0

    def drop_preparations(self) -> None:
        """End all preparations with what they have."""
        self._preparations.drop()

    def step(self) -> list[StepOutput]:
        """Admit, draft, verify, commit; return the committed tokens in order, or an empty list if no request is left.

        Without requests a part of a preparation is computed, if there is one. An error ends the requests that cause it,
        with finish_reason "error", and leaves the others running.
        """
        self.doubtful = False
        if self._learning is not None and self._learning.due:
            self._learning.work()
        if not self._by_id:
            self._prepare()
            return []
        if self.measurement.active:
            self._measure()
        started = time.perf_counter()
        with self.mark("schedule"):
            schedule = self._scheduler.schedule()
        for request in schedule.preempted:
            self._drafters.end(request)
        committed, timings = self._run(schedule)
        if self.stored_prefixes is not None:
            rows = sum(item.num_rows for item in schedule.items)
            self.stored_prefixes.note_passes(rows, sum(timing.pass_s for timing in timings))
            self.metrics.disk_hit_tokens = self.stored_prefixes.files.read_tokens
        if timings and self._scheduler.shares:
            self._charge(schedule, committed, timings)
        outputs, explained = list[StepOutput](), not committed
        for each in committed:
            outputs += each.outputs
            error = each.request.ending.error
            explained = explained or error is None or isinstance(error, SpeculantError)
            if each.request.ending.reason is not None:
                self._end(each.request)
        self.doubtful = not explained
        self._count(schedule, committed)
        self._last_s = time.perf_counter() - started
        self.metrics.count_times(self._last_s, timings)
        return outputs

    def _prepare(self) -> None:
        """Compute a part of a preparation."""
        if (schedule := self._preparations.schedule()) is None:
            return
        started, [item] = time.perf_counter(), schedule.items
        try:
            [committed], _ = step(self._plain, schedule, self.mark)
            if (error := committed.request.ending.error) is not None:
                raise error
        except BaseException as error:
            self._preparations.fail(error)
            if not isinstance(error, Exception):
                raise
            return
        self._preparations.settle(item, time.perf_counter() - started)
        self._note_standing()

    def _measure(self) -> None:
        """Continue the measurement for as long as the last step took. A new request goes first, but not always."""
        if self._is_new and self._delays < MOST_DELAYS:
            self._delays += 1
        else:
            self.measurement.run(min(self._last_s, SLICE_S))
            self._delays = 0
        self._is_new = False

    def check_target(self) -> None:
        """Raise the target's own error if it can't compute anything at all."""
        check_target(self._context.target, self._context.cache)

    def abort(self, request_id: str, reason: str = "abort") -> None:
        """End every sequence of a request at once and release its memory; an unknown id is ignored."""
        if self._learning is not None and self._learning.ended:
            return  # a garbage collection may be here while what was learned is written
        for request in list(self._by_id.get(request_id, ())):
            for sample in ending_with(request):
                sample.ending = Ending(reason)
            self._end(request)
        self._note_standing()

    def close(self) -> None:
        """Write what is kept on disk: prompts, and what drafters have learned. The engine is not used any more."""
        for cache in (self._context.cache, *self._drafters.caches):
            if cache.stored is not None:
                cache.stored.files.flush()
        if self._learning is not None:
            self._learning.close()

    def check(self) -> None:
        """Assert the invariants that hold between steps; for tests."""
        cache = self._context.cache
        cache.check()
        self._drafters.check()
        sources = self._scheduler.sources
        sources.check()
        self._preparations.prefixes.check()
        assert not (self._by_id and cache.length(PREPARED)), "a preparation holds blocks while requests run"
        for request in self._scheduler.waiting:
            held = (each.length(request.seq_id) for each in (cache, *self._drafters.caches))
            assert not any(held), "a waiting request owns blocks"
            assert sources.of(request.seq_id) is None, "a waiting request holds a source"
        for request in self._scheduler.running:
            source = sources.of(request.seq_id)
            assert (() if source is None else source.tokens) == request.source, "a running request lacks its source"
            assert cache.length(request.seq_id) < len(request.tokens), "the newest token is in the cache already"
            assert len(request.tokens) <= self._context.limits.max_model_len, "a context overflowed"

    def reset_prefix_cache(self) -> bool:
        """Drop all prompts from the caches except those of running sequences; return whether none is left."""
        self._preparations.pause()
        caches = self._context.cache, *self._drafters.caches
        kept = [cache for cache in caches if not cache.forget_prefixes()]
        return not kept

    def free_kv_tokens(self) -> int:
        """Return how many positions new sequences could take in the fullest cache (docs/references.md, capacity)."""
        return min(cache.free_tokens() for cache in (self._context.cache, *self._drafters.caches))

    def _run(self, schedule: Schedule) -> tuple[list[Committed], list[StepTiming]]:
        """Step; if that fails, step for each source and sequence alone, so that only requests that can't be served end.

        A request whose source can't be encoded is one of them.
        """
        if not (schedule.items or schedule.sources):
            return [], []
        try:
            committed, timing = step(self._context, schedule, self.mark)
            return committed, [timing]
        except Exception as error:  # noqa: BLE001 - no error may affect the other requests
            if culprits := schedule.culprits():
                return [fail(request, error) for request in culprits], []
            cause = error
        self.metrics.repeated_steps += 1
        runs = [self._run(alone) for alone in schedule.one_by_one(self._context.cache)]
        committed = [each for run in runs for each in run[0]]
        if not any(each.request.ending.error for each in committed):
            self.metrics.transient_errors += 1
            if self.metrics.transient_errors == 1:
                logger.warning("a step failed for all sequences together and for none alone: %r", cause)
        return committed, [timing for run in runs for timing in run[1]]

    def _charge(self, schedule: Schedule, committed: Sequence[Committed], timings: Sequence[StepTiming]) -> None:
        """Charge clients for the time of their drafts and of their sequences' work, as rows that take as long."""
        used, nodes = defaultdict[str, float](float), Counter[str]()
        for each in committed:
            used[each.request.sender.client.name] += each.request.work.last_s
            nodes[each.request.sender.client.name] += sum(each.outcome.drafted) if each.outcome is not None else 0
        node_s = sum(timing.draft_s for timing in timings) / max(1, nodes.total())
        rows = nodes.total() + sum(item.num_rows for item in schedule.items)
        row_s = sum(timing.pass_s for timing in timings) / max(1, rows)
        self._scheduler.charge({name: (used[name] + node_s * nodes[name]) / row_s for name in used})

    def _end(self, request: Request) -> None:
        self._release(request)
        self._by_id[request.request_id].remove(request)
        if not self._by_id[request.request_id]:
            del self._by_id[request.request_id]
        for sample in ending_with(request):
            self.metrics.finished += sample.ending.reason in ("stop", "length")
            self.metrics.aborted += sample.ending.reason == "abort"
            self.metrics.failed += sample.ending.reason == "error"
            self.metrics.lossy += not sample.metrics.lossless

    def _release(self, request: Request) -> None:
        self._drafters.end(request)
        self._context.cache.mark_used(request.seq_id)
        self._scheduler.remove(request)
        self.metrics.prompt_tokens += len(request.source) + len(request.prompt)
        self.metrics.prefix_hit_tokens += request.metrics.cached_tokens

    def _count(self, schedule: Schedule, committed: Sequence[Committed]) -> None:
        metrics, before = self.metrics, self.metrics.tokens
        metrics.preemptions += len(schedule.preempted)
        for each in committed:
            metrics.sampled_passes += each.sampled
            for output in each.outputs:
                metrics.tokens += output.token is not None
            if each.outcome is not None:
                metrics.count_draft(sum(each.outcome.drafted), sum(each.outcome.accepted))
        prompts = 0
        for item in schedule.items:
            if item.start < len(item.request.prompt):
                prompts += item.num_prompt_tokens
        for encoding in schedule.sources:
            prompts += encoding.num_rows
        metrics.count_step(metrics.tokens - before + prompts)
        self._note_standing()

    def _note_standing(self) -> None:
        metrics, cache = self.metrics, self._context.cache
        prepared = self._preparations.prefixes
        metrics.prepared_tokens, metrics.prepared_tokens_used = prepared.computed, prepared.used
        metrics.waiting, metrics.running = len(self._scheduler.waiting), len(self._scheduler.running)
        metrics.blocks_used = cache.num_blocks - cache.free_tokens() // cache.block_size
        metrics.evicted_until = cache.whole.evicted_until


def _num_sequences(params: SamplingParams) -> int:
    """Return how many sequences run for a request: a beam search runs on its first sample."""
    return params.n if params.beam_width is None else 1
