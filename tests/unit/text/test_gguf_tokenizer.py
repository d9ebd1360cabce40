"""A tokenizer that a GGUF file describes gives the tokens of the tokenizer.json that it was made from."""

from __future__ import annotations

import json
import random
import time
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest
from gguf import GGUFWriter
from tokenizers import Tokenizer as Backend, pre_tokenizers

from speculant.errors import ModelError
from speculant.models import resolve_source
from speculant.text import SPLITS, Tokenizer, TokenType, read_gguf_tokenizer
from tests.examples import examples
from tests.gguf_tokenizers import metadata_of
from tests.texts import texts
from tests.unit.text.tokenizers_for_tests import SETTINGS, byte_level, pieces_of, sentencepiece_style

ALPHABET = sorted(pre_tokenizers.ByteLevel.alphabet())
BYTES = [f"<0x{byte:02X}>" for byte in range(256)]
KEY = "tokenizer.ggml"

# A text, and the words of each kind of splitting, as llama.cpp gives them. But gpt-4o and tekken are as in the original
# tokenizers, which know capitals beyond ASCII, and marks: llama.cpp keeps "éÀ" together and splits "क्षि".
TEXT = "I'll DON'T 1234 x²½ éÀь 你好,世。 ...\n\n  a=(b);\t#ok\r\nक्षि  "
WORDS = {
    "default": "I|'|ll| DON|'|T| |123|4| x|²½| éÀь| 你好|,|世|。| |...|\n\n | a|=(|b|);|\t|#|ok|\r|\n|क|्|ष|ि|  ",
    "llama-bpe": "I|'ll| DON|'T| |123|4| x|²½| éÀь| 你好|,世|。| ...\n\n| | a|=(|b|);|\t|#ok|\r\n|क|्ष|ि|  ",
    "qwen2": "I|'ll| DON|'T| |1|2|3|4| x|²|½| éÀь| 你好|,世|。| ...\n\n| | a|=(|b|);|\t|#ok|\r\n|क|्ष|ि|  ",
    "qwen35": "I|'ll| DON|'T| |1|2|3|4| x|²|½| éÀь| 你好|,世|。| ...\n\n| | a|=(|b|);|\t|#ok|\r\n|क्षि|  ",
    "gpt-2": "I|'ll| DON|'|T| 1234| x|²½| éÀь| 你好|,|世|。| ...|\n\n | a|=(|b|);|\t|#|ok|\r|\n|क|्|ष|ि|  ",
    "smollm": "I|'ll| DON|'|T| |1|2|3|4| x|²|½| éÀь| 你好|,|世|。| ...|\n\n | a|=(|b|);|\t|#|ok|\r|\n|क|्|ष|ि|  ",
    "falcon": "I|'|ll| DON|'|T| |123|4| x|²½| éÀь| 你好|,|世|。| |...|\n\n | a|=(|b|);|\t|#|ok|\r|\n|क|्|ष|ि|  ",
    "gpt-4o": "I'll| DON'T| |123|4| x|²½| é|Àь| 你好|,世|。| ...\n\n| | a|=(|b|);|\t|#ok|\r\n|क्षि|  ",
    "tekken": "I|'ll| DON|'T| |1|2|3|4| x|²|½| é|Àь| 你好|,世|。| ...\n\n| | a|=(|b|);|\t|#ok|\r\n|क्षि|  ",
    "deepseek-llm": "I|'|ll| DON|'|T| |1234| x|²½| éÀь| |你好|,|世|。| ...|\n|\n| | a|=(|b|);|\t#|ok|\r|\n|क्षि|  ",
    "deepseek-coder": "I|'|ll| DON|'|T| |1|2|3|4| x|²|½| éÀь| |你好|,|世|。| ...|"
    "\n|\n| | a|=|(|b|);|\t#|ok|\r|\n|क|्|ष|ि|  ",
    "deepseek-v3": "I|'ll| DON|'T| |123|4| x|²½| éÀь| |你好|,|世|。| ...\n\n| | a|=(|b|);|\t|#ok|\r\n|क्षि|  ",
}


