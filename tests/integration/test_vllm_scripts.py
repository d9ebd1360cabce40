"""vLLM's documented offline scripts and configurations, written anew from its API: they run, or say why not.

A script's import lines are changed, and small models stand in for its own.
"""

from __future__ import annotations

import re
import sys
from collections.abc import Mapping
from functools import cache
from pathlib import Path
from typing import Any

import pytest
from safetensors.torch import load_file, save_file

import speculant
from speculant import LLM, SamplingParams
from speculant.errors import SpeculantError
from tests.drafters import model_of, with_mask
from tests.encoder_decoders import make_t5, write_t5
from tests.gguf_models import convert
from tests.heads import write_mtp
from tests.models import HIDDEN_SIZE, VOCAB_SIZE, Shape, write_checkpoint

PAGE = (Path(__file__).parents[2] / "docs/vllm.md").read_text(encoding="utf-8")
IMPORT = re.compile(r"^from vllm[\w.]* import ", re.MULTILINE)
# By vLLM's name: a script that runs, with what it must have made.
RUNS: Mapping[str, str] = {
    "basic": """
from vllm import LLM, SamplingParams
prompts = ["Hello, my name is", "The president of the", "The capital of", "The future of"]
llm = LLM(model="demo", tensor_parallel_size=1, gpu_memory_utilization=0.8, enforce_eager=True, dtype="half",
          trust_remote_code=True, max_model_len=512, swap_space=4, disable_log_stats=False)
outputs = llm.generate(prompts, SamplingParams(temperature=0.8, top_p=0.95))
assert [output.prompt for output in outputs] == prompts
assert all(output.finished and output.outputs[0].finished() for output in outputs)
""",
    "basic_with_model_default_sampling": """
from vllm import LLM
llm = LLM(model="demo", trust_remote_code=True)
sampling_params = llm.get_default_sampling_params()
sampling_params.max_tokens = 5
sampling_params.temperature = 0.5
(output,) = llm.generate(["Hello, my name is"], sampling_params)
assert len(output.outputs[0].token_ids) == 5
assert llm.get_default_sampling_params().max_tokens == 16
""",
    "chat": """
from vllm import LLM
llm = LLM(model="demo", seed=0)
sampling_params = llm.get_default_sampling_params()
for name, value in {"max_tokens": 8, "temperature": 0.0, "top_p": 0.95, "top_k": -1}.items():
    setattr(sampling_params, name, value)
conversation = [
    {"role": "system", "content": "You are a helpful assistant"},
    {"role": "user", "content": "Hello"},
    {"role": "assistant", "content": "Hello! How can I assist you today?"},
    {"role": "user", "content": [{"type": "text", "text": "Write an essay."}]},
]
template = (
    "{% for m in messages %}<{{ m.role }}>{{ m.content }}{% endfor %}"
    "{% if add_generation_prompt %}<a>{% endif %}"
)
(one,) = llm.chat(conversation, sampling_params, use_tqdm=False, chat_template=template)
many = llm.chat([conversation for _ in range(3)], sampling_params, use_tqdm=True, chat_template=template)
ids = llm.get_tokenizer().apply_chat_template(
    conversation, chat_template=template, add_generation_prompt=True, tokenize=True, return_dict=False
)
assert one.prompt.startswith("<system>You are a helpful assistant<user>Hello<assistant>")
assert one.prompt.endswith("<user>Write an essay.<a>")
by_ids = llm.generate({"prompt_token_ids": ids}, sampling_params)
assert [each.outputs[0].token_ids for each in (*many, *by_ids)] == [one.outputs[0].token_ids] * 4
""",
    "chat_with_tools": """
import json
from vllm import LLM
from vllm.sampling_params import SamplingParams
sampling_params = SamplingParams(max_tokens=16, temperature=0.0)
llm = LLM(model="demo")
tools = [{"type": "function", "function": {"name": "get_current_weather", "description": "Get the weather",
          "parameters": {"type": "object", "properties": {"city": {"type": "string"}}, "required": ["city"]}}}]
messages = [{"role": "user", "content": "What is the weather in Dallas?"}]
template = "{% for m in messages %}{{ m.role }}: {{ m.content }} {% endfor %}{{ tools | tojson }}"
outputs = llm.chat(messages, sampling_params=sampling_params, tools=tools, chat_template=template)
assert "get_current_weather" in outputs[0].prompt
messages.append({"role": "assistant", "content": outputs[0].outputs[0].text.strip()})
messages.append({"role": "tool", "content": "21 degrees", "tool_call_id": "abcdefghi"})
outputs = llm.chat(messages, sampling_params, tools=tools, chat_template=template)
assert "21 degrees" in outputs[0].prompt
""",
    "automatic_prefix_caching": """
import time
from vllm import LLM, SamplingParams
table = "You are a helpful assistant that reads a table of ages and towns. " * 8
llm = LLM(model="demo", enable_prefix_caching=True)
sampling_params = SamplingParams(temperature=0, max_tokens=10)
first = llm.generate(table + "Question: what is the age of John?", sampling_params=sampling_params)
second = llm.generate(table + "Question: what is the age of Zack?", sampling_params=sampling_params)
assert first[0].num_cached_tokens == 0 < second[0].num_cached_tokens
""",
    "prefix_caching": """
from vllm import LLM, SamplingParams
from vllm.inputs import TextPrompt, TokensPrompt
prefix = "You are an expert school principal, skilled in effectively managing faculty and staff. " * 3
prompts = [prefix + end for end in ("Hello", "The president", "The capital")]
greedy = SamplingParams(temperature=0.0)
regular = LLM(model="demo", enable_prefix_caching=False).generate(prompts, greedy)
llm = LLM(model="demo", enable_prefix_caching=True, gpu_memory_utilization=0.4, block_size=16)
llm.generate(prompts[0], greedy)
cached = llm.generate(prompts, greedy)
salted = llm.generate(TextPrompt(prompt=prompts[0], cache_salt="someone else"), greedy)
ids = llm.generate(TokensPrompt(prompt_token_ids=cached[1].prompt_token_ids), greedy)
assert [each.outputs[0].text for each in regular] == [each.outputs[0].text for each in cached]
assert all(output.num_cached_tokens > 0 for output in (*cached, *ids))
assert llm.reset_prefix_cache() is True
assert salted[0].num_cached_tokens == llm.generate(prompts[0], greedy)[0].num_cached_tokens == 0
""",
    "reproducibility": """
import os
os.environ["VLLM_ENABLE_V1_MULTIPROCESSING"] = "0"
from vllm import LLM, SamplingParams
prompts = ["Hello, my name is", "The capital of"]
params = SamplingParams(temperature=0.8, top_p=0.95)
first, second = ([output.outputs[0].text for output in LLM(model="demo", seed=7).generate(prompts, params)]
                 for _ in range(2))
assert first == second
""",
    "structured_outputs": """
import json
import re
from vllm import LLM, SamplingParams
from vllm.sampling_params import StructuredOutputsParams
llm = LLM(model="demo", max_model_len=256, structured_outputs_config={"backend": "auto"})
def generate(**form):
    params = SamplingParams(structured_outputs=StructuredOutputsParams(**form), max_tokens=100, temperature=0.0)
    outputs = llm.generate(prompts="Classify this sentiment: vLLM is wonderful!", sampling_params=params)
    return outputs[0].outputs[0].text
assert generate(choice=["Positive", "Negative"]) in ("Positive", "Negative")
assert re.fullmatch(r"[a-z]{3}@[a-z]{3}[.]com", generate(regex=r"[a-z]{3}@[a-z]{3}[.]com"))
schema = {
    "type": "object", "properties": {"ok": {"type": "boolean"}}, "required": ["ok"], "additionalProperties": False,
}
assert isinstance(json.loads(generate(json=schema, disable_any_whitespace=True))["ok"], bool)
grammar = '''
root ::= select_statement
select_statement ::= "SELECT " column " from " table " where " condition
column ::= "col_1 "
  | "col_2 "
table ::= "table_1 " | "table_2 "
condition ::= column "= " number
number ::= "1 " | "2 "
'''
assert re.fullmatch(r"SELECT col_\\d  from table_\\d  where col_\\d = \\d ", generate(grammar=grammar))
assert generate(grammar='start: "SELECT " ("a" | "b")') in ("SELECT a", "SELECT b")
""",
    "spec_decode": """
from vllm import LLM, SamplingParams
from vllm.v1.metrics.reader import Counter, Vector
llm = LLM(
    model="demo", trust_remote_code=True, tensor_parallel_size=1, enable_chunked_prefill=True, enforce_eager=False,
    speculative_config={
        "method": "ngram", "num_speculative_tokens": 3, "prompt_lookup_max": 4, "prompt_lookup_min": 2,
    },
    disable_log_stats=False, max_model_len=512, limit_mm_per_prompt={"image": 5}, max_num_seqs=4,
)
llm.generate([{"prompt_token_ids": [9, 8, 7, 6] * 8}], sampling_params=SamplingParams(temperature=0, max_tokens=256))
num_drafts = num_draft_tokens = num_accepted = 0
counts = [0] * 3
for metric in llm.get_metrics():
    if metric.name == "vllm:spec_decode_num_drafts":
        assert isinstance(metric, Counter)
        num_drafts += metric.value
    elif metric.name == "vllm:spec_decode_num_draft_tokens":
        num_draft_tokens += metric.value
    elif metric.name == "vllm:spec_decode_num_accepted_tokens":
        num_accepted += metric.value
    elif metric.name == "vllm:spec_decode_num_accepted_tokens_per_pos":
        assert isinstance(metric, Vector)
        for pos in range(len(metric.values)):
            counts[pos] += metric.values[pos]
assert num_drafts > 0
assert num_draft_tokens >= num_accepted == sum(counts)
""",
    "metrics": """
from vllm import LLM, SamplingParams
from vllm.v1.metrics.reader import Counter, Gauge, Histogram, Vector
llm = LLM(model="demo", disable_log_stats=False)
llm.generate(["Hello, my name is"], SamplingParams(temperature=0.8, top_p=0.95))
kinds = {}
for metric in llm.get_metrics():
    assert isinstance(metric, Counter | Gauge | Vector) and not isinstance(metric, Histogram)
    kinds[metric.name] = type(metric).__name__
assert kinds["vllm:num_requests_running"] == kinds["speculant:running"] == "Gauge"
assert kinds["vllm:prompt_tokens"] == kinds["speculant:steps"] == "Counter"
""",
    "beam_search": """
from vllm import LLM
from vllm.sampling_params import BeamSearchParams
llm = LLM(model="demo", max_logprobs=20)
params = BeamSearchParams(beam_width=3, max_tokens=8)
outputs = llm.beam_search([{"prompt": "Hello, my name is"}, "The future of"], params, use_tqdm=False)
assert [len(output.sequences) for output in outputs] == [3, 3]
tokenizer = llm.get_tokenizer()
prompt, scores = tokenizer.encode("Hello, my name is"), []
for sequence in outputs[0].sequences:
    assert sequence.tokens[: len(prompt)] == prompt
    assert sequence.text == tokenizer.decode(sequence.tokens)
    scores.append(sequence.cum_logprob)
assert scores == sorted(scores, reverse=True) and scores[0] < 0
""",
    "logprobs": """
from vllm import LLM, SamplingParams
llm = LLM(model="demo", max_logprobs=-1, seed=0, revision="main", tokenizer="demo", download_dir=None)
tokenizer = llm.get_tokenizer()
first, second = (tokenizer.encode(text, add_special_tokens=False)[0] for text in "AB")
params = SamplingParams(temperature=0, max_tokens=1, logprobs=-1, allowed_token_ids=[first, second], detokenize=True)
scored = llm.generate("The answer is", params, use_tqdm=False)[0].outputs[0]
probabilities = {token: scored.logprobs[0][token].logprob for token in (first, second)}
best = max(probabilities, key=probabilities.get)
assert scored.token_ids == [best] and scored.cumulative_logprob == probabilities[best]
assert len(scored.logprobs[0]) >= len(tokenizer)
assert params.clone() == params
""",
    "prompt_logprobs": """
from vllm import LLM, SamplingParams
(output,) = LLM(model="demo").generate("One day", SamplingParams(prompt_logprobs=1, max_tokens=1))
assert output.prompt_logprobs[0] is None
assert len(output.prompt_logprobs) == len(output.prompt_token_ids)
""",
    "bad_words": """
from vllm import LLM, SamplingParams
llm = LLM(model="demo")
free = llm.generate("One day", SamplingParams(temperature=0, max_tokens=20))[0].outputs[0].text
word = free.split()[1]
banned = llm.generate("One day", SamplingParams(temperature=0, max_tokens=20, bad_words=[word]))[0].outputs[0].text
assert word not in banned.split()
""",
    "stop_token_ids": """
from vllm import LLM, SamplingParams
llm = LLM(model="demo")
sampling_params = SamplingParams(temperature=0.0, max_tokens=64)
tokens = llm.generate("One day", sampling_params)[0].outputs[0].token_ids
sampling_params.stop_token_ids = [tokens[3]]
stopped = llm.generate("One day", sampling_params)[0].outputs[0]
assert stopped.stop_reason == tokens[3] and len(stopped.token_ids) <= 4
""",
    "priority": """
from vllm import LLM, SamplingParams
llm = LLM(model="demo", scheduling_policy="priority", max_num_seqs=1)
outputs = llm.generate(["Hello", "The capital of"], SamplingParams(max_tokens=4), priority=[1, 0])
assert [output.prompt for output in outputs] == ["Hello", "The capital of"]
""",
    "parallel_sampling": """
from vllm import LLM, SamplingParams
params = [SamplingParams(n=3, temperature=1.0, seed=5, max_tokens=8), SamplingParams(temperature=0.0, max_tokens=4)]
many, one = LLM(model="demo").generate(["Hello", "The capital of"], params)
assert [sample.index for sample in many.outputs] == [0, 1, 2] and len(one.outputs) == 1
""",
    "generation_config": """
from vllm import LLM, SamplingParams
llm = LLM(model="demo", generation_config="vllm", override_generation_config={"temperature": 0.5, "max_new_tokens": 4})
assert llm.get_default_sampling_params() == SamplingParams(temperature=0.5, max_tokens=4)
assert len(llm.generate("Hello")[0].outputs[0].token_ids) == 4
""",
    "encoder_decoder": """
from vllm import LLM, SamplingParams
from vllm.inputs import ExplicitEncoderDecoderPrompt, TextPrompt, TokensPrompt
llm = LLM(model=T5, dtype="float")
prompts = [
    "Hello, my name is", TextPrompt(prompt="The president of the"), TokensPrompt(prompt_token_ids=[1, 2, 3]),
    ExplicitEncoderDecoderPrompt(encoder_prompt="The capital of", decoder_prompt="a"),
]
outputs = llm.generate(prompts, SamplingParams(temperature=0, top_p=1.0, min_tokens=0, max_tokens=20))
assert outputs[0].encoder_prompt == "Hello, my name is"
assert outputs[3].prompt == "a"
""",
    "gguf_inference": """
from vllm import LLM, SamplingParams
llm = LLM(model=GGUF, tokenizer=TOKENIZER, max_model_len=128, gpu_memory_utilization=0.95)
outputs = llm.generate(["How many", "Explain"], SamplingParams(temperature=0, max_tokens=8))
assert len(outputs) == 2
""",
}
# By vLLM's name: a script that is refused, and a part of the message.
REFUSED: Mapping[str, tuple[str, str]] = {
    "async_llm_streaming": ("from vllm.v1.engine.async_llm import AsyncLLM", "AsyncEngine"),
    "classify": ('from vllm import LLM\nLLM(model="demo", runner="pooling", enforce_eager=True)', "complete text"),
    "context_extension": (
        'from vllm import LLM\nLLM(model="demo", hf_overrides={"rope_parameters": {"rope_type": "yarn"}})',
        "edit a copy of config.json",
    ),
    "cpu_offload": ('from vllm import LLM\nLLM(model="demo", cpu_offload_gb=10)', "set quantization"),
    "data_parallel": ('from vllm import LLM\nLLM(model="demo", data_parallel_size=2)', "one process per copy"),
    "embed": ('from vllm import LLM\nLLM(model="demo").embed(["Hello, my name is"])', "embeddings"),
    "encoder_decoder_multimodal": (
        'from vllm import LLM\nLLM(model="demo").generate({"prompt": "<s>", "multi_modal_data": {"audio": 1}})',
        "multi_modal_data",
    ),
    "generate": ("from vllm import EngineArgs", "LLM"),
    "extract_hidden_states": (
        'from vllm import LLM\nLLM(model="demo", speculative_config={"method": "extract_hidden_states"})',
        "the target's states in a file",
    ),
    "kv_transfer": (
        'from vllm import LLM\nLLM(model="demo", kv_transfer_config={"kv_connector": "LMCacheConnectorV1"})',
        "stay in this process",
    ),
    "llm_engine": ("from vllm import EngineArgs, LLMEngine", "LLM"),
    "logits_processor": ('from vllm import LLM\nLLM(model="demo", logits_processors=[object])', "logit_bias"),
    "lora": ('from vllm import LLM\nLLM(model="demo", enable_lora=True, max_loras=1)', "merge the adapter"),
    "manual_prompt_rendering": ('from vllm import LLM\nLLM(model="demo").renderer', "render_chat"),
    "mistral_small": ('from vllm import LLM\nLLM(model="demo", tokenizer_mode="mistral")', "tokenizer.json"),
    "mlpspeculator": (
        'from vllm import LLM\nLLM(model="demo", speculative_config={"method": "mlp_speculator", "model": "x"})',
        "docs/drafters.md",
    ),
    "pause_resume": ('from vllm import LLM\nLLM(model="demo", enable_sleep_mode=True)', "as long as its LLM"),
    "profiling": ('from vllm import LLM\nLLM(model="demo").start_profile()', "docs/profiling.md"),
    "prompt_embed": ('from vllm import LLM\nLLM(model="demo", enable_prompt_embeds=True)', "texts or token ids"),
    "rlhf": ('from vllm import LLM\nLLM(model="demo").collective_rpc("update_weights")', "middle of a step"),
    "score": ('from vllm import LLM\nLLM(model="demo").score("What is it?", ["a", "b"])', "prompt_logprobs"),
    "vision_language": (
        """from vllm import LLM
content = [{"type": "image_url", "image_url": {"url": "https://example.org/a.jpg"}}]
LLM(model="demo").chat([{"role": "user", "content": content}])""",
        "text",
    ),
}


