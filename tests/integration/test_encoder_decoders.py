"""Encoder-decoder models through `LLM` and `AsyncEngine`: prompts, results, and the texts of transformers."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import numpy as np
import pytest
import torch

from speculant import LLM, AsyncEngine, ExplicitEncoderDecoderPrompt, SamplingParams
from speculant.config import EngineConfig
from speculant.engine import build_engine
from speculant.errors import ConfigError, RequestError
from speculant.kernels import REFERENCE, usable_sets
from speculant.lab.bench import Text, TextReader, WorkloadConfig, added_tokens, make_workload, require_room
from speculant.lab.exactness import TargetReader, complete, longest_of, reread
from speculant.sampling import Node
from speculant.structured import StructuredOutputs
from speculant.types import RequestOutput
from tests.encoder_decoders import make_bart, make_t5, write_t5
from tests.integration.conftest import MakeLLM
from tests.models import ALPHABET, BEGIN, END

TEXTS = [
    "hello world",
    "def f(x): return x",
    "a",
    "the same words, the same words, the same words",
    "hello world",
]
GREEDY = SamplingParams(temperature=0, max_tokens=16)
NATIVE = pytest.mark.skipif(not usable_sets(), reason="the native kernels are not built")
MakeT5 = Callable[..., LLM]


@pytest.fixture(scope="module")
def theirs() -> Any:
    """Return the model of transformers."""
    return make_t5()


@pytest.fixture(scope="module")
def folder(theirs: Any, tmp_path_factory: pytest.TempPathFactory) -> str:
    """Return the folder with the model."""
    return write_t5(tmp_path_factory.mktemp("t5") / "plain", theirs)


@pytest.fixture
def t5(folder: str, made: dict[str, LLM]) -> Iterator[MakeT5]:
    """Make an engine over the model, in float64; every test leaves it idle."""
    used = list[LLM]()

    def make(**arguments: Any) -> LLM:
        arguments = {"dtype": "float64", "max_model_len": 128, **arguments}
        key = f"t5 {sorted(arguments.items())!r}"
        if key not in made:
            made[key] = LLM(folder, **arguments)
        used.append(made[key])
        return made[key]

    yield make
    for llm in used:
        assert not llm.engine.has_unfinished(), "a test left requests behind"
        llm.engine.check()
        cache = llm.engine._context.cache
        assert cache.free_tokens() == cache.num_blocks * cache.block_size, "a test left cache in use"


def ids_of(text: str) -> list[int]:
    """Return the token ids of a text: those of its bytes."""
    return [ALPHABET.index("\u0120" if character == " " else character) for character in text]


def tokens_of(results: Sequence[RequestOutput]) -> list[list[list[int]]]:
    return [[sample.token_ids for sample in result.outputs] for result in results]


def generated(theirs: Any, source: Sequence[int], start: Sequence[int] = (BEGIN,), **settings: Any) -> list[int]:
    """Return what transformers generates."""
    ids, begin = torch.tensor([source]), torch.tensor([start])
    settings = {"max_new_tokens": 16, "do_sample": False, **settings}
    tokens: list[int] = theirs.generate(ids, decoder_input_ids=begin, **settings)[0].tolist()
    return tokens[len(start) :]


# --- texts


def test_texts_are_those_of_transformers(t5: MakeT5, theirs: Any) -> None:
    results = t5().generate(TEXTS, GREEDY)
    for text, result in zip(TEXTS, results, strict=True):
        source = [*ids_of(text), END]
        assert result.encoder_prompt_token_ids == source, "the tokenizer ends a source"
        assert tokens_of([result]) == [[generated(theirs, source)]]


def test_beams_are_those_of_transformers(t5: MakeT5, theirs: Any) -> None:
    params = SamplingParams(beam_width=3, n=1, max_tokens=12, temperature=0)
    for result in t5().generate(TEXTS[:3], params):
        source = result.encoder_prompt_token_ids or []
        expected = generated(theirs, source, num_beams=3, max_new_tokens=12, early_stopping=False)
        assert result.outputs[0].token_ids == expected


RULES: list[dict[str, Any]] = [
    {"forced_bos_token_id": 65},
    {"forced_eos_token_id": END},
    {"forced_bos_token_id": 66, "forced_eos_token_id": END, "bad_words_ids": [[66], [110, 110]]},
    {"bad_words_ids": [[110], [87], [48, 48]]},
]


@pytest.mark.parametrize(
    "rules", [*(pytest.param(each, marks=pytest.mark.slow) for each in RULES[:2]), *RULES[2:]], ids=str
)
def test_forced_and_banned_tokens_are_those_of_transformers(tmp_path: Any, rules: dict[str, Any]) -> None:
    model = make_t5(**rules)
    llm = LLM(write_t5(tmp_path / "t5", model), dtype="float64", max_model_len=128)
    for settings in ({}, {"beam_width": 3}):
        params = SamplingParams(temperature=0, max_tokens=8, **settings)
        beams = {"num_beams": 3, "early_stopping": False} if settings else {}
        for start in ([BEGIN], [BEGIN, 72]):
            prompts = [{"encoder_prompt": text, "decoder_prompt": start} for text in TEXTS[:2]]
            for result in llm.generate(prompts, params):
                source = result.encoder_prompt_token_ids or []
                expected = generated(model, source, start, max_new_tokens=8, **beams)
                assert result.outputs[0].token_ids == expected


SLOW = [pytest.param(family, marks=pytest.mark.slow) for family in ("bart", "marian")]


@pytest.mark.parametrize("family", ["mbart", *SLOW])
def test_families_write_the_texts_of_transformers(tmp_path: Any, family: str) -> None:
    """Greedy, and in beams; also with the language that a decoder's prompt names (mBART-50)."""
    model = make_bart(family, forced_bos_token_id=66 if family == "mbart" else None, bad_words_ids=[[BEGIN]])
    folder = write_t5(tmp_path / family, model)
    llm = LLM(folder, dtype="float64")
    for settings in ({}, {"beam_width": 3}):
        params = SamplingParams(temperature=0, max_tokens=12, **settings)
        beams = {"num_beams": 3, "early_stopping": False} if settings else {}
        prompts = [*TEXTS[:2], {"encoder_prompt": TEXTS[2], "decoder_prompt": [67]}]
        for result in llm.generate(prompts, params):
            source, start = result.encoder_prompt_token_ids or [], result.prompt_token_ids or []
            expected = generated(model, source, start, max_new_tokens=12, **beams)
            assert result.outputs[0].token_ids == expected
    (longest,) = llm.generate("x" * 63, SamplingParams(temperature=0, max_tokens=100, ignore_eos=True))
    assert len(longest.outputs[0].token_ids) == 63, "the decoder's prompt has one of 64 positions"
    with pytest.raises(RequestError, match="the source has 65 tokens and at most 64"):
        llm.generate("x" * 64, GREEDY)
    with pytest.raises(ConfigError, match="max_model_len"):
        LLM(folder, max_model_len=65)


