"""Reads a GGUF file back and compares it with its source: a setting that the format has no key for is refused."""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping
from dataclasses import fields, is_dataclass, replace
from itertools import combinations
from pathlib import Path
from typing import Any

from speculant.errors import ModelError
from speculant.gguf_file import GgufFile
from speculant.models import (
    SAME_NAMES,
    CheckpointFiles,
    DecoderConfig,
    read_description,
    read_end_tokens,
    read_generation,
    read_gguf_config,
    read_output_rules,
    read_sampling,
    read_start_tokens,
    show,
)
from speculant.text import ROLE_KEYS, Tokenizer

_FIX = "name a folder as OUT."
_LAYERS = {".layers", ".encoder.layers"}  # whose number differs
_RULES = ("forced_bos_token_id", "forced_eos_token_id", "bad_words_ids")


def check_model(source: Path, file: Path) -> None:
    """Compare the description and the settings of generation in a file with those of its source.

    Weights are not read, so they need not be there yet. Raises ModelError that names the entry that differs.
    """
    own = CheckpointFiles.open(source)
    _compare(own.config, read_gguf_config(GgufFile.open(file)))
    read = CheckpointFiles.open(file)
    one, other = (_generation(place, files) for place, files in ((source, own), (file, read)))
    if different := [name for name in one if one[name] != other[name]]:
        raise _refusal({name: one[name] for name in different})


def check_tokenizer(source: Path, file: Path) -> None:
    """Compare the tokenizer and the chat templates of a file with those of its source. Raises ModelError."""
    own, read = (Tokenizer.load(place) for place in (source, file))
    parts: dict[str, list[Any]] = {"tokens": [each.backend.to_str() for each in (own, read)]}
    parts["chat_template"] = [(each.chat_template, each.template_for(tools=True)) for each in (own, read)]
    parts |= {role: [each.special_token(role) for each in (own, read)] for role in _compared(own)}
    for name, (one, other) in parts.items():
        if one != other:
            raise ModelError(f"the tokenizer has {name} = {show(one)}, which a GGUF file can't hold", _FIX)


def _compared(own: Tokenizer) -> list[str]:
    """Return the roles of tokens that must be the same. Templates can tell whether a role has a token."""
    tokens = {role: own.special_token(role) for role in ROLE_KEYS}
    vocab = own.vocab()
    return [
        role for role, token in tokens.items() if (own.chat_template is not None if token is None else token in vocab)
    ]


def differences(own: Any, other: Any, place: str = "") -> Iterator[str]:
    """Yield where two descriptions differ; files store numbers in float32."""
    if is_dataclass(own) and type(own) is type(other):
        for field in fields(own):
            yield from differences(getattr(own, field.name), getattr(other, field.name), f"{place}.{field.name}")
    elif isinstance(own, tuple) and isinstance(other, tuple) and len(own) == len(other):
        for index, (one, two) in enumerate(zip(own, other, strict=True)):
            yield from differences(one, two, f"{place}[{index}]")
    else:
        numbers = isinstance(own, int | float) and isinstance(other, int | float)
        if not (math.isclose(own, other, rel_tol=1e-6) if numbers else own == other):
            yield place


def _compare(own: Mapping[str, Any], read: Mapping[str, Any]) -> None:
    """Raise ModelError if the descriptions of two configs differ in more than the names of tensors."""
    one, other = (replace(read_description(each), tensors=SAME_NAMES) for each in (own, read))
    places = set(differences(one, other))
    if not places:
        return
    stated = list(_names(own))
    attempts: list[dict[tuple[str, ...], dict[str, Any]]] = [
        {(name,): _without(own, name) for name in stated},
        {(name,): {**own, name: value} for name, value in read.items()},  # which may be left to the family's defaults
        {(name, second): _without(_without(own, name), second) for name, second in combinations(stated, 2)},
    ]
    for changed, most in ((attempts[0], 0), *((each, None) for each in attempts)):
        if named := _nearest(one, other, places, changed, most):
            raise _refusal({name: _value(own, name) for name in named})
    raise ModelError(f"a GGUF file would have another {min(places)[1:]}", _FIX)


def _nearest(
    own: DecoderConfig,
    read: DecoderConfig,
    places: set[str],
    changed: Mapping[tuple[str, ...], Mapping[str, Any]],
    most: int | None,
) -> list[str]:
    """Return the names of the configs nearest to the one that was read, among those that differ at these places.

    most: in how many places they may differ from it; None = any number.
    """
    found: dict[tuple[str, ...], tuple[int, int]] = {}
    for names, config in changed.items():
        try:
            other = replace(read_description(config), tensors=SAME_NAMES)
        except ModelError:
            continue
        moved = set(differences(own, other))
        if any(each.startswith(place) or place.startswith(each) for each in moved - _LAYERS for place in places):
            found[names] = len(set(differences(other, read))), len(moved)
    least = min((each for each in found.values() if most is None or each[0] <= most), default=None)
    return list(dict.fromkeys(name for names, distance in found.items() if distance == least for name in names))


def _refusal(entries: Mapping[str, Any]) -> ModelError:
    named = ", ".join(f"{name} = {show(value)}" for name, value in entries.items())
    return ModelError(f"the model has {named}, and a GGUF file of its family has no key for it", _FIX)


def _names(config: Mapping[str, Any], outer: str = "") -> Iterator[str]:
    """Yield the names of all entries; "a.b" is the entry b of the object a."""
    for name, value in config.items():
        if isinstance(value, dict):
            yield from _names(value, f"{outer}{name}.")
        else:
            yield outer + name


def _without(config: Mapping[str, Any], name: str) -> dict[str, Any]:
    outer, _, inner = name.partition(".")
    if inner:
        return {**config, outer: _without(config[outer], inner)}
    return {key: value for key, value in config.items() if key != name}


def _value(config: Mapping[str, Any], name: str) -> Any:
    outer, _, inner = name.partition(".")
    return _value(config[outer], inner) if inner else config.get(name)


def _generation(place: Path, files: CheckpointFiles) -> dict[str, Any]:
    """Return what generation reads of a checkpoint, by the names in generation_config.json."""
    generation, config, size = read_generation(place), files.config, files.decoder.vocab_size
    sampling = read_sampling(generation, place)
    found: dict[str, Any] = {
        "eos_token_id": sorted(read_end_tokens(generation, config, size)),
        **{field.name: getattr(sampling, field.name) for field in fields(sampling)},
    }
    if files.decoder.encoder is None:
        return found
    rules = read_output_rules(generation, config, size)
    found["decoder_start_token_id"] = read_start_tokens(generation, config, size)
    return found | dict(zip(_RULES, (rules.first, rules.last, rules.bad_words), strict=True))
