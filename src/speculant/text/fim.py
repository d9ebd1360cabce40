"""Completion at the cursor: a tokenizer's marks for filling in the middle, and the prompts that they form.

    prefix first    [prefix] text before the cursor [suffix] text after it [middle]
    suffix first    [suffix] text after it [prefix] text before the cursor
    other files     [repository] name, then for each file [file] path and text; without these marks plain text

Marks are tokens, and texts are encoded apart: a text that spells a mark or another special token stays text.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass
from itertools import pairwise
from types import MappingProxyType
from typing import NamedTuple

from speculant.text.tokenizer import Tokenizer


class MarkNames(NamedTuple):
    """The marks of a family as its vocabulary spells them. Without a middle (empty), the suffix comes first."""

    prefix: str
    suffix: str
    middle: str = ""


FAMILIES: Mapping[str, MarkNames] = MappingProxyType(
    {
        "Qwen2.5-Coder, CodeGemma, Granite 4": MarkNames("<|fim_prefix|>", "<|fim_suffix|>", "<|fim_middle|>"),
        "StarCoder, Granite": MarkNames("<fim_prefix>", "<fim_suffix>", "<fim_middle>"),
        "SantaCoder": MarkNames("<fim-prefix>", "<fim-suffix>", "<fim-middle>"),
        "CodeLlama": MarkNames("▁<PRE>", "▁<SUF>", "▁<MID>"),
        "DeepSeek-Coder": MarkNames("<\uff5cfim▁begin\uff5c>", "<\uff5cfim▁hole\uff5c>", "<\uff5cfim▁end\uff5c>"),
        "GLM": MarkNames("<|code_prefix|>", "<|code_suffix|>", "<|code_middle|>"),
        "Codestral": MarkNames("[PREFIX]", "[SUFFIX]"),
    }
)
_ROLES = (("fim_pre_token", "prefix_token"), ("fim_suf_token", "suffix_token"), ("fim_mid_token", "middle_token"))
_FILES = ("<|file_sep|>", "<file_sep>", "<|file_separator|>", "<|filename|>", "<filename>")
_REPOSITORIES = ("<|repo_name|>", "<repo_name>", "<|reponame|>", "<reponame>")
_ENDS = ("<|fim_pad|>", "<fim_pad>", "<fim-pad>", "▁<EOT>", "<|EOT|>", "<|endoftext|>", "<|end_of_text|>")
_REPOSITORY, _PATH = "project", "untitled"  # names that no request gives, in a place where models expect one
_LINE = "\n"


@dataclass(frozen=True)
class FimMarks:
    """The token ids of a tokenizer's marks; None = it lacks the mark. ends: tokens that end the text of a hole."""

    prefix: int
    suffix: int
    middle: int | None
    file: int | None
    repository: int | None
    ends: tuple[int, ...]


@dataclass(frozen=True)
class Hole:
    """A place to fill in: the texts before and after it, and other files by path and text, the newest last."""

    prefix: str
    suffix: str = ""
    files: Sequence[tuple[str, str]] = ()


class FimPrompt(NamedTuple):
    """The token ids of a prompt. is_cut: some of the texts did not fit and was left out."""

    tokens: list[int]
    is_cut: bool


def find_fim(tokenizer: Tokenizer) -> FimMarks | None:
    """Return the marks that a checkpoint names, otherwise those of a known family; None if it has none.

    A checkpoint names them in the metadata of a GGUF file, or in tokenizer_config.json.
    """
    named = MarkNames(*(_named(tokenizer, roles) or "" for roles in _ROLES))
    for names in (*([named] if all(named) else []), *FAMILIES.values()):
        prefix, suffix, middle = (_first(tokenizer, [name]) for name in names)
        if prefix is not None and suffix is not None and (middle is not None or not names.middle):
            file = _first(tokenizer, [_named(tokenizer, ("fim_sep_token",)), *_FILES])
            repository = _first(tokenizer, [_named(tokenizer, ("fim_rep_token",)), *_REPOSITORIES])
            pads = [_named(tokenizer, ("fim_pad_token",)), _named(tokenizer, ("eot_token",)), *_ENDS]
            found = (prefix, suffix, middle, file, repository, *(_first(tokenizer, [name]) for name in pads))
            ends = tuple(dict.fromkeys(token for token in found if token is not None))
            return FimMarks(prefix, suffix, middle, file, repository, ends)
    return None


def _named(tokenizer: Tokenizer, roles: Sequence[str]) -> str | None:
    return next((token for role in roles if (token := tokenizer.special_token(role))), None)


def _first(tokenizer: Tokenizer, names: Sequence[str | None]) -> int | None:
    ids = (tokenizer.backend.token_to_id(name) for name in names if name)
    return next((token for token in ids if token is not None), None)


