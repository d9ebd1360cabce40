"""Loads a draft model: fits its vocabulary to the target's, and chooses the type of its weights.

The chosen type is the one that is expected to generate text fastest on this machine. A draft does not change the
output's distribution, so its weights may be rounded: its passes become faster, and fewer of its tokens are accepted.
For a small draft both are measured, on a text that the draft itself draws. A large one would have to be packed in every
type for that. So its times are estimated from bytes (models/native/speeds.py), and a usual loss of acceptance is
assumed; `speculant check-pair` measures it. A measured choice is kept on disk if the machine was not busy.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path

import torch
from torch import Tensor

from speculant.cache.base import KVCache
from speculant.cache.factory import slotted_cache
from speculant.cache.sources import MEASURED, Source
from speculant.drafting.growth import fit_vocabulary, grow_chains
from speculant.drafting.model.drafter import mask_of
from speculant.drafting.model.intersection import intersect
from speculant.engine.calibration import requests, spread_token, timed
from speculant.errors import ModelError, PairError, SpeculantError
from speculant.files import Run, costs_folder, is_steady, key_of, read_measured, spread_of, write_file
from speculant.models.backends.base import TimesWeights, why_not
from speculant.models.base import CausalLM, Chain, SequenceInput, build_batch, known
from speculant.models.encoding import encode_sources
from speculant.models.sizes import matrix_weights
from speculant.models.vocabulary import DraftVocabulary, MappedVocabulary, TargetVocabulary
from speculant.models.weights.load import Checkpoint, CheckpointFiles
from speculant.params import SamplingParams
from speculant.sampling.chance import KeyedChances
from speculant.text.tokenizer import Tokenizer, compare_vocabularies, substitute_token
from speculant.types import DraftTree

logger = logging.getLogger(__name__)

AUTO = "auto"
UNCHANGED = "none"
LEAST_GAIN = 0.02  # rounded weights that gain less are not worth the risk that the estimate is wrong
LONGEST = 16  # drafts that are compared
LARGE_BYTES = 64 * 2**20  # of a model in bfloat16: a smaller one is packed quickly, and may stay in caches
USUAL_ACCEPTANCE = {None: 0.7, "int8": 0.695, "int4": 0.68}  # by type, assumed for a large draft
FURTHER_ROW = 0.05  # of the time of the target's pass of one row, assumed for each further row
PROMPT, SAMPLE = 8, 48  # tokens
SOURCE = 64  # tokens of the source of such a text, for encoder-decoder models
DRAWN = SamplingParams(temperature=1.0, max_tokens=None)


def draft_vocabulary(
    folder: Path, target: Checkpoint, tokenizer: Tokenizer, other: bool | None = None
) -> TargetVocabulary | None:
    """Compare the tokenizer in a draft's folder with the target's, `tokenizer`.

    other: False = a draft whose ids mean other tokens is refused. Returns the vocabulary to load the draft model with;
    None = it has the target's tokens. Raises PairError if it can't be used.
    """
    if tokenizer.has_file_of(folder):
        return None
    own = Tokenizer.load(folder)
    try:
        unknown = compare_vocabularies(tokenizer, own)
    except PairError as error:
        if other is False:
            fix = "leave use_heterogeneous_vocab out, or use a draft of the target's own family."
            raise PairError(error.problem, fix) from None
        return intersect(tokenizer, own, target.model.vocab_size)
    if not unknown:
        return None
    lacks = len(unknown - {*own.vocab().values()})
    return DraftVocabulary(target.model.vocab_size, unknown, substitute_token(own, unknown), lacks)


def check_encoder(draft: Checkpoint, target: Checkpoint, vocabulary: TargetVocabulary | None) -> None:
    """Check that the target of a draft model with an encoder has one too, and the same tokens. Raises PairError.

    A draft model without an encoder may draft for an encoder-decoder model: it reads only the decoder's tokens.
    """
    if not draft.model.needs.source:
        return
    if not target.model.needs.source:
        raise PairError(
            f"the draft model {draft.folder} is an encoder-decoder model and the target {target.folder} is not",
            "use a draft model without an encoder.",
        )
    if isinstance(vocabulary, MappedVocabulary):
        raise PairError(
            f"the draft model {draft.folder} has an encoder, and its vocabulary is not that of {target.folder}",
            "use a draft model of the target's family: encoders read the target's own tokens.",
        )
    if draft.start_tokens != target.start_tokens:
        raise PairError(
            f"texts of the draft model {draft.folder} begin with {list(draft.start_tokens)}, and those of the target "
            f"with {list(target.start_tokens)}",
            "use a draft model with the target's decoder_start_token_id.",
        )


def describe_vocabulary(vocabulary: TargetVocabulary | None) -> str:
    """Say for the user which tokens a draft model does not draft; empty = it drafts all."""
    if isinstance(vocabulary, MappedVocabulary):
        number, size = len(vocabulary.shared), vocabulary.size
        return f"the vocabularies differ and share {number} of the target's {size} tokens, which alone are drafted"
    if vocabulary is not None and vocabulary.lacks:
        return f"the draft lacks {vocabulary.lacks} of the target's tokens and never drafts them"
    return ""


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
        for length in range(1, LONGEST + 1):
            reached *= self.acceptance
            expected += reached
            best = max(best, expected / (pass_s(length + 1) + self.draft_s + length * self.token_s))
        return best


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
        if 2 * matrix_weights(draft.decoder) < LARGE_BYTES or draft.tensors.quantised_kinds():
            return None
        if why_not(backend, draft.decoder, draft.dtype(dtype), device) is not None:
            return None
        return cls(backend, draft, CheckpointFiles.open(target.folder), dtype, quantization)

    def fastest(self) -> str | None:
        """Return the type that is expected to be fastest, without loading weights."""
        (target_s,), types = self._seconds(self.target, [self.quantization]), [None, *self.backend.quantizations]
        found = list[Precision]()
        for each, token_s in zip(types, self._seconds(self.draft, types), strict=True):
            found.append(Precision(each, USUAL_ACCEPTANCE.get(each, 0.0), token_s))
            logger.info(
                "a draft in %s: acceptance %.3f is assumed, %.2g s a token", each, found[-1].acceptance, token_s
            )
        return fastest(found, lambda rows: target_s * (1 + FURTHER_ROW * (rows - 1)))

    def _seconds(self, files: CheckpointFiles, quantizations: Sequence[str | None]) -> list[float]:
        return self.backend.row_seconds(files.decoder, files.weights, files.dtype(self.dtype), quantizations)


def choose_precision(
    target: CausalLM,
    load: Callable[[str | None], Checkpoint],
    identity: Sequence[str],
    estimated: Callable[[], str | None] | None = None,
) -> tuple[Checkpoint, str | None]:
    """Return the draft in the type that is expected to be fastest, and the type; None = unchanged.

    load: loads the draft in a type. identity: texts that name the pair, types and kernels; with the machine they are
    the key of the kept choice. estimated: chooses the type of a draft before it is loaded, from speeds that are kept;
    None = all types are measured.
    """
    started = time.perf_counter()
    if estimated is not None:
        chosen = estimated()
        logger.info("chose draft_quantization=%s in %.1f s", chosen, time.perf_counter() - started)
        with suppress(ModelError):  # weights that are not finite can't be rounded
            return load(chosen), chosen
    path = choice_path(identity)
    with suppress(ValueError, TypeError, KeyError, SpeculantError):
        kept = read_measured(path)["draft_quantization"]
        return load(kept), kept
    drafts: dict[str | None, Checkpoint] = {None: load(None)}
    for each in drafts[None].quantizations:
        with suppress(ModelError):  # weights that are not finite can't be rounded
            drafts[each] = load(each)
    runs = list[Sequence[Run]]()
    chosen = _measure(target, drafts, runs) if len(drafts) > 1 else None
    logger.info("chose draft_quantization=%s in %.1f s", chosen, time.perf_counter() - started)
    keep_choice(path, chosen, runs)
    return drafts[chosen], chosen


def choice_path(identity: Sequence[str]) -> Path:
    """Return the file in which a choice is kept; identity: see `choose_precision`."""
    return costs_folder() / f"{key_of([str(torch.get_num_threads()), *identity])}.precision.json"


def keep_choice(path: Path, chosen: str | None, runs: Sequence[Sequence[Run]]) -> None:
    """Keep a choice, unless the machine was busy. runs: those that it was made from."""
    if is_steady(spread := spread_of(runs)):
        write_file(path, {"draft_quantization": chosen, "spread": spread})


def fastest(found: Sequence[Precision], pass_s: Callable[[int], float]) -> str | None:
    """Return the type that is expected to be fastest, among drafts of which the first one is unchanged."""
    best = max(found, key=lambda each: each.speed(pass_s))
    return best.quantization if best.speed(pass_s) > (1 + LEAST_GAIN) * found[0].speed(pass_s) else None


@torch.inference_mode()
def _measure(target: CausalLM, drafts: dict[str | None, Checkpoint], runs: list[Sequence[Run]]) -> str | None:
    size, pass_s = target.vocab_size, pass_seconds(target, runs)
    own = drafts[None]
    tokens = drawn(own, size, max(1, min(SAMPLE, own.model.max_positions - PROMPT)))
    wanted = _probs(target, tokens, size)
    found = list[Precision]()
    for quantization, draft in drafts.items():
        overlap = float(torch.minimum(wanted, _probs(draft.model, tokens, size)).sum(-1).mean())
        found.append(Precision(quantization, overlap, *_draft_seconds(draft, size, runs)))
        logger.info("a draft in %s: acceptance %.3f, %.2g s a token, %.2g s a draft", *vars(found[-1]).values())
    return fastest(found, pass_s)


def text_cache(model: CausalLM, size: int, length: int) -> tuple[KVCache, int | None]:
    """Make a cache for one text of a length; return it with the sequence id of the text's source, which is encoded.

    size: that of the target's vocabulary, to which the source's tokens belong. The id is None for a model without an
    encoder.
    """
    if not model.needs.source:
        return slotted_cache(model.cache_shape, 1, length), None
    source = Source(MEASURED, tuple(spread_token(place, size) for place in range(min(SOURCE, model.max_positions))))
    cache = slotted_cache(model.cache_shape, 2, max(length, len(source.tokens)))
    encode_sources(model, cache, [source])
    return cache, source.seq_id


def _draw(draft: Checkpoint, size: int, length: int, cache: KVCache, source: int | None) -> list[int]:
    """Return a text of PROMPT tokens and `length` more, which a model draws at temperature 1."""
    (request,) = requests(1, PROMPT, size, DRAWN)
    chain = Chain(request, request.tokens, length, KeyedChances(draft.backend.sampler).draft(request), source=source)
    grow_chains(draft.model, [chain], cache, size, draft.backend.sampler)
    cache.release(request.seq_id)
    return [*chain.input_tokens, *chain.tokens]


def drawn(draft: Checkpoint, size: int, length: int) -> list[int]:
    """Return a text of PROMPT tokens and `length` more, which a model draws at temperature 1."""
    return _draw(draft, size, length, *text_cache(draft.model, size, PROMPT + length))


def _probs(model: CausalLM, tokens: Sequence[int], size: int) -> Tensor:
    """Return a model's distributions [n, size] at temperature 1 after each of the drawn tokens but the last."""
    cache, source = text_cache(model, size, len(tokens))
    inputs = SequenceInput(0, known(tokens, model.vocab_size), DraftTree.empty(), source=source)
    batch = build_batch([inputs], cache, model.cache_shape.device)
    hidden = model.forward(batch, cache.storage).last[PROMPT - 1 : -1]
    return torch.softmax(fit_vocabulary(model.logits(hidden), size).double(), -1)


