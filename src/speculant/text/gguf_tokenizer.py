"""The tokenizer that a GGUF file's metadata describes: byte-level BPE, or SentencePiece's BPE or Unigram with scores.

Tokens, merges and settings become the same objects as those of a tokenizer.json and a tokenizer_config.json.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from itertools import repeat
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
from speculant.text.sentencepiece import BYTES, SPACE, Normalisation, TokenType, joining_decoder, scored, unigram

_CONTRACTION = r"(?i:'s|'t|'re|'ve|'m|'ll|'d)"
_LETTERS = r"[^\r\n\p{L}\p{N}]?\p{L}+"
_SYMBOLS = r" ?[^\s\p{L}\p{N}]+[\r\n]*"
_SPACES = r"\s*[\r\n]+|\s+(?!\S)|\s+"
_CAPITALS, _SMALL = r"[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}]", r"[\p{Ll}\p{Lm}\p{Lo}\p{M}]"
_ASCII_SYMBOL = r"""[!"#$%&'()*+,\-./:;<=>?@\[\\\]^_`{|}~]"""
_KANA_AND_HAN = "[\u4e00-\u9fa5\u3040-\u309f\u30a0-\u30ff]+"
_ASIAN = "[\u4e00-\u9fa5\u0800-\u4e00\uac00-\ud7ff]+"
_GPT2 = r"'s|'t|'re|'ve|'m|'ll|'d| ?\p{L}+| ?\p{N}+| ?[^\s\p{L}\p{N}]+|\s+(?!\S)|\s+"
# Letters of alphabets that have capitals, as in DeepSeek LLM's tokenizer.json
_CASED = (
    "A-Za-z\u00b5\u00c0-\u00d6\u00d8-\u00f6\u00f8-\u01ba\u01bc-\u01bf\u01c4-\u0293\u0295-\u02af\u0370-\u0373\u0376"
    "\u0377\u037b-\u037d\u037f\u0386\u0388-\u038a\u038c\u038e-\u03a1\u03a3-\u03f5\u03f7-\u0481\u048a-\u052f"
    "\u0531-\u0556\u10a0-\u10c5\u13a0-\u13f5\u13f8-\u13fd\u1c90-\u1cba\u1cbd-\u1cbf\u1d00-\u1d2b\u1d6b-\u1d77"
    "\u1d79-\u1d9a\u1e00-\u1f15\u1f18-\u1f1d\u1f20-\u1f45\u1f48-\u1f4d\u1f50-\u1f57\u1f59\u1f5b\u1f5d\u1f5f-\u1f7d"
    "\u1f80-\u1fb4\u1fb6-\u1fbc\u1fbe\u1fc2-\u1fc4\u1fc6-\u1fcc\u1fd0-\u1fd3\u1fd6-\u1fdb\u1fe0-\u1fec\u1ff2-\u1ff4"
    "\u1ff6-\u1ffc\u2102\u2107\u210a-\u2113\u2115\u2119-\u211d\u2124\u2126\u2128\u212a-\u212d\u212f-\u2134\u2139"
    "\u213c-\u213f\u2145-\u2149\u214e\u2183\u2184\u2c00-\u2c7b\u2c7e-\u2ce4\u2ceb-\u2cee\u2cf2\u2cf3\ua640-\ua66d"
    "\ua680-\ua69b\ua722-\ua76f\ua771-\ua787\ua78b-\ua78e\uab70-\uabbf\ufb00-\ufb06\ufb13-\ufb17\uff21-\uff3a"
    "\uff41-\uff5a\U00010400-\U0001044f\U000104b0-\U000104d3\U000104d8-\U000104fb\U00010c80-\U00010cb2"
    "\U00010cc0-\U00010cf2\U000118a0-\U000118df\U0001e900-\U0001e943"
)
_DEEPSEEK_LLM = (
    r"[\r\n]",
    rf"\s?[{_CASED}]+",
    "\\s?[!-/:-~\uff01-\uff0f\uff1a-\uff5e\u2018-\u201f\u3000-\u3002]+",
    r"\s+$",
    _ASIAN,
    r"\p{N}+",
)
_DEEPSEEK_CODER = (r"[\r\n]", r"\s?\p{L}+", r"\s?\p{P}+", _ASIAN, r"\p{N}")
_DEFAULT = (r"[\p{P}$+<=>^~|]+", _GPT2, r"\p{N}+", "[0-9][0-9][0-9]")
_FALCON = (r"[\p{P}$+<=>^~|`]+", _GPT2, "[0-9][0-9][0-9]")
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
# The marks for filling in the middle, by role; older files have the second key.
FIM_KEYS = {
    "fim_pre_token": ("fim_pre_token_id", "prefix_token_id"),
    "fim_suf_token": ("fim_suf_token_id", "suffix_token_id"),
    "fim_mid_token": ("fim_mid_token_id", "middle_token_id"),
    "fim_pad_token": ("fim_pad_token_id",),
    "fim_rep_token": ("fim_rep_token_id",),
    "fim_sep_token": ("fim_sep_token_id",),
}
_UNSTRIPPED = ("<unk>", "<s>", "<|endoftext|>")  # added tokens of Phi-3 that take in no spaces


def _any_of(*patterns: str) -> str:
    return "|".join(patterns)


_LLAMA3 = _any_of(_CONTRACTION, _LETTERS, r"\p{N}{1,3}", _SYMBOLS, _SPACES)
_QWEN2 = _any_of(_CONTRACTION, _LETTERS, r"\p{N}", _SYMBOLS, _SPACES)
_QWEN35 = _any_of(
    _CONTRACTION, r"[^\r\n\p{L}\p{N}]?[\p{L}\p{M}]+", r"\p{N}", r" ?[^\s\p{L}\p{M}\p{N}]+[\r\n]*", _SPACES
)
_DEEPSEEK3 = _any_of(
    rf"{_ASCII_SYMBOL}[A-Za-z]+", r"[^\r\n\p{L}\p{P}\p{S}]?[\p{L}\p{M}]+", r" ?[\p{P}\p{S}]+[\r\n]*", _SPACES
)


def _camel_case(contraction: str, digits: str) -> str:
    """Return a pattern that starts a new word at a capital letter after a small one."""
    words = (rf"{_CAPITALS}*{_SMALL}+", rf"{_CAPITALS}+{_SMALL}*")
    letters = (rf"[^\r\n\p{{L}}\p{{N}}]?{word}{contraction}" for word in words)
    return _any_of(*letters, digits, r" ?[^\s\p{L}\p{N}]+[\r\n/]*", _SPACES)


@dataclass(frozen=True)
class WordSplit:
    """How a byte-level tokenizer splits a text into words, and settings that files may lack.

    Each pattern splits the words that the patterns before it made: its matches become words, and so does the text
    between them. The patterns are those of the original tokenizer.json files.
    """

    patterns: tuple[str, ...]
    ignore_merges: bool = False  # a word that is a token is never split
    add_bos: bool = False  # unless the file says otherwise
    clean_spaces: bool = False  # clean_up_tokenization_spaces in tokenizer_config.json


_SPLITS = {
    "default": WordSplit(_DEFAULT, clean_spaces=True),
    "llama3 llama-v3 llama-bpe falcon3 falcon-h1 pixtral midm-2.0 lfm2 jina-v5-nano": WordSplit(
        (_LLAMA3,), ignore_merges=True, add_bos=True, clean_spaces=True
    ),
    "dbrx smaug-bpe chatglm-bpe": WordSplit((_LLAMA3,), clean_spaces=True),
    "glm4 glm5": WordSplit((_LLAMA3,), ignore_merges=True, clean_spaces=True),
    "qwen2 deepseek-r1-qwen kormo f2llmv2 hunyuan solar-open grok-2": WordSplit((_QWEN2,)),
    "megrez stablelm2": WordSplit((_QWEN2,), clean_spaces=True),
    "qwen35": WordSplit((_QWEN35,)),
    "gpt-2 phi-2 gigachat a.x-4.0 mellum exaone4 mpt olmo jais": WordSplit((_GPT2,), clean_spaces=True),
    "trillion granite-docling": WordSplit((_GPT2,)),
    "smollm command-r": WordSplit((r"\p{N}", _GPT2)),
    "starcoder refact codeshell exaone minerva-7b mellum2": WordSplit((r"\p{N}", _GPT2), clean_spaces=True),
    "falcon": WordSplit(_FALCON, clean_spaces=True),
    "gpt-4o llama4 kanana2 talkie minimax-m2": WordSplit((_camel_case(f"{_CONTRACTION}?", r"\p{N}{1,3}"),)),
    "tekken": WordSplit((_camel_case("", r"\p{N}"),), ignore_merges=True, add_bos=True),
    "deepseek-llm": WordSplit(_DEEPSEEK_LLM),
    "deepseek-coder": WordSplit(_DEEPSEEK_CODER),
    "deepseek-v3 hunyuan-dense joyai-llm hy_v4": WordSplit((r"\p{N}{1,3}", _KANA_AND_HAN, _DEEPSEEK3)),
}
SPLITS = {name: split for names, split in _SPLITS.items() for name in names.split()}


def find_split(name: str) -> WordSplit:
    """Return the splitting of a `tokenizer.ggml.pre`. Raises ModelError for an unknown one."""
    if name not in SPLITS:
        raise ModelError(
            f"tokenizer.ggml.pre is {name!r}, a way to split text that is not implemented",
            f"use a model with one of: {', '.join(sorted(SPLITS))}.",
        )
    return SPLITS[name]


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


class _Kind(NamedTuple):
    """build: makes the tokenizer without added tokens and without tokens around a text."""

    defaults: _Defaults
    build: Callable[[_Entries, _Tokens, Mapping[str, Any]], Backend]


def _find_kind(entries: _Entries) -> _Kind:
    name = entries.get("tokenizer.ggml.model", str)
    if name == "gpt2":
        split = find_split(entries.get("tokenizer.ggml.pre", str) or "default")
        return _Kind(_Defaults(split.add_bos, clean_spaces=split.clean_spaces), partial(_byte_level, split))
    if name == "llama":
        roles = {"bos_token": 1, "eos_token": 2, "unk_token": 0}
        return _Kind(_Defaults(add_bos=True, role_ids=roles), _sentencepiece)
    if name == "t5":
        roles = {"pad_token": 0, "eos_token": 1, "unk_token": 2}
        return _Kind(_Defaults(add_eos=True, role_ids=roles), _unigram)
    if name is None:
        raise ModelError("the file has no tokenizer.ggml.model", _FIX)
    raise ModelError(
        f"tokenizer.ggml.model is {name[:60]!r}, a kind of tokenizer that is not supported",
        "use a model with one of: gpt2, llama, t5.",
    )


def _byte_level(split: WordSplit, entries: _Entries, tokens: _Tokens, settings: Mapping[str, Any]) -> Backend:
    """Each byte is a character, and pairs are merged in the order of a list."""
    if tokens.ids.keys().isdisjoint(pre_tokenizers.ByteLevel.alphabet()):
        raise ModelError("tokenizer.ggml.tokens has no token for any single byte", _FIX)
    backend = Backend(models.BPE(tokens.ids, _stored_merges(entries, tokens), ignore_merges=split.ignore_merges))
    splits = [pre_tokenizers.Split(Regex(pattern), "isolated") for pattern in split.patterns]
    byte_level = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    backend.pre_tokenizer = pre_tokenizers.Sequence([*splits, byte_level])
    backend.decoder = decoders.ByteLevel()
    return backend


def _stored_merges(entries: _Entries, tokens: _Tokens) -> list[tuple[str, str]]:
    """Return the pairs of tokens that are merged, in order. The model checks that both halves are tokens."""
    merges = entries.needed("tokenizer.ggml.merges", str)
    if {*map(str.count, merges, repeat(" "))} - {1}:
        raise ModelError("tokenizer.ggml.merges has an entry that is not two tokens with a space between them", _FIX)
    pairs = [(left, right) for left, _, right in [merge.partition(" ") for merge in dict.fromkeys(merges)]]
    lost = [text for text in map("".join, pairs) if text not in tokens.ids]
    if lost:
        raise ModelError(f"tokenizer.ggml.merges gives {min(lost)[:60]!r}, which is no token", _FIX)
    return pairs


def _sentencepiece(entries: _Entries, tokens: _Tokens, settings: Mapping[str, Any]) -> Backend:
    """Pairs whose text is the token with the highest score are merged first; other characters are bytes.

    The scores become a list of merges: all pairs of tokens that form a token, highest score first.
    """
    scores = _scores(entries, tokens)
    if tokens.ids.keys().isdisjoint(BYTES):
        raise ModelError("tokenizer.ggml.tokens has no token such as <0x0A> for any byte", _FIX)
    unknown, merges = settings.get("unk_token"), [*_merges(tokens, scores)]
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


def _unigram(entries: _Entries, tokens: _Tokens, settings: Mapping[str, Any]) -> Backend:
    """The most likely of all ways to divide a text into tokens, whose scores are log-probabilities.

    Unused tokens at the end are rows of the model's table that no text has, and are left out.
    """
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
    keys = {role: (key,) for role, key in ROLE_KEYS.items()} | FIM_KEYS
    for role, names in keys.items():
        found = (_role_id(entries, f"tokenizer.ggml.{name}", len(tokens.texts)) for name in names)
        token_id = next((each for each in found if each is not None), defaults.role_ids.get(role))
        if token_id is not None and token_id < len(tokens.texts):
            settings[role] = tokens.texts[token_id]
    settings["add_bos_token"] = entries.flag("tokenizer.ggml.add_bos_token", defaults.add_bos)
    settings["add_eos_token"] = entries.flag("tokenizer.ggml.add_eos_token", defaults.add_eos)
    settings["clean_up_tokenization_spaces"] = defaults.clean_spaces
    return settings | _templates(entries)


def _role_id(entries: _Entries, key: str, num_tokens: int) -> int | None:
    token_id = entries.get(key, int)
    if token_id is not None and not 0 <= token_id < num_tokens:
        raise ModelError(f"{key} is {token_id}, but there are {num_tokens} tokens", _FIX)
    return token_id


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
    hidden, added = (TokenType.CONTROL, TokenType.UNKNOWN), []
    kinds = {*hidden, TokenType.USER_DEFINED}
    for text, kind in zip(tokens.texts, tokens.types, strict=True):
        if kind in kinds or text in ends:
            special, rstrip = kind in hidden or text in ends, strips and text not in _UNSTRIPPED
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
