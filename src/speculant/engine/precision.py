"""Chooses the type of a draft's weights: the one that is expected to generate text fastest on this machine.

A draft does not change the output's distribution, so its weights may be rounded: its passes become faster, and fewer of
its tokens are accepted. Both are measured for each type, along a text that a small draft model itself draws, or the
target of a head. The mean of sum min(p, q) along the text estimates how often drafts are accepted. A large draft model
would have to be packed in every type for that. So its times are estimated from bytes (models/native/speeds.py), and a
usual loss of acceptance is assumed; `speculant check-pair` measures it. A measured choice is kept on disk if the
machine was not busy.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import suppress
from dataclasses import dataclass, field, replace
from functools import cache
from pathlib import Path
from typing import TypeVar

import torch
from torch import Tensor

from speculant.cache import KVCache, Source, slotted_cache
from speculant.drafting import Build, Drafter, DrafterContext, complete, fit_vocabulary, grow_chains, mask_of
from speculant.errors import ConfigError, ModelError, SpeculantError
from speculant.files import Run, costs_folder, is_steady, key_of, read_measured, spread_of, write_file
from speculant.lengths import make_sequence, spread_token, timed, usual_tokens
from speculant.models import (
    CausalLM,
    Chain,
    Checkpoint,
    CheckpointFiles,
    HeadHost,
    Hidden,
    RoundsWeights,
    SequenceInput,
    TimesWeights,
    build_batch,
    encode_sources,
    known,
    matrix_weights,
    why_not,
)
from speculant.params import SamplingParams
from speculant.sampling import KeyedChances
from speculant.scheduling import NO_DRAFT
from speculant.types import CommittedRows, DraftRules, DraftTree, Request

logger = logging.getLogger(__name__)
T = TypeVar("T")

AUTO = "auto"
UNCHANGED = "none"
LEAST_GAIN = 0.02  # rounded weights that gain less are not worth the risk that the estimate is wrong
LONGEST_COMPARED = 16  # nodes of drafts
LARGE_BYTES = 64 * 2**20  # of a model in bfloat16: a smaller one is packed quickly, and may stay in caches
USUAL_ACCEPTANCE = {None: 0.7, "int8": 0.695, "int4": 0.68}  # by type, assumed for a large draft
FURTHER_ROW = 0.05  # of the time of the target's pass of one row, assumed for each further row
PROMPT, SAMPLE = 8, 48  # tokens
FEWEST, TEXT_SECONDS = 8, 3.0  # tokens of a text that a target draws, which may take so long if there are more
SOURCE = 64  # tokens of the source of such a text, for encoder-decoder models
DEPTH = 5  # nodes of the longer draft that is timed
ROOM = 64  # rows of drafts in the cache of a drafter that is measured
DRAWN = SamplingParams(temperature=1.0, max_tokens=None)
_TEXT, _SOURCE = 0, 1  # sequence ids
Runs = list[Sequence[Run]]


def rounded(given: str | None) -> str | None:
    """Return the type that weights are rounded to; None = unchanged, for which the command line has a name."""
    return None if given == UNCHANGED else given


@dataclass(frozen=True)
class Precision:
    """A draft in one type.

    acceptance: the mean of sum min(p, q) with the target. token_s: seconds for each drafted token. draft_s: further
    seconds of a draft of any length.
    """

    quantization: str | None
    acceptance: float
    token_s: float
    draft_s: float = 0.0

    def speed(self, pass_s: Callable[[int], float]) -> float:
        """Return the expected tokens per second with the best length; pass_s: seconds of the target's pass, by rows."""
        reached = expected = 1.0
        best = 0.0
        for length in range(1, LONGEST_COMPARED + 1):
            reached *= self.acceptance
            expected += reached
            best = max(best, expected / (pass_s(length + 1) + self.draft_s + length * self.token_s))
        return best


def fastest(found: Sequence[Precision], pass_s: Callable[[int], float]) -> str | None:
    """Return the type that is expected to be fastest, among drafts of which the first one is unchanged."""
    best = max(found, key=lambda each: each.speed(pass_s))
    return best.quantization if best.speed(pass_s) > (1 + LEAST_GAIN) * found[0].speed(pass_s) else None


# Seconds of the target's pass by rows, and a function that measures a draft in a type.
Trial = tuple[Callable[[int], float], Callable[[str | None, T], Precision]]