@cache
def hidden_and_vocabulary() -> tuple[int, int]:
    model = LLM("demo", use_speculative_decoding=False).checkpoint.model
    return model.hidden_size, model.vocab_size


def head(method: str) -> str:
    """Return a head of the embedded target."""
    found = model_of(method, "demo", *hidden_and_vocabulary())
    assert found is not None
    return found


def run(script: str, **names: Any) -> dict[str, Any]:
    """Run a script after its imports were changed; return its variables. names: further ones."""
    changed, count = IMPORT.subn("from speculant import ", script)
    assert count, "it imports nothing of vLLM"
    exec(compile(changed, "script", "exec"), names)
    return names


@pytest.fixture(scope="module")
def places(tmp_path_factory: pytest.TempPathFactory) -> dict[str, str]:
    folder = tmp_path_factory.mktemp("models")
    plain = write_checkpoint(folder / "plain", Shape(layers=1))
    gguf = convert(plain, folder / "model.gguf")
    return {"T5": write_t5(folder / "t5", make_t5()), "GGUF": str(gguf), "TOKENIZER": plain}


@pytest.mark.parametrize("name", RUNS)
def test_a_script_runs(name: str, places: dict[str, str]) -> None:
    run(RUNS[name], **places)


@pytest.mark.parametrize("name", REFUSED)
def test_a_script_says_why_it_does_not_run(name: str) -> None:
    script, reason = REFUSED[name]
    with pytest.raises((SpeculantError, ImportError), match=f"(?s){reason}"):
        run(script)


