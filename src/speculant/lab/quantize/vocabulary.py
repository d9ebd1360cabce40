"""The metadata that describes a tokenizer in a GGUF file, from the files of a folder.

Byte-level tokenizers can be written, and Unigram ones that divide texts as T5's does. The whole tokenizer.json is
stored too, and takes precedence in readers that know it.
"""

from __future__ import annotations

import base64
import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from speculant.errors import ModelError
from speculant.files import read_json, read_optional_json
from speculant.models import END_KEYS, ENDS, read_generation, text_config
from speculant.text import (
    BYTES,
    ROLE_KEYS,
    SENTENCEPIECE_ROLES,
    SPLITS,
    TOOL_USE,
    TokenType,
    find_sentencepiece,
    find_template,
)

_FOLDER = "name a folder as OUT instead of a .gguf file."
_EOS, *_OTHER_ENDS = (f"tokenizer.ggml.{key}" for key in END_KEYS)
_UNUSED_SCORE = -10000.0
_PLAIN = SPLITS["gpt-2"].patterns  # of a ByteLevel step that splits by itself


def tokenizer_entries(folder: Path, vocab_size: int) -> dict[str, Any]:
    """Return the metadata of a folder's tokenizer. Raises ModelError for a kind that can't be written."""
    settings = {
        **read_optional_json(folder / "special_tokens_map.json"),
        **read_optional_json(folder / "tokenizer_config.json"),
    }
    if (folder / "tokenizer.json").is_file():
        content = read_json(folder / "tokenizer.json")
    else:
        found = find_sentencepiece(folder, settings)
        if found is None:
            raise ModelError(f"{folder} has no tokenizer.json, which a GGUF file needs", _FOLDER)
        content, settings = json.loads(found.to_str()), {**SENTENCEPIECE_ROLES, **settings}
    model = content.get("model") or {}
    if model.get("type") == "Unigram":
        return _unigram_entries(folder, content, settings, vocab_size)
    others = model.get("byte_fallback") or content.get("normalizer") or not model.get("merges")
    if model.get("type", "BPE") != "BPE" or others:
        raise ModelError(
            "this tokenizer is not a byte-level BPE, nor T5's Unigram; only those are written to GGUF files", _FOLDER
        )
    texts, types = _tokens(content, vocab_size)
    ids = {text: index for index, text in enumerate(texts)}
    return {
        "tokenizer.ggml.model": "gpt2",
        "tokenizer.ggml.pre": _split_name(content.get("pre_tokenizer") or {}, bool(model.get("ignore_merges"))),
        "tokenizer.ggml.tokens": texts,
        "tokenizer.ggml.token_type": types,
        "tokenizer.ggml.merges": [each if isinstance(each, str) else " ".join(each) for each in model["merges"]],
        **_roles(folder, settings, ids),
        "tokenizer.ggml.add_bos_token": _adds_first(content, settings),
        **_templates(folder, settings),
        "tokenizer.huggingface.json": json.dumps(content, ensure_ascii=False),
    }


def _unigram_entries(
    folder: Path, content: Mapping[str, Any], settings: Mapping[str, Any], vocab_size: int
) -> dict[str, Any]:
    """Return the metadata of a Unigram tokenizer. Raises ModelError unless it divides texts as T5's does."""
    model, step = content["model"], content.get("normalizer") or {}
    words = content.get("pre_tokenizer") or {}
    kinds = [each.get("type") for each in words.get("pretokenizers", [words])]
    if step.get("type") not in (None, "Precompiled") or kinds != ["WhitespaceSplit", "Metaspace"]:
        raise ModelError("this Unigram tokenizer divides texts in another way than T5's", _FOLDER)
    scores: dict[str, float] = dict(model["vocab"])
    texts, types = _tokens({**content, "model": {"vocab": {text: i for i, text in enumerate(scores)}}}, vocab_size)
    types[model["unk_id"]] = int(TokenType.UNKNOWN)
    if model.get("byte_fallback"):
        types = [int(TokenType.BYTE) if text in BYTES else kind for text, kind in zip(texts, types, strict=True)]
    charsmap = base64.b64decode(step.get("precompiled_charsmap") or "")
    template = (content.get("post_processor") or {}).get("single") or [{}]
    return {
        "tokenizer.ggml.model": "t5",
        "tokenizer.ggml.pre": "default",
        "tokenizer.ggml.tokens": texts,
        "tokenizer.ggml.token_type": types,
        "tokenizer.ggml.scores": [float(scores.get(text, _UNUSED_SCORE)) for text in texts],
        "tokenizer.ggml.add_space_prefix": True,
        "tokenizer.ggml.remove_extra_whitespaces": True,
        **({"tokenizer.ggml.precompiled_charsmap": charsmap} if charsmap else {}),
        **_roles(folder, settings, {text: index for index, text in enumerate(texts)}),
        "tokenizer.ggml.add_bos_token": "SpecialToken" in template[0],
        "tokenizer.ggml.add_eos_token": "SpecialToken" in template[-1],
        "tokenizer.huggingface.json": json.dumps(content, ensure_ascii=False),
    }


