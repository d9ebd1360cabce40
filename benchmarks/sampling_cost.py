"""What a distribution costs beside a pass: 6 rows over 128,256 tokens, and one pass of a 1B-shaped target.

    python benchmarks/sampling_cost.py [--rounds 9]

The target is a random Llama of Llama 3.2 1B's shape in bfloat16; a pass feeds 6 rows after 128 tokens
of context. Passes and distributions are timed in turn; the ratio of medians is the figure.
"""

from __future__ import annotations

import argparse
from functools import partial
from typing import Any

import torch
from measuring import interleave, spread, write

from speculant import SamplingParams
from speculant.cache.factory import slotted_cache
from speculant.metrics import RequestMetrics, TimingMetrics
from speculant.models.base import SequenceInput, build_batch
from speculant.models.families.llama import read_config
from speculant.models.reference.decoder import Decoder
from speculant.sampling.distribution import Node, distribution
from speculant.types import DraftTree, Request

SHAPE = {
    "model_type": "llama", "vocab_size": 128256, "hidden_size": 2048, "intermediate_size": 8192,
    "num_hidden_layers": 16, "num_attention_heads": 32, "num_key_value_heads": 8, "head_dim": 64,
    "max_position_embeddings": 4096, "tie_word_embeddings": True, "rope_theta": 500000.0,
}  # fmt: skip
DISTRIBUTIONS: dict[str, dict[str, Any]] = {
    "greedy": {"temperature": 0.0},
    "temperature": {"temperature": 0.8},
    "top_p": {"temperature": 0.8, "top_p": 0.95},
    "top_k, top_p, min_p, penalty": {
        "temperature": 0.8, "top_k": 50, "top_p": 0.95, "min_p": 0.02, "repetition_penalty": 1.1,
    },
}  # fmt: skip
PREDICTED = "A pass takes about 150 ms here; every distribution under 5% of it."


def make_target() -> Decoder:
    """Make the random model without initialising 2.5 GB twice."""
    with torch.device("meta"):
        model = Decoder(read_config(SHAPE)).to(torch.bfloat16)
    model = model.to_empty(device="cpu").requires_grad_(False).eval()
    for parameter in model.parameters():
        parameter.fill_(0.01)
    return model


def make_nodes(settings: dict[str, Any]) -> list[Node]:
    """Six nodes of one request that has 500 tokens."""
    metrics = RequestMetrics(TimingMetrics(arrival=0.0))
    prompt = tuple(range(500))
    request = Request(1, "r", 0, prompt, SamplingParams(**settings), 1, frozenset(), metrics, tokens=list(prompt))
    return [Node(request, tuple(range(i))) for i in range(6)]


@torch.inference_mode()
def main() -> None:
    """Measure and write results/sampling_cost.json."""
    parser = argparse.ArgumentParser()
    parser.add_argument("--rounds", type=int, default=9)
    rounds = parser.parse_args().rounds
    model = make_target()
    cache = slotted_cache(model.cache_shape, 1, 256)
    device = torch.device("cpu")
    model.forward(build_batch([SequenceInput(1, [1] * 128, DraftTree.empty())], cache, device), cache.storage)
    peaked = torch.randn(6, SHAPE["vocab_size"]) * 2
    peaked[:, :20] += torch.linspace(14, 8, 20)  # as peaked as real text: a few tokens hold most of the mass

    def run_pass() -> None:
        batch = build_batch([SequenceInput(1, [1], DraftTree.chain([2] * 5))], cache, device)
        model.logits(model.forward(batch, cache.storage).last)
        cache.truncate_to(1, 128)

    subjects: dict[str, Any] = {"pass": run_pass}
    for name, settings in DISTRIBUTIONS.items():
        subjects[name] = partial(distribution, peaked, make_nodes(settings))
    times = interleave(subjects, rounds)
    target = spread(times["pass"])["median"]
    figures = {
        name: {**spread(values), "share_of_pass": spread(values)["median"] / target} for name, values in times.items()
    }
    write("sampling_cost", PREDICTED, figures)


if __name__ == "__main__":
    main()
