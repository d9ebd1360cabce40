"""Structured outputs have the requested form, and are the same with and without drafts."""

from __future__ import annotations

import asyncio
import json
import re
from collections.abc import Callable, Mapping
from dataclasses import replace
from functools import cache, lru_cache
from pathlib import Path
from typing import Any

import hypothesis
import jsonschema
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from speculant import LLM, AsyncEngine, RequestOutput, SamplingParams, StructuredOutputs, plugins
from speculant.config import Limits
from speculant.errors import RequestError
from speculant.kernels.native import usable_sets
from speculant.lab.exactness.tables import FULL_SUPPORT, Pair, TableModel
from speculant.structured.grammars import Grammars
from speculant.text.tokenizer import Tokenizer
from tests.drafters import OPTIONS, UNSHIPPED, model_of, options_of, predicting
from tests.examples import examples
from tests.fakes import ScriptedDrafter, build_rig, few_blocks
from tests.integration.conftest import MakeLLM
from tests.models import END, VOCAB_SIZE, Checkpoints

pytest.importorskip("llguidance")
native = pytest.mark.skipif(not usable_sets(), reason="the native library was not built")

PROMPT = "def main(argv=None):\n"
PERSON = {
    "type": "object",
    "properties": {
        "name": {"type": "string", "maxLength": 8},
        "age": {"type": "integer", "minimum": 0, "maximum": 120},
        "tags": {"type": "array", "items": {"enum": ["red", "green", None]}, "maxItems": 3},
    },
    "required": ["name", "age", "tags"],
    "additionalProperties": False,
}
TREE = {
    "$defs": {
        "node": {
            "type": "object",
            "properties": {
                "value": {"anyOf": [{"type": "boolean"}, {"const": "leaf"}]},
                "next": {"type": "array", "maxItems": 1, "items": {"$ref": "#/$defs/node"}},
            },
            "required": ["value", "next"],
            "additionalProperties": False,
        }
    },
    "$ref": "#/$defs/node",
}
CHOICES = ["yes", "yes, sir", "no", "straße", "日本"]
ARITHMETIC = 'start: sum\nsum: term ("+" term){0,3}\nterm: NUMBER | "(" sum ")"\nNUMBER: /[0-9]{1,2}/'


def is_valid(schema: Any) -> Callable[[str], bool]:
    def check(text: str) -> bool:
        jsonschema.validate(json.loads(text), schema)
        return True

    return check


FORMS: dict[str, tuple[dict[str, Any], Callable[[str], object]]] = {
    "person": ({"json": PERSON}, is_valid(PERSON)),
    "compact person": ({"json": json.dumps(PERSON), "disable_any_whitespace": True}, is_valid(PERSON)),
    "compact tree": ({"json": TREE, "disable_any_whitespace": True}, is_valid(TREE)),
    "object": ({"json_object": True}, is_valid({"type": "object"})),
    "regex": ({"regex": "[a-z]{2,6}(-[0-9]{1,3}){0,2}"}, re.compile("[a-z]{2,6}(-[0-9]{1,3}){0,2}").fullmatch),
    "choice": ({"choice": CHOICES}, CHOICES.__contains__),
    "grammar": ({"grammar": ARITHMETIC}, re.compile(r"[0-9+()]+").fullmatch),
}
SETTINGS: dict[str, dict[str, Any]] = {
    "greedy": {"temperature": 0},
    "seeded": {"seed": 11},
    "filtered": {"seed": 12, "temperature": 0.8, "top_p": 0.9, "frequency_penalty": 0.3},
}


def params_of(form: str, max_tokens: int = 64, **values: Any) -> SamplingParams:
    return SamplingParams(max_tokens=max_tokens, structured_outputs=StructuredOutputs(**FORMS[form][0]), **values)


def assert_form(form: str, output: RequestOutput) -> bool:
    """Assert that every sample that came to its end has the form; return whether all did."""
    assert output.error is None
    for sample in output.outputs:
        if sample.finish_reason == "stop":
            assert FORMS[form][1](sample.text), sample.text
        else:
            assert sample.finish_reason == "length"
    return all(sample.finish_reason == "stop" for sample in output.outputs)


DRAFTING = "speculant.drafting"
MASKED = [method for method in plugins.names(DRAFTING) if plugins.load(DRAFTING, method).METHOD.reads_masks]
ALONE = (*OPTIONS, *UNSHIPPED, *MASKED)  # methods that need a file, a head or another draft, with engines of their own
METHODS = [method for method in plugins.names(DRAFTING) if method not in ALONE]