def choose(
    load: Callable[[str | None], T],
    types: Callable[[T], Sequence[str]],
    trial: Callable[[T, Runs], Trial[T]],
    identity: Sequence[str],
) -> tuple[T, str | None]:
    """Return a draft in the type that is expected to be fastest, and the type; None = unchanged.

    load: makes the draft in a type. types: the draft's possible types. trial: begins to measure, with the
    unchanged draft, and adds what it times to the runs. ModelError of `load` or `measure`: the weights are not finite
    and can't be rounded. identity: texts that name the pair, types and kernels; with the machine they are the key of
    the kept choice.
    """
    path = costs_folder() / f"{key_of([str(torch.get_num_threads()), *identity])}.precision.json"
    with suppress(ValueError, TypeError, KeyError, SpeculantError):
        kept = read_measured(path)["draft_quantization"]
        return load(kept), kept
    started, runs, found = time.perf_counter(), Runs(), list[Precision]()
    drafts: dict[str | None, T] = {None: load(None)}
    for each in types(drafts[None]):
        with suppress(ModelError):
            drafts[each] = load(each)
    chosen = None
    if len(drafts) > 1:
        with torch.inference_mode():
            pass_s, measure = trial(drafts[None], runs)
            for quantization, draft in drafts.items():
                with suppress(*[ModelError] if found else []):
                    found.append(measure(quantization, draft))
                    values = vars(found[-1]).values()
                    logger.info("a draft in %s: acceptance %.3f, %.2g s a token, %.2g s a draft", *values)
        chosen = fastest(found, pass_s)
    logger.info("chose draft_quantization=%s in %.1f s", chosen, time.perf_counter() - started)
    keep_choice(path, chosen, runs)
    return drafts[chosen], chosen


def keep_choice(path: Path, chosen: str | None, runs: Sequence[Sequence[Run]]) -> None:
    """Keep a choice, unless the machine was busy. runs: the runs that decided it."""
    if is_steady(spread := spread_of(runs)):
        write_file(path, {"draft_quantization": chosen, "spread": spread})


# Draft models


def choose_precision(
    target: CausalLM,
    load: Callable[[str | None], Checkpoint],
    identity: Sequence[str],
    large: LargeDraft | None = None,
) -> tuple[Checkpoint, str | None]:
    """Choose the type of a draft model: see `choose`. large: estimates the times of a large one before it is loaded."""
    if large is not None:
        with suppress(ModelError):  # weights that are not finite can't be rounded
            return load(chosen := large.fastest()), chosen

    def trial(own: Checkpoint, runs: Runs) -> Trial[Checkpoint]:
        size, pass_s = target.vocab_size, pass_seconds(target, runs)
        tokens = drawn(own, size, max(1, min(SAMPLE, own.model.max_positions - PROMPT)))
        wanted = probs_along(target, tokens, size)

        def measure(quantization: str | None, draft: Checkpoint) -> Precision:
            overlap = torch.minimum(wanted, probs_along(draft.model, tokens, size))[PROMPT - 1 : -1].sum(-1).mean()
            return Precision(quantization, float(overlap), *draft_seconds(draft, size, runs))

        return pass_s, measure

    return choose(load, lambda own: own.quantizations, trial, identity)


