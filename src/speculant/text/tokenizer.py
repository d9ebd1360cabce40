"""A checkpoint's tokenizer, the bytes that each of its tokens adds to a text, and the comparison of two vocabularies.

Vocabularies spell bytes in several ways. Byte-level BPE (GPT-2) spells a byte as one character and a space as U+0120.
SentencePiece spells a space as U+2581, and with byte fallback a byte as a token such as <0xE4>. WordPiece marks tokens
that no space precedes by ##.
"""

from __future__ import annotations

import copy
import filecmp
import re
from collections.abc import Callable, Collection, Mapping, Sequence
from contextlib import suppress
from functools import cached_property, lru_cache
from pathlib import Path
from types import MappingProxyType
from typing import Any

from tokenizers import Tokenizer as Backend

from speculant.errors import Converts, ModelError, PairError, RequestError
from speculant.files import read_optional_json
from speculant.gguf_file import GgufFile, is_gguf
from speculant.text.chat import TOOL_USE, ChatTemplate, find_template, template_in
from speculant.text.gguf_tokenizer import read_gguf_tokenizer
from speculant.text.sentencepiece import SENTENCEPIECE_ROLES, find_sentencepiece
from speculant.text.tokenizer_bounds import characters_per_token, check_length_bounds, steps_of

TOKENIZER = "tokenizer.json"
_JOINED = ({"type": "WordPiece", "prefix": ""},)
_SHORT = 4096  # characters or tokens; the library works on more of them without the interpreter's lock
_SOURCE = "use another text, or correct the tokenizer.json of this checkpoint."
_ENCODING = Converts(RequestError, "the tokenizer can't encode this text", _SOURCE)
_DECODING = Converts(RequestError, "the tokenizer can't decode these token ids", _SOURCE)
_FALLBACK = re.compile(r"<0x([0-9A-Fa-f]{2})>")