@cache
def demo() -> LLM:
    """The embedded pair in bfloat16, with every drafter that needs no file."""
    return LLM("demo", "demo", dtype="bfloat16", max_model_len=512, speculative_config={"methods": METHODS})


@lru_cache
def plain(form: str, setting: str) -> RequestOutput:
    params = params_of(form, **SETTINGS[setting], speculation=False)
    (output,) = demo().generate(PROMPT, params)
    return output


@native
@pytest.mark.covering(1)
@pytest.mark.parametrize("form", FORMS)
@pytest.mark.parametrize("setting", SETTINGS)
def test_speculation_changes_no_structured_text(form: str, setting: str) -> None:
    """All methods of an engine at once, in one batch."""
    expected, params = plain(form, setting), params_of(form, **SETTINGS[setting])
    assert_form(form, expected)
    asked = [params]
    for method in METHODS:
        own = predicting(method, params, expected.outputs[0].token_ids).speculation
        asked.append(replace(params, speculation={**(own if isinstance(own, Mapping) else {}), "method": method}))
    for params, output in zip(asked, demo().generate([PROMPT] * len(asked), asked), strict=True):
        assert output.outputs[0].token_ids == expected.outputs[0].token_ids, params.speculation
        assert output.outputs[0].text == expected.outputs[0].text
        assert output.outputs[0].finish_reason == expected.outputs[0].finish_reason


@native
def test_sampled_texts_have_their_form() -> None:
    """Without a seed the ratio rules verify; every sample that ends is valid, and most do."""
    ended, forms = 0, [form for form in FORMS for _ in range(2)]
    params = [
        params_of(form, max_tokens=80, n=2, speculation=speculation, logprobs=1)
        for form in FORMS
        for speculation in (None, {"verification": "rejection", "method": "draft_model"})
    ]
    for form, output in zip(forms, demo().generate([PROMPT] * len(forms), params), strict=True):
        ended += assert_form(form, output)
        assert all(len(sample.logprobs or ()) == len(sample.token_ids) for sample in output.outputs)
    assert ended > len(FORMS)


@native
def test_forced_tokens_save_passes() -> None:
    """The frame of compact JSON is drafted without a drafter, even one that never drafts what is accepted."""
    params = params_of("compact person", seed=1)
    (free,) = demo().generate(PROMPT, replace(params, speculation=False))
    (drafted,) = demo().generate(PROMPT, replace(params, speculation={"method": "random"}))
    assert drafted.outputs[0].text == free.outputs[0].text
    assert drafted.metrics.timing.target_passes < 0.75 * free.metrics.timing.target_passes


@native
def test_a_cut_text_is_marked() -> None:
    (output,) = demo().generate(PROMPT, params_of("person", max_tokens=5, seed=1))
    assert output.outputs[0].finish_reason == "length"
    with pytest.raises(json.JSONDecodeError):
        json.loads(output.outputs[0].text)


@native
def test_a_stop_string_ends_a_structured_text() -> None:
    (output,) = demo().generate(PROMPT, params_of("compact person", seed=1, stop=['"age"']))
    assert output.outputs[0].stop_reason == '"age"'
    assert output.outputs[0].text.startswith('{"name":"')
    assert '"age"' not in output.outputs[0].text


@native
@pytest.mark.parametrize("settings", [{"min_tokens": 30}, {"ignore_eos": True}])
def test_a_form_that_is_complete_ends_the_text(settings: dict[str, Any]) -> None:
    (output,) = demo().generate(PROMPT, params_of("choice", seed=3, **settings))
    assert output.outputs[0].finish_reason == "stop"
    assert output.outputs[0].text in CHOICES


def test_an_invalid_form_is_refused_before_anything_runs(llm_of: MakeLLM) -> None:
    llm = llm_of()
    params = [SamplingParams(), SamplingParams(structured_outputs=StructuredOutputs(regex="(a"))]
    with pytest.raises(RequestError, match="unclosed group"):
        llm.generate(["a", "b"], params)
    assert not llm.engine.has_unfinished()


@pytest.mark.parametrize("dtype", ["float64", "float32"])
def test_structured_texts_of_padded_heads(llm_of: MakeLLM, dtype: str) -> None:
    """The head has more rows than the tokenizer has tokens, and bytes are tokens."""
    texts = set()
    for arguments in ({"use_speculative_decoding": False}, {"draft": "near", "spec_length": 4}):
        llm = llm_of(dtype=dtype, **arguments)
        (output,) = llm.generate(["Hello"], params_of("compact person", max_tokens=100, seed=4))
        assert assert_form("compact person", output)
        texts.add(output.outputs[0].text)
    assert len(texts) == 1


