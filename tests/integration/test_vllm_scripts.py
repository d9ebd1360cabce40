"""Scripts of vLLM's users, with changed import lines and the demo as model."""

from __future__ import annotations

import re
import sys
from typing import Any

import pytest

import speculant

IMPORT = re.compile(r"^from vllm[\w.]* import ", re.MULTILINE)


def run(script: str) -> dict[str, Any]:
    """Run a script after its imports were changed; return its variables."""
    changed, count = IMPORT.subn("from speculant import ", script)
    assert count, "it imports nothing of vLLM"
    variables: dict[str, Any] = {}
    exec(compile(changed, "script", "exec"), variables)
    return variables


def test_completing_a_list_of_prompts(capsys: pytest.CaptureFixture[str]) -> None:
    made = run(
        """
from vllm import LLM, SamplingParams

prompts = ["Hello, my name is", "The president of the", "The capital of", "The future of"]
sampling_params = SamplingParams(temperature=0.8, top_p=0.95)


def main():
    llm = LLM(model="demo", tensor_parallel_size=1, gpu_memory_utilization=0.8, enforce_eager=True,
              trust_remote_code=False, dtype="half", max_model_len=512, swap_space=4, disable_log_stats=False)
    outputs = llm.generate(prompts, sampling_params)
    for output in outputs:
        prompt = output.prompt
        generated_text = output.outputs[0].text
        print(f"Prompt: {prompt!r} Output: {generated_text!r}")
    return outputs


outputs = main()
"""
    )
    assert capsys.readouterr().out.count("Prompt: ") == 4
    assert [output.prompt for output in made["outputs"]] == made["prompts"]
    assert all(output.finished and output.outputs[0].finished() for output in made["outputs"])


def test_chatting_about_one_and_several_conversations() -> None:
    made = run(
        """
from vllm import LLM

llm = LLM(model="demo", seed=0)
sampling_params = llm.get_default_sampling_params()
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
one = llm.chat(conversation, sampling_params, False, chat_template=template, chat_template_content_format="string")
many = llm.chat([conversation for _ in range(3)], sampling_params, use_tqdm=True, chat_template=template)
ids = llm.get_tokenizer().apply_chat_template(
    conversation, chat_template=template, add_generation_prompt=True, tokenize=True, return_dict=False
)
by_ids = llm.generate({"prompt_token_ids": ids}, sampling_params)
"""
    )
    (one,) = made["one"]
    assert one.prompt.startswith("<system>You are a helpful assistant<user>Hello<assistant>")
    assert one.prompt.endswith("<user>Write an essay.<a>")
    assert [each.prompt_token_ids for each in (*made["many"], *made["by_ids"])] == [one.prompt_token_ids] * 4


def test_forms() -> None:
    made = run(
        """
import json
from vllm import LLM, SamplingParams
from vllm.sampling_params import StructuredOutputsParams

llm = LLM(model="demo", max_model_len=256, structured_outputs_config={"backend": "auto"})


def generate(**form):
    params = SamplingParams(structured_outputs=StructuredOutputsParams(**form), max_tokens=100, temperature=0.0)
    outputs = llm.generate(prompts="Classify this sentiment: vLLM is wonderful!", sampling_params=params)
    return outputs[0].outputs[0].text


choice = generate(choice=["Positive", "Negative"])
address = generate(regex=r"[a-z]{3}@[a-z]{3}[.]com")
schema = {
    "type": "object", "properties": {"ok": {"type": "boolean"}}, "required": ["ok"], "additionalProperties": False,
}
value = json.loads(generate(json=schema, disable_any_whitespace=True))
query = generate(grammar='start: "SELECT " ("a" | "b") " FROM t"')
"""
    )
    assert made["choice"] in ("Positive", "Negative")
    assert re.fullmatch(r"[a-z]{3}@[a-z]{3}[.]com", made["address"])
    assert isinstance(made["value"]["ok"], bool)
    assert made["query"] in ("SELECT a FROM t", "SELECT b FROM t")


def test_prompts_that_share_a_prefix() -> None:
    made = run(
        """
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
reset = llm.reset_prefix_cache()
again = llm.generate(prompts[0], greedy)
"""
    )
    texts = [[output.outputs[0].text for output in made[name]] for name in ("regular", "cached")]
    assert texts[0] == texts[1]
    assert all(output.num_cached_tokens > 0 for output in (*made["cached"], *made["ids"]))
    assert made["ids"][0].outputs[0].text == texts[1][1]
    assert made["reset"] is True
    assert made["salted"][0].num_cached_tokens == made["again"][0].num_cached_tokens == 0


