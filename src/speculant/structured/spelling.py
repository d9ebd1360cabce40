"""A checkpoint's tokenizer in the form of the grammar library."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, cast

if TYPE_CHECKING:
    from llguidance import LLTokenizer, TokenizerWrapper

    from speculant.text import Tokenizer


def read_vocabulary(tokenizer: Tokenizer, size: int, end_token_ids: Sequence[int]) -> LLTokenizer:
    """Return the library's tokenizer of `size` tokens; see `read_definition`."""
    return read_definition(tokenizer.backend.to_str(), size, end_token_ids)


def read_definition(definition: str, size: int, end_token_ids: Sequence[int]) -> LLTokenizer:
    """Return the library's tokenizer of `size` tokens, from the content of a tokenizer.json.

    Raises the library's error for one that it can't read.

    If a grammar forces the next bytes, the library encodes them and allows only the first of their tokens. It marks
    special tokens, and added tokens that look like `<tag>`: a grammar's text never matches them, only `<[id]>` does.
    The checkpoint's own encoder would encode such a name as its marked token, which the grammar then forbids. So the
    library gets an encoder that spells these names with other tokens.
    """
    from llguidance import LLTokenizer

    own = LLTokenizer(definition, n_vocab=size, eos_token=list(end_token_ids))
    spelling = cast("TokenizerWrapper", SpellingTokenizer(own, size, end_token_ids[0]))
    return LLTokenizer(spelling, n_vocab=size, eos_token=list(end_token_ids))


class SpellingTokenizer:
    """A `TokenizerWrapper` of the library: the bytes of all tokens, and an encoder that uses no marked tokens."""

    is_tokenizer_wrapper = True
    bos_token_id = None

    def __init__(self, own: LLTokenizer, size: int, end_token_id: int) -> None:
        """own: the library's reading of the same tokenizer."""
        self.eos_token_id = end_token_id
        self.tokens = [own.decode_bytes([token]) for token in range(size)]
        self.special_token_ids = [token for token in range(size) if own.is_special_token(token)]
        self._own, self._marked = own, frozenset(self.special_token_ids)

    def __call__(self, text: str) -> list[int]:
        """Return the tokens of a text. Their bytes are the text's, and none of them is marked."""
        tokens = self._own.tokenize_str(text)
        if not self._marked.isdisjoint(tokens):
            tokens = [each for token in tokens for each in self._spelled(token)]
        spelt = b"".join(self.tokens[token] for token in tokens)
        return tokens if spelt == text.encode("utf-8") else self._own.greedy_tokenize(text)

    def _spelled(self, token: int) -> list[int]:
        if token not in self._marked:
            return [token]
        return self._own.greedy_tokenize(self.tokens[token].decode("utf-8", "replace"))
