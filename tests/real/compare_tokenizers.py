"""Compare tokenizers read from GGUF files with llama.cpp's: `python -m tests.real.compare_tokenizers FILE...`.

For each name of `tokenizer.ggml.pre` that no file has, a file's name is changed to it in a copy. A copy needs no
tensors, so give files with a vocabulary alone, such as models/ggml-vocab-*.gguf in llama.cpp's sources.
"""

from __future__ import annotations

import argparse
import ctypes
import re
import sys
import tempfile
from collections.abc import Iterable, Iterator, Mapping, Sequence
from functools import cache
from pathlib import Path
from typing import Any, NamedTuple

from tokenizers import Regex, pre_tokenizers

from speculant.gguf_file import GgufFile
from speculant.text.gguf_tokenizer import SPLITS, WordSplit, read_gguf_tokenizer
from speculant.text.sentencepiece import TokenType
from tests.texts import texts

PRE = b"tokenizer.ggml.pre"
MOST_ADDED = 300
END_TAG = "</s>"

# llama.cpp's own patterns, where they are not the original ones: it matches neither the case of letters nor marks. Its
# ranges have no spaces beyond ASCII, such as the ideographic space among DeepSeek LLM's symbols.
_NOT_SMALL, _NOT_CAPITAL = r"(?:(?=\p{L})[^a-z])", r"(?:(?=\p{L})[^A-Z])"
_REST = r" ?[^\s\p{L}\p{N}]+[\r\n/]*|\s*[\r\n]+|\s+(?!\S)|\s+"


def _without_case(contraction: str, digits: str) -> tuple[str, ...]:
    start = r"[^\r\n\p{L}\p{N}]?"
    words = (f"{_NOT_SMALL}*{_NOT_CAPITAL}+", f"{_NOT_SMALL}+{_NOT_CAPITAL}*")
    return ("|".join((*(f"{start}{word}{contraction}" for word in words), digits, _REST)),)


DEEPSEEK_LLM = SPLITS["deepseek-llm"].patterns
APPROXIMATED = {
    SPLITS["gpt-4o"].patterns: _without_case("(?i:'s|'t|'re|'ve|'m|'ll|'d)?", r"\p{N}{1,3}"),
    SPLITS["tekken"].patterns: _without_case("", r"\p{N}"),
    DEEPSEEK_LLM: tuple(re.sub(r"(\[.+\])\+", r"(?:(?!\\s)\1)+", pattern) for pattern in DEEPSEEK_LLM),
}


class Peer:
    """llama.cpp's tokenizer of a file, through llama-cpp-python."""

    def __init__(self, path: Path) -> None:
        import llama_cpp

        self._library = llama_cpp
        self._quiet = llama_cpp.llama_log_callback(lambda level, text, data: None)
        llama_cpp.llama_log_set(self._quiet, ctypes.c_void_p(0))
        parameters = llama_cpp.llama_model_default_params()
        parameters.vocab_only = True
        self._model = llama_cpp.llama_model_load_from_file(bytes(path), parameters)
        if not self._model:
            raise ValueError(f"llama.cpp can't load {path}")
        self._vocabulary = llama_cpp.llama_model_get_vocab(self._model)

    def encode(self, text: str) -> list[int]:
        """Return a text's tokens, with the tokens that the file adds around it."""
        content = text.encode()
        room = (self._library.llama_token * (2 * len(content) + 8))()
        count = self._library.llama_tokenize(self._vocabulary, content, len(content), room, len(room), True, True)
        assert 0 <= count <= len(room)
        return list(room[:count])

    def close(self) -> None:
        """Free the model."""
        self._library.llama_model_free(self._model)


class Result(NamedTuple):
    """The comparison of one kind. lost: texts that do not decode to themselves."""

    different: int
    lost: int
    approximated: int | None  # differences with llama.cpp's own patterns; None where they are the original ones
    example: tuple[str, list[str], list[str]] | None


def compare(path: Path, count: int) -> Result:
    """Compare both tokenizers of a file on generated texts."""
    metadata = GgufFile.open(path).metadata
    read, peer = read_gguf_tokenizer(metadata), Peer(path)
    backend, other, added = read.backend, approximate(metadata), read.backend.get_added_tokens_decoder()
    different, lost, approximated, example = 0, 0, 0, None
    for text in without_known_deviations(texts(count, _added(metadata)), metadata):
        ids, expected = backend.encode(text).ids, peer.encode(text)
        if ids != expected:
            different += 1
            example = example or (text, *([backend.id_to_token(each) for each in row] for row in (ids, expected)))
        if other is not None and other.encode(text).ids != expected:
            approximated += 1
            example = text, *([backend.id_to_token(each) for each in row] for row in (other.encode(text).ids, expected))
        inner = backend.encode(text, add_special_tokens=False).ids
        lost += added.keys().isdisjoint(inner) and backend.decode(inner) != text
    peer.close()
    return Result(different, lost, approximated if other else None, example)


