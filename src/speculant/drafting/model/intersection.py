"""Maps a target's vocabulary to a draft's with another tokenizer (token-level intersection, arXiv 2502.05202).

Two tokens are shared if they add the same bytes to a text (text/tokenizer.py), however they are spelt. Special tokens
are shared only if their names are the same: no end of text is drafted for another special token. Any other token of the
target is read as the draft tokens that the draft's tokenizer makes of it, if they have the same bytes, and else as the
longest draft tokens that fit its bytes. So part of a character becomes tokens of single bytes.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from speculant.errors import PairError
from speculant.models import MappedVocabulary
from speculant.text import Tokenizer, fallback_byte, substitute_token, token_bytes

_BEFORE = ("", "\n", "a")  # prefixes of an encoded piece: some tokenizers put a space before a text
_Spelling = bytes | str  # the bytes of a usual token, the name of a special one


def intersect(target: Tokenizer, draft: Tokenizer, size: int) -> MappedVocabulary:
    """Return the vocabulary of a target with `size` rows in its head for a draft with another tokenizer.

    Raises PairError if they share no token but special ones.
    """
    wanted, spellings = _spellings(target), _Spellings(draft)
    usual = _preferred(target, wanted)
    shared = {
        token: spellings.ids[spelling]
        for spelling, token in usual.items()
        if token < size and spelling in spellings.ids and spelling != b""
    }
    if not any(isinstance(wanted[token], bytes) for token in shared):
        raise PairError(
            "the draft's vocabulary has no token in common with the target's",
            "use another draft model, or a drafter that needs no model.",
        )
    lead = _before_a_text(draft)
    roles = _roles(target, draft, lead)

    def spell(token: int) -> Sequence[int]:
        return roles.get(token) or (spellings.pieces(wanted[token]) if token in wanted else ())

    return MappedVocabulary(
        size,
        shared,
        tuple(sorted(spellings.by_id.keys() - {*shared.values()})),
        spell,
        lead,
        frozenset() if target.bos_id is None else frozenset({target.bos_id}),
        substitute_token(draft, draft.special_ids),
    )


def _spellings(tokenizer: Tokenizer) -> dict[int, _Spelling]:
    special = tokenizer.special_ids
    names = {token: name for name, token in tokenizer.vocab().items() if token in special}
    return {**token_bytes(tokenizer), **names}


def _preferred(tokenizer: Tokenizer, spellings: Mapping[int, _Spelling]) -> dict[_Spelling, int]:
    """Return the id of each spelling. Of several, it is the first that is no token of byte fallback."""
    found = dict[_Spelling, int]()
    fallback = {token for name, token in tokenizer.vocab().items() if fallback_byte(name) is not None}
    for token in [*sorted(spellings.keys() - fallback), *sorted(fallback)]:
        found.setdefault(spellings[token], token)
    return found


class _Spellings:
    """The spellings of a draft's tokens by id, its ids by spelling, and its tokens for other spellings."""

    def __init__(self, draft: Tokenizer) -> None:
        self._draft, self.by_id = draft, _spellings(draft)
        self.ids = _preferred(draft, self.by_id)
        self._longest = max((len(each) for each in self.ids if isinstance(each, bytes)), default=0)

    def pieces(self, spelling: _Spelling) -> Sequence[int]:
        """Return the draft's tokens for a spelling; empty if it has none."""
        wanted = spelling.encode("utf-8", "replace") if isinstance(spelling, str) else spelling
        return self._encoded(wanted) or self._fitted(wanted)

    def _encoded(self, wanted: bytes) -> Sequence[int]:
        """Return the tokens that the draft's tokenizer makes of these bytes within a text; () = of other bytes."""
        try:
            text = wanted.decode("utf-8")
        except UnicodeDecodeError:
            return ()
        for before in _BEFORE:
            skipped = self._draft.encode(before, add_special_tokens=False) if before else []
            found = self._draft.encode(before + text, add_special_tokens=False)
            if found[: len(skipped)] == skipped and self._bytes(found[len(skipped) :]) == wanted:
                return found[len(skipped) :]
        return ()

    def _bytes(self, tokens: Sequence[int]) -> bytes | None:
        """Return the bytes of tokens; None if one is special."""
        spelt = [self.by_id.get(token, "") for token in tokens]
        return None if any(isinstance(each, str) for each in spelt) else b"".join(map(bytes, spelt))  # type: ignore[arg-type]

    def _fitted(self, wanted: bytes) -> Sequence[int]:
        """Return the longest tokens that fit, from the first byte on; () if a byte has no token."""
        found, start = list[int](), 0
        while start < len(wanted):
            ends = range(min(len(wanted), start + self._longest), start, -1)
            end = next((end for end in ends if wanted[start:end] in self.ids), None)
            if end is None:
                return ()
            found.append(self.ids[wanted[start:end]])
            start = end
        return found


def _before_a_text(draft: Tokenizer) -> tuple[int, ...]:
    """Return the special tokens that a tokenizer puts before a text."""
    found = draft.encode("a")
    count = next((place for place, token in enumerate(found) if token not in draft.special_ids), 0)
    return tuple(found[:count])


def _roles(target: Tokenizer, draft: Tokenizer, lead: tuple[int, ...]) -> dict[int, tuple[int, ...]]:
    """Return the draft's tokens for the target's begin and end tokens."""
    ends = (draft.eos_id,) if draft.eos_id is not None else ()
    begins = lead or ((draft.bos_id,) if draft.bos_id is not None else ends)
    roles = [(target.eos_id, ends), (target.bos_id, begins)]
    return {token: read for token, read in roles if token is not None and read}
