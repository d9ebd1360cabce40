"""Chat in the library: a conversation is the prompt that its template makes."""

from __future__ import annotations

import asyncio
import shutil
from pathlib import Path
from typing import Any

import pytest

from speculant import LLM, AsyncEngine, RequestOutput, SamplingParams
from speculant.errors import ConfigError, ModelError, RequestError
from tests.models import BEGIN, EXACT_DTYPE, Checkpoints

TEMPLATE = """{{ '<begin>' }}
{%- if tools %}{{ '[' + tools[0].function.name + ']' }}{% endif %}
{%- for message in messages %}{{ message.role + ':' + message.content + ';' }}{% endfor %}
{%- if add_generation_prompt %}{{ mood | default('') }}{{ 'assistant:' }}{% endif %}"""
FIRST: list[dict[str, Any]] = [
    {"role": "system", "content": "Be brief."},
    {"role": "user", "content": [{"type": "text", "text": "Hi"}]},
]
SECOND: list[dict[str, Any]] = [{"role": "user", "content": "Bye"}]
TOOLS: list[dict[str, Any]] = [{"type": "function", "function": {"name": "now"}}]
GREEDY = SamplingParams(temperature=0, max_tokens=12)
ARGUMENTS: dict[str, Any] = {"dtype": EXACT_DTYPE}


@pytest.fixture(scope="module")
def folder(checkpoints: Checkpoints, tmp_path_factory: pytest.TempPathFactory) -> str:
    """A checkpoint whose tokenizer begins texts with a token, as its template does."""
    path = tmp_path_factory.mktemp("chat") / "target"
    shutil.copytree(checkpoints.target, path)
    (path / "chat_template.jinja").write_text(TEMPLATE, encoding="utf-8")
    _begin_texts(path / "tokenizer.json")
    return str(path)


def _begin_texts(file: Path) -> None:
    from tokenizers import Tokenizer
    from tokenizers.processors import TemplateProcessing

    tokenizer = Tokenizer.from_file(str(file))
    tokenizer.post_processor = TemplateProcessing(single="<begin> $A", special_tokens=[("<begin>", BEGIN)])
    tokenizer.save(str(file))


@pytest.fixture(scope="module")
def llm(folder: str, checkpoints: Checkpoints) -> LLM:
    return LLM(folder, checkpoints.near, **ARGUMENTS)


def prompt_of(*pieces: str) -> list[int]:
    return [BEGIN, *"".join(pieces).encode()]


def essence(output: RequestOutput) -> Any:
    return output.prompt, output.prompt_token_ids, output.outputs


def test_one_conversation_is_answered(llm: LLM) -> None:
    (output,) = llm.chat(FIRST, GREEDY)
    assert output.prompt == "<begin>system:Be brief.;user:Hi;assistant:"
    assert llm.tokenizer.encode("x")[0] == BEGIN, "the tokenizer would add a second one"
    assert output.prompt_token_ids.count(BEGIN) == 1
    assert output.prompt_token_ids == llm.tokenizer.encode(output.prompt, add_special_tokens=False)
    assert output.outputs == llm.generate([output.prompt_token_ids], GREEDY)[0].outputs
    assert output.metrics.verification is not None, "there is a draft"


def test_several_conversations_are_answered(llm: LLM) -> None:
    outputs = llm.chat([FIRST, SECOND], [GREEDY, SamplingParams(temperature=0, max_tokens=3)])
    assert [essence(output) for output in outputs[:1]] == [essence(output) for output in llm.chat(FIRST, GREEDY)]
    assert outputs[1].prompt == "<begin>user:Bye;assistant:"
    assert len(outputs[1].outputs[0].token_ids) == 3


def test_the_template_gets_its_variables(llm: LLM) -> None:
    (output,) = llm.chat(SECOND, GREEDY, tools=TOOLS, chat_template_kwargs={"mood": "(glad)"})
    assert output.prompt == "<begin>[now]user:Bye;(glad)assistant:"
    assert llm.chat(SECOND, GREEDY, add_generation_prompt=False)[0].prompt == "<begin>user:Bye;"


def test_an_answer_is_streamed(llm: LLM) -> None:
    pieces = list(llm.stream_chat(FIRST, GREEDY))
    assert pieces[-1].output is not None
    assert essence(pieces[-1].output) == essence(llm.chat(FIRST, GREEDY)[0])
    assert "".join(piece.text for piece in pieces) == pieces[-1].output.outputs[0].text