@pytest.mark.parametrize("name", ["EngineArgs", "AsyncLLMEngine"])
def test_an_absent_class_can_be_asked_for(name: str) -> None:
    """hasattr is False; an import says what takes the place of the class, and so does a look at the attribute."""
    assert not hasattr(speculant, name)
    with pytest.raises(AttributeError, match=f"speculant has no {name}: .*docs/vllm.md"):
        getattr(speculant, name)
    with pytest.raises(ImportError, match=f"speculant has no {name}: .*docs/vllm.md"):
        exec(f"from speculant import {name}")


# vLLM's documented speculative configurations; HEAD(kind) is a head, MASKS a draft model that reads masks.
CONFIGURATIONS: Mapping[str, tuple[dict[str, Any], str]] = {
    "ngram": ({"method": "ngram", "num_speculative_tokens": 5, "prompt_lookup_max": 4}, ""),
    "ngram range": (
        {"method": "ngram", "num_speculative_tokens": 4, "prompt_lookup_min": 2, "prompt_lookup_max": 5},
        "",
    ),
    "ngram_gpu": ({"method": "ngram_gpu", "num_speculative_tokens": 5, "prompt_lookup_max": 4}, ""),
    "suffix": ({"method": "suffix", "num_speculative_tokens": 32}, ""),
    "suffix keys": (
        {"method": "suffix", "num_speculative_tokens": 8, "suffix_decoding_max_tree_depth": 24,
         "suffix_decoding_max_cached_requests": 10000, "suffix_decoding_max_spec_factor": 1.0,
         "suffix_decoding_min_token_prob": 0.1}, "",
    ),
    "suffix adaptive": ({"method": "suffix", "num_speculative_tokens": 8, "enable_adaptive_verification": True}, ""),
    "draft_model": ({"model": "demo", "num_speculative_tokens": 5, "method": "draft_model"}, ""),
    "other vocabulary": (
        {"method": "draft_model", "model": "demo", "num_speculative_tokens": 3, "use_heterogeneous_vocab": True}, "",
    ),
    "pard": (
        {"model": "MASKS", "num_speculative_tokens": 12, "method": "draft_model", "parallel_drafting": True}, "",
    ),
    "fly": (
        {"method": "draft_model", "model": "demo", "num_speculative_tokens": 8, "rejection_sample_method": "fly"},
        "the text is not the model's",
    ),
    "eagle": (
        {"model": "HEAD eagle", "draft_tensor_parallel_size": 1, "num_speculative_tokens": 2, "method": "eagle"}, "",
    ),
    "eagle3 on two processors": (
        {"model": "HEAD eagle3", "draft_tensor_parallel_size": 2, "num_speculative_tokens": 2, "method": "eagle3"},
        "one process computes the model",
    ),
    "dynamic": (
        {"method": "eagle3", "model": "HEAD eagle3", "num_speculative_tokens": 5,
         "num_speculative_tokens_per_batch_size": [[1, 16, 5], [17, 32, 4], [129, 512, 0]]}, "",
    ),
    "mtp": ({"method": "mtp", "num_speculative_tokens": 1}, ""),
    "mlp_speculator": (
        {"model": "ibm-ai-platform/llama3-8b-accelerator", "draft_tensor_parallel_size": 1, "method": "mlp_speculator"},
        "perceptrons",
    ),
    "dflash": ({"method": "dflash", "model": "HEAD dflash", "num_speculative_tokens": 4}, ""),
    "dspark": (
        {"method": "dspark", "model": "deepseek-ai/dspark_qwen3_4b_block7", "num_speculative_tokens": 7,
         "adaptive_verification": True, "draft_sample_method": "probabilistic"}, "blocks of drafts",
    ),
}  # fmt: skip


