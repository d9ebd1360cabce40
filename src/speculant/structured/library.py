"""The grammar library: its calls that compile a form, its form of a tokenizer, and its errors in words for users.

This module needs no tensors, so that a small process can use it. Users know neither the library's grammars nor its
options.
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from typing import TYPE_CHECKING, NamedTuple, cast

from speculant.structured.spec import GrammarSource

if TYPE_CHECKING:
    from llguidance import LLMatcher, LLParserLimits, LLTokenizer, TokenizerWrapper


class StepLimits(NamedTuple):
    """Work that one mask may take, and states that the lexer of one form may have, of one or two kB each.

    The defaults are the library's. Over 50,000 tokens ordinary forms need at most 20,000 of fuel, 1,000 items and
    10,000 states.
    """

    lexer_fuel: int = 200_000
    items: int = 50_000
    lexer_states: int = 250_000


_EBNF = re.compile(r"^\s*[\w-]+\s*::=", re.MULTILINE)  # a rule as vLLM and llama.cpp write it
STRANGERS = StepLimits(50_000, 5_000, 25_000)  # a mask at these limits takes some 10 ms, and forced text 50 ms


def make_matcher(tokens: LLTokenizer, source: GrammarSource, steps: StepLimits) -> LLMatcher:
    """Return a matcher of a form. It may be in a state of error, and the library may raise errors of its own."""
    from llguidance import LLMatcher

    return LLMatcher(tokens, _grammar_text(source), log_level=0, limits=_limits(steps))


def compute_beginning(matcher: LLMatcher) -> None:
    """Do the work that the first token of an output needs: a mask, forced tokens and the mask after the first one.

    It may end in a state of error.
    """
    matcher.compute_bitmask()
    if forced := matcher.compute_ff_tokens():
        matcher.consume_tokens(forced[:1])
        matcher.compute_bitmask()


def _grammar_text(source: GrammarSource) -> str:
    """Return a source as a grammar of the library."""
    from llguidance import LLMatcher, grammar_from

    if source.kind == "json":
        return LLMatcher.grammar_from_json_schema(source.text, defaults={"whitespace_flexible": not source.compact})
    if source.kind == "choice":
        return grammar_from("choice", source.text)
    if source.kind == "regex":
        return LLMatcher.grammar_from_regex(source.text)
    if _EBNF.search(source.text):
        from speculant.structured.ebnf import ebnf_to_lark

        return LLMatcher.grammar_from_lark(ebnf_to_lark(source.text))
    return LLMatcher.grammar_from_lark(source.text)


def _limits(steps: StepLimits) -> LLParserLimits:
    """Return the library's limits. They bound most of the work for a form, and each mask, but not all of compiling.

    The fuel that compiling leaves may be spent on bytes that are forced at the beginning: `(a{1000}){1000}` forces a
    million. Compiling the largest accepted texts takes 100,000.
    """
    from llguidance import LLParserLimits

    return LLParserLimits(
        initial_lexer_fuel=250_000,
        step_lexer_fuel=steps.lexer_fuel,
        step_max_items=steps.items,
        max_lexer_states=steps.lexer_states,
        max_grammar_size=100_000,
        verbose_errors=False,
    )


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


MOST = 300  # characters of a reason
_OF_SCHEMA = "failed to compile JSON schema: "
_PLACE = re.compile(r"at (\d+)\((\d+)\): ")
_LISTING = re.compile(r"\n\s*\d+ \| ")  # of the source, in which the error is marked
_ENDLESS = ("NoExtensionBias", "circular references")
_REWORDED = (  # messages of the library, and their meaning for a schema
    (r"oneOf constraints are not supported", "two alternatives of a oneOf may fit the same value: use anyOf"),
    (r"Failed to generate regex for (?:integer|float) range", "a bound of a number is too large: use one within 1e17"),
    (r"Unsatisfiable schema: Regex is empty", "no text fits both a string's pattern and its other keywords"),
    (r"regex parse error.*error: ([^\n]*)", r"a pattern is not valid: \1"),
    (r"Expected f64 for ('\w+'), got (.*)", r"Expected a number for \1, got \2"),
    (r"Resource '(?:json-schema:///)?([^']*)'.*", r"the schema refers to '\1', which is not part of it"),
)
_PLAIN = re.compile(  # messages of the library in the schema's own words
    r"(Unimplemented keys: |Unsatisfiable schema: |Unknown format: |Invalid type: |Expected |Pointer '|Anchor '"
    r"|Value for '|patternProperty regexes /|\w+ must be |schema too large)",
)
_UNKNOWN = "the schema is too large, or has a keyword with a value that is not supported"


def has_no_text(error: str) -> bool:
    """Whether an error says that nothing has the form."""
    return any(sign in error for sign in _ENDLESS)


def is_of_schema(error: str) -> bool:
    """Whether an error is about a JSON schema within a grammar."""
    return _OF_SCHEMA in error


def reason_of(error: str, kind: str = "") -> str:
    """Return an error of the library in one line, without its traceback, its grammars and its options.

    kind: of the form's source.
    """
    text = _LISTING.split(error.partition("<backtrace>")[0].replace("<non-verbose/>", ""))[0].strip()
    place, text = _PLACE.match(text), _PLACE.sub("", text, count=1)
    if has_no_text(text):
        return "no text has this form, as for a schema or a rule that refers only to itself"
    text = text.removeprefix("lexer error: ").rpartition(_OF_SCHEMA)[2]
    if kind != "grammar" or is_of_schema(error):
        for pattern, words in _REWORDED:
            if found := re.search(pattern, text, re.DOTALL):
                return _in_one_line(found.expand(words))
    if kind == "json" or is_of_schema(error):
        return _in_one_line(text if _PLAIN.match(text) else _UNKNOWN)
    return _in_one_line(f"line {place[1]}, column {place[2]}: {text}" if place and kind == "grammar" else text)


def _in_one_line(text: str) -> str:
    line = " ".join(text.split())
    return line if len(line) <= MOST else line[: MOST - 3] + "..."