def bytes_alone(pre: str = "gpt-2", *more: str, **entries: Any) -> dict[str, Any]:
    """Metadata of a tokenizer whose tokens are the bytes and a few more, without merges."""
    tokens = {f"{KEY}.tokens": [*ALPHABET, *more], f"{KEY}.merges": []}
    return (
        tokens | {f"{KEY}.model": "gpt2", f"{KEY}.pre": pre} | {f"{KEY}.{key}": each for key, each in entries.items()}
    )


def scored(scores: Mapping[str, float], **entries: Any) -> dict[str, Any]:
    """Metadata of a SentencePiece tokenizer of some tokens and the bytes."""
    tokens = ["<unk>", "<s>", "</s>", *BYTES, *scores]
    types = [TokenType.UNKNOWN, TokenType.CONTROL, TokenType.CONTROL, *[TokenType.BYTE] * 256]
    return {
        f"{KEY}.model": "llama",
        f"{KEY}.tokens": tokens,
        f"{KEY}.token_type": [int(each) for each in types] + [1] * len(scores),
        f"{KEY}.scores": [0.0] * 259 + [*scores.values()],
    } | {f"{KEY}.{key}": each for key, each in entries.items()}


def words(pre: str, text: str) -> list[str]:
    """Split a text into words by a kind."""
    split = read_gguf_tokenizer(bytes_alone(pre, add_bos_token=False)).backend.pre_tokenizer.pre_tokenize_str(text)
    return [text[start:end] for _, (start, end) in split]


def demo() -> tuple[Tokenizer, dict[str, Any]]:
    """The embedded target's tokenizer, and the metadata of a GGUF file with it."""
    folder = resolve_source("demo")
    content = json.loads(Path(folder / "tokenizer.json").read_text(encoding="utf-8"))
    settings = json.loads(Path(folder / "tokenizer_config.json").read_text(encoding="utf-8"))
    return Tokenizer.from_folder(folder), metadata_of(content, settings)


def write(metadata: Mapping[str, Any], file: Path) -> Path:
    """Write a GGUF file without tensors."""
    writer = GGUFWriter(str(file), "llama")
    for key, value in metadata.items():
        if isinstance(value, list):
            writer.add_array(key, value)
        elif isinstance(value, bool):
            writer.add_bool(key, value)
        elif isinstance(value, int):
            writer.add_uint32(key, value)
        else:
            writer.add_string(key, value)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.close()
    return file


@pytest.mark.slow
def test_the_demo_pair_has_the_same_tokens_from_a_gguf_file() -> None:
    original, metadata = demo()
    read = read_gguf_tokenizer(metadata)
    for text in texts(2000, ["<|endoftext|>"]):
        ids = original.encode(text)
        assert read.backend.encode(text).ids == ids
        assert read.backend.decode(ids) == original.decode(ids)
    assert read.backend.get_vocab() == original.vocab()
    told = {name: read.settings[name] for name in ("bos_token", "eos_token", "chat_template")}
    assert told == {name: original.settings[name] for name in told}


@pytest.mark.parametrize("original", [byte_level(), sentencepiece_style()], ids=["byte-level", "sentencepiece"])
def test_a_converted_tokenizer_gets_the_same_parts(original: Tokenizer, tmp_path: Path) -> None:
    expected = json.loads(original.backend.to_str())
    file = write(metadata_of(expected, SETTINGS), tmp_path / "model.gguf")
    tokenizer = Tokenizer.load(file)
    found = json.loads(tokenizer.backend.to_str())
    assert (found["decoder"], found["normalizer"]) == (expected["decoder"], expected["normalizer"])
    assert [each["content"] for each in found["added_tokens"]] == [each["content"] for each in expected["added_tokens"]]
    assert tokenizer.vocab() == original.vocab()
    assert (tokenizer.bos_id, tokenizer.eos_id) == (original.bos_id, original.eos_id)
    for text in texts(examples(300), ["<s>", "</s>"]):
        ids = original.encode(text)
        assert tokenizer.encode(text) == ids
        assert "".join(pieces_of(tokenizer, ids)) == original.decode(ids)


def test_every_kind_splits_as_llama_cpp_does() -> None:
    assert {SPLITS[pre].patterns for pre in WORDS} == {split.patterns for split in SPLITS.values()}
    for pre, expected in WORDS.items():
        assert "|".join(words(pre, TEXT)) == expected, pre