def fim_prompt(
    tokenizer: Tokenizer, marks: FimMarks, hole: Hole, most: int | None = None, begins: bool = True
) -> FimPrompt:
    """Return the prompt of a hole, of at most `most` tokens (None = of any length).

    Texts that do not fit are cut: the prefix keeps its end, and the suffix its beginning, at least a quarter of the
    room if it needs it. Files get what is left, the newest first; the oldest that fits only in part keeps its end.
    begins: the prompt begins with the tokenizer's first token, if it adds one. Raises RequestError for a text that the
    tokenizer can't encode.
    """
    encode = PlainEncoder(tokenizer, marks.ends)
    start = [token for token in tokenizer.encode("") if token == tokenizer.bos_id] if begins else []
    before = encode(hole.prefix, inside=bool(hole.files) and marks.file is None)
    after = encode(hole.suffix, inside=True)
    room = len(before) + len(after) if most is None else max(0, most - len(start) - 2 - (marks.middle is not None))
    kept_after = min(len(after), max(room // 4, room - len(before)))
    kept_before = min(len(before), room - kept_after)
    left = None if most is None else room - kept_after - kept_before
    files, lost = _files(encode, marks, hole.files, left)
    is_cut = lost or kept_after < len(after) or kept_before < len(before)
    outer, inner = (files, []) if marks.file is not None else ([], files)
    prefix = [marks.prefix, *inner, *before[len(before) - kept_before :]]
    suffix = [marks.suffix, *after[:kept_after]]
    hole_tokens = [*suffix, *prefix] if marks.middle is None else [*prefix, *suffix, marks.middle]
    return FimPrompt([*start, *outer, *hole_tokens], is_cut)


def _files(
    encode: PlainEncoder, marks: FimMarks, files: Sequence[tuple[str, str]], room: int | None
) -> tuple[list[int], bool]:
    """Return the tokens of the files that fit, and whether something was left out."""
    if not files:
        return [], False

    def heading(path: str) -> list[int]:
        return encode(f"# {path}\n", inside=True) if marks.file is None else [marks.file, *encode(f"{path}\n")]

    first = [] if marks.repository is None else [marks.repository, *encode(f"{_REPOSITORY}\n")]
    last = [] if marks.file is None else heading(_PATH)
    kept, lost = list[list[int]](), False
    left = None if room is None else room - len(first) - len(last)
    for path, text in reversed(files):
        title, body = heading(path or _PATH), encode(text if text.endswith(_LINE) else text + _LINE, inside=True)
        fits = len(body) if left is None else left - len(title)
        lost = fits < len(body)
        if fits > 0 or not lost:
            kept.append([*title, *body[-fits:]])
        if lost:
            break
        left = None if left is None else left - len(kept[-1])
    parts = [first, *reversed(kept), last] if kept else []
    return [token for part in parts for token in part], lost


class PlainEncoder:
    """Encodes texts in which special tokens and marks are text like any other.

    A token of one character alone can't be told apart from its text, and stays.
    """

    def __init__(self, tokenizer: Tokenizer, marks: Collection[int]) -> None:
        """marks: tokens that no text becomes, beside the special ones."""
        self._tokenizer = tokenizer
        unknown = _first(tokenizer, [tokenizer.special_token("unk_token")])
        self._never = (tokenizer.special_ids | {*marks}) - {unknown}
        self._line = tokenizer.encode(_LINE, add_special_tokens=False) if _adds_space(tokenizer) else []

    def __call__(self, text: str, inside: bool = False) -> list[int]:
        """Return the token ids of a text. inside: the tokenizer does not put a space before it."""
        tokens = self._inside(text) if inside and self._line else self._tokenizer.encode(text, False)
        if self._never.isdisjoint(tokens):
            return tokens
        found = self._tokenizer.backend.encode(text, add_special_tokens=False)
        spans = [span for token, span in zip(found.ids, found.offsets, strict=True) if token in self._never]
        cuts = [0, *((start + end) // 2 for start, end in spans if end - start > 1), len(text)]
        if len(cuts) == 2:
            return tokens
        parts = [text[start:end] for start, end in pairwise(cuts)]
        return [token for place, part in enumerate(parts) for token in self(part, inside or place > 0)]

    def _inside(self, text: str) -> list[int]:
        """Encode a text after a line break, whose own tokens are left out."""
        tokens = self._tokenizer.encode(_LINE + text, add_special_tokens=False)
        start = len(self._line)
        return tokens[start:] if tokens[:start] == self._line else self._tokenizer.encode(text, False)


def _adds_space(tokenizer: Tokenizer) -> bool:
    """Whether the tokenizer puts a space before a text."""
    backend, text = tokenizer.backend, "a"
    if backend.normalizer is not None:
        text = backend.normalizer.normalize_str(text)
    if backend.pre_tokenizer is not None:
        text = "".join(piece for piece, _ in backend.pre_tokenizer.pre_tokenize_str(text))
    return text != "a"