class Tokenizer:
    """Text to token ids and back, by the checkpoint's tokenizer.json, SentencePiece files or GGUF file."""

    def __init__(
        self,
        backend: Backend,
        settings: Mapping[str, Any],
        template: str | None = None,
        tool_template: str | None = None,
    ) -> None:
        """settings: the content of tokenizer_config.json. template: the source of the chat template.

        tool_template: the template for conversations with tools; None = the same.
        """
        backend.no_truncation()
        backend.no_padding()
        self.backend = backend
        self._file: Path | None = None
        self._settings, self._special = settings, _special_tokens(settings)
        self._template, self._tool_template = template, tool_template

    @classmethod
    def load(cls, place: Path) -> Tokenizer:
        """Load the tokenizer of a checkpoint: a folder, or a GGUF file. Raises ModelError."""
        return cls.from_gguf(place) if is_gguf(place) else cls.from_folder(place)

    @classmethod
    def from_folder(cls, folder: Path) -> Tokenizer:
        """Load tokenizer.json, the tokenizer's settings and the chat template. Raises ModelError.

        Without tokenizer.json, SentencePiece's files of T5 and of Marian are read.
        """
        settings = {
            **read_optional_json(folder / "special_tokens_map.json"),
            **read_optional_json(folder / "tokenizer_config.json"),
        }
        backend = None if (folder / TOKENIZER).exists() else find_sentencepiece(folder, settings)
        if backend is None:
            backend = _load_backend(folder)
        else:
            settings = {**SENTENCEPIECE_ROLES, **settings}
        templates = find_template(folder, settings), find_template(folder, settings, TOOL_USE)
        with Converts(ModelError, f"{folder / TOKENIZER} can't be used", "download it again."):
            made = cls(backend, settings, *templates)._checked()
        made._file = folder / TOKENIZER
        return made

    @classmethod
    def from_gguf(cls, file: Path) -> Tokenizer:
        """Load the tokenizer that the metadata of a GGUF file describes. Raises ModelError.

        A file without a chat template gets the chat_template.jinja beside it.
        """
        metadata = GgufFile.open(file).metadata
        try:
            backend, settings = read_gguf_tokenizer(metadata)
            plain, tools = template_in(settings), template_in(settings, TOOL_USE)
            templates = plain or find_template(file.parent, {}), tools
            with Converts(ModelError, "its tokenizer can't be used", "download it again."):
                made = cls(backend, settings, *templates)._checked()
            made._file = file
            return made
        except ModelError as error:
            raise ModelError(f"{file}: {error.problem}", error.fix) from error

    def _checked(self) -> Tokenizer:
        """Read every part once. Errors are those of a damaged file."""
        check_length_bounds(self.backend)
        _ = self.special_ids, self.decoder_steps, self.vocab_size, self.characters_per_token
        return self

    def has_file_of(self, folder: Path) -> bool:
        """Whether this tokenizer was read from a tokenizer.json with the same bytes as the one in a folder.

        Of GGUF files, whether all metadata of tokenizers but the template are the same.
        """
        own = self._file
        if own is not None and is_gguf(own) and is_gguf(folder):
            return _tokenizer_in(own) == _tokenizer_in(folder)
        with suppress(OSError):
            return own is not None and filecmp.cmp(own, folder / TOKENIZER, shallow=False)
        return False

    def encode(self, text: str, add_special_tokens: bool = True) -> list[int]:
        """Return the token ids of a text, with the special tokens that the tokenizer adds, if wanted.

        Raises RequestError for a text that the tokenizer can't encode.
        """
        with _ENCODING:
            if len(text) <= _SHORT:
                made = self.backend.encode(text, add_special_tokens=add_special_tokens)
            else:
                (made,) = self.backend.encode_batch_fast([text], add_special_tokens=add_special_tokens)
        ids: list[int] = made.ids
        return ids

    def decode(self, ids: Sequence[int], skip_special_tokens: bool = True) -> str:
        """Return the text of token ids. Ids without a token (padded rows of a head) are left out.

        Raises RequestError for ids that the tokenizer's decoder fails on.
        """
        with _DECODING:
            if len(ids) <= _SHORT:
                text: str = self.backend.decode(list(ids), skip_special_tokens=skip_special_tokens)
            else:
                (text,) = self.backend.decode_batch([list(ids)], skip_special_tokens=skip_special_tokens)
        return text

    def decode_alone(self, token_id: int) -> str | None:
        """Return the text of one token, special or not; None if the decoder fails on it alone."""
        try:
            return self.decode([token_id], skip_special_tokens=False)
        except RequestError:
            return None

    @cached_property
    def characters_per_token(self) -> int | None:
        """The most characters of a text for each of its tokens; None = there is no bound, see `tokenizer_bounds`."""
        return characters_per_token(self.backend)

    @property
    def vocab_size(self) -> int:
        """The number of tokens, added ones included."""
        size: int = self.backend.get_vocab_size(with_added_tokens=True)
        return size

    def vocab(self) -> dict[str, int]:
        """Return every token's id, added tokens included."""
        vocabulary: dict[str, int] = self.backend.get_vocab(with_added_tokens=True)
        return vocabulary

    @property
    def eos_id(self) -> int | None:
        """The tokenizer's end-of-sequence token."""
        return self._id_of("eos_token")

    @property
    def bos_id(self) -> int | None:
        """The tokenizer's beginning-of-sequence token."""
        return self._id_of("bos_token")

    @cached_property
    def special_ids(self) -> frozenset[int]:
        """Tokens that are left out of decoded text when `skip_special_tokens` is set."""
        added = self.backend.get_added_tokens_decoder()
        return frozenset(token_id for token_id, token in added.items() if token.special)

    @cached_property
    def decoder_steps(self) -> Sequence[Mapping[str, Any]]:
        """The decoder's steps as in tokenizer.json. Without a decoder, tokens are joined by spaces."""
        return steps_of(self.backend.decoder) if self.backend.decoder else _JOINED

    @property
    def settings(self) -> dict[str, Any]:
        """The content of tokenizer_config.json, with the class, the template, and special tokens as texts.

        Paths of its files are left out.
        """
        kept = {name: value for name, value in self._settings.items() if not name.endswith(("_file", "name_or_path"))}
        named = {"tokenizer_class": "PreTrainedTokenizerFast", **kept, **self._special}
        return named | {"chat_template": self._template}

    @property
    def chat_template(self) -> str | None:
        """The source of the checkpoint's chat template; None if it has none."""
        return self._template

    def with_template(self, source: str) -> Tokenizer:
        """Return a tokenizer with another chat template, which conversations with tools have too."""
        other = copy.copy(self)
        other._template, other._tool_template = source, None
        return other

    def template_for(self, tools: bool) -> str | None:
        """Return the source of the template for conversations with or without tools; None if there is none."""
        return self._tool_template if tools and self._tool_template is not None else self._template

    def apply_chat_template(
        self,
        messages: Sequence[Mapping[str, Any]],
        add_generation_prompt: bool = True,
        variables: Mapping[str, Any] = MappingProxyType({}),
        source: str | None = None,
    ) -> str:
        """Render a conversation to prompt text in the model's format.

        The text contains its special tokens: encode it with `add_special_tokens=False`. variables: for the template.
        source: of a template; None = the checkpoint's. Raises RequestError when the template rejects the messages,
        ModelError when the checkpoint has no template or a broken one.
        """
        chat = self._compile(source or self.template_for(bool(variables.get("tools"))))
        return chat.render(messages, add_generation_prompt, **{**self._special, **variables})

    @cached_property
    def _compile(self) -> Callable[[str | None], ChatTemplate]:
        return lru_cache(maxsize=2)(_compile)

    def special_token(self, role: str) -> str | None:
        """Return the token of a role such as "pad_token"; None if the checkpoint names none."""
        return self._special.get(role)

    def _id_of(self, role: str) -> int | None:
        token = self._special.get(role)
        token_id: int | None = None if token is None else self.backend.token_to_id(token)
        return token_id