@pytest.mark.parametrize("name", CONFIGURATIONS)
def test_a_configuration_drafts_or_says_why_not(name: str, own_head: str) -> None:
    given, reason = CONFIGURATIONS[name]
    config = {key: model(value) if key == "model" else value for key, value in given.items()}
    target = own_head if name == "mtp" else "demo"
    if reason:
        with pytest.raises(SpeculantError, match=reason):
            LLM(target, speculative_config=config)
        return
    greedy = SamplingParams(temperature=0, max_tokens=24)
    llm, plain = LLM(target, speculative_config=config), LLM(target, use_speculative_decoding=False)
    assert llm.speculating
    assert (llm.generate("def f(x):", greedy)[0].outputs[0].token_ids
            == plain.generate("def f(x):", greedy)[0].outputs[0].token_ids)  # fmt: skip


def model(name: str) -> str:
    """Return the model that stands in for one of vLLM's."""
    if name == "MASKS":
        return with_mask("demo")
    return head(name.removeprefix("HEAD ")) if name.startswith("HEAD ") else name


@pytest.fixture(scope="module")
def own_head(tmp_path_factory: pytest.TempPathFactory) -> str:
    return with_own_head(tmp_path_factory.mktemp("mtp"), "qwen")


def with_own_head(folder: Path, form: str) -> str:
    """Write a checkpoint with a head for multi-token prediction among its weights."""
    settings = (("num_nextn_predict_layers", 1),)
    target = write_checkpoint(folder / "target", Shape(layers=2, settings=settings))
    size = {"intermediate_size": 2 * HIDDEN_SIZE}
    head = write_mtp(folder / "head", HIDDEN_SIZE, VOCAB_SIZE, form, **size)
    stored = [load_file(f"{each}/model.safetensors") for each in (target, head)]
    save_file({**stored[0], **stored[1]}, f"{target}/model.safetensors")
    return target


