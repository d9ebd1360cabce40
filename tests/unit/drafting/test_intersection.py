"""Which tokens two tokenizers share, and how a draft reads the others."""

from __future__ import annotations

import pytest
from tokenizers import Tokenizer as Backend, decoders, models

from speculant.drafting import intersect
from speculant.errors import PairError
from speculant.text import Tokenizer, token_bytes
from tests.unit.text.tokenizers_for_tests import byte_level, metaspace_style, sentencepiece_style

TEXTS = ["ab é 世 the fox", " a  b\n\n\tab", "👍🏽 naïve <tool>", "größer", ""]
KINDS = [byte_level, sentencepiece_style, metaspace_style]


def pair_of(target: object, draft: object) -> tuple[Tokenizer, Tokenizer]:
    return target(), draft()  # type: ignore[operator]


@pytest.mark.covering(1)
@pytest.mark.parametrize("text", TEXTS)
@pytest.mark.parametrize("draft", KINDS)
@pytest.mark.parametrize("target", KINDS)
def test_a_draft_reads_the_bytes_of_a_text(target: object, draft: object, text: str) -> None:
    """Whole characters and parts of them, with every token that the target has for the text."""
    ours, theirs = pair_of(target, draft)
    vocabulary, spelt, own = intersect(ours, theirs, ours.vocab_size), token_bytes(ours), token_bytes(theirs)
    tokens = ours.encode(text, add_special_tokens=False)
    for part in (tokens, tokens[1:], tokens[:-1]):
        read = vocabulary.draft_tokens(vocabulary.read(part))
        assert b"".join(own[each] for each in read) == b"".join(spelt[each] for each in part)
        assert len(read) >= len(part)
    split = vocabulary.split(tokens)
    assert [each for ids in split for each in ids] == vocabulary.begin(tokens) + vocabulary.read(tokens)
    assert all(split)


@pytest.mark.parametrize("draft", KINDS)
@pytest.mark.parametrize("target", KINDS)
def test_shared_tokens_have_the_same_bytes(target: object, draft: object) -> None:
    ours, theirs = pair_of(target, draft)
    vocabulary, spelt, own = intersect(ours, theirs, ours.vocab_size), token_bytes(ours), token_bytes(theirs)
    names, others = ({token: name for name, token in each.vocab().items()} for each in (ours, theirs))
    assert len({*vocabulary.shared.values()}) == len(vocabulary.shared), "no two tokens are one of the draft's"
    for token, draft_token in vocabulary.shared.items():
        if token in spelt:
            assert spelt[token] == own[draft_token]
        else:
            assert names[token] == others[draft_token]
    assert {*vocabulary.own} == {*own, *theirs.special_ids} - {*vocabulary.shared.values()}
    shared_bytes = {spelt[token] for token in vocabulary.shared if token in spelt}
    assert shared_bytes == {*spelt.values()} & {*own.values()}


def test_a_character_is_preferred_to_its_byte() -> None:
    """`a` has a token and `<0x61>`, of which a text has the first."""
    ours, theirs = byte_level(), sentencepiece_style()
    vocabulary = intersect(ours, theirs, ours.vocab_size)
    assert vocabulary.shared[ours.vocab()["a"]] == theirs.vocab()["a"]
    assert vocabulary.shared[ours.vocab()["Ċ"]] == theirs.vocab()["<0x0A>"]
    back = intersect(theirs, ours, theirs.vocab_size)
    assert theirs.vocab()["<0x61>"] not in back.shared
    assert back.draft_tokens(back.read([theirs.vocab()["<0x61>"]])) == [ours.vocab()["a"]]


def words(names: list[str], begin: str, end: str, special: tuple[str, ...]) -> Tokenizer:
    backend = Backend(models.WordLevel({name: place for place, name in enumerate(names)}, unk_token=names[0]))
    backend.decoder = decoders.Fuse()
    backend.add_special_tokens(list(special))
    return Tokenizer(backend, {"bos_token": begin, "eos_token": end})


def test_special_tokens_are_shared_by_name_alone() -> None:
    """Marks of beginning and end are read as the draft's, and never drafted for one another."""
    target = words(["a", "<s>", "<end>", "<call>", "<x>"], "<s>", "<end>", ("<s>", "<end>", "<call>"))
    draft = words(
        ["a", "<call>", "<stop>", "<x>", "<begin>"], "<begin>", "<stop>", ("<call>", "<stop>", "<begin>", "<x>")
    )
    vocabulary = intersect(target, draft, 7)
    assert vocabulary.shared == {0: 0, 3: 1}, "<x> is special in one of the two alone"
    assert vocabulary.lacks == 5
    assert vocabulary.draft_tokens(vocabulary.read([1, 2, 3])) == [4, 2, 1]
    assert vocabulary.begin([1, 0]) == []
    assert vocabulary.draft_tokens(vocabulary.read([5, 6])) == [vocabulary.substitute] * 2, "ids without a token"


def test_what_a_draft_expects_before_a_text_is_read() -> None:
    target = words(["a", "b"], "", "", ())
    draft = byte_level()  # it puts <s> before a text
    vocabulary = intersect(target, draft, 2)
    assert vocabulary.draft_tokens(vocabulary.begin([0])) == [draft.bos_id]
    assert vocabulary.begin([]) == []


def test_tokenizers_without_a_common_token_are_refused() -> None:
    with pytest.raises(PairError, match="no token in common"):
        intersect(words(["a", "<s>"], "<s>", "", ("<s>",)), words(["b", "<s>"], "<s>", "", ("<s>",)), 2)