def test_a_form_follows_a_forced_token(tmp_path: Any) -> None:
    """Drafted or not; the log-probabilities have the forced token too."""
    folder = write_t5(tmp_path / "t5", make_t5(forced_bos_token_id=BEGIN, forced_eos_token_id=END))
    form = StructuredOutputs(regex="(yes|no), (yes|no)!")
    found = []
    for settings in ({}, {"use_speculative_decoding": True, "spec_length": 4}):
        llm = LLM(folder, dtype="float64", max_model_len=128, **settings)  # type: ignore[arg-type]
        params = SamplingParams(temperature=0, max_tokens=16, structured_outputs=form, n=2, seed=1)
        (result,) = llm.generate("hello", params)
        for sample in result.outputs:
            assert sample.token_ids[0] == BEGIN
            assert sample.text in [f"{one}, {other}!" for one in ("yes", "no") for other in ("yes", "no")]
        found.append(tokens_of([result]))
        (cut,) = llm.generate("hello", SamplingParams(temperature=0, max_tokens=4, structured_outputs=form))
        assert (cut.outputs[0].finish_reason, cut.outputs[0].token_ids[0]) == ("length", BEGIN)
    assert found[0] == found[1]


# --- prompts


def test_a_plain_prompt_in_any_form_is_the_source(t5: MakeT5) -> None:
    llm, ids, few = t5(), [*ids_of("hello"), END], SamplingParams(temperature=0, max_tokens=4)
    (expected,) = llm.generate("hello", few)
    assert (expected.encoder_prompt, expected.encoder_prompt_token_ids) == ("hello", ids)
    assert (expected.prompt, expected.prompt_token_ids) == (None, [BEGIN])
    forms: list[Any] = [
        ids, np.array(ids), {"prompt": "hello"}, {"prompt_token_ids": ids}, {"prompt": "hello", "decoder_prompt": None},
        {"encoder_prompt": "hello"}, {"encoder_prompt": ids, "decoder_prompt": None},
        {"encoder_prompt": {"prompt": "hello"}, "decoder_prompt": [BEGIN]},
        {"encoder_prompt": {"prompt_token_ids": ids}, "decoder_prompt": []},
    ]  # fmt: skip
    for form in forms:
        (result,) = llm.generate(form, few)
        assert result.encoder_prompt_token_ids == ids
        assert (result.prompt_token_ids, tokens_of([result])) == ([BEGIN], tokens_of([expected]))


