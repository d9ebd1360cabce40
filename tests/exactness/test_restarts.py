"""Texts that grow past the original context of LongRoPE: all their keys and values are computed again.

Every text must be the same as without a draft, alone, whole, with nothing cached, and as transformers generates it.
"""

from __future__ import annotations

import json
import shutil
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import AutoModelForCausalLM, Phi3Config

from speculant import LLM, SamplingParams
from speculant.kernels import usable_sets
from tests.exactness.selection import slow_but
from tests.examples import examples, sizes
from tests.heads import WRITERS
from tests.models import HIDDEN_SIZE, VOCAB_SIZE, Shape, write_checkpoint

AT = 24  # tokens, the original context
SETTINGS = {
    "rope_scaling": {
        "rope_type": "longrope",
        "short_factor": [1.0, 1.2, 1.5, 2.0],
        "long_factor": [4.0, 9.0, 20.0, 40.0],
        "original_max_position_embeddings": AT,
    }
}
ENGINES = ["native", pytest.param("reference", marks=pytest.mark.slow)] if usable_sets() else ["reference"]
LENGTHS = [3, 9, AT - 4, AT - 2, AT - 1, AT, AT + 1, AT + 9]  # of prompts
GREEDY = SamplingParams(temperature=0, max_tokens=20, ignore_eos=True)
DRAFTERS: dict[str, dict[str, Any]] = {
    "draft_model": {"method": "draft_model", "num_speculative_tokens": 5},
    "ngram": {"method": "ngram", "num_speculative_tokens": 4},
    "early_exit": {"method": "early_exit", "num_speculative_tokens": 4},
    "specinfer": {"method": "specinfer", "num_speculative_tokens": 6},
    "eagle": {"method": "eagle", "num_speculative_tokens": 4},
    "eagle3": {"method": "eagle3", "num_speculative_tokens": 4},
    "pass": {"method": "pass", "num_speculative_tokens": 3},
}

pytestmark = pytest.mark.usefixtures("one_thread")


def prompts(seed: int = 0) -> list[list[int]]:
    """Prompts around the boundary, which share beginnings."""
    generator = torch.Generator().manual_seed(seed)
    text = torch.randint(33, 127, (max(LENGTHS),), generator=generator).tolist()
    return [text[:length] for length in LENGTHS]


@pytest.fixture(scope="module")
def folders(tmp_path_factory: pytest.TempPathFactory) -> dict[str, str]:
    """A target, and a draft model that often agrees with it and has another boundary."""
    made = {}
    for name, shape, at in (("target", Shape(), AT), ("near", Shape(noise=0.05), AT - 5)):
        folder = Path(write_checkpoint(tmp_path_factory.mktemp("restarts") / name, shape))
        config = json.loads((folder / "config.json").read_text())
        scaling = {**SETTINGS["rope_scaling"], "original_max_position_embeddings": at}
        (folder / "config.json").write_text(json.dumps({**config, "rope_scaling": scaling}))
        made[name] = str(folder)
    for method in ("eagle", "eagle3", "pass"):
        own = {} if method == "pass" else SETTINGS
        made[method] = WRITERS[method](tmp_path_factory.mktemp("restarts") / method, HIDDEN_SIZE, VOCAB_SIZE, **own)
    return made


def engine(kernels: str) -> dict[str, Any]:
    return {"kernels": "native", "dtype": "float32"} if kernels == "native" else {"dtype": "float64"}


def texts(llm: LLM, params: SamplingParams | Sequence[SamplingParams] = GREEDY) -> list[list[int]]:
    given = list(params) if isinstance(params, Sequence) else [params] * len(LENGTHS)
    return [out.outputs[0].token_ids for out in llm.generate(prompts(), given)]


def seeded() -> list[SamplingParams]:
    return [
        SamplingParams(temperature=0.9, top_p=0.95, seed=i, max_tokens=20, ignore_eos=True) for i in range(len(LENGTHS))
    ]


@pytest.fixture(scope="module", params=ENGINES)
def plain(request: pytest.FixtureRequest, folders: dict[str, str]) -> tuple[str, list[list[int]], list[list[int]]]:
    """The kernels, and the greedy and the seeded texts of each prompt alone."""
    llm = LLM(
        folders["target"],
        max_num_seqs=1,
        use_speculative_decoding=False,
        enable_prefix_caching=False,
        **engine(request.param),
    )
    return request.param, texts(llm), texts(llm, seeded())