def test_a_line_break_before_a_digit_stays_whole() -> None:
    assert words("smollm", "a\n\n1") == ["a", "\n\n", "1"]
    assert words("gpt-2", "a\n\n1") == ["a", "\n", "\n", "1"]


def test_a_word_that_is_a_token_may_be_kept() -> None:
    def encode(pre: str) -> list[str]:
        tokens: list[str] = (
            read_gguf_tokenizer(bytes_alone(pre, "abc", add_bos_token=False)).backend.encode("abc").tokens
        )
        return tokens

    assert encode("llama-bpe") == encode("tekken") == ["abc"]
    assert encode("gpt-2") == encode("qwen2") == ["a", "b", "c"]


def test_the_first_of_equal_merges_counts() -> None:
    merges = ["b c", "a b", "b c"]
    metadata = bytes_alone("gpt-2", "ab", "bc") | {f"{KEY}.merges": merges}
    assert read_gguf_tokenizer(metadata).backend.encode("abc").tokens == ["a", "bc"]


def slow_merges(text: str, scores: Mapping[str, float]) -> list[str]:
    """SentencePiece's algorithm: join the neighbours whose text has the highest score, the leftmost of equal ones."""
    symbols = [*text]
    while True:
        joined = ((scores.get(symbols[i] + symbols[i + 1]), -i) for i in range(len(symbols) - 1))
        found = [(score, place) for score, place in joined if score is not None]
        if not found:
            break
        place = -max(found)[1]
        symbols[place : place + 2] = [symbols[place] + symbols[place + 1]]
    known = {*scores}
    return [
        each
        for symbol in symbols
        for each in ([symbol] if symbol in known else map("<0x{:02X}>".format, symbol.encode()))
    ]


def random_scores(chance: random.Random) -> dict[str, float]:
    """Scores of characters, and of tokens that are joined at random; some can't be reached."""
    tokens = ["▁", *"abcé"]
    while len(tokens) < 40:
        text = chance.choice(tokens) + chance.choice(tokens)
        if text not in tokens and len(text) < 12:
            tokens.append(text)
    return {token: chance.uniform(-9, 0) for token in tokens}


def test_scores_merge_as_sentencepiece_does() -> None:
    chance = random.Random(5)
    for _ in range(20):
        scores = random_scores(chance)
        backend = read_gguf_tokenizer(scored(scores, add_bos_token=False)).backend
        for _ in range(100):
            text = "".join(chance.choices("  abcéx世\n", k=chance.randint(0, 40)))
            expected = slow_merges("▁" + text.replace(" ", "▁"), scores) if text else []
            assert backend.encode(text).tokens == expected
            assert backend.decode(backend.encode(text).ids) == text


def test_a_run_of_equal_scores_grows_from_the_left() -> None:
    scores = {"▁" * length: -1e9 if length > 1 else -1.0 for length in range(1, 17)}
    backend = read_gguf_tokenizer(scored(scores, add_bos_token=False, add_space_prefix=False)).backend
    for length in range(60):
        assert backend.encode(" " * length).tokens == slow_merges("▁" * length, scores)


def test_the_prefix_of_a_text_is_a_switch() -> None:
    scores = {"▁": -1.0, "a": -2.0, "▁a": -0.5}
    for prefix, tokens in ((True, ["<s>", "▁a", "</s>", "▁a"]), (False, ["<s>", "a", "</s>", "a"])):
        backend = read_gguf_tokenizer(scored(scores, add_space_prefix=prefix)).backend
        assert backend.encode("a</s>a").tokens == tokens
        assert backend.decode(backend.encode("a").ids) == "a"


@pytest.mark.parametrize(
    ("entries", "expected"),
    [
        ({}, "<s> a"),
        ({"add_bos_token": False}, "a"),
        ({"add_eos_token": True}, "<s> a </s>"),
        ({"add_bos_token": False, "add_eos_token": True, "eos_token_id": 1}, "a <s>"),
    ],
)
def test_tokens_around_a_text(entries: dict[str, Any], expected: str) -> None:
    backend = read_gguf_tokenizer(scored({"a": -1.0}, add_space_prefix=False, **entries)).backend
    assert " ".join(backend.encode("a").tokens) == expected
    assert backend.encode("a", add_special_tokens=False).tokens == ["a"]