def compare_vocabularies(target: Tokenizer, draft: Tokenizer) -> frozenset[int]:
    """Check that each id of both tokenizers is the same text in both. Return the ids that only one of them has.

    Only tokens are compared; a model's head may have more rows. Raises PairError with the first differences.
    """
    ours, theirs = _by_id(target), _by_id(draft)
    if ours == theirs:
        return frozenset()
    both = ours.keys() & theirs.keys()
    differing = sorted(token_id for token_id in both if ours[token_id] != theirs[token_id])
    if differing or not both:
        shown = [f"id {i} is {ours[i]!r} in the target, {theirs[i]!r} in the draft" for i in differing[:3]]
        raise PairError(
            f"the draft's vocabulary is not the target's: {len(differing)} of {len(both)} ids differ"
            f" ({'; '.join(shown) or 'they share none'})",
            "use a draft of the target's own family, or a drafter that needs no model.",
        )
    return frozenset(ours.keys() ^ theirs.keys())


def substitute_token(draft: Tokenizer, unknown: Collection[int]) -> int:
    """Return the token that a draft reads in place of one that it lacks: a line break, which means little.

    A tokenizer without a line break encodes it as its unknown token. unknown: ids that can't be used.
    """
    known = [token for token in draft.encode("\n", add_special_tokens=False) if token not in unknown]
    return known[-1] if known else min({*draft.vocab().values()} - {*unknown})


def _by_id(tokenizer: Tokenizer) -> dict[int, str]:
    return {token_id: token for token, token_id in tokenizer.vocab().items()}


def _tokenizer_in(file: Path) -> dict[str, Any]:
    found = GgufFile.open(file).metadata.items()
    return {key: value for key, value in found if key.startswith("tokenizer.") and "chat_template" not in key}


def _compile(template: str | None) -> ChatTemplate:
    if template is None:
        raise ModelError(
            "this checkpoint has no chat template",
            "send a plain prompt, give one as --chat-template or chat_template, or add a chat_template.jinja to its"
            " folder.",
        )
    return ChatTemplate(template)


def _load_backend(folder: Path) -> Backend:
    file = folder / "tokenizer.json"
    if not file.exists():
        found = [name for name in ("tokenizer.model", "sentencepiece.bpe.model") if (folder / name).exists()]
        only = f" but {found[0]}, a sentencepiece file" if found else ""
        raise ModelError(
            f"{folder} has no tokenizer.json{only}",
            "save it with a fast tokenizer: AutoTokenizer.from_pretrained(...).save_pretrained(...) in transformers.",
        )
    with Converts(ModelError, f"{file} can't be read", "download it again."):
        return Backend.from_file(str(file))


def _special_tokens(settings: Mapping[str, Any]) -> dict[str, str]:
    """Return special tokens by role, such as eos_token; a token is stored as text or as an object with its content."""
    tokens = {}
    for role, value in settings.items():
        content = value.get("content") if isinstance(value, dict) else value
        if role.endswith("_token") and isinstance(content, str):
            tokens[role] = content
    return tokens


def byte_table() -> dict[str, int]:
    """Return the byte for each character of byte-level tokenizers (GPT-2's table)."""
    shown = [*range(33, 127), *range(161, 173), *range(174, 256)]
    hidden = [byte for byte in range(256) if byte not in shown]
    return {chr(byte): byte for byte in shown} | {chr(256 + place): byte for place, byte in enumerate(hidden)}


_BYTES = byte_table()


def fallback_byte(token: str) -> bytes | None:
    """Return the byte that a token of byte fallback, `<0x0A>`, stands for; None = another token."""
    hit = _FALLBACK.fullmatch(token) if len(token) == 6 else None
    return bytes.fromhex(hit[1]) if hit else None


def token_bytes(tokenizer: Tokenizer) -> dict[int, bytes]:
    """Return the bytes of every token that is not special, by id: those that it adds within a text.

    Spaces that a decoder strips from the ends of a whole text are kept. A step of the decoder that is not in the
    module's list leaves a token as it is spelt.
    """
    special, found = tokenizer.special_ids, dict[int, bytes]()
    left = {token_id: token for token, token_id in tokenizer.vocab().items() if token_id not in special}
    for step in tokenizer.decoder_steps:
        match step:
            case {"type": "ByteLevel"}:
                alphabet = _BYTES.keys()
                found |= {each: bytes(map(_BYTES.__getitem__, t)) for each, t in left.items() if alphabet >= {*t}}
            case {"type": "ByteFallback"}:
                found |= {each: byte for each, t in left.items() if (byte := fallback_byte(t)) is not None}
            case _:
                change = _change(step)
                left = {each: change(t) for each, t in left.items()}
    return {each: t.encode("utf-8", "replace") for each, t in left.items()} | found


def _change(step: Mapping[str, Any]) -> Callable[[str], str]:
    """Return how a step changes the text of a token."""
    match step:
        case {"type": "Replace", "pattern": {"String": str(old)}, "content": str(new)} if old:
            return lambda token: token.replace(old, new)
        case {"type": "Metaspace", "replacement": str(old)} | {"type": "BPEDecoder", "suffix": str(old)} if old:
            return lambda token: token.replace(old, " ")
        case {"type": "WordPiece", "prefix": str(mark)}:
            return lambda token: token[len(mark) :] if mark and token.startswith(mark) else " " + token
    return lambda token: token