def test_counting_what_speculation_gains() -> None:
    made = run(
        """
from vllm import LLM, SamplingParams
from vllm.v1.metrics.reader import Counter, Gauge, Histogram, Vector

llm = LLM(
    model="demo",
    speculative_config={
        "method": "ngram", "num_speculative_tokens": 3, "prompt_lookup_max": 4, "prompt_lookup_min": 2,
    },
    tensor_parallel_size=1, enable_chunked_prefill=True, disable_log_stats=False, max_num_seqs=4,
)
llm.generate([{"prompt_token_ids": [9, 8, 7, 6] * 8}], sampling_params=SamplingParams(temperature=0, max_tokens=256))
num_drafts = num_draft_tokens = num_accepted = 0
acceptance_counts = [0] * 3
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
            acceptance_counts[pos] += metric.values[pos]
length = 1 + (num_accepted / num_drafts) if num_drafts > 0 else 1
kinds = {metric.name: type(metric).__name__ for metric in llm.get_metrics()}
"""
    )
    assert made["num_drafts"] > 0
    assert made["num_draft_tokens"] >= made["num_accepted"] == sum(made["acceptance_counts"])
    assert made["length"] >= 1
    assert made["kinds"]["vllm:num_requests_running"] == "Gauge"
    assert made["kinds"]["vllm:prompt_tokens"] == made["kinds"]["speculant:steps"] == "Counter"
    assert made["kinds"]["speculant:running"] == "Gauge"


def test_searching_by_beams() -> None:
    made = run(
        """
from vllm import LLM
from vllm.sampling_params import BeamSearchParams

llm = LLM(model="demo", max_logprobs=20)
params = BeamSearchParams(beam_width=3, max_tokens=8)
outputs = llm.beam_search([{"prompt": "Hello, my name is"}, "The future of"], params, use_tqdm=False)
for output in outputs:
    for sequence in output.sequences:
        print(sequence.text, sequence.cum_logprob, len(sequence.tokens))
tokenizer = llm.get_tokenizer()
"""
    )
    first, second = made["outputs"]
    assert [len(output.sequences) for output in (first, second)] == [3, 3]
    prompt = made["tokenizer"].encode("Hello, my name is")
    for sequence in first.sequences:
        assert sequence.tokens[: len(prompt)] == prompt
        assert sequence.text == made["tokenizer"].decode(sequence.tokens)
        assert "Hello, my name is" in sequence.text
        assert sequence.cum_logprob < 0
    scores = [sequence.cum_logprob for sequence in first.sequences]
    assert scores == sorted(scores, reverse=True)


def test_scoring_and_banning_tokens() -> None:
    made = run(
        """
from vllm import LLM, SamplingParams

llm = LLM(model="demo", max_logprobs=-1, seed=0, revision="main", tokenizer="demo", download_dir=None)
tokenizer = llm.get_tokenizer()
first, second = tokenizer.encode("A", add_special_tokens=False)[0], tokenizer.encode("B", add_special_tokens=False)[0]
params = SamplingParams(temperature=0, max_tokens=1, logprobs=-1, allowed_token_ids=[first, second], detokenize=True)
scored = llm.generate("The answer is", params, use_tqdm=False)[0].outputs[0]
probabilities = {token: scored.logprobs[0][token].logprob for token in (first, second)}
mild = params.clone()
free = llm.generate("One day", SamplingParams(temperature=0, max_tokens=20))[0].outputs[0].text
word = free.split()[1]
banned = llm.generate("One day", SamplingParams(temperature=0, max_tokens=20, bad_words=[word]))[0].outputs[0].text
"""
    )
    best = max(made["probabilities"], key=made["probabilities"].__getitem__)
    assert made["scored"].token_ids == [best]
    assert len(made["scored"].logprobs[0]) >= len(made["tokenizer"])
    assert made["scored"].cumulative_logprob == made["probabilities"][best]
    assert made["mild"] == made["params"]
    assert made["word"] in made["free"].split()
    assert made["word"] not in made["banned"].split()


def test_every_name_is_exported() -> None:
    for name in speculant.__all__:
        assert getattr(speculant, name).__name__ in (name, "StructuredOutputs")


def test_importing_the_package_loads_no_torch() -> None:
    import subprocess

    code = "import speculant, sys; assert 'torch' not in sys.modules and 'speculant.params' not in sys.modules"
    subprocess.run([sys.executable, "-c", code], check=True)
