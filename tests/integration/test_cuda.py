"""The reference kernels on a CUDA device; skipped where there is none."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file

from speculant import LLM, SamplingParams
from speculant.models import load_model
from tests.encoder_decoders import make_t5, write_t5
from tests.models import write_checkpoint

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="no CUDA device"),
]
PROMPTS = ["def read(path):", "class Stack:", "import os\n"]


@pytest.mark.parametrize("distribution", [{"temperature": 0.0}, {"temperature": 0.8, "top_p": 0.95, "seed": 5}])
def test_text_is_the_same_on_the_device_with_and_without_drafts(distribution: dict[str, float]) -> None:
    params = SamplingParams(**distribution, max_tokens=48)
    texts = {
        name: [out.outputs[0].token_ids for out in LLM("demo", **arguments).generate(PROMPTS, params)]
        for name, arguments in {
            "cpu": {"dtype": "float64"},
            "plain": {"dtype": "float64", "device": "cuda"},
            "drafted": {"dtype": "float64", "device": "cuda", "draft_model": "demo"},
            "ngram": {"dtype": "float64", "device": "cuda", "speculative_config": {"method": "ngram"}},
        }.items()
    }
    assert texts["plain"] == texts["drafted"] == texts["ngram"] == texts["cpu"]


def test_a_ratio_rule_runs_on_the_device() -> None:
    llm = LLM("demo", "demo", device="cuda", dtype="float32")
    [out] = llm.generate(PROMPTS[:1], SamplingParams(temperature=1.0, max_tokens=48))
    assert out.metrics.verification == "block"
    assert out.metrics.speculative_decoding.num_accepted_draft_tokens > 0


def test_a_float16_checkpoint_runs_in_float32_on_the_device(tmp_path: Path) -> None:
    folder = write_checkpoint(tmp_path / "model")
    weights = load_file(f"{folder}/model.safetensors")
    save_file({name: tensor.half() for name, tensor in weights.items()}, f"{folder}/model.safetensors")
    config = json.loads((tmp_path / "model/config.json").read_text())
    (tmp_path / "model/config.json").write_text(json.dumps({**config, "torch_dtype": "float16"}))
    checkpoint = load_model(folder, device="cuda:0")
    assert checkpoint.dtype == torch.float32
    assert checkpoint.model.cache_shape.device == torch.device("cuda:0")


def test_an_encoder_decoder_writes_the_same_text_on_the_device(tmp_path: Path) -> None:
    folder = write_t5(tmp_path / "t5", make_t5())
    params = SamplingParams(temperature=0.7, seed=3, max_tokens=24, n=2, ignore_eos=True)
    texts = []
    for arguments in ({}, {"device": "cuda"}, {"device": "cuda", "speculative_config": {"method": "ngram"}}):
        llm = LLM(folder, dtype="float64", max_model_len=128, **arguments)
        texts.append([sample.token_ids for out in llm.generate(PROMPTS, params) for sample in out.outputs])
    assert texts[0] == texts[1] == texts[2]
