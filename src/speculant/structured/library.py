"""The grammar library's calls that compile a form. This module needs no tensors, so that a small process can use it."""

from __future__ import annotations

from typing import TYPE_CHECKING

from speculant.structured.spec import GrammarSource

if TYPE_CHECKING:
    from llguidance import LLMatcher, LLParserLimits, LLTokenizer


def make_matcher(tokens: LLTokenizer, source: GrammarSource) -> LLMatcher:
    """Return a matcher of a form. It may be in a state of error, and the library may raise errors of its own."""
    from llguidance import LLMatcher

    return LLMatcher(tokens, _grammar_text(source), log_level=0, limits=_limits())


def compute_beginning(matcher: LLMatcher) -> None:
    """Do the work that the first token of an output needs: a mask, forced tokens and the mask after the first one."""
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
    return (
        LLMatcher.grammar_from_regex(source.text)
        if source.kind == "regex"
        else LLMatcher.grammar_from_lark(source.text)
    )


def _limits() -> LLParserLimits:
    """Return the library's limits. They bound most of the work for a form, and each mask, but not all of compiling.

    The fuel that compiling leaves may be spent on bytes that are forced at the beginning: `(a{1000}){1000}` forces a
    million. Compiling the largest accepted texts takes 100,000. A state of the lexer takes one or two kB of memory.
    """
    from llguidance import LLParserLimits

    return LLParserLimits(
        initial_lexer_fuel=250_000, max_grammar_size=100_000, max_lexer_states=50_000, verbose_errors=False
    )