@pytest.mark.parametrize(("pre", "adds"), [("llama-bpe", True), ("tekken", True), ("gpt-2", False), ("qwen2", False)])
def test_each_kind_has_its_own_default_for_the_first_token(pre: str, adds: bool) -> None:
    tokens = read_gguf_tokenizer(bytes_alone(pre, "<s>", bos_token_id=256)).backend.encode("a").tokens
    assert tokens == (["<s>", "a"] if adds else ["a"])


def test_types_make_added_tokens_and_special_ones() -> None:
    types = [1] * 256 + [3, 4, 1, 1, 5]
    metadata = bytes_alone("gpt-2", "<ctl>", "<user>", "</s>", "<|im_end|>", "<unused>", token_type=types)
    tokenizer = Tokenizer(*read_gguf_tokenizer(metadata))
    assert tokenizer.special_ids == {256, 259}  # an end of a turn is special in old files, too
    assert tokenizer.encode("<user><ctl><|im_end|>") == [257, 256, 259]
    assert len(tokenizer.encode("</s>")) == 4
    assert len(tokenizer.encode("<unused>")) == 8


def test_tokens_of_phi3_take_in_the_spaces_after_them() -> None:
    metadata = scored({"a": -1.0, "▁": -2.0}, add_bos_token=False)
    named = metadata | {"general.name": "Phi3 mini"}

    def decoded(text: str, given: dict[str, Any]) -> str:
        backend = read_gguf_tokenizer(given).backend
        return str(backend.decode(backend.encode(text).ids, skip_special_tokens=False))

    assert decoded("</s> \n a", metadata) == "</s>  \n a"
    assert decoded("</s> \n a", named) == "</s> a"
    assert decoded("<s> a", named) == decoded("<s> a", metadata) == "<s>  a"


def test_templates_become_a_text_or_a_list() -> None:
    def templates(**entries: Any) -> Any:
        stored = {f"tokenizer.{key}": each for key, each in entries.items()}
        return read_gguf_tokenizer(bytes_alone() | stored).settings.get("chat_template")

    assert templates() is None
    assert templates(chat_template="x") == "x"
    named = templates(**{"chat_template": "x", "chat_templates": ["tool_use"], "chat_template.tool_use": "y"})
    assert named == [{"name": "default", "template": "x"}, {"name": "tool_use", "template": "y"}]


def test_a_file_with_named_templates_uses_the_one_for_tools(tmp_path: Path) -> None:
    named = {"tokenizer.chat_templates": ["tool_use"], "tokenizer.chat_template.tool_use": "y"}
    metadata = bytes_alone("gpt-2", "ab") | {f"{KEY}.merges": ["a b"], "tokenizer.chat_template": "x"}
    tokenizer = Tokenizer.load(write(metadata | named, tmp_path / "a.gguf"))
    assert (tokenizer.template_for(tools=False), tokenizer.template_for(tools=True)) == ("x", "y")


@pytest.mark.parametrize(("own", "beside", "expected"), [(None, "b", "b"), ("x", "b", "x"), (None, None, None)])
def test_a_file_without_a_template_gets_the_one_beside_it(
    tmp_path: Path, own: str | None, beside: str | None, expected: str | None
) -> None:
    metadata = bytes_alone("gpt-2", "ab") | {f"{KEY}.merges": ["a b"]}
    file = write(metadata | ({} if own is None else {"tokenizer.chat_template": own}), tmp_path / "a.gguf")
    if beside is not None:
        (tmp_path / "chat_template.jinja").write_text(beside, encoding="utf-8")
    assert Tokenizer.load(file).chat_template == expected


def test_a_stored_tokenizer_json_takes_precedence() -> None:
    stored = byte_level().backend
    metadata = bytes_alone("gpt-9", eos_token_id=5) | {"tokenizer.huggingface.json": stored.to_str()}
    read = read_gguf_tokenizer(metadata)
    assert read.backend.to_str() == stored.to_str()
    assert read.settings["eos_token"] == ALPHABET[5]


