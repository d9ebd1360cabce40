"""Loads a draft model: fits its vocabulary to the target's, in the configured type of weights or in the fastest one."""

from __future__ import annotations

from dataclasses import dataclass, field
from functools import partial
from pathlib import Path

from speculant.cache import KVCache
from speculant.config import EngineConfig
from speculant.drafting import check_kind, intersect
from speculant.engine.precision import AUTO, LargeDraft, choose_precision, expected_gain, rounded, state_of
from speculant.errors import PairError
from speculant.models import (
    CausalLM,
    Checkpoint,
    CheckpointFiles,
    DraftVocabulary,
    MappedVocabulary,
    TargetVocabulary,
    load_model,
    read_model_config,
    resolve_source,
)
from speculant.text import Tokenizer, compare_vocabularies, substitute_token


@dataclass(frozen=True)
class DraftLoader:
    """Loads the draft models of an engine.

    facts: texts that name the target, its type and its kernels. heterogeneous: False = a draft whose ids mean other
    tokens is refused. notes: for the user. least_gain: the least speed over plain decoding that is expected of a draft
    which nobody named; None = the draft is used whatever it gains.
    """

    config: EngineConfig
    target: Checkpoint
    tokenizer: Tokenizer
    facts: tuple[str, ...]
    heterogeneous: bool | None = None
    least_gain: float | None = None
    notes: list[str] = field(default_factory=list)
    mapped: list[tuple[CausalLM, MappedVocabulary]] = field(default_factory=list)
    folders: list[tuple[CausalLM, Path]] = field(default_factory=list)

    def load(self, source: str, head_tokens: tuple[int, ...] = ()) -> CausalLM:
        """Load a draft model; see `LoadDraft`."""
        folder = resolve_source(source, "draft", download_dir=self.config.download_dir)
        check_kind(folder, read_model_config(folder))
        vocabulary = draft_vocabulary(folder, self.target, self.tokenizer, self.heterogeneous)
        if note := describe_vocabulary(vocabulary):
            self.notes.append(f", {note}")
        model = self._load_fastest(folder, source, head_tokens, vocabulary)
        if self.least_gain is not None:
            self._check_gain(folder, model, self.least_gain)
        if isinstance(vocabulary, MappedVocabulary):
            self.mapped.append((model, vocabulary))
        self.folders.append((model, folder))
        return model

    def _check_gain(self, folder: Path, model: CausalLM, least: float) -> None:
        """Measure a draft along this module's text. Raises PairError for one that does not pay."""
        text = self.tokenizer.encode(Path(__file__).read_text(encoding="utf-8"), add_special_tokens=False)
        places = (str(place) + state_of(place) for place in (self.target.folder, folder))
        given = str(self.config.draft_quantization), str(self.config.draft_model_backend)
        gain = expected_gain(self.target, model, text, [*self.facts, *given, *places])
        if gain < least:
            raise PairError(
                f"texts are expected to come {gain:.2f} times as fast with {folder} as without drafts",
                "name it as the draft model to use it nevertheless.",
            )
        self.notes.append(f", expected to be {gain:.1f} times as fast as plain decoding")

    def vocabulary_of(self, model: CausalLM) -> MappedVocabulary | None:
        """Return how a loaded draft model reads the target's texts; None = token by token, as they are."""
        return next((vocabulary for each, vocabulary in self.mapped if each is model), None)

    def keep_prompts(self, model: CausalLM, cache: KVCache) -> None:
        """Let a loaded draft model's cache keep its prompts on disk, if the engine does."""
        folder = self.config.prompt_cache_folder()
        if folder is None:
            return
        from speculant.engine.prompt_cache import open_prompt_cache

        for each, place in self.folders:
            if each is model:
                open_prompt_cache(self.config, folder, model, place, cache)

    def _load_fastest(
        self, folder: Path, source: str, head_tokens: tuple[int, ...], vocabulary: TargetVocabulary | None
    ) -> CausalLM:
        """Load a draft model in the configured type, or in the fastest one."""
        config, load = self.config, partial(self._load, source, head_tokens, vocabulary)
        if config.draft_model_backend != AUTO:
            loaded = load(None if config.draft_quantization == AUTO else rounded(config.draft_quantization))
            self.notes.append(f", the draft is computed by {loaded.kernels}")
            return loaded.model
        if config.draft_quantization != AUTO:
            return load(rounded(config.draft_quantization)).model
        large = LargeDraft.open(folder, self.target, config.dtype, config.quantization)
        identity = *self.facts, str(folder), str(head_tokens)
        draft, chosen = choose_precision(self.target.model, load, identity, large)
        if draft.quantizations:
            is_stored = chosen is None and CheckpointFiles.open(folder).tensors.quantised_kinds()
            own = "their own types" if is_stored else str(draft.dtype).removeprefix("torch.")
            self.notes.append(f", draft weights in {chosen or own} (fastest here)")
        return draft.model

    def _load(
        self,
        source: str,
        head_tokens: tuple[int, ...],
        vocabulary: TargetVocabulary | None,
        quantization: str | None,
    ) -> Checkpoint:
        config = self.config
        loaded = load_model(
            source, config.dtype, config.device, role="draft",
            kernels=config.kernels, quantization=quantization, head_tokens=head_tokens, vocabulary=vocabulary,
            weight_packing=config.weight_packing, weight_cache=config.weight_cache_folder(),
            download_dir=config.download_dir, model_backend=config.draft_model_backend,
            kv_cache_dtype=config.kv_cache_dtype,
        )  # fmt: skip
        check_encoder(loaded, self.target, vocabulary)
        return loaded


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