def test_a_decoder_prompt_begins_with_the_start_token(t5: MakeT5, theirs: Any) -> None:
    """It is put before a prompt that lacks it; a text gets no end token."""
    llm = t5()
    pair = ExplicitEncoderDecoderPrompt(encoder_prompt="hello", decoder_prompt="ab")
    forms: list[Any] = [
        pair,
        {**pair, "decoder_prompt": [*ids_of("ab")]},
        {**pair, "decoder_prompt": [BEGIN, *ids_of("ab")]},
    ]
    expected = generated(theirs, [*ids_of("hello"), END], [BEGIN, *ids_of("ab")])
    for result in llm.generate(forms, GREEDY):
        assert result.prompt_token_ids == [BEGIN, *ids_of("ab")]
        assert tokens_of([result]) == [[expected]]
    assert [each.prompt for each in llm.generate(forms, GREEDY)] == ["ab", None, None]


REFUSED: list[tuple[Any, str]] = [
    ([[]], "the source has no tokens"),
    ({"encoder_prompt": [], "decoder_prompt": "x"}, "the source has no tokens"),
    ("x" * 128, "the source has 129 tokens and at most 128 are encoded in one pass"),
    ([1, 999], "the source has 999, which is not a token id"),
    ({"encoder_prompt": "x", "decoder_prompt": [999]}, "prompt has 999"),
    ({"encoder_prompt": "x", "decoder_prompt": "y" * 128}, "too long: 129 tokens > 127 maximum"),
    ({"decoder_prompt": "x"}, "a decoder_prompt and no encoder_prompt"),
    ({"encoder_prompt": "x", "prompt": "y"}, "the unknown key 'prompt'"),
    ({"encoder_prompt": {"prompt": "x", "multi_modal_data": {}}}, "multi_modal_data"),
    ({"encoder_prompt": {"encoder_prompt": "x"}}, "the unknown key 'encoder_prompt'"),
    ({"encoder_prompt": 7, "decoder_prompt": None}, "a prompt is a int"),
    ({"encoder_prompt": {"prompt": "x", "cache_salt": "a"}, "cache_salt": "b"}, "different cache salts"),
    (
        {"encoder_prompt": {"prompt": "x", "cache_salt": "a"}, "decoder_prompt": {"prompt": "x", "cache_salt": "b"}},
        "different cache salts",
    ),
]


@pytest.mark.parametrize(("prompt", "words"), REFUSED, ids=[words for _, words in REFUSED])
def test_a_prompt_that_cannot_be_served_is_refused(t5: MakeT5, prompt: Any, words: str) -> None:
    with pytest.raises(RequestError, match=words) as caught:
        t5().generate(prompt, GREEDY)
    assert caught.value.fix


def test_a_conversation_is_refused(t5: MakeT5) -> None:
    llm = t5()
    for call in (llm.chat, llm.render_chat):
        with pytest.raises(RequestError, match=r"encoder-decoder, which has no conversations(?s:.*)generate"):
            call([{"role": "user", "content": "hello"}])


def test_a_model_without_encoder_refuses_an_encoder_prompt(llm_of: MakeLLM) -> None:
    with pytest.raises(RequestError, match="a prompt has an encoder_prompt, and the model has no encoder"):
        llm_of().generate({"encoder_prompt": "x", "decoder_prompt": "y"}, GREEDY)
    assert llm_of().generate({"prompt": "x", "encoder_prompt": None}, GREEDY)[0].encoder_prompt_token_ids is None


