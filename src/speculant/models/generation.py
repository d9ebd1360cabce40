"""A checkpoint's settings for generation: its special tokens, and the sampling settings that it recommends.

GGUF files have the end tokens in their config (models/gguf.py), and sampling settings as metadata.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from speculant.errors import ConfigError, ModelError
from speculant.files import read_optional_json
from speculant.gguf_file import GgufFile
from speculant.models.entries import is_whole, show
from speculant.params import SamplingParams

_CONFIG, _GENERATION = "config.json", "generation_config.json"
_WORDS = "bad_words_ids"
_SAMPLING = ("temperature", "top_k", "top_p", "min_p", "repetition_penalty")
_GGUF_SAMPLING = "general.sampling."  # before the name of a setting, in metadata
_GGUF_NAMES = {"temperature": "temp", "repetition_penalty": "penalty_repeat"}  # of settings with other names


def read_generation(place: Path) -> dict[str, Any]:
    """Return generation_config.json as it is, or the sampling settings of a GGUF file in its keys; empty without them.

    Raises ModelError.
    """
    if not place.is_file():
        return read_optional_json(place / _GENERATION)
    metadata = GgufFile.open(place).metadata
    stored = {name: metadata.get(_GGUF_SAMPLING + _GGUF_NAMES.get(name, name)) for name in _SAMPLING}
    given = {name: _shortest(value) for name, value in stored.items() if value is not None}
    return {"do_sample": True, **given} if given else {}


def sampling_entries(generation: Mapping[str, Any]) -> dict[str, Any]:
    """Return the metadata of a GGUF file with the sampling settings in generation_config.json that have an effect."""
    given = _SAMPLING if generation.get("do_sample") else ()
    return {
        _GGUF_SAMPLING + _GGUF_NAMES.get(name, name): generation[name]
        for name in given
        if generation.get(name) is not None
    }


def _shortest(value: Any) -> Any:
    """Return a float32 number in seven decimal digits: 0.6, not 0.6000000238."""
    return float(f"{value:.7g}") if isinstance(value, float) else value


def read_end_tokens(generation: Mapping[str, Any], config: Mapping[str, Any], vocab_size: int) -> frozenset[int]:
    """Return the end tokens. generation_config.json takes precedence, as it also lists the end tokens of chats.

    Both files are checked. A null entry counts as absent. Raises ModelError for an entry that is not a token id below
    vocab_size.
    """
    return frozenset(_read_ids("eos_token_id", generation, config, vocab_size))


@dataclass(frozen=True)
class OutputRules:
    """Tokens that a checkpoint forces or forbids in its outputs.

    first: the first token of an output whose decoder prompt has one token; None = any. last: if an output reaches its
    greatest length, its last token is one of these; () = any. bad_words: series of tokens that no output has.
    """

    first: int | None = None
    last: tuple[int, ...] = ()
    bad_words: tuple[tuple[int, ...], ...] = ()


NO_RULES = OutputRules()


def read_start_tokens(generation: Mapping[str, Any], config: Mapping[str, Any], vocab_size: int) -> tuple[int, ...]:
    """Return the tokens that a decoder's prompt begins with; () = the checkpoint names none.

    As in transformers, bos_token_id stands for a missing decoder_start_token_id. Raises ModelError as
    `read_end_tokens` does.
    """
    found = _read_ids("decoder_start_token_id", generation, config, vocab_size)
    return tuple(found[:1] or _read_ids("bos_token_id", generation, config, vocab_size)[:1])


def read_output_rules(generation: Mapping[str, Any], config: Mapping[str, Any], vocab_size: int) -> OutputRules:
    """Return the forced tokens and the bad words of outputs. Raises ModelError as `read_end_tokens` does.

    As in transformers, an end token alone is no bad word.
    """
    first = _read_ids("forced_bos_token_id", generation, config, vocab_size)
    last = _read_ids("forced_eos_token_id", generation, config, vocab_size)
    ends = read_end_tokens(generation, config, vocab_size)
    words: Any = next((file[_WORDS] for file in (generation, config) if file.get(_WORDS) is not None), [])
    if not isinstance(words, list) or not all(isinstance(word, list) and word for word in words):
        raise ModelError(f"{_WORDS} = {show(words)} is not a list of lists of token ids", f"correct {_GENERATION}.")
    checked = [tuple(_checked(_GENERATION, _WORDS, word, vocab_size)) for word in words]
    bad = tuple(word for word in checked if len(word) > 1 or word[0] not in ends)
    return OutputRules(first[0] if first else None, tuple(last), bad)


def _read_ids(key: str, generation: Mapping[str, Any], config: Mapping[str, Any], vocab_size: int) -> list[int]:
    """Return the token ids of an entry of generation_config.json, or else of config.json. Both files are checked."""
    files = {_GENERATION: generation, _CONFIG: config}
    given = [
        _checked(name, key, content[key], vocab_size) for name, content in files.items() if content.get(key) is not None
    ]
    return given[0] if given else []


def _checked(file: str, key: str, given: Any, vocab_size: int) -> list[int]:
    ids = given if isinstance(given, list) else [given]
    for token_id in ids:
        if not is_whole(token_id) or not 0 <= token_id < vocab_size:
            raise ModelError(
                f"{file} has {key} = {show(given)}, in which {show(token_id)} is no token id from 0 to"
                f" {vocab_size - 1}",
                f"correct {file}.",
            )
    return ids


def read_sampling(generation: Mapping[str, Any], place: Path) -> SamplingParams:
    """Return the sampling settings that a checkpoint recommends; this package's defaults if do_sample is not true.

    place: its folder or GGUF file, for messages. Raises ModelError for a setting that is out of range.
    """
    sampled = generation.get("do_sample")
    if sampled is not None and not isinstance(sampled, bool):
        raise ModelError(f"{_GENERATION} has do_sample = {show(sampled)}, not true or false", f"correct {_GENERATION}.")
    if not sampled:
        return SamplingParams()
    given = {name: generation[name] for name in _SAMPLING if generation.get(name) is not None}
    try:
        return SamplingParams.from_mapping(given)
    except ConfigError as error:
        origin = f"{place} has metadata {_GGUF_SAMPLING}*, which" if place.is_file() else _GENERATION
        raise ModelError(f"{origin} recommends a setting that can't be used: {error.problem}", error.fix) from error