@dataclass(frozen=True)
class LargeDraft:
    """A draft that is too large to be packed in every type, and the target whose backend computes it.

    quantization: the type that the target's weights are rounded to.
    """

    backend: TimesWeights
    draft: CheckpointFiles
    target: CheckpointFiles
    dtype: str
    quantization: str | None

    @classmethod
    def open(cls, folder: Path, target: Checkpoint, dtype: str, quantization: str | None) -> LargeDraft | None:
        """Return the draft in a folder; None if it is small or can't be rounded, or if times can't be estimated."""
        backend, device = target.backend, target.model.cache_shape.device
        if not isinstance(backend, TimesWeights):
            return None
        draft = CheckpointFiles.open(folder)
        if 2 * matrix_weights(draft.decoder) < LARGE_BYTES:
            return None
        if why_not(backend, draft.decoder, draft.dtype(dtype), device) is not None:
            return None
        return cls(backend, draft, CheckpointFiles.open(target.folder), dtype, quantization)

    def fastest(self) -> str | None:
        """Return the type that is expected to be fastest, without loading weights."""
        started, types, found = time.perf_counter(), [None, *self.backend.quantizations], list[Precision]()
        (target_s,) = self._seconds(self.backend, self.target, [self.quantization])
        own = self.backend.for_drafts() if isinstance(self.backend, RoundsWeights) else self.backend
        assert isinstance(own, TimesWeights)
        for each, token_s in zip(types, self._seconds(own, self.draft, types), strict=True):
            found.append(Precision(each, USUAL_ACCEPTANCE.get(each, 0.0), token_s))
            logger.info(
                "a draft in %s: acceptance %.3f is assumed, %.2g s a token", each, found[-1].acceptance, token_s
            )
        chosen = fastest(found, lambda rows: target_s * (1 + FURTHER_ROW * (rows - 1)))
        logger.info("chose draft_quantization=%s in %.1f s", chosen, time.perf_counter() - started)
        return chosen

    def _seconds(
        self, backend: TimesWeights, files: CheckpointFiles, quantizations: Sequence[str | None]
    ) -> list[float]:
        return backend.row_seconds(files.decoder, files.weights, files.dtype(self.dtype), quantizations)


def draft_seconds(draft: Checkpoint, size: int, runs: Runs) -> tuple[float, float]:
    """Return the seconds of each drafted token, and further seconds of a draft of any length."""
    if mask_of(draft.model) is not None:  # a row for each token, in one pass
        one, two = map(pass_seconds(draft.model, runs), (1, 2))
        row = max(two - one, 1e-9)
        return row, max(0.0, one - row)
    cache, source = text_cache(draft.model, size, PROMPT + DEPTH)
    seconds = timed(lambda length: _draw(draft, size, length, cache, source), [1, DEPTH], runs)
    return max((seconds[DEPTH] - seconds[1]) / (DEPTH - 1), 1e-9), 0.0


def expected_gain(target: Checkpoint, draft: CausalLM, text: Sequence[int], identity: Sequence[str]) -> float:
    """Return the expected speed of a draft model over plain decoding, by its acceptance along a text; see `choose`."""
    path = costs_folder() / f"{key_of([str(torch.get_num_threads()), *identity])}.gain.json"
    with suppress(ValueError, TypeError, KeyError):
        return float(read_measured(path)["gain"])
    size, runs = target.model.vocab_size, Runs()
    tokens = text[: max(PROMPT, min(PROMPT + SAMPLE, draft.max_positions, target.model.max_positions))]
    with torch.inference_mode():
        p, q = (probs_along(model, tokens, size) for model in (target.model, draft))
        overlap = float(torch.minimum(p, q)[PROMPT - 1 :].sum(-1).mean())
        pass_s = pass_seconds(target.model, runs)
        times = draft_seconds(replace(target, model=draft), size, runs)
    gain = Precision(None, overlap, *times).speed(pass_s) * pass_s(1)
    logger.info("a draft that was found: acceptance %.3f, %.2g s a token, %.2g s a draft", overlap, *times)
    if is_steady(spread := spread_of(runs)):
        write_file(path, {"gain": gain, "spread": spread})
    return gain


# Heads


@dataclass(frozen=True)
class HeadRounding:
    """The `DraftModels.round_head` of an engine.

    given: the configured type, see `EngineConfig`. facts: texts that name target, types and kernels. notes: the choice
    is added here, for the user.
    """

    target: Checkpoint
    given: str | None
    facts: Sequence[str]
    notes: list[str] = field(default_factory=list)

    def __call__(self, build: Build, context: DrafterContext) -> DrafterContext:
        """Return the context with a target for heads in the configured type, or in the fastest one."""
        model = self.target.model
        if self.given != AUTO:
            return _hosted_by(context, hosting(model, rounded(self.given)))
        if not isinstance(model, HeadHost):
            return context
        own = [build.__module__, str(context.model), state_of(context.model), str(sorted(context.options.items()))]

        def trial(host: CausalLM, runs: Runs) -> Trial[CausalLM]:
            pass_s = pass_seconds(model, runs)
            length = int(min(SAMPLE, max(FEWEST, TEXT_SECONDS / pass_s(1)), model.max_positions - PROMPT))
            sample = DraftSample.of(self.target, drawn(self.target, model.vocab_size, max(1, length)))

            def measure(quantization: str | None, host: CausalLM) -> Precision:
                room = len(sample.tokens) + ROOM
                small = replace(context, make_cache=lambda shape: slotted_cache(shape, 1, room), stop_below=0.0)
                return sample.measure(quantization, complete(build(_hosted_by(small, host))), runs)

            return pass_s, measure

        types = model.head_quantizations
        host, chosen = choose(lambda each: hosting(model, each), lambda host: types, trial, [*self.facts, *own])
        own_type = str(model.cache_shape.dtype).removeprefix("torch.")
        self.notes.append(f", draft weights in {chosen or own_type} (fastest here)")
        return _hosted_by(context, host)