def test_a_source_is_cut_to_its_end(t5: MakeT5) -> None:
    llm, text = t5(), "abcdefgh" * 30
    for most, kept in ((5, 5), (-1, 128)):
        params = SamplingParams(temperature=0, max_tokens=2, truncate_prompt_tokens=most)
        (result,) = llm.generate({"encoder_prompt": text, "decoder_prompt": "xyz"}, params)
        assert result.encoder_prompt_token_ids == [*ids_of(text), END][-kept:]
        assert result.prompt_token_ids == [BEGIN, *ids_of("xyz")]


# --- results


def test_samples_and_figures(t5: MakeT5, theirs: Any) -> None:
    """Several samples share the source; log-probabilities are those of the decoder's prompt and of the output."""
    params = SamplingParams(n=3, seed=5, max_tokens=6, logprobs=2, prompt_logprobs=1)
    (result,) = t5().generate({"encoder_prompt": "hello", "decoder_prompt": "ab"}, params)
    (again,) = t5().generate({"encoder_prompt": "hello", "decoder_prompt": "ab"}, params)
    assert len({tuple(sample.token_ids) for sample in result.outputs}) > 1
    assert tokens_of([result]) == tokens_of([again])
    text = [BEGIN, *ids_of("ab"), *result.outputs[0].token_ids]
    with torch.inference_mode():
        logits = theirs(
            input_ids=torch.tensor([[*ids_of("hello"), END]]), decoder_input_ids=torch.tensor([text])
        ).logits[0]
    expected = torch.log_softmax(logits, -1)[range(len(text) - 1), text[1:]].tolist()
    assert result.prompt_logprobs is not None
    assert result.outputs[0].logprobs is not None
    entries = [*result.prompt_logprobs[1:], *result.outputs[0].logprobs]
    found = [entry[token].logprob for entry, token in zip(entries, text[1:], strict=True) if entry is not None]
    assert found == pytest.approx(expected, abs=1e-6), "norms of transformers are computed in float32"
    assert result.prompt_logprobs[0] is None


def test_stop_strings_and_forms(t5: MakeT5) -> None:
    llm = t5()
    (plain,) = llm.generate("hello", SamplingParams(temperature=0, max_tokens=8, allowed_token_ids=[*ids_of("abc")]))
    text = plain.outputs[0].text
    params = SamplingParams(temperature=0, max_tokens=8, allowed_token_ids=[*ids_of("abc")], stop=[text[2:4]])
    (stopped,) = llm.generate("hello", params)
    assert (stopped.outputs[0].text, stopped.outputs[0].stop_reason) == (text[: text.index(text[2:4])], text[2:4])
    form = SamplingParams(temperature=0, max_tokens=8, structured_outputs=StructuredOutputs(regex="(yes|no)!"))
    (formed,) = llm.generate("hello", form)
    assert formed.outputs[0].text in ("yes!", "no!")


SETTINGS = [
    GREEDY,
    SamplingParams(seed=3, max_tokens=16),
    SamplingParams(n=4, seed=4, temperature=0.8, max_tokens=8),
    SamplingParams(beam_width=3, n=2, max_tokens=8, temperature=0),
    SamplingParams(temperature=0, max_tokens=16, repetition_penalty=1.2),
]
ON_TORCH: dict[str, Any] = {"dtype": "float64", "kernels": "reference"}
ENGINES: list[Any] = [
    pytest.param(ON_TORCH, marks=pytest.mark.slow),
    pytest.param({**ON_TORCH, "use_speculative_decoding": True}, marks=pytest.mark.slow),
    {**ON_TORCH, "kv_cache_backend": "slotted", "max_num_seqs": 3},
    {**ON_TORCH, "max_num_batched_tokens": 68, "max_num_seqs": 6},
    *(
        pytest.param({"dtype": dtype, "kernels": "native", **more}, marks=NATIVE)
        for dtype in ("float32", "bfloat16")
        for more in (
            {},
            {"spec_length": 3, "kv_memory": 2 * 128 * 512, "max_num_seqs": 4},
            {"use_speculative_decoding": False},
        )
    ),
]
PROMPTS: list[Any] = [*TEXTS, {"encoder_prompt": "hello world", "decoder_prompt": "hello, hello, hello"}]
PARAMS = [SETTINGS[place % len(SETTINGS)] for place in range(len(PROMPTS))]