@pytest.mark.parametrize("form", ["mimo", "qwen", "deepseek"])
def test_a_head_among_the_target_s_weights_is_found(form: str, tmp_path: Path) -> None:
    config = {"method": "mtp", "num_speculative_tokens": 1}
    assert LLM(with_own_head(tmp_path, form), speculative_config=config).speculation.startswith("mtp, 1 tokens")


@pytest.mark.parametrize(
    ("method", "rule"),
    [
        ("mtp", None),
        ("mtp", "standard"),
        ("mtp", "block"),
        ("deepseek_mtp", "strict"),
        ("qwen3_next_mtp", "probabilistic"),
    ],
)
def test_lossless_rules_and_old_names_of_methods_are_taken(method: str, rule: str | None, own_head: str) -> None:
    config = {"method": method, "num_speculative_tokens": 2, "rejection_sample_method": rule}
    assert LLM(own_head, speculative_config=config).speculation.startswith("mtp, 2 tokens")


def test_a_model_without_a_head_of_its_own_says_so() -> None:
    with pytest.raises(SpeculantError, match="no head for multi-token prediction"):
        LLM("demo", speculative_config={"method": "mtp", "num_speculative_tokens": 1})


def test_the_kind_of_a_head_need_not_be_named() -> None:
    llm = LLM("demo", speculative_config={"model": head("dflash"), "num_speculative_tokens": 4})
    assert llm.speculation.startswith("dflash, 4 tokens")


def test_the_page_counts_and_names_the_cases() -> None:
    section = PAGE.partition("\n## What runs")[2].partition("\n## ")[0]
    refused = [name for name, (_, reason) in CONFIGURATIONS.items() if reason]
    assert f"{len(RUNS)} of {len(RUNS) + len(REFUSED)} scripts" in section
    assert f"{len(CONFIGURATIONS) - len(refused)} of {len(CONFIGURATIONS)} configurations" in section
    assert [name for name in (*RUNS, *REFUSED) if f"`{name}`" not in section] == []


def test_every_name_is_exported() -> None:
    for name in speculant.__all__:
        assert getattr(speculant, name).__name__ in (name, "StructuredOutputs")


def test_importing_the_package_loads_no_torch() -> None:
    import subprocess

    code = "import speculant, sys; assert 'torch' not in sys.modules and 'speculant.params' not in sys.modules"
    subprocess.run([sys.executable, "-c", code], check=True)