def _tokens(content: Mapping[str, Any], vocab_size: int) -> tuple[list[str], list[int]]:
    """Return the texts and types of all tokens; ids that the tokenizer does not use get a text of their own."""
    found = {index: (text, TokenType.NORMAL) for text, index in content["model"]["vocab"].items()}
    for each in content.get("added_tokens") or ():
        found[each["id"]] = each["content"], TokenType.CONTROL if each["special"] else TokenType.USER_DEFINED
    if max(found) >= vocab_size:
        raise ModelError(f"the tokenizer has the token {max(found)} and the model {vocab_size} tokens", _FOLDER)
    ordered = [found.get(index, (f"[PAD{index}]", TokenType.UNUSED)) for index in range(vocab_size)]
    return [text for text, _ in ordered], [int(type_) for _, type_ in ordered]


def _split_name(step: Mapping[str, Any], ignores_merges: bool) -> str:
    """Return the name in `tokenizer.ggml.pre` of the way that words are split."""
    patterns = tuple(_patterns(step))
    for name, split in SPLITS.items():
        if split.patterns == patterns and split.ignore_merges == ignores_merges:
            return name
    raise ModelError("this tokenizer splits texts in a way that has no name in GGUF files", _FOLDER)


def _patterns(step: Mapping[str, Any]) -> Sequence[str]:
    match step.get("type"):
        case "Sequence":
            return [pattern for each in step["pretokenizers"] for pattern in _patterns(each)]
        case "ByteLevel" if not step.get("add_prefix_space"):
            return _PLAIN if step.get("use_regex", True) else ()
        case "Split" if step.get("behavior") == "Isolated" and "Regex" in step["pattern"]:
            return [step["pattern"]["Regex"]]
        case "Digits" if step.get("individual_digits"):
            return [r"\p{N}"]
    raise ModelError(f"this tokenizer has the step {step.get('type')!r}, which has no name in GGUF files", _FOLDER)


def end_entries(folder: Path, roles: Mapping[str, Any]) -> dict[str, Any]:
    """Return the metadata for a model's end tokens. roles: that of its tokenizer.

    Ollama and Speculant read all of them in one entry, llama.cpp up to two beside the tokenizer's own.
    """
    ids = _stated(folder, "eos_token_id")
    first = roles.get(_EOS, *ids[:1])
    others = [each for each in ids if each != first]
    return {_EOS: first, ENDS: ids, **dict(zip(_OTHER_ENDS, others, strict=False))} if ids else {}


def _stated(folder: Path, key: str) -> list[Any]:
    """Return the token ids of an entry of generation_config.json, or else of config.json."""
    files = read_generation(folder), text_config(read_json(folder / "config.json"))
    found: Any = next((each[key] for each in files if each.get(key) is not None), [])
    return found if isinstance(found, list) else [found]


def _roles(folder: Path, settings: Mapping[str, Any], ids: Mapping[str, int]) -> dict[str, int]:
    """Return the ids of tokens with a role, as the tokenizer's settings or the model's name them."""
    found = dict[str, int]()
    for role, key in ROLE_KEYS.items():
        named = settings.get(role)
        text = named.get("content") if isinstance(named, dict) else named
        index = ids.get(text) if isinstance(text, str) else next(iter(_stated(folder, f"{role}_id")), None)
        if isinstance(index, int):
            found[f"tokenizer.ggml.{key}"] = index
    return found


def _adds_first(content: Mapping[str, Any], settings: Mapping[str, Any]) -> bool:
    """Whether texts begin with the BOS token."""
    if isinstance(settings.get("add_bos_token"), bool):
        return bool(settings["add_bos_token"])
    step = content.get("post_processor") or {}
    steps = step.get("processors", [step])
    singles = [each["single"][0] for each in steps if each.get("type") == "TemplateProcessing" and each.get("single")]
    return any("SpecialToken" in first for first in singles)


def _templates(folder: Path, settings: Mapping[str, Any]) -> dict[str, Any]:
    """Return the chat template, and the one for conversations with tools if it is another."""
    default, tools = find_template(folder, settings), find_template(folder, settings, TOOL_USE)
    key = "tokenizer.chat_template"
    found: dict[str, Any] = {} if default is None else {key: default}
    return found if tools is None else {**found, f"{key}s": [TOOL_USE], f"{key}.{TOOL_USE}": tools}