def test_plain_texts_are_those_of_whole_passes(
    plain: tuple[str, list[list[int]], list[list[int]]], folders: dict[str, str]
) -> None:
    """Transformers computes each whole text anew, for each token: as generate with a cache that drops all at 24."""
    theirs = AutoModelForCausalLM.from_pretrained(folders["target"], dtype=torch.float64).eval()
    _, greedy, _ = plain
    for prompt, own in zip(prompts(), greedy, strict=True):
        text = list(prompt)
        with torch.inference_mode():
            for _ in own:
                text.append(int(theirs(torch.tensor([text]), use_cache=False).logits[0, -1].argmax()))
        assert own == text[len(prompt) :], len(prompt)
    assert len({tuple(text) for text in greedy}) > 5


@pytest.mark.parametrize("method", slow_but(["draft_model", "early_exit", "eagle3"], DRAFTERS))
def test_drafts_do_not_change_a_text(
    method: str, plain: tuple[str, list[list[int]], list[list[int]]], folders: dict[str, str]
) -> None:
    kernels, greedy, sampled = plain
    draft = folders["near"] if method in ("draft_model", "specinfer") else folders.get(method)
    for batch in (8, 1)[: examples(2, least=1)]:
        llm = LLM(
            folders["target"], draft_model=draft, speculative_config=DRAFTERS[method], max_num_seqs=batch,
            **engine(kernels),
        )  # fmt: skip
        outputs = llm.generate(prompts(), [GREEDY] * len(LENGTHS))
        assert [out.outputs[0].token_ids for out in outputs] == greedy
        assert texts(llm, seeded()) == sampled
        assert sum(out.metrics.speculative_decoding.num_draft_tokens for out in outputs) > 0
        if method == "draft_model":
            assert sum(out.metrics.speculative_decoding.num_accepted_draft_tokens for out in outputs) > 20


