"""The tokenizer that a GGUF file's metadata describes: byte-level BPE, or SentencePiece's BPE or Unigram with scores.

Tokens, merges and settings become the same objects as those of a tokenizer.json and a tokenizer_config.json.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, NamedTuple, TypeVar

from tokenizers import (
    AddedToken,
    Regex,
    Tokenizer as Backend,
    decoders,
    models,
    normalizers,
    pre_tokenizers,
    processors,
)

from speculant.errors import Converts, ModelError
from speculant.gguf_file import end_tokens
from speculant.text.gguf_splits import WordSplit, find_split
from speculant.text.unigram import BYTES, SPACE, Normalisation, TokenType, joining_decoder, scored, unigram

_FIX = "download the file again, or convert the original checkpoint again."
_UNUSABLE = Converts(ModelError, "the tokenizer of this GGUF file can't be used", _FIX)
_MOST_COMPARED = 2**26  # characters of all beginnings and ends of tokens; Gemma's tokens have a third of that
_MOST_ADDED = 2**15  # tokens; files in use have up to 6,500
_T = TypeVar("_T")

# The metadata that holds the id of a role's token; "seperator" is the format's spelling.
ROLE_KEYS = {
    "bos_token": "bos_token_id",
    "eos_token": "eos_token_id",
    "unk_token": "unknown_token_id",
    "sep_token": "seperator_token_id",
    "pad_token": "padding_token_id",
    "cls_token": "cls_token_id",
    "mask_token": "mask_token_id",
}
_UNSTRIPPED = ("<unk>", "<s>", "<|endoftext|>")  # added tokens of Phi-3 that take in no spaces


class GgufTokenizer(NamedTuple):
    """The tokenizer of a file, and its settings in the form of tokenizer_config.json."""

    backend: Backend
    settings: dict[str, Any]


def read_gguf_tokenizer(metadata: Mapping[str, Any]) -> GgufTokenizer:
    """Return the tokenizer of a GGUF file. Raises ModelError if it is damaged or of an unknown kind.

    A tokenizer.json inside the metadata takes precedence over the file's tokens and merges.
    """
    with _UNUSABLE:
        entries = _Entries(metadata)
        tokens = _read_tokens(entries)
        stored = entries.get("tokenizer.huggingface.json", str)
        if stored is not None:
            return GgufTokenizer(Backend.from_str(stored), _settings(entries, tokens, _Defaults()))
        kind = _find_kind(entries)
        settings = _settings(entries, tokens, kind.defaults)
        backend = kind.build(entries, tokens, settings)
        _mark_added_tokens(backend, entries, tokens, settings)
        backend.post_processor = _post_processor(settings, tokens)
        return GgufTokenizer(backend, settings)


@dataclass(frozen=True)
class _Entries:
    """Typed access to metadata. An entry of another type raises ModelError."""

    metadata: Mapping[str, Any]

    def get(self, key: str, kind: type[_T]) -> _T | None:
        """Return an entry; None if there is none."""
        value = self.metadata.get(key)
        if value is not None and type(value) is not kind:
            raise ModelError(f"{key} is {_shown(value)}; expected: {kind.__name__}", _FIX)
        return value

    def flag(self, key: str, default: bool) -> bool:
        """Return a switch."""
        value = self.get(key, bool)
        return default if value is None else value

    def all_of(self, key: str, *kinds: type[_T]) -> list[_T] | None:
        """Return a list whose entries have one of some types; None if there is none."""
        values = self.get(key, list)
        if values is not None and not {*map(type, values)} <= {*kinds}:
            raise ModelError(f"{key} has entries of another type than {kinds[0].__name__}", _FIX)
        return values

    def needed(self, key: str, *kinds: type[_T]) -> list[_T]:
        """Return a list that must be there."""
        values = self.all_of(key, *kinds)
        if values is None:
            raise ModelError(f"the file has no {key}", _FIX)
        return values


def _shown(value: object) -> str:
    return f"a {type(value).__name__}" if isinstance(value, list | dict) else repr(value)[:60]


@dataclass(frozen=True)
class _Tokens:
    """All tokens of a file by id, and their types."""

    texts: Sequence[str]
    types: Sequence[int]
    ids: dict[str, int] = field(repr=False)


def _read_tokens(entries: _Entries) -> _Tokens:
    texts = entries.needed("tokenizer.ggml.tokens", str)
    if not any(texts):
        raise ModelError("tokenizer.ggml.tokens has no text", _FIX)
    texts = [text or f"[EMPTY_{token_id}]" for token_id, text in enumerate(texts)]
    ids = {text: token_id for token_id, text in enumerate(texts)}
    if len(ids) < len(texts):
        twice = next(text for token_id, text in enumerate(texts) if ids[text] != token_id)
        raise ModelError(f"tokenizer.ggml.tokens has {twice[:60]!r} twice", _FIX)
    types = entries.all_of("tokenizer.ggml.token_type", int)
    if types is not None and len(types) != len(texts):
        raise ModelError(f"the file has {len(texts)} tokens, but types for {len(types)}", _FIX)
    return _Tokens(texts, types or [TokenType.NORMAL] * len(texts), ids)


@dataclass(frozen=True)
class _Defaults:
    """Settings of a kind, for files that have none."""

    add_bos: bool = False
    add_eos: bool = False
    clean_spaces: bool = False
    role_ids: Mapping[str, int] = field(default_factory=dict)


def _find_kind(entries: _Entries) -> _ByteLevel | _SentencePiece | _Unigram:
    name = entries.get("tokenizer.ggml.model", str)
    if name == "gpt2":
        return _ByteLevel(find_split(entries.get("tokenizer.ggml.pre", str) or "default"))
    if name == "llama":
        return _SentencePiece()
    if name == "t5":
        return _Unigram()
    if name is None:
        raise ModelError("the file has no tokenizer.ggml.model", _FIX)
    raise ModelError(
        f"tokenizer.ggml.model is {name[:60]!r}, a kind of tokenizer that is not supported",
        "use a model with one of: gpt2, llama, t5.",
    )


class _ByteLevel:
    """Kind `gpt2`: each byte is a character, and pairs are merged in the order of a list."""

    def __init__(self, split: WordSplit) -> None:
        self._split = split
        self.defaults = _Defaults(split.add_bos, clean_spaces=split.clean_spaces)

    def build(self, entries: _Entries, tokens: _Tokens, settings: Mapping[str, Any]) -> Backend:
        """Return the tokenizer without added tokens and without tokens around a text."""
        if tokens.ids.keys().isdisjoint(pre_tokenizers.ByteLevel.alphabet()):
            raise ModelError("tokenizer.ggml.tokens has no token for any single byte", _FIX)
        merges = _stored_merges(entries, tokens)
        model = models.BPE(tokens.ids, merges, ignore_merges=self._split.ignore_merges)
        backend = Backend(model)
        splits = [pre_tokenizers.Split(Regex(pattern), "isolated") for pattern in self._split.patterns]
        byte_level = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
        backend.pre_tokenizer = pre_tokenizers.Sequence([*splits, byte_level])
        backend.decoder = decoders.ByteLevel()
        return backend


def _stored_merges(entries: _Entries, tokens: _Tokens) -> list[tuple[str, str]]:
    """Return the pairs of tokens that are merged, in order. The model checks that both halves are tokens."""
    pairs = [merge.split(" ") for merge in entries.needed("tokenizer.ggml.merges", str)]
    if any(len(pair) != 2 for pair in pairs):
        raise ModelError("tokenizer.ggml.merges has an entry that is not two tokens with a space between them", _FIX)
    lost = {*map("".join, pairs)} - tokens.ids.keys()
    if lost:
        raise ModelError(f"tokenizer.ggml.merges gives {min(lost)[:60]!r}, which is no token", _FIX)
    return [*dict.fromkeys((left, right) for left, right in pairs)]


class _SentencePiece:
    """Kind `llama`: pairs whose text is the token with the highest score are merged first; other characters are bytes.

    The scores become a list of merges: all pairs of tokens that form a token, highest score first.
    """

    defaults = _Defaults(add_bos=True, role_ids={"bos_token": 1, "eos_token": 2, "unk_token": 0})

    def build(self, entries: _Entries, tokens: _Tokens, settings: Mapping[str, Any]) -> Backend:
        """Return the tokenizer without added tokens and without tokens around a text."""
        scores = _scores(entries, tokens)
        if tokens.ids.keys().isdisjoint(BYTES):
            raise ModelError("tokenizer.ggml.tokens has no token such as <0x0A> for any byte", _FIX)
        unknown = settings.get("unk_token")
        merges = [*_merges(tokens, scores)]
        backend = Backend(models.BPE(tokens.ids, merges, unk_token=unknown, fuse_unk=True, byte_fallback=True))
        prefixed = entries.flag("tokenizer.ggml.add_space_prefix", True)
        spaces = normalizers.Replace(" ", SPACE)
        backend.normalizer = normalizers.Sequence([normalizers.Prepend(SPACE), spaces]) if prefixed else spaces
        backend.decoder = joining_decoder(prefixed)
        return backend


def _scores(entries: _Entries, tokens: _Tokens) -> list[float]:
    """Return the score of each token."""
    scores = entries.needed("tokenizer.ggml.scores", float, int)
    if len(scores) != len(tokens.texts):
        raise ModelError(f"the file has {len(tokens.texts)} tokens, but scores for {len(scores)}", _FIX)
    if any(score != score for score in scores):
        raise ModelError("tokenizer.ggml.scores has entries that are not numbers", _FIX)
    return scores


def _merges(tokens: _Tokens, scores: Sequence[float]) -> Iterator[tuple[str, str]]:
    if sum(len(text) ** 2 for text in tokens.texts) > _MOST_COMPARED:
        raise ModelError("tokenizer.ggml.tokens has too many long tokens", _FIX)
    ids = tokens.ids
    # Of equal scores, SentencePiece merges the leftmost pair first, so a run of spaces grows from its start. A list of
    # merges has no equal ranks. With the longer token first, such runs come out the same.
    for _, _, text in sorted(zip(scores, map(len, tokens.texts), tokens.texts, strict=True), reverse=True):
        for middle in range(1, len(text)):
            if text[:middle] in ids and text[middle:] in ids:
                yield text[:middle], text[middle:]


class _Unigram:
    """Kind `t5`: the most likely of all ways to divide a text into tokens, whose scores are log-probabilities.

    Unused tokens at the end are rows of the model's table that no text has, and are left out.
    """

    defaults = _Defaults(add_eos=True, role_ids={"pad_token": 0, "eos_token": 1, "unk_token": 2})

    def build(self, entries: _Entries, tokens: _Tokens, settings: Mapping[str, Any]) -> Backend:
        """Return the tokenizer without added tokens and without tokens around a text."""
        unknown = settings.get("unk_token")
        charsmap = entries.all_of("tokenizer.ggml.precompiled_charsmap", int) or ()
        of = Normalisation(
            bytes(each & 0xFF for each in charsmap),  # stored signed or not
            entries.flag("tokenizer.ggml.add_space_prefix", True),
            entries.flag("tokenizer.ggml.remove_extra_whitespaces", True),
        )
        pieces = scored(tokens.texts, _scores(entries, tokens), tokens.types)
        return unigram(pieces, None if unknown is None else tokens.ids[unknown], of)


def _settings(entries: _Entries, tokens: _Tokens, defaults: _Defaults) -> dict[str, Any]:
    settings: dict[str, Any] = {}
    for role, key in ROLE_KEYS.items():
        token_id = entries.get(f"tokenizer.ggml.{key}", int)
        if token_id is not None and not 0 <= token_id < len(tokens.texts):
            raise ModelError(f"tokenizer.ggml.{key} is {token_id}, but there are {len(tokens.texts)} tokens", _FIX)
        token_id = defaults.role_ids.get(role) if token_id is None else token_id
        if token_id is not None and token_id < len(tokens.texts):
            settings[role] = tokens.texts[token_id]
    settings["add_bos_token"] = entries.flag("tokenizer.ggml.add_bos_token", defaults.add_bos)
    settings["add_eos_token"] = entries.flag("tokenizer.ggml.add_eos_token", defaults.add_eos)
    settings["clean_up_tokenization_spaces"] = defaults.clean_spaces
    return settings | _templates(entries)


def _templates(entries: _Entries) -> dict[str, Any]:
    """Return the chat template as tokenizer_config.json has it: a text, or a list of named templates."""
    default = entries.get("tokenizer.chat_template", str)
    names = entries.all_of("tokenizer.chat_templates", str) or []
    named = {name: entries.get(f"tokenizer.chat_template.{name}", str) for name in names}
    if not named:
        return {} if default is None else {"chat_template": default}
    found = {"default": default} | named
    return {"chat_template": [{"name": name, "template": source} for name, source in found.items() if source]}


def _mark_added_tokens(backend: Backend, entries: _Entries, tokens: _Tokens, settings: Mapping[str, Any]) -> None:
    """Mark added tokens, which are found in a text before it is split; some of them are special."""
    named = end_tokens(tokens.texts, entries.get("tokenizer.ggml.token_type", list))
    ends = {tokens.texts[index] for index in named} | {settings.get("eos_token")}
    name = (entries.get("general.name", str) or "").lower()
    strips = "phi-3" in name or "phi3" in name  # files do not store which tokens take in the spaces after them
    added = []
    for text, kind in zip(tokens.texts, tokens.types, strict=True):
        special = kind in (TokenType.CONTROL, TokenType.UNKNOWN) or text in ends
        if special or kind == TokenType.USER_DEFINED:
            rstrip = strips and text not in _UNSTRIPPED
            added.append(AddedToken(text, special=special, normalized=False, rstrip=rstrip))
    if len(added) > _MOST_ADDED:
        problem = f"{len(added)} tokens are control or user-defined tokens; at most {_MOST_ADDED} are read"
        raise ModelError(problem, _FIX)
    backend.add_tokens(added)


def _post_processor(settings: Mapping[str, Any], tokens: _Tokens) -> processors.TemplateProcessing | None:
    before, after = (_around(settings, role) for role in ("bos", "eos"))
    if not before and not after:
        return None
    special = [(text, tokens.ids[text]) for text in {*before, *after}]
    return processors.TemplateProcessing(
        single=[*before, "$A", *after], pair=[*before, "$A", *after, *before, "$B", *after], special_tokens=special
    )


def _around(settings: Mapping[str, Any], role: str) -> list[str]:
    """Return the token that is added at one end of a text, if any."""
    if not settings[f"add_{role}_token"]:
        return []
    if f"{role}_token" not in settings:
        raise ModelError(
            f"the file adds a {role.upper()} token to texts, but has no tokenizer.ggml.{role}_token_id", _FIX
        )
    return [settings[f"{role}_token"]]
