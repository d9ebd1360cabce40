"""The reasoning is separated from the answer, however the stream is split."""

from __future__ import annotations

import itertools
from collections.abc import Sequence

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from speculant.engine.prompts import RenderedPrompt
from speculant.serving.reasoning import ReasoningDelta, ReasoningParser, find_reasoning
from speculant.serving.tools import TextDelta
from speculant.structured.reasoned import Reasoning
from speculant.text.chat import expect_reasoning
from tests.examples import examples
from tests.timing import cpu_seconds, is_within

PIECES = st.sampled_from(["<think>", "</think>", "<thi", "</", " ", "\n", "text"]) | st.text(max_size=3)


def read(text: str, cuts: Sequence[int] = (), opened: bool = False) -> tuple[str, str]:
    """Return reasoning and answer, and check that they do not alternate."""
    parser = ReasoningParser(opened=opened)
    places = [0, *sorted(cuts), len(text)]
    deltas = [delta for i, j in itertools.pairwise(places) for delta in parser.feed(text[i:j])]
    deltas += parser.finish()
    kinds = [kind for kind, _ in itertools.groupby(deltas, type)]
    assert kinds in ([], [TextDelta], [ReasoningDelta], [ReasoningDelta, TextDelta])
    assert all(delta.text for delta in deltas)
    return (
        "".join(delta.text for delta in deltas if isinstance(delta, ReasoningDelta)),
        "".join(delta.text for delta in deltas if isinstance(delta, TextDelta)),
    )


@pytest.mark.parametrize(
    ("text", "opened", "expected"),
    [
        ("<think>\nI see.\n\nGood.\n</think>\n\nYes.", False, ("I see.\n\nGood.", "Yes.")),
        ("\n<think></think>Yes.", False, ("", "Yes.")),
        ("<think>a < b </thin", False, ("a < b </thin", "")),
        ("I see.\n</think>\n\nYes. </think>", True, ("I see.", "Yes. </think>")),
        ("cut off ", True, ("cut off ", "")),
        (" <thing> is </think>.", False, ("", " <thing> is </think>.")),
        ("Yes. <think>no</think>", False, ("", "Yes. <think>no</think>")),
        ("<thi", False, ("", "<thi")),
    ],
)
def test_reasoning_is_separated(text: str, opened: bool, expected: tuple[str, str]) -> None:
    assert read(text, opened=opened) == expected
    assert read(text, range(1, len(text)), opened) == expected


@settings(max_examples=examples(1000), deadline=None)
@given(pieces=st.lists(PIECES, max_size=10), opened=st.booleans(), data=st.data())
def test_cuts_change_nothing(pieces: list[str], opened: bool, data: st.DataObject) -> None:
    text = "".join(pieces)
    cuts = data.draw(st.lists(st.integers(0, len(text)), max_size=8))
    assert read(text, cuts, opened) == read(text, opened=opened)


def test_pieces_are_streamed_at_once() -> None:
    parser = ReasoningParser()
    fed = [parser.feed(piece) for piece in ("<think>", "I ", "see", " </th", "ink>", "Yes", ".")]
    assert fed == [
        [],
        [ReasoningDelta("I")],
        [ReasoningDelta(" see")],
        [],
        [],
        [TextDelta("Yes")],
        [TextDelta(".")],
    ]


@pytest.mark.parametrize(
    ("template", "prompt", "split"),
    [
        ("{{ '</think>' }}", "<|assistant|>", ("", "a</think>b")),
        ("{{ '</think>' }}", "<|assistant|><think>\n", ("a", "b")),
        ("{{ '</think>' }}", "<think>\n\n</think>\n\n", ("", "a</think>b")),
    ],
)
def test_a_prompt_may_open_the_reasoning(template: str, prompt: str, split: tuple[str, str]) -> None:
    parser = find_reasoning(RenderedPrompt(prompt, expected=expect_reasoning(template, prompt)))
    assert parser is not None
    deltas = [*parser.feed("a</think>b"), *parser.finish()]
    reasoning = "".join(delta.text for delta in deltas if isinstance(delta, ReasoningDelta))
    assert (reasoning, "".join(delta.text for delta in deltas if isinstance(delta, TextDelta))) == split


def test_a_template_without_tags_has_no_reasoning() -> None:
    for template in ("{{ messages }}", None):
        assert expect_reasoning(template, "<think>") is None
    assert find_reasoning(RenderedPrompt("<think>")) is None
    assert find_reasoning(None) is None


def test_a_tag_in_a_user_message_opens_no_reasoning() -> None:
    for prompt, quoted, opened in (
        ("user: What is <think>\n", "What is <think>", False),
        ("user: What is <think>\nassistant: <think>\n", "What is <think>", True),
        ("user: hi\n<think>", "hi", True),
        ("<think>", " ", True),
    ):
        expected = expect_reasoning("</think>", prompt, quoted)
        assert expected is not None
        assert expected.opened == opened


@pytest.mark.parametrize("opened", [False, True])
def test_tags_in_other_tokens_than_the_form_s_are_text(opened: bool) -> None:
    """The form does not read the same text in other tokens as a tag, so neither does the reader."""

    def read_tokens(*pieces: tuple[str, int]) -> tuple[str, str]:
        parser = ReasoningParser(opened=opened, tokens=Reasoning(1, 2, opened))
        deltas = [delta for text, token in pieces for delta in parser.feed(text, token)] + parser.finish()
        thoughts = "".join(delta.text for delta in deltas if isinstance(delta, ReasoningDelta))
        return thoughts, "".join(delta.text for delta in deltas if isinstance(delta, TextDelta))

    start = [] if opened else [("<think>", 1)]
    assert read_tokens(*start, ("a</th", 7), ("ink>b", 7), ("</think>", 2), ("c", 7)) == ("a</think>b", "c")
    assert read_tokens(*start, ("", 7), ("a</think>", 2), ("</think>", 7)) == ("a", "</think>"), "held back"
    if not opened:
        assert read_tokens(("<think>", 7), ("a</think>", 2)) == ("", "<think>a</think>")


@pytest.mark.parametrize("text", ["</think" * 5_000, " " * 30_000, "<think>" + " " * 30_000])
def test_time_is_linear(text: str) -> None:
    length, short = len(text), len(text) // 10
    bound_s = 40 * cpu_seconds(lambda: read(text[:short], range(1, short), opened=True)) + 0.1
    assert is_within(bound_s, lambda: read(text, range(1, length), opened=True))  # 10 if linear, 100 if quadratic