def test_preempted_sequences_keep_their_form(checkpoints: Checkpoints) -> None:
    tokenizer = Tokenizer.from_folder(Path(checkpoints.target))
    grammar = Grammars(tokenizer, {END}).compile(StructuredOutputs(**FORMS["compact person"][0])).result()
    model = TableModel(Pair(3, VOCAB_SIZE, FULL_SUPPORT).target, VOCAB_SIZE)
    texts = []
    for blocks in (200, 25):
        limits = Limits(max_model_len=96, max_num_seqs=4, max_num_batched_tokens=32)
        drafter = ScriptedDrafter(lambda request: tokenizer.encode('"age":1'))
        rig = build_rig(model, drafter, length=4, limits=limits, ends=frozenset({END}), cache=few_blocks(blocks))
        params = SamplingParams(max_tokens=None, seed=5)
        made = [rig.add((i, 2, 3), params, f"r{i}", constraint=grammar.constrain)[0] for i in range(4)]
        rig.finish()
        texts.append([request.output for request in made])
        assert (rig.engine.metrics.preemptions > 0) == (blocks == 25)
    assert texts[0] == texts[1]
    assert all(FORMS["compact person"][1](tokenizer.decode(output)) for output in texts[0])


@native
def test_async_engine_compiles_beside_its_loop() -> None:
    """Many requests of one new form at once, some of which are cancelled: it is compiled once, and the others go on."""
    form = StructuredOutputs(choice=[f"choice {i:03}" for i in range(500)])
    params = SamplingParams(structured_outputs=form, seed=2)

    async def serve() -> list[RequestOutput]:
        async with AsyncEngine("demo", dtype="bfloat16", max_model_len=128) as engine:
            tasks = [asyncio.create_task(engine.generate(PROMPT, params)) for _ in range(6)]
            await asyncio.sleep(0)
            tasks[0].cancel()
            outputs = await asyncio.gather(*tasks, return_exceptions=True)
            with pytest.raises(RequestError, match="unclosed group"):
                await engine.generate(PROMPT, SamplingParams(structured_outputs=StructuredOutputs(regex="(a")))
            assert isinstance(outputs[0], asyncio.CancelledError)
            return outputs[1:]  # type: ignore[return-value]

    texts = {output.outputs[0].text for output in asyncio.run(serve())}
    assert len(texts) == 1
    assert form.choice is not None
    assert texts < set(form.choice)


def schemas() -> st.SearchStrategy[dict[str, Any]]:
    """Draw schemas whose instances are bounded, so that a text mostly comes to its end."""
    leaves = st.one_of(
        st.builds(lambda most: {"type": "string", "maxLength": most}, st.integers(0, 6)),
        st.builds(
            lambda low, span: {"type": "integer", "minimum": low, "maximum": low + span},
            st.integers(-1000, 1000),
            st.integers(0, 500),
        ),
        st.sampled_from([{"type": "boolean"}, {"type": "null"}, {"type": "string", "pattern": "^[a-f]{1,4}$"}]),
        st.builds(
            lambda values: {"enum": values},
            st.lists(st.one_of(st.text(max_size=5), st.integers(-9, 9), st.none()), min_size=1, max_size=4),
        ),
        st.sampled_from([{"type": "string", "format": name} for name in ("date", "time", "uuid", "ipv4")]),
    )

    def around(inner: st.SearchStrategy[dict[str, Any]]) -> st.SearchStrategy[dict[str, Any]]:
        names = st.text(st.characters(exclude_categories=("Cs",), exclude_characters="\x7f"), min_size=1, max_size=6)
        properties = st.dictionaries(names, inner, max_size=4)
        return st.one_of(
            st.builds(
                lambda named, optional: {
                    "type": "object",
                    "properties": named,
                    "required": list(named)[optional:],
                    "additionalProperties": False,
                },
                properties,
                st.integers(0, 2),
            ),
            st.builds(
                lambda items, low, span: {"type": "array", "items": items, "minItems": low, "maxItems": low + span},
                inner,
                st.integers(0, 2),
                st.integers(0, 2),
            ),
            st.builds(lambda options: {"anyOf": options}, st.lists(inner, min_size=1, max_size=3)),
        )

    return st.recursive(leaves, around, max_leaves=6)