@pytest.fixture(scope="module")
def alone() -> dict[str, list[list[list[int]]]]:
    """Keep the texts of each prompt alone, by the engine."""
    return {}


@pytest.mark.parametrize("engine", ENGINES, ids=str)
def test_texts_together_are_those_alone(
    t5: MakeT5, alone: dict[str, list[list[list[int]]]], engine: dict[str, Any]
) -> None:
    """Bit for bit on native kernels, drafted or not; also where prefixes are found again."""
    llm = t5(**engine)
    own = {"dtype": engine["dtype"], "kernels": engine["kernels"], "use_speculative_decoding": False}
    if str(own) not in alone:
        plain = t5(**own, max_num_seqs=1)
        alone[str(own)] = [
            tokens_of(plain.generate([prompt], [each]))[0] for prompt, each in zip(PROMPTS, PARAMS, strict=True)
        ]
    for _ in range(2):
        assert tokens_of(llm.generate(PROMPTS, PARAMS)) == alone[str(own)]


def test_the_async_engine_streams_encoder_decoder_texts(folder: str, t5: MakeT5) -> None:
    (expected,) = t5().generate("hello", GREEDY)

    async def run() -> RequestOutput:
        async with AsyncEngine(folder, dtype="float64", max_model_len=128) as engine:
            pieces = [piece async for piece in engine.stream({"encoder_prompt": "hello"}, GREEDY)]
            with pytest.raises(RequestError, match="no conversations"):
                await engine.chat([{"role": "user", "content": "hello"}])
        assert "".join(piece.text for piece in pieces) == expected.outputs[0].text
        assert pieces[-1].output is not None
        return pieces[-1].output

    result = asyncio.run(run())
    assert (result.encoder_prompt, tokens_of([result])) == ("hello", tokens_of([expected]))
    assert result.prompt_token_ids == [BEGIN]


# --- the laboratory


def test_readers_of_whole_texts_read_the_source(folder: str, theirs: Any) -> None:
    """The benchmarks' reader in one pass and the checks' reader token by token find the logits of transformers."""
    runtime = build_engine(EngineConfig(folder, dtype="float64", max_model_len=128))
    sources = [list(range(60, 60 + count)) for count in (1, 40)]
    texts = complete(runtime, sources, [SamplingParams(max_tokens=6, ignore_eos=True)] * 2)
    readers = TargetReader(runtime, 2, max(map(longest_of, texts))), TargetReader(runtime, 1, 40)
    model = runtime.checkpoint.model
    for text, source in zip(texts, sources, strict=True):
        assert (text.prompt, list(text.source)) == ((BEGIN,), source)
        inputs = {"input_ids": torch.tensor([source]), "decoder_input_ids": torch.tensor([text.tokens[:-1]])}
        with torch.inference_mode():
            expected = theirs(**inputs).logits[0]
        whole = TextReader(model, REFERENCE, model.vocab_size).logits(Text(text.prompt, text.output, source))
        assert torch.allclose(whole, expected, atol=1e-6)
        for place in range(text.num_output):
            copy = reread(text, place)
            (found,) = readers[0].distributions([Node(copy)])
            assert torch.allclose(found, expected[place].softmax(0), atol=1e-6)
            assert torch.allclose(readers[1].distributions([Node(copy)])[0], found, atol=1e-12)
            readers[1].end(copy)


def test_code_ends_with_the_end_token_of_sources(folder: str) -> None:
    runtime = build_engine(EngineConfig(folder, max_model_len=128))
    assert added_tokens(runtime.tokenizer) == ([], [END])
    for prompts in ("code", "edit"):
        for length in (1, 2, 30):
            workload = make_workload(WorkloadConfig(prompts, 2, length), runtime, 2)
            assert [(len(each), list(each).index(END)) for each in workload.prompts] == [(length, length - 1)] * 2
    assert workload.sources
    require_room(workload, 127, runtime.limits)
    with pytest.raises(RequestError, match="1 tokens and 128 to generate are more than max_model_len=128"):
        require_room(workload, 128, runtime.limits)
