"""Tokenizers as metadata of GGUF files: a converter from tokenizer.json."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from speculant.text.sentencepiece import TokenType

ROLE_KEYS = {
    "bos_token": "bos_token_id",
    "eos_token": "eos_token_id",
    "unk_token": "unknown_token_id",
    "pad_token": "padding_token_id",
}


def metadata_of(
    tokenizer_json: Mapping[str, Any], settings: Mapping[str, Any] | None = None, pre: str = "gpt-2"
) -> dict[str, Any]:
    """Return the metadata of a GGUF file with the tokenizer of a tokenizer.json.

    settings: the content of its tokenizer_config.json. pre: the name of its splitting into words, for byte-level BPE.
    A tokenizer with byte fallback becomes one of SentencePiece's kind.
    """
    settings, model = settings or {}, tokenizer_json["model"]
    added = {token["content"]: token for token in tokenizer_json["added_tokens"]}
    ids = model["vocab"] | {text: token["id"] for text, token in added.items()}
    merges = [pair if isinstance(pair, list) else pair.split(" ") for pair in model["merges"]]
    texts = sorted(ids, key=ids.__getitem__)
    metadata: dict[str, Any] = {
        "tokenizer.ggml.tokens": texts,
        "tokenizer.ggml.token_type": [_type_of(text, added.get(text), model["byte_fallback"]) for text in texts],
    }
    if model["byte_fallback"]:
        metadata |= {"tokenizer.ggml.model": "llama", "tokenizer.ggml.scores": _scores(texts, merges)}
    else:
        joined = [" ".join(pair) for pair in merges]
        metadata |= {"tokenizer.ggml.model": "gpt2", "tokenizer.ggml.pre": pre, "tokenizer.ggml.merges": joined}
    return metadata | _settings_of(settings, ids, tokenizer_json)


def _type_of(text: str, added: Mapping[str, Any] | None, byte_fallback: bool) -> int:
    if added:
        return int(TokenType.CONTROL if added["special"] else TokenType.USER_DEFINED)
    is_byte = byte_fallback and len(text) == 6 and text.startswith("<0x")
    return int(TokenType.BYTE if is_byte else TokenType.NORMAL)


def _scores(texts: list[str], merges: list[list[str]]) -> list[float]:
    """Return scores in the order of merges, as SentencePiece gives them; single characters come last."""
    ranks = {left + right: rank for rank, (left, right) in reversed([*enumerate(merges)])}
    return [-float(ranks.get(text, len(merges) + token_id)) for token_id, text in enumerate(texts)]


def _settings_of(settings: Mapping[str, Any], ids: Mapping[str, int], source: Mapping[str, Any]) -> dict[str, Any]:
    stored: dict[str, Any] = {}
    for role, key in ROLE_KEYS.items():
        given = settings.get(role)
        text = given["content"] if isinstance(given, dict) else given
        if text is not None:
            stored[f"tokenizer.ggml.{key}"] = ids[text]
    single = (source["post_processor"] or {}).get("single", [])
    stored["tokenizer.ggml.add_bos_token"] = bool(single) and "SpecialToken" in single[0]
    stored["tokenizer.ggml.add_eos_token"] = bool(single) and "SpecialToken" in single[-1]
    normalizer = str(source["normalizer"])
    stored["tokenizer.ggml.add_space_prefix"] = "Prepend" in normalizer
    if settings.get("chat_template") is not None:
        stored["tokenizer.chat_template"] = settings["chat_template"]
    return stored
