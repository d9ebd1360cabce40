"""How the byte-level tokenizers of GGUF files split a text into words, by the name in `tokenizer.ggml.pre`.

Each pattern splits the words that the patterns before it made: its matches become words, and so does the text between
them. The patterns are those of the original tokenizer.json files.
"""

from __future__ import annotations

from dataclasses import dataclass

from speculant.errors import ModelError


def _any_of(*patterns: str) -> str:
    return "|".join(patterns)


_CONTRACTION = r"(?i:'s|'t|'re|'ve|'m|'ll|'d)"
_LETTERS = r"[^\r\n\p{L}\p{N}]?\p{L}+"
_SYMBOLS = r" ?[^\s\p{L}\p{N}]+[\r\n]*"
_SPACES = r"\s*[\r\n]+|\s+(?!\S)|\s+"
_CAPITALS, _SMALL = r"[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}]", r"[\p{Ll}\p{Lm}\p{Lo}\p{M}]"
_ASCII_SYMBOL = r"""[!"#$%&'()*+,\-./:;<=>?@\[\\\]^_`{|}~]"""
_KANA_AND_HAN = "[\u4e00-\u9fa5\u3040-\u309f\u30a0-\u30ff]+"
_ASIAN = "[\u4e00-\u9fa5\u0800-\u4e00\uac00-\ud7ff]+"

_GPT2 = r"'s|'t|'re|'ve|'m|'ll|'d| ?\p{L}+| ?\p{N}+| ?[^\s\p{L}\p{N}]+|\s+(?!\S)|\s+"
_LLAMA3 = _any_of(_CONTRACTION, _LETTERS, r"\p{N}{1,3}", _SYMBOLS, _SPACES)
_QWEN2 = _any_of(_CONTRACTION, _LETTERS, r"\p{N}", _SYMBOLS, _SPACES)
_QWEN35 = _any_of(
    _CONTRACTION, r"[^\r\n\p{L}\p{N}]?[\p{L}\p{M}]+", r"\p{N}", r" ?[^\s\p{L}\p{M}\p{N}]+[\r\n]*", _SPACES
)
_DEEPSEEK3 = _any_of(
    rf"{_ASCII_SYMBOL}[A-Za-z]+", r"[^\r\n\p{L}\p{P}\p{S}]?[\p{L}\p{M}]+", r" ?[\p{P}\p{S}]+[\r\n]*", _SPACES
)
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


def _camel_case(contraction: str, digits: str) -> str:
    """Return a pattern that starts a new word at a capital letter after a small one."""
    words = (rf"{_CAPITALS}*{_SMALL}+", rf"{_CAPITALS}+{_SMALL}*")
    letters = (rf"[^\r\n\p{{L}}\p{{N}}]?{word}{contraction}" for word in words)
    return _any_of(*letters, digits, r" ?[^\s\p{L}\p{N}]+[\r\n/]*", _SPACES)


@dataclass(frozen=True)
class WordSplit:
    """The patterns of one kind, and its settings, which files may lack."""

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
