"""Continuations from suffix automata over this request and over others (SuffixDecoding, arXiv 2411.04975).

The request's own index holds its source, prompt and output. The store holds the outputs of other requests, with the
end of their prompts before them, and the corpus the texts of a file. An output enters the store in parts while its
request runs. For a match of L tokens the most frequent continuation is followed for at most floor(L * factor) tokens,
while the product of its ratios stays at min_prob or above. A ratio is a token's count divided by the count of all
tokens that followed.
The match with the largest sum of products wins, the request's own index on a tie.

A match of LEAST_COPY tokens in the request's own text begins a copy (`Copying`), which drafts as many tokens as are
wanted, and goes on after tokens that were changed: an edited file repeats long parts of the old one.

Memory: with the native library at most 200 bytes per token of a running request, of the store and of the corpus (75 to
110 on code), without it at most 590 (270), and 3 kB for each salt in the store. Where they are kept for
a later engine, the texts take 5 bytes per token more. The store holds at most
suffix_decoding_max_cached_requests texts and suffix_decoding_corpus_tokens tokens, at most 95 MiB with the defaults.
Proposing and observing take 7 to 22 microseconds a token, whatever the history, and 13 to 24 without the native
library, which looks all sequences of a step up in one call. Finding a copy again takes up to 1.2 ms, on
texts with few distinct tokens; looking in vain for the beginning of one, 0.4 ms on 100,000 tokens and 6 on 500,000.
"""

from __future__ import annotations

from array import array
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, cast
from weakref import WeakKeyDictionary

from typing_extensions import override

from speculant.drafting.base import DrafterContext, Method, read_options
from speculant.drafting.lookup.reading import Reading, ReadingDrafter, SequenceReader, match_scores, note_read
from speculant.errors import ConfigError, DraftError
from speculant.kernels import Continuation, SuffixIndex, SuffixQuery, SuffixSettings, open_suffix_index
from speculant.text import read_sequences
from speculant.types import DraftTree, Request

METHOD = Method(default_length=8, learns=True, varies=True)
FINISHED = ("stop", "length")  # reasons; the last part of an aborted or failed output is not learnt
PART = 64  # tokens of a running request that are learnt at a time
LEAST_COPY = 16  # tokens of a match that begins a copy
CONFIRMED = 8  # tokens after which a place that was found again counts as the right one
PATIENCE = 64  # changed tokens after which a copy ends
BEFORE, AFTER = 256, 512  # tokens around a departure in which a copy is found again


@dataclass(frozen=True)
class SuffixOptions:
    """vLLM's keys with its defaults, except for the corpus, which is half as large.

    suffix_decoding_max_tree_depth: most tokens of match and draft together. suffix_decoding_max_spec_factor: a match of
    L tokens is continued by at most floor(factor * L). suffix_decoding_min_token_prob: the smallest product of ratios.
    suffix_decoding_max_cached_requests and suffix_decoding_corpus_tokens bound the store; 0 = no store. suffix_corpus:
    a file of texts that drafts may continue from the start, see `read_sequences`; all requests share it.
    """

    suffix_decoding_max_tree_depth: int = 24
    suffix_decoding_max_cached_requests: int = 10_000
    suffix_decoding_max_spec_factor: float = 1.0
    suffix_decoding_min_token_prob: float = 0.1
    suffix_decoding_corpus_tokens: int = 2**19
    suffix_corpus: Any = None

    def __post_init__(self) -> None:
        checks = {
            "suffix_decoding_max_tree_depth": (self.suffix_decoding_max_tree_depth >= 2, "2 or more"),
            "suffix_decoding_max_cached_requests": (self.suffix_decoding_max_cached_requests >= 0, "0 or more"),
            "suffix_decoding_max_spec_factor": (0 <= self.suffix_decoding_max_spec_factor < 2**31, "0 or more"),
            "suffix_decoding_min_token_prob": (0 <= self.suffix_decoding_min_token_prob <= 1, "a number from 0 to 1"),
            "suffix_decoding_corpus_tokens": (0 <= self.suffix_decoding_corpus_tokens < 2**28, "0 to 268 million"),
        }
        for name, (holds, wanted) in checks.items():
            if not holds:
                raise ConfigError(f"{name}={getattr(self, name)} is out of range", f"use {wanted}.")

    @property
    def settings(self) -> SuffixSettings:
        """The settings of each index."""
        return SuffixSettings(
            self.suffix_decoding_max_tree_depth,
            float(self.suffix_decoding_max_spec_factor),
            float(self.suffix_decoding_min_token_prob),
        )