def test_the_async_engine_answers_the_same(llm: LLM, folder: str, checkpoints: Checkpoints) -> None:
    async def main() -> None:
        async with AsyncEngine(folder, checkpoints.near, **ARGUMENTS) as engine:
            answers = await asyncio.gather(
                engine.chat(FIRST, GREEDY, request_id="a"), engine.chat(SECOND, GREEDY, TOOLS, cache_salt="b")
            )
            pieces = [piece async for piece in engine.stream_chat(FIRST, GREEDY)]
            with pytest.raises(RequestError, match="no messages"):
                await engine.chat([])
        expected = [*llm.chat(FIRST, GREEDY), *llm.chat(SECOND, GREEDY, tools=TOOLS)]
        assert [essence(answer) for answer in answers] == [essence(output) for output in expected]
        assert pieces[-1].output is not None
        assert essence(pieces[-1].output) == essence(expected[0])

    asyncio.run(main())


def test_the_demo_chats() -> None:
    llm = LLM("demo", max_num_seqs=1)
    (output,) = llm.chat(SECOND, GREEDY)
    begin = llm.tokenizer.encode("x")[0]
    assert begin == llm.tokenizer.bos_id, "the tokenizer would add a second one"
    assert output.prompt_token_ids.count(begin) == 1


def test_a_model_without_a_template_is_named(checkpoints: Checkpoints) -> None:
    with pytest.raises(ModelError, match=r"no chat template\n.*plain prompt.*--chat-template.*chat_template\.jinja"):
        LLM(checkpoints.target, **ARGUMENTS).chat(SECOND)


@pytest.mark.parametrize(
    ("messages", "reason"),
    [([], "no messages"), ("Hi", "a conversation is a str"), ([FIRST, []], "no messages"), ([FIRST, "Hi"], "is a str")],
)
def test_wrong_conversations_are_refused(llm: LLM, messages: Any, reason: str) -> None:
    with pytest.raises(RequestError, match=reason):
        llm.chat(messages)
    assert not llm.engine.has_unfinished()


def test_the_last_message_may_be_continued(llm: LLM) -> None:
    begun = [*SECOND, {"role": "assistant", "content": "See you "}]
    (output,) = llm.chat(begun, GREEDY, continue_final_message=True)
    assert output.prompt == "<begin>user:Bye;assistant:See you "
    (whole,) = llm.chat(begun, GREEDY, add_generation_prompt=False)
    assert whole.prompt == "<begin>user:Bye;assistant:See you ;"
    (empty,) = llm.chat([*SECOND, {"role": "assistant", "content": ""}], GREEDY, continue_final_message=True)
    assert empty.prompt == "<begin>user:Bye;assistant:"
    silent = "{{ messages[0].content }}"
    with pytest.raises(RequestError, match="can't be continued"):
        llm.chat(begun, GREEDY, continue_final_message=True, chat_template=silent)


OWN = "{% for message in messages %}<{{ message.content }}>{% endfor %}{{ '!' if add_generation_prompt }}"


def test_a_caller_s_template_comes_before_others(
    llm: LLM, folder: str, checkpoints: Checkpoints, tmp_path: Path
) -> None:
    (output,) = llm.chat(SECOND, GREEDY, chat_template=OWN)
    assert output.prompt == "<Bye>!"
    *_, last = llm.stream_chat(SECOND, GREEDY, chat_template=OWN)
    assert last.output is not None
    assert essence(last.output) == essence(output)
    file = tmp_path / "own.jinja"
    file.write_text("own:" + OWN, encoding="utf-8")
    for given in (file, str(file), "own:" + OWN):
        other = LLM(folder, checkpoints.near, chat_template=given, **ARGUMENTS)
        assert other.render_chat(SECOND).text == "own:<Bye>!"
        assert other.render_chat(SECOND, tools=TOOLS).text == "own:<Bye>!"
        assert other.tokenizer.chat_template == "own:" + OWN, "servers list it"
        assert other.render_chat(SECOND, chat_template=OWN).text == "<Bye>!"


@pytest.mark.parametrize("given", ["no/such/file", 3, "{% if %}"])
def test_a_template_that_can_t_be_read_is_refused(folder: str, given: Any) -> None:
    with pytest.raises(ConfigError, match="chat"):
        LLM(folder, chat_template=given, **ARGUMENTS)


def test_a_caller_s_template_runs_in_the_sandbox(llm: LLM) -> None:
    with pytest.raises(ModelError, match="the sandbox stopped"):
        llm.chat(SECOND, GREEDY, chat_template="{{ messages.append(1) }}")
    with pytest.raises(ModelError, match="not valid"):
        llm.chat(SECOND, GREEDY, chat_template="{% if %}")


@pytest.mark.parametrize("name", ["template", "source", "chat_template"])
def test_variables_of_a_template_do_not_replace_it(llm: LLM, name: str) -> None:
    assert llm.render_chat(SECOND, chat_template_kwargs={name: OWN}).text == llm.render_chat(SECOND).text


def test_tools_in_the_place_of_another_argument_are_refused(llm: LLM) -> None:
    with pytest.raises(ConfigError, match="use_tqdm is a list"):
        llm.chat(SECOND, GREEDY, TOOLS)  # type: ignore[arg-type]