@pytest.mark.slow
@settings(max_examples=examples(300))
@given(schemas(), st.data())
def test_valid_texts_are_allowed(checkpoints: Checkpoints, schema: dict[str, Any], data: st.DataObject) -> None:
    """No mask forbids a token of a valid text whose keys come in the order of the schema.

    Control characters are escaped in it, and U+007F too: `json.dumps` writes that one as it is, the grammar does not,
    but for keys, which therefore have none.
    """
    tokenizer, instance = byte_tokenizer(checkpoints.target), draw_instance(schema, data.draw)
    jsonschema.validate(instance, schema)
    try:
        grammar = compiler(checkpoints.target).compile(StructuredOutputs(json=schema, disable_any_whitespace=True))
        constraint = grammar.result().constrain()
    except RequestError:
        hypothesis.reject()
    text = json.dumps(instance, ensure_ascii=False, separators=(",", ":")).replace("\x7f", r"\u007f")
    constraint.advance([*tokenizer.encode(text), END])
    assert constraint.is_done


def draw_instance(schema: Mapping[str, Any], draw: Callable[[st.SearchStrategy[Any]], Any]) -> Any:
    """Draw what one of `schemas` describes."""
    match schema:
        case {"anyOf": options}:
            return draw_instance(draw(st.sampled_from(options)), draw)
        case {"enum": values}:
            return draw(st.sampled_from(values))
        case {"type": "object", "properties": named, "required": required}:
            kept = [key for key in named if key in required or draw(st.booleans())]
            return {key: draw_instance(named[key], draw) for key in kept}
        case {"type": "array", "items": items, "minItems": low, "maxItems": high}:
            return [draw_instance(items, draw) for _ in range(draw(st.integers(low, high)))]
        case {"type": "integer", "minimum": low, "maximum": high}:
            return draw(st.integers(low, high))
        case {"type": "string", "maxLength": most}:
            return draw(st.text(st.characters(exclude_categories=["Cs", "Cc"]), max_size=most))
        case {"format": name}:
            return {"date": "2024-02-29", "time": "23:59:59Z", "uuid": "9" * 8 + 3 * "-abcd" + "-" + "0" * 12}.get(
                name, "127.0.0.1"
            )
    return {"boolean": True, "null": None, "string": "abc"}[schema["type"]]


@cache
def byte_tokenizer(folder: str) -> Tokenizer:
    return Tokenizer.from_folder(Path(folder))


@cache
def compiler(folder: str) -> Grammars:
    return Grammars(byte_tokenizer(folder), {END})


@cache
def all_drafters() -> list[tuple[str, LLM]]:
    """Return every drafter with an engine that has it."""
    others = [{"method": method, **options_of(method, 8192, [tuple(range(40))])} for method in ALONE]
    engines = [
        LLM("demo", model_of(method, "demo", 256, 8192), dtype="bfloat16", max_model_len=512, speculative_config=each)
        for method, each in zip(ALONE, others, strict=True)
    ]
    return [*((method, demo()) for method in METHODS), *zip(ALONE, engines, strict=True)]


@native
@pytest.mark.slow
@settings(max_examples=examples(500))
@given(schemas(), st.integers(0, 2**32), st.booleans())
def test_random_schemas_under_every_drafter(schema: dict[str, Any], seed: int, compact: bool) -> None:
    """500 schemas x every drafter: the text without speculation, byte for byte, and valid if it comes to its end."""
    form = StructuredOutputs(json=schema, disable_any_whitespace=compact)
    params = SamplingParams(max_tokens=120, seed=seed, structured_outputs=form)
    try:
        (free,) = demo().generate(PROMPT, replace(params, speculation=False))
    except RequestError as error:
        hypothesis.event(f"refused: {error.problem[:60]}")
        hypothesis.reject()
    expected = free.outputs[0]
    hypothesis.event(f"ends by {expected.finish_reason}")
    if expected.finish_reason == "stop":
        jsonschema.validate(json.loads(expected.text), schema)
    for method, llm in all_drafters():
        own = predicting(method, params, expected.token_ids).speculation
        speculation = {**(own if isinstance(own, Mapping) else {}), "method": method}
        (output,) = llm.generate(PROMPT, replace(params, speculation=speculation))
        assert output.outputs[0].token_ids == expected.token_ids, method
        assert output.outputs[0].text == expected.text
