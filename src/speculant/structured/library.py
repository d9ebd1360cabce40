"""The grammar library's calls that compile a form. This module needs no tensors, so that a small process can use it."""

from __future__ import annotations

from typing import TYPE_CHECKING, NamedTuple

from speculant.structured.spec import GrammarSource

if TYPE_CHECKING:
    from llguidance import LLMatcher, LLParserLimits, LLTokenizer


class StepLimits(NamedTuple):
    """Work that one mask may take, and states that the lexer of one form may have, of one or two kB each.

    The defaults are the library's. Over 50,000 tokens ordinary forms need at most 20,000 of fuel, 1,000 items and
    10,000 states.
    """

    lexer_fuel: int = 200_000
    items: int = 50_000
    lexer_states: int = 250_000


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
    return (
        LLMatcher.grammar_from_regex(source.text)
        if source.kind == "regex"
        else LLMatcher.grammar_from_lark(source.text)
    )


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