def without_known_deviations(given: Iterable[str], metadata: Mapping[str, Any]) -> Iterator[str]:
    """Change texts so that llama.cpp reads them as the original tokenizers do.

    llama.cpp takes an ordinary token "</s>", such as the tag of HTML among Qwen2's tokens, for an end of a text. An
    added token that takes in the spaces after it takes in ASCII spaces only. A byte without a token ends a word in
    llama.cpp; the original tokenizers drop it before they merge.
    """
    types = dict(zip(metadata["tokenizer.ggml.tokens"], metadata["tokenizer.ggml.token_type"], strict=True))
    has_tag = types.get(END_TAG) == TokenType.NORMAL
    strips = "phi3" in metadata.get("general.name", "").lower()
    byte_level = metadata["tokenizer.ggml.model"] == "gpt2"
    dropped = pre_tokenizers.ByteLevel.alphabet() - types.keys() if byte_level else ()
    for text in given:
        if has_tag:
            text = text.replace(END_TAG, END_TAG[1:])
        if dropped:
            text = "".join(character for character in text if not _bytes_of(character).intersection(dropped))
        yield re.sub(r"[^\S \t\n\v\f\r]", " ", text) if strips else text


@cache
def _bytes_of(character: str) -> frozenset[str]:
    byte_level = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    return frozenset("".join(word for word, _ in byte_level.pre_tokenize_str(character)))


def approximate(metadata: Any) -> Any:
    """Return the tokenizer with llama.cpp's own patterns; None where they are the original ones."""
    split = SPLITS.get(metadata.get("tokenizer.ggml.pre", ""))
    if split is None or split.patterns not in APPROXIMATED:
        return None
    backend = read_gguf_tokenizer(metadata).backend
    words = [pre_tokenizers.Split(Regex(pattern), "isolated") for pattern in APPROXIMATED[split.patterns]]
    byte_level = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    backend.pre_tokenizer = pre_tokenizers.Sequence([*words, byte_level])
    return backend


def _added(metadata: Any) -> list[str]:
    tokens, types = metadata["tokenizer.ggml.tokens"], metadata["tokenizer.ggml.token_type"]
    marked = (TokenType.CONTROL, TokenType.USER_DEFINED)
    return [text for text, kind in zip(tokens, types, strict=True) if kind in marked][:MOST_ADDED]


def renamed(path: Path, pre: str, folder: Path) -> Path:
    """Return a copy of a file, which has no tensors, with another `tokenizer.ggml.pre`."""
    content = path.read_bytes()
    start = content.index(PRE) + len(PRE) + 4  # after the key and the type
    length = int.from_bytes(content[start : start + 8], "little")
    name = pre.encode()
    copy = folder / f"{pre}.gguf"
    copy.write_bytes(content[:start] + len(name).to_bytes(8, "little") + name + content[start + 8 + length :])
    return copy


def cases(files: Sequence[Path], names: Sequence[str], folder: Path) -> Iterator[tuple[str, Path, Path]]:
    """Yield a kind, the file to compare, and the file that it was made from."""
    found = {}
    for path in files:
        metadata = GgufFile.open(path).metadata
        if metadata["tokenizer.ggml.model"] in ("gpt2", "llama"):
            kind = metadata.get("tokenizer.ggml.pre", "default")
            yield kind, path, path
            found[kind] = path
    base = found.get("llama-bpe") or found.get("qwen2") or found.get("gpt-2")
    for name in names if base else []:
        if name not in found:
            yield name, renamed(base, name, folder), base


def main() -> None:
    """Print a table of kinds and differences. The exit status is 1 if there are any."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("files", nargs="+", type=Path)
    parser.add_argument("--texts", type=int, default=10_000)
    parser.add_argument("--pre", nargs="*", default=sorted(SPLITS), help="kinds to make copies for")
    given = parser.parse_args()
    failed, seen = False, set[WordSplit]()
    with tempfile.TemporaryDirectory() as folder:
        for kind, path, base in cases(given.files, given.pre, Path(folder)):
            repeated = path is not base and SPLITS[kind] in seen
            count = given.texts // 20 if repeated else given.texts
            seen.add(SPLITS[kind])
            result = compare(path, count)
            failed |= bool(result.different if result.approximated is None else result.approximated)
            note = "" if result.approximated is None else f" ({result.approximated} with llama.cpp's own patterns)"
            counts = f"{count:6} texts, {result.different:4} different{note}, {result.lost} lost"
            print(f"{kind:20} {base.stem.removeprefix('ggml-vocab-'):12} {counts}")
            if result.different if result.approximated is None else result.approximated:
                print(*map(repr, result.example or ()), sep="\n    ")
            sys.stdout.flush()
    sys.exit(failed)


if __name__ == "__main__":
    main()