def _draft_seconds(draft: Checkpoint, size: int, runs: list[Sequence[Run]]) -> tuple[float, float]:
    """Return the seconds of each drafted token, and further seconds of a draft of any length."""
    if mask_of(draft.model) is not None:  # a row for each token, in one pass
        one, two = map(pass_seconds(draft.model, runs), (1, 2))
        row = max(two - one, 1e-9)
        return row, max(0.0, one - row)

    cache = text_cache(draft.model, size, PROMPT + 5)
    seconds = timed(lambda length: _draw(draft, size, length, *cache), [1, 5], runs)
    return max((seconds[5] - seconds[1]) / 4, 1e-9), 0.0


def pass_seconds(model: CausalLM, runs: list[Sequence[Run]]) -> Callable[[int], float]:
    """Return a function of a number of rows: the seconds of a model's pass, linear between those measured.

    runs: gets those that were timed.
    """
    rows = [1, 8]
    cache, source = text_cache(model, model.vocab_size, max(rows))

    def run(count: int) -> None:
        inputs = SequenceInput(0, [0] * count, DraftTree.empty(), source=source)
        batch = build_batch([inputs], cache, model.cache_shape.device)
        model.logits(model.forward(batch, cache.storage).last)
        cache.release(inputs.seq_id)

    seconds = timed(run, rows, runs)
    slope = (seconds[8] - seconds[1]) / 7
    return lambda count: seconds[1] + (count - 1) * slope