def _hosted_by(context: DrafterContext, host: CausalLM) -> DrafterContext:
    """Return a context whose target computes heads with `host`."""
    return replace(context, target=replace(context.target, model=host))


def hosting(target: CausalLM, quantization: str | None) -> CausalLM:
    """Return a target for heads in a type; None = its cache's type. Raises ConfigError if it can't compute them."""
    if quantization is None:
        return target
    if not isinstance(target, HeadHost):
        raise ConfigError(
            f"draft_quantization={quantization!r} rounds a head on the kernels of its target, and those of this target"
            " compute no rounded heads",
            'use the native kernels for the target, or draft_quantization="auto".',
        )
    return target.rounding_heads(quantization)


def state_of(source: object) -> str:
    """Return sizes and times of a head's file, or of all in its folder: another head has a choice of its own."""
    place = Path(str(source)).expanduser()
    files = sorted(place.iterdir()) if place.is_dir() else [place] if place.is_file() else []
    return str([(file.name, file.stat().st_size, file.stat().st_mtime_ns) for file in files])


@dataclass(frozen=True)
class DraftSample:
    """A text, with the target's distributions [n, V] at temperature 1 after each token.

    states: returns the hidden states of layers, [n, hidden] each, see `DrafterNeeds.hidden_layers`.
    """

    tokens: Sequence[int]
    probs: Tensor
    states: Callable[[Sequence[int]], tuple[Tensor, ...]]

    @classmethod
    def of(cls, target: Checkpoint, tokens: Sequence[int]) -> DraftSample:
        """Compute a text in one pass."""
        model = target.model

        @cache
        def states(layers: Sequence[int]) -> tuple[Tensor, ...]:
            taps = sorted({layer for layer in layers if layer <= model.num_layers})
            hidden = _forward(model, tokens, model.vocab_size, taps)
            found = dict(zip(taps, hidden.taps, strict=True))
            return tuple(found.get(layer, hidden.last) for layer in layers)

        return cls(tokens, probs_along(model, tokens, model.vocab_size), states)

    def measure(self, quantization: str | None, drafter: Drafter, runs: Runs) -> Precision:
        """Draft along the text, and time drafts after it."""
        overlap = [_overlap(tree, probs) for tree, probs in self.drafts(drafter)]
        return Precision(quantization, sum(overlap) / len(overlap), *self.seconds(drafter, runs))

    def drafts(self, drafter: Drafter) -> Iterator[tuple[DraftTree, Tensor]]:
        """Yield a draft of one node at each token after the first ones, and the target's distribution [V] there."""
        states, last = self.states(tuple(drafter.needs.hidden_layers)), len(self.tokens) - 1
        sequence, seen = self._sequence(min(PROMPT, last)), 0
        drafter.begin(sequence)
        for place in range(len(sequence.tokens), last + 1):
            _observe(drafter, sequence, states, seen)
            seen = place - 1
            (tree,) = drafter.propose([sequence], [1])
            yield tree, self.probs[place - 1]
            sequence.tokens.append(self.tokens[place])
        drafter.end(sequence)

    def seconds(self, drafter: Drafter, runs: Runs) -> tuple[float, float]:
        """Time drafts after the text: return the seconds per drafted token, and the fixed seconds per draft."""
        sequence, states = self._sequence(len(self.tokens)), self.states(tuple(drafter.needs.hidden_layers))
        drafter.begin(sequence)
        _observe(drafter, sequence, states, 0)
        depth = min(DEPTH, drafter.needs.max_nodes or DEPTH)
        seconds = timed(lambda limit: drafter.propose([sequence], [limit]), sorted({1, depth}), runs)
        drafter.end(sequence)
        token_s = max((seconds[depth] - seconds[1]) / max(1, depth - 1), 1e-9)
        return token_s, max(0.0, seconds[1] - token_s)

    def _sequence(self, length: int) -> Request:
        """Return a sequence that has the first tokens of the text, and whose drafts have probs."""
        return replace(make_sequence(_TEXT, self.tokens[:length], DRAWN), drafts=DraftRules(shared_noise=False))