@dataclass
class TextGeneration:
    """Texts of the same age, by salt. changed: the salts that gained texts since the last `SuffixStore.changed`."""

    indexes: dict[str, SuffixIndex] = field(default_factory=dict)
    texts: dict[str, list[array[int]]] = field(default_factory=dict)
    changed: set[str] = field(default_factory=set)
    num_texts: int = 0
    num_tokens: int = 0


class SuffixStore:
    """At most `most_texts` finished texts of at most `most_tokens` tokens together; 0 of either = none.

    There are two generations of half the bound each. Texts enter the newer one; when it is full, the older one is
    dropped and the newer takes its place. So the newest half of the bound is always kept, nothing is ever deleted from
    an index, and memory is freed at once. Texts of different salts have indexes of their own. corpus: an index whose
    texts are always kept, for all salts; None = there is none.
    """

    def __init__(
        self,
        most_texts: int,
        most_tokens: int,
        open_index: Callable[[], SuffixIndex],
        corpus: SuffixIndex | None = None,
    ) -> None:
        self._corpus = corpus
        self._most_texts, self._half_texts = most_texts, max(1, most_texts // 2)
        self._half_tokens = most_tokens // 2 if most_texts else 0
        self._open_index = open_index
        self._older, self._newer = TextGeneration(), TextGeneration()
        self._keeps_texts = False  # until `changed` is called

    def add(self, salt: str, tokens: Sequence[int]) -> None:
        """Add a text, or only its end if it is longer than half the bound."""
        if not self._half_tokens:
            return
        kept = tokens[-self._half_tokens :]
        self._make_room(len(kept))
        if salt not in self._newer.indexes:
            self._newer.indexes[salt] = self._open_index()
        index = self._newer.indexes[salt]
        try:
            index.begin()
            index.extend(kept)
        except MemoryError:
            del self._newer.indexes[salt]  # it takes no more texts
            self._newer.texts.pop(salt, None)
            raise
        if self._keeps_texts:
            self._newer.texts.setdefault(salt, []).append(array("i", kept))
            self._newer.changed.add(salt)
        self._newer.num_texts += 1
        self._newer.num_tokens += len(kept)

    def indexes(self, salt: str) -> list[SuffixIndex]:
        """Return the indexes with the texts of this salt, of newer ones first, then the corpus."""
        indexes = self._newer.indexes.get(salt), self._older.indexes.get(salt), self._corpus
        return [index for index in indexes if index is not None]

    def texts(self, salt: str) -> list[array[int]]:
        """Return the texts of a salt that came after the first call of `changed`, older ones first."""
        return [text for each in (self._older, self._newer) for text in each.texts.get(salt, ())]

    def changed(self) -> set[str]:
        """Return the salts that gained texts since the last call; the first one has texts kept from now on."""
        self._keeps_texts = True
        older, newer = self._older.changed, self._newer.changed
        self._older.changed, self._newer.changed = set(), set()
        return older | newer

    @property
    def num_texts(self) -> int:
        """How many texts it holds."""
        return self._older.num_texts + self._newer.num_texts

    @property
    def num_tokens(self) -> int:
        """How many tokens it holds."""
        return self._older.num_tokens + self._newer.num_tokens

    @property
    def num_bytes(self) -> int:
        """The memory that its indexes take, in bytes."""
        return sum(index.num_bytes for each in (self._older, self._newer) for index in each.indexes.values())

    def _make_room(self, num_tokens: int) -> None:
        full = self._newer.num_tokens + num_tokens > self._half_tokens
        if full or self._newer.num_texts >= self._half_texts:
            self._older, self._newer = self._newer, TextGeneration()
        if self.num_texts >= self._most_texts:  # only where the bound is a single text
            self._older = TextGeneration()


class Copying:
    """The place in a text's earlier tokens that its newest ones copy, also after a few tokens that were changed.

        earlier   a b c d e f g
        newest    a b X d          e f g follow

    text: all tokens. place: of the token that comes next; None = there is no copy, or it has not been found again. run:
    how many tokens have agreed since it began or was found again.
    """

    def __init__(self) -> None:
        self.text = array("q")
        self.place: int | None = None
        self.run = 0
        self._last: int | None = None  # the place of the departure that is to be followed; None = there is no copy
        self._departed = self._begun = 0  # how many tokens the text had then, and before the copy

    def read(self, tokens: Sequence[int]) -> None:
        """Read tokens that follow the text."""
        end, text = len(self.text), self.text
        text.extend(tokens)
        while self._last is not None and end < len(text):
            end += 1
            if self.place is not None and text[self.place] == text[end - 1]:
                self.place, self.run = self.place + 1, self.run + 1
            else:
                self._depart(end)

    def begin(self, length: int) -> None:
        """Begin a copy after the latest of the earlier places where the text's last `length` tokens are, if any."""
        size, text = self.text.itemsize, self.text.tobytes()
        at = end = len(text) - size
        while (at := text.rfind(text[-length * size :], 0, end)) % size and at > 0:
            end = at + length * size - 1
        if at >= 0:
            self.place = self._last = at // size + length
            self.run, self._begun = length, len(self.text) - length

    def ahead(self, drafted: Sequence[int], limit: int) -> list[int]:
        """Return up to `limit` tokens after those `drafted`; nothing if these are not of the copy."""
        if self.place is None:
            return []
        period, wanted = len(self.text) - self.place, len(drafted) + limit
        copied = self.text[self.place : self.place + wanted].tolist()
        copied = (copied * (1 + wanted // period))[:wanted] if wanted > period else copied
        return copied[len(drafted) :] if copied[: len(drafted)] == list(drafted) else []

    def _depart(self, end: int) -> None:
        """Look for the copy again: text[end - 1], or one of the tokens before it, is another one."""
        if self.place is not None and self.run >= CONFIRMED:
            self._last, self._departed = self.place, end
        if end - self._departed > PATIENCE:
            self.place = self._last = None
        else:
            self.place, self.run = self._find(end)

    def _find(self, end: int) -> tuple[int | None, int]:
        """Return the place after the longest match of the text's end near the departure, and the match's length.

        Of equal matches it is the first one after the departure; a single token counts only there. The copy itself is
        not searched.
        """
        text, last, found, longest = self.text, self._last, None, 0
        assert last is not None, "there is a copy"
        at, stop = max(0, last - BEFORE), min(last + AFTER, max(last, self._begun), end - 1)
        while (at := _index(text, text[end - 1], at, stop) + 1) > 0:
            length = 1
            while length < min(LEAST_COPY, at) and text[at - length - 1] == text[end - length - 1]:
                length += 1
            better = length > longest or (length == longest and found is not None and found <= last < at)
            if better and (length > 1 or at > last):
                found, longest = at, length
        return found, longest


def _index(text: array[int], token: int, start: int, stop: int) -> int:
    """Return the first place of a token; -1 = there is none."""
    try:
        return text.index(token, start, stop)
    except ValueError:
        return -1


class SuffixReader(SequenceReader):
    """The `SequenceReader` of one sequence: its own index, and the store's texts of its salt."""

    def __init__(self, index: SuffixIndex, store: SuffixStore, salt: str) -> None:
        self.index, self._store, self._salt = index, store, salt
        self._copying = Copying()
        self.seen = 0

    @override
    def update(self, tokens: Sequence[int]) -> None:
        (found,) = self.index.look_up([self.query(tokens, (), 0)])
        self.choose(found, tokens, (), 0)
        self.seen += len(tokens)

    @override
    def draft(self, limit: int, ahead: Sequence[int] = ()) -> DraftTree:
        (found,) = self.index.look_up([self.query((), ahead, limit)])
        return self.choose(found, (), ahead, limit)

    def query(self, unread: Sequence[int], ahead: Sequence[int], limit: int) -> SuffixQuery:
        """Return the question for the next tokens; `look_up` appends the unread ones to the index."""
        return [self.index, *self._store.indexes(self._salt)], array("q", unread), array("q", ahead), limit

    def choose(self, found: Continuation, unread: Sequence[int], ahead: Sequence[int], limit: int) -> DraftTree:
        """Return the draft of a copy if there is one, else that of the continuation that a query found."""
        copying = self._copying
        copying.read(unread)
        if copying.run < LEAST_COPY <= found.length and not ahead:
            copying.begin(LEAST_COPY)
        if tokens := copying.ahead(ahead, limit):
            return DraftTree.chain(tokens, scores=match_scores(copying.run + len(ahead) + 1, len(tokens)))
        return DraftTree.chain(found.tokens, scores=scores_of(found)) if found.tokens else DraftTree.empty()


def scores_of(found: Continuation) -> list[float]:
    """Estimate each token's acceptance by its ratio and by the length of the match before it."""
    return [ratio * (matched / (matched + 2)) for matched, ratio in enumerate(found.ratios, found.length)]


class SuffixDrafter(ReadingDrafter):
    """One `SuffixReader` per sequence, and a store that learns from every request."""

    keeps = "texts"

    def __init__(
        self,
        options: SuffixOptions,
        open_index: Callable[[SuffixSettings], SuffixIndex] = open_suffix_index,
        corpus: Iterable[Sequence[int]] | None = None,
    ) -> None:
        settings = options.settings
        most_texts, most_tokens = options.suffix_decoding_max_cached_requests, options.suffix_decoding_corpus_tokens
        self._most_recent = settings.depth - 1
        self._learnt: WeakKeyDictionary[Request, int] = WeakKeyDictionary()  # by request, the tokens up to here
        known = None if corpus is None else _indexed(corpus, open_index(settings))
        self.store = SuffixStore(most_texts, most_tokens, lambda: open_index(settings), known)
        super().__init__(lambda request: SuffixReader(open_index(settings), self.store, request.sender.cache_salt))

    @override
    def propose(self, requests: Sequence[Request], limits: Sequence[int]) -> list[DraftTree]:
        """Draft, and learn the newest tokens of a request once they fill a whole part."""
        drafts = super().propose(requests, limits)
        for request in requests:
            if len(request.tokens) >= len(request.prompt) + PART and self._gained(request) >= PART:
                self._learn(request)
        return drafts

    @override
    def draft(self, readings: Sequence[Reading]) -> Iterable[DraftTree]:
        """Look all of them up at once."""
        queries = list[SuffixQuery]()
        for reader, unread, ahead, limit in readings:
            queries.append(cast(SuffixReader, reader).query(unread, ahead, limit))
        note_read(readings)
        for (reader, unread, ahead, limit), found in zip(readings, queries[0][0][0].look_up(queries), strict=True):
            yield cast(SuffixReader, reader).choose(found, unread, ahead, limit)

    @override
    def end(self, request: Request) -> None:
        """Forget the sequence, and learn the rest of a finished output."""
        super().end(request)
        if request.ending.reason in FINISHED and self._gained(request):
            self._learn(request)

    @override
    def learned(self) -> Iterator[tuple[str, Sequence[array[int]]]]:
        for salt in self.store.changed():
            yield salt, self.store.texts(salt)

    @override
    def learn(self, salt: str, part: array[int]) -> None:
        if not part or min(part) < 0:
            raise DraftError("a text has no tokens, or an unknown one", "keep tokens alone.")
        self.store.add(salt, part)

    def _gained(self, request: Request) -> int:
        """Return how many tokens of the output have not been learnt."""
        return len(request.tokens) - request.num_drafted - self._learnt.get(request, len(request.prompt))

    def _learn(self, request: Request) -> None:
        """Add the output since the last part, with the tokens before it that a match can have."""
        committed = len(request.tokens) - request.num_drafted
        start = max(0, self._learnt.get(request, len(request.prompt)) - self._most_recent)
        self.store.add(request.sender.cache_salt, request.tokens[start:committed])
        self._learnt[request] = committed


def _indexed(corpus: Iterable[Sequence[int]], index: SuffixIndex) -> SuffixIndex:
    """Add the texts of a corpus to an index."""
    for tokens in corpus:
        index.begin()
        index.extend(tokens)
    return index


def build(context: DrafterContext) -> SuffixDrafter:
    """Make the drafter; it needs no model. Raises ConfigError for a corpus that can't be read."""
    options = read_options(context, SuffixOptions)
    corpus = None if options.suffix_corpus is None else _corpus(options.suffix_corpus, context)
    return SuffixDrafter(options, corpus=corpus)


def _corpus(given: object, context: DrafterContext) -> Iterator[list[int]]:
    """Yield the texts of a corpus in the target's tokens."""
    if not isinstance(given, str | Path) or context.target.tokenizer is None:
        raise ConfigError(f"suffix_corpus={given!r} names no file", "name a file of UTF-8 text or of token ids.")
    for tokens in read_sequences([Path(given).expanduser()], context.target.tokenizer):
        if tokens and not 0 <= min(tokens) <= max(tokens) < context.target.vocab_size:
            raise ConfigError(
                f"{given} has the token {max(tokens)}, and the target has {context.target.vocab_size}",
                "name a file of this target's tokens.",
            )
        yield tokens
