"""The forms in which callers give prompts, and how they are read."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from operator import index
from typing import Any, NamedTuple, NotRequired, TypedDict

import numpy as np
import torch
from torch import Tensor

from speculant.errors import RequestError, suggest
from speculant.speculation import is_whole
from speculant.structured.reasoned import Reasoning
from speculant.text.chat import ExpectedReasoning


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
    """The content of a prompt: its text, its token ids or both, and a salt."""

    text: str | None = None
    tokens: list[int] | None = None
    cache_salt: str = ""


@dataclass(frozen=True)
class RenderedPrompt:
    """The text of a conversation in the model's format. It already has its special tokens, so none are added.

    tokens: its token ids, if they are known already. reasoning: the tokens around the reasoning that may come before
    an answer of a given form; None = the form begins at once. expected: the reasoning that other answers may have.
    """

    text: str
    tokens: Sequence[int] | None = None
    reasoning: Reasoning | None = None
    expected: ExpectedReasoning | None = None


Plain = str | Sequence[int] | TextPrompt | TokensPrompt  # or an array of whole numbers


class ExplicitEncoderDecoderPrompt(TypedDict):
    """The source of an encoder-decoder model, and the beginning of its output; None = the model's start tokens alone.

    Start tokens that the decoder's prompt lacks come before it. cache_salt: see `TextPrompt`.
    """

    encoder_prompt: Plain
    decoder_prompt: NotRequired[Plain | None]
    cache_salt: NotRequired[str]


class PromptPair(NamedTuple):
    """The content of an `ExplicitEncoderDecoderPrompt`."""

    encoder: PlainPrompt
    decoder: PlainPrompt | None = None
    cache_salt: str = ""


Prompt = Plain | RenderedPrompt | ExplicitEncoderDecoderPrompt


@dataclass(frozen=True)
class TokenisedPrompt:
    """A prompt as token ids, with its text if it came with one. source: what an encoder reads, with its own text."""

    text: str | None
    tokens: Sequence[int]
    cache_salt: str = ""
    source_text: str | None = None
    source: Sequence[int] = ()


_KEYS = ("prompt", "prompt_token_ids", "cache_salt")
_MEDIA = "images, audio and video are not supported; the models here read text"
_PAIR = ("encoder_prompt", "decoder_prompt", "cache_salt")
REFUSED: Mapping[str, str] = {
    "multi_modal_data": _MEDIA,
    "multi_modal_uuids": _MEDIA,
    "mm_processor_kwargs": _MEDIA,
    "prompt_embeds": "a prompt can't be given as embeddings",
    "token_type_ids": "the models here have no types of tokens",
}
_FORMS = 'give a text, token ids, {"prompt": text} or {"prompt_token_ids": ids}; or a list of those.'


def split_prompts(given: Any) -> list[Any]:
    """Return the prompts that were given: one, or several in a list, a tuple, an iterator or a two-dimensional array.

    A sequence that begins with a whole number is one prompt of token ids. Raises RequestError for anything else.
    """
    if isinstance(given, np.ndarray | Tensor):
        return list(given) if given.ndim == 2 else [given]
    if isinstance(given, Iterator):
        return list(given)
    if not _is_list(given):
        return [given]
    return [given] if len(given) > 0 and _is_number(given[0]) else list(given)


def read_prompt(given: object) -> PlainPrompt | PromptPair:
    """Return the content of one prompt. Raises RequestError for one that can't be read."""
    is_pair = isinstance(given, Mapping) and any(given.get(key) is not None for key in _PAIR[:2])
    return _read_pair(given) if is_pair else _read_plain(given)


def _read_pair(given: Any) -> PromptPair:
    _check_keys(given, _PAIR)
    encoder, decoder, salt = (given.get(key) for key in _PAIR)
    if encoder is None:
        raise RequestError("a prompt has a decoder_prompt and no encoder_prompt", "give both, or one prompt.")
    _check_text("cache_salt", salt)
    own, start = _read_plain(encoder), None if decoder is None else _read_plain(decoder)
    salts = {salt or "", own.cache_salt, start.cache_salt if start else ""} - {""}
    if len(salts) > 1:
        raise RequestError("the parts of a prompt, or the prompt around them, have different cache salts", "give one.")
    return PromptPair(own, start, next(iter(salts), ""))


def _read_plain(given: object) -> PlainPrompt:
    if isinstance(given, str):
        return PlainPrompt(given)
    if not isinstance(given, Mapping):
        return PlainPrompt(tokens=_token_ids(given, "a prompt"))
    _check_keys(given, _KEYS)
    text, tokens, salt = (given.get(key) for key in _KEYS)
    if text is None and tokens is None:
        raise RequestError("a prompt has neither prompt nor prompt_token_ids", _FORMS)
    _check_text("prompt", text)
    _check_text("cache_salt", salt)
    return PlainPrompt(text, None if tokens is None else _token_ids(tokens, "prompt_token_ids"), salt or "")


def _check_keys(given: Mapping[Any, Any], known: Sequence[str]) -> None:
    """Check that a mapping has only known keys, and others that are None."""
    for key, value in given.items():
        if key in REFUSED and value is not None:
            raise RequestError(f"a prompt has {key}: {REFUSED[key]}", f"leave out {key}.")
        if key not in known and not (value is None and (key in REFUSED or key in _PAIR)):
            raise RequestError(f"a prompt has the unknown key {key!r}", suggest(str(key), known))


def _check_text(key: str, value: object) -> None:
    if value is not None and not isinstance(value, str):
        raise RequestError(f"{key} of a prompt is a {type(value).__name__}", f"give {key} as text.")


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
    """Whether an element of a list is a whole number; a truth value is not one."""
    if isinstance(given, Tensor | np.ndarray | np.generic):
        return given.ndim == 0 and _has_whole_numbers(given)
    return is_whole(given)
