"""The forms in which a prompt is given, in vLLM's names, and how each is read."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from operator import index
from typing import Any, NamedTuple, NotRequired, TypedDict

import numpy as np
import torch
from torch import Tensor

from speculant.errors import RequestError, suggest


class TextPrompt(TypedDict):
    """A text to complete. cache_salt: only prompts of the same salt share a cache."""

    prompt: str
    cache_salt: NotRequired[str]


class TokensPrompt(TypedDict):
    """Token ids to complete. prompt: their text, which results repeat. cache_salt: see `TextPrompt`."""

    prompt_token_ids: Sequence[int]
    prompt: NotRequired[str]
    cache_salt: NotRequired[str]


class PlainPrompt(NamedTuple):
    """What a prompt holds: its text, its token ids or both, and a salt."""

    text: str | None = None
    tokens: list[int] | None = None
    cache_salt: str = ""


_KEYS = ("prompt", "prompt_token_ids", "cache_salt")
_MEDIA = "images, audio and video are not supported; the models here read text"
_ENCODER = "encoder-decoder models are not supported"
REFUSED: Mapping[str, str] = {
    "multi_modal_data": _MEDIA,
    "multi_modal_uuids": _MEDIA,
    "mm_processor_kwargs": _MEDIA,
    "prompt_embeds": "a prompt can't be given as embeddings",
    "encoder_prompt": _ENCODER,
    "decoder_prompt": _ENCODER,
    "token_type_ids": "the models here know no types of tokens",
}
_FORMS = 'give a text, token ids, {"prompt": text} or {"prompt_token_ids": ids}; or a list of those.'


def split_prompts(given: Any) -> list[Any]:
    """Return the prompts that were given: one, or several in a list, a tuple, an iterator or a two-dimensional array.

    A sequence that begins with a whole number is one prompt of token ids. Raises RequestError for what is no prompt.
    """
    if isinstance(given, np.ndarray | Tensor):
        return list(given) if given.ndim == 2 else [given]
    if isinstance(given, Iterator):
        return list(given)
    if not _is_list(given):
        return [given]
    return [given] if len(given) > 0 and _is_number(given[0]) else list(given)


def read_prompt(given: object) -> PlainPrompt:
    """Return what one prompt holds. Raises RequestError that says what is wrong with it."""
    if isinstance(given, str):
        return PlainPrompt(given)
    if isinstance(given, Mapping):
        return _read_mapping(given)
    return PlainPrompt(tokens=_token_ids(given, "a prompt"))


def _read_mapping(given: Mapping[Any, Any]) -> PlainPrompt:
    for key, value in given.items():
        if key in REFUSED and value is not None:
            raise RequestError(f"a prompt has {key}: {REFUSED[key]}", f"leave out {key}.")
        if key not in _KEYS and key not in REFUSED:
            raise RequestError(f"a prompt has the unknown key {key!r}", suggest(str(key), _KEYS))
    text, tokens, salt = (given.get(key) for key in _KEYS)
    if text is None and tokens is None:
        raise RequestError("a prompt has neither prompt nor prompt_token_ids", _FORMS)
    for key, value in {"prompt": text, "cache_salt": salt}.items():
        if value is not None and not isinstance(value, str):
            raise RequestError(f"{key} of a prompt is a {type(value).__name__}", f"give {key} as text.")
    return PlainPrompt(text, None if tokens is None else _token_ids(tokens, "prompt_token_ids"), salt or "")


def _token_ids(given: Any, name: str) -> list[int]:
    if isinstance(given, np.ndarray | Tensor):
        return _ids_of_array(given, name)
    if not _is_list(given):
        raise RequestError(f"{name} is a {type(given).__name__}", _FORMS)
    if set(map(type, given)) <= {int}:  # nearly always, and a prompt may be long
        return list(given)
    for token in given:
        if not _is_number(token):
            raise RequestError(f"{name} has {token!r:.80}, which is not a token id", "give token ids as whole numbers.")
    return list(map(index, given))


def _ids_of_array(given: Any, name: str) -> list[int]:
    if given.ndim != 1 or not _has_whole_numbers(given):
        raise RequestError(
            f"{name} is an array of {given.dtype} with {given.ndim} dimensions",
            "give whole numbers in one dimension; in two dimensions each row is a prompt.",
        )
    ids: list[int] = given.tolist()
    return ids


def _has_whole_numbers(given: Any) -> bool:
    if isinstance(given, Tensor):
        return not (given.is_floating_point() or given.is_complex() or given.dtype == torch.bool)
    return np.issubdtype(given.dtype, np.integer)


def _is_list(given: object) -> bool:
    return isinstance(given, Sequence) and not isinstance(given, str | bytes | bytearray | memoryview)


def _is_number(given: Any) -> bool:
    """Whether an element of a list is a whole number; a truth value is none."""
    if isinstance(given, Tensor | np.ndarray | np.generic):
        return given.ndim == 0 and _has_whole_numbers(given)
    return isinstance(given, int) and not isinstance(given, bool)