DAMAGE = {
    "no kind": ({f"{KEY}.model": None}, "no tokenizer.ggml.model"),
    "kind": ({f"{KEY}.model": "bert"}, "'bert'(.|\n)*gpt2, llama"),
    "pre": ({f"{KEY}.pre": "gpt-9"}, "'gpt-9'(.|\n)*llama-bpe"),
    "no tokens": ({f"{KEY}.tokens": None}, "no tokenizer.ggml.tokens"),
    "tokens": ({f"{KEY}.tokens": [1, 2]}, "another type than str"),
    "a text": ({f"{KEY}.tokens": "abc"}, "'abc'; expected: list"),
    "twice": ({f"{KEY}.tokens": [*ALPHABET, "a"]}, "'a' twice"),
    "no byte": ({f"{KEY}.tokens": ["abc"]}, "any single byte"),
    "empty": ({f"{KEY}.tokens": [""] * 10**6}, "no text"),
    "no merges": ({f"{KEY}.merges": None}, "no tokenizer.ggml.merges"),
    "merge of one": ({f"{KEY}.merges": ["ab"]}, "two tokens"),
    "merge of three": ({f"{KEY}.merges": ["a b c"]}, "two tokens"),
    "merge to none": ({f"{KEY}.merges": ["a b"]}, "gives 'ab', which is no token"),
    "merge of none": ({f"{KEY}.merges": ["a €"], f"{KEY}.tokens": ["a", "a€"]}, "out of vocabulary"),
    "types": ({f"{KEY}.token_type": [1]}, "256 tokens, but types for 1"),
    "a type": ({f"{KEY}.token_type": ["x"] * 256}, "another type than int"),
    "id": ({f"{KEY}.eos_token_id": 256}, "eos_token_id is 256, but there are 256 tokens"),
    "negative": ({f"{KEY}.bos_token_id": -1}, "bos_token_id is -1"),
    "no id": ({f"{KEY}.add_bos_token": True}, "adds a BOS token"),
    "switch": ({f"{KEY}.add_bos_token": 1}, "expected: bool"),
    "template": ({"tokenizer.chat_template": 1}, "expected: str"),
    "json": ({"tokenizer.huggingface.json": "{"}, "can't be used"),
}


@pytest.mark.parametrize(("change", "reason"), DAMAGE.values(), ids=DAMAGE)
def test_damage_is_named(change: dict[str, Any], reason: str) -> None:
    with pytest.raises(ModelError, match=reason):
        read_gguf_tokenizer(bytes_alone() | change)


@pytest.mark.parametrize(
    ("change", "reason"),
    [
        ({f"{KEY}.scores": None}, "no tokenizer.ggml.scores"),
        ({f"{KEY}.scores": [1.0]}, "scores for 1"),
        ({f"{KEY}.scores": [float("nan")] * 260}, "not numbers"),
        ({f"{KEY}.tokens": list(map(str, range(260)))}, "for any byte"),
        ({f"{KEY}.tokens": [*BYTES, "a", "b", "c", "d" * 2**14]}, "too many long tokens"),
    ],
)
def test_damaged_scores_are_named(change: dict[str, Any], reason: str) -> None:
    with pytest.raises(ModelError, match=reason):
        read_gguf_tokenizer(scored({"a": -1.0}) | change)


def test_the_file_is_named(tmp_path: Path) -> None:
    file = write(bytes_alone("gpt-9"), tmp_path / "model.gguf")
    with pytest.raises(ModelError, match=r"model\.gguf: tokenizer\.ggml\.pre is 'gpt-9'"):
        Tokenizer.load(file)


WRONG: list[Any] = [None, 0, -1, 2**40, 1.5, "x", "", True, [], [1], [""], ["a", "a"], [None], [True], [0.5], {}, [[1]]]


@pytest.mark.parametrize("metadata", [bytes_alone("llama-bpe", "ab", bos_token_id=3), scored({"a": -1.0, "aa": -2.0})])
def test_any_entry_may_be_anything(metadata: dict[str, Any]) -> None:
    more = ["eos_token_id", "add_eos_token", "add_space_prefix", "token_type", "unknown_token_id"]
    keys = {*metadata, *(f"{KEY}.{name}" for name in more), "tokenizer.chat_template", "tokenizer.chat_templates"}
    for key in sorted(keys | {"tokenizer.huggingface.json", "general.name"}):
        for value in WRONG:
            started = time.process_time()
            try:
                backend = read_gguf_tokenizer(metadata | {key: value}).backend
            except ModelError:
                continue
            finally:
                assert time.process_time() - started < 1
            assert isinstance(backend, Backend)
            assert backend.decode(backend.encode("a b").ids)