@pytest.mark.parametrize(
    "limits",
    [
        {"max_num_batched_tokens": 7, "max_num_seqs": 5},
        {"max_num_batched_tokens": 16, "max_num_seqs": 3, "block_size": 4},
        {"kv_cache_backend": "slotted"},
        {"block_size": 4, "max_model_len": 56, "kv_memory": 110_000},
    ],
    ids=str,
)
def test_limits_do_not_change_a_text(
    limits: dict[str, Any], plain: tuple[str, list[list[int]], list[list[int]]], folders: dict[str, str]
) -> None:
    """Chunks of prompts, prefixes of other texts, and preemption for want of memory."""
    kernels, greedy, sampled = plain
    if kernels == "native" and "kv_memory" in limits:
        limits = {**limits, "kv_memory": limits["kv_memory"] // 2}  # its numbers have 4 bytes, not 8
    llm = LLM(
        folders["target"], draft_model=folders["near"], speculative_config=DRAFTERS["draft_model"],
        **limits, **engine(kernels),
    )  # fmt: skip
    preempted = 0
    for _ in range(2):  # the second finds prefixes of both kinds
        outputs = llm.generate(prompts(), [GREEDY] * len(LENGTHS))
        assert [out.outputs[0].token_ids for out in outputs] == greedy
        preempted += sum(out.metrics.num_preemptions for out in outputs)
        assert texts(llm, seeded()) == sampled
    assert bool(preempted) == ("kv_memory" in limits)


def test_long_texts_continue_prefixes_of_long_texts_alone(
    plain: tuple[str, list[list[int]], list[list[int]]], folders: dict[str, str]
) -> None:
    kernels, greedy, _ = plain
    llm = LLM(folders["target"], use_speculative_decoding=False, block_size=4, **engine(kernels))
    params = SamplingParams(temperature=0, max_tokens=1, ignore_eos=True)
    text = prompts()[-1]
    assert llm.generate([text[:AT]], [params])[0].num_cached_tokens == 0
    assert llm.generate([text[: AT + 2]], [params])[0].num_cached_tokens == 0
    assert llm.generate([text[: AT + 6]], [params])[0].num_cached_tokens == AT
    assert llm.generate([text[: AT - 2]], [params])[0].num_cached_tokens == AT - 4
    assert llm.generate([text], [GREEDY])[0].outputs[0].token_ids == greedy[-1]


def test_several_samples_of_a_prompt_at_the_boundary(
    plain: tuple[str, list[list[int]], list[list[int]]], folders: dict[str, str]
) -> None:
    kernels, _, _ = plain
    found = []
    for own in ({"use_speculative_decoding": False, "enable_prefix_caching": False, "max_num_seqs": 1}, {}):
        draft = {} if own else {"draft_model": folders["near"], "speculative_config": DRAFTERS["draft_model"]}
        llm = LLM(folders["target"], **own, **draft, **engine(kernels))
        params = SamplingParams(temperature=1.0, seed=3, n=3, max_tokens=12, ignore_eos=True)
        outputs = llm.generate([prompts()[index] for index in (3, 4, 5, 6)], [params] * 4)
        found.append([[each.token_ids for each in out.outputs] for out in outputs])
    assert found[0] == found[1]
    assert len({tuple(text) for text in found[0][0]}) == 3


@pytest.mark.parametrize("width", sizes(2, 4))
def test_beams_across_the_boundary(
    width: int, plain: tuple[str, list[list[int]], list[list[int]]], folders: dict[str, str]
) -> None:
    kernels, _, _ = plain
    params = SamplingParams(temperature=0, beam_width=width, max_tokens=12, ignore_eos=True)
    found = []
    for own in ({"use_speculative_decoding": False, "enable_prefix_caching": False, "max_num_seqs": 1}, {}):
        draft = {} if own else {"draft_model": folders["near"], "speculative_config": DRAFTERS["draft_model"]}
        llm = LLM(folders["target"], **own, **draft, **engine(kernels))
        outputs = llm.generate(prompts(), [params] * len(LENGTHS))
        found.append([out.outputs[0].token_ids for out in outputs])
    assert found[0] == found[1]
    theirs = AutoModelForCausalLM.from_pretrained(folders["target"], dtype=torch.float64).eval()
    for prompt, own in zip(prompts(), found[0], strict=True):
        expected = theirs.generate(
            torch.tensor([prompt]), num_beams=width, max_new_tokens=12, do_sample=False, use_cache=False,
            eos_token_id=None, pad_token_id=0,
        )  # fmt: skip
        assert expected[0, len(prompt) :].tolist() == own, len(prompt)


@pytest.mark.slow  # as a family: test_model_families.py; past the boundary: the tests above
def test_phi_3_generates_as_in_transformers(folders: dict[str, str], tmp_path: Path) -> None:
    """The family whose generation drops its cache at the boundary."""
    sizes: dict[str, Any] = {
        "vocab_size": VOCAB_SIZE, "hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 2,
        "num_attention_heads": 4, "num_key_value_heads": 2, "max_position_embeddings": 128, "pad_token_id": 0,
        "bos_token_id": 1, "eos_token_id": None, "partial_rotary_factor": 0.75,
        "original_max_position_embeddings": AT,
    }  # fmt: skip
    scaling = {"rope_type": "longrope", "short_factor": [1.0, 1.3, 1.5], "long_factor": [4.0, 9.0, 40.0]}
    torch.manual_seed(0)
    theirs = AutoModelForCausalLM.from_config(Phi3Config(**sizes, rope_scaling=scaling)).double().eval()
    with torch.no_grad():
        for parameter in theirs.parameters():
            parameter.copy_(torch.randn(parameter.shape, dtype=torch.float64) * 0.3)
    theirs.save_pretrained(tmp_path)
    for name in ("tokenizer.json", "tokenizer_config.json"):
        shutil.copy(Path(folders["target"]) / name, tmp_path)
    llm = LLM(
        str(tmp_path), dtype="float64",
        speculative_config={"method": "ngram", "num_speculative_tokens": 4},
    )  # fmt: skip
    for prompt, out in zip(prompts(), llm.generate(prompts(), [GREEDY] * len(LENGTHS)), strict=True):
        expected = theirs.generate(torch.tensor([prompt]), max_new_tokens=20, do_sample=False)
        assert out.outputs[0].token_ids == expected[0, len(prompt) :].tolist(), len(prompt)