def _observe(drafter: Drafter, sequence: Request, states: Sequence[Tensor], seen: int) -> None:
    """Give a drafter the states of a sequence's tokens from `seen` to the last but one."""
    known = len(sequence.tokens) - 1
    rows = tuple(each[seen:known] for each in states)
    drafter.observe(sequence, CommittedRows(seen, sequence.tokens[seen:known], sequence.tokens[-1:], rows))


def _overlap(tree: DraftTree, probs: Tensor) -> float:
    """Return sum min(p, q) of a draft's first node; a node without probs is q's only token."""
    if not tree.size:
        return 0.0
    if tree.probs is None:
        return float(probs[tree.token_list[0]])
    return float(torch.minimum(probs, tree.probs[0].double()).sum())


# Texts


def text_cache(model: CausalLM, size: int, length: int) -> tuple[KVCache, int | None]:
    """Make a cache for one text of a length; return it with the sequence id of the text's source, which is encoded.

    size: of the target's vocabulary, to which the source's tokens belong. The id is None for a model without an
    encoder.
    """
    if not model.needs.source:
        return slotted_cache(model.cache_shape, 1, length), None
    source = Source(_SOURCE, tuple(spread_token(place, size) for place in range(min(SOURCE, model.max_positions))))
    cache = slotted_cache(model.cache_shape, 2, max(length, len(source.tokens)))
    encode_sources(model, cache, [source])
    return cache, source.seq_id


def drawn(draft: Checkpoint, size: int, length: int) -> list[int]:
    """Return a text of PROMPT tokens and up to `length` more, which a model draws at temperature 1."""
    cache, source = text_cache(draft.model, size, PROMPT + length)
    text, end = usual_tokens(PROMPT, size), PROMPT + length
    for _ in range(0, length, most := draft.model.needs.most_nodes or length):
        text = _draw(draft, size, min(most, end - len(text)), cache, source, text)
    return text


def _draw(
    draft: Checkpoint, size: int, length: int, cache: KVCache, source: int | None, text: Sequence[int] = ()
) -> list[int]:
    request = make_sequence(_TEXT, text or usual_tokens(PROMPT, size), DRAWN)
    chain = Chain(request, request.tokens, length, KeyedChances(draft.backend.sampler).draft(request), source=source)
    grow_chains(draft.model, [chain], cache, size, draft.backend.sampler)
    cache.release(request.seq_id)
    return [*chain.input_tokens, *chain.tokens]


def probs_along(model: CausalLM, tokens: Sequence[int], size: int) -> Tensor:
    """Return a model's distributions [n, size] at temperature 1 after each token of a text."""
    logits = model.logits(_forward(model, tokens, size).last)
    return torch.softmax(fit_vocabulary(logits, size).double(), -1)


def _forward(model: CausalLM, tokens: Sequence[int], size: int, taps: Sequence[int] = ()) -> Hidden:
    return _run(model, tokens, *text_cache(model, size, len(tokens)), taps)


def _run(
    model: CausalLM, tokens: Sequence[int], cache: KVCache, source: int | None, taps: Sequence[int] = ()
) -> Hidden:
    inputs = SequenceInput(_TEXT, known(tokens, model.vocab_size), NO_DRAFT, source=source)
    return model.forward(build_batch([inputs], cache, model.cache_shape.device), cache.storage, taps)


def pass_seconds(model: CausalLM, runs: Runs) -> Callable[[int], float]:
    """Return a function of a number of rows: the seconds of a model's pass, linear between those measured.

    runs: gets the timed runs.
    """
    rows = [1, 8]
    cache, source = text_cache(model, model.vocab_size, max(rows))

    def run(count: int) -> None:
        model.logits(_run(model, [0] * count, cache, source).last)
        cache.release(_TEXT)

    seconds = timed(run, rows, runs)
    slope = (seconds[8] - seconds[1]) / 7
    return lambda count: seconds[1] + (count - 1) * slope
