"""What a pass of a 1B shape is made of, attention over a long context, and a prompt beside the reference path.

    python benchmarks/passes.py [--rounds 21] [--prompt-rounds 3]

One row after 256 tokens: the whole pass and its linear layers alone. One row after 8,192 tokens: attention alone,
beside one read of its keys and values. 48 rows after 4,096 tokens: attention alone, of a chain and of a tree. A prompt
of 1,024 tokens in one pass: native and reference. All bfloat16.
"""

from __future__ import annotations

import argparse
from collections.abc import Callable
from functools import partial
from typing import Any

import torch
from measuring import interleave, ratio, spread, write
from shapes import COMMON, TARGET, VOCABULARY, tensors
from torch import Tensor

from speculant.cache.base import KVCache
from speculant.cache.factory import paged_cache
from speculant.kernels.native import Code, Op, open_kernels
from speculant.models.base import Batch, SequenceInput, build_batch
from speculant.models.families.llama import read_config
from speculant.models.native.decoder import NativeDecoder
from speculant.models.reference.decoder import Decoder
from speculant.models.weights.source import ModuleWeights
from speculant.types import DraftTree

SHORT, LONG, PROMPT, BLOCK = 256, 8192, 1024, 16
DRAFTED = LONG // 2  # tokens before a draft
PARENTS = [-1] * 5 + [node // 3 for node in range(42)]  # of its tree: 47 nodes
PREDICTED = (
    "All but the linear layers 2% of a pass after 256 tokens; attention over 8,192 tokens 1.95 x a read of its keys "
    "and values at eight places at once, as sums of scores no longer lie in memory (was 2.09); a prompt of 1,024 "
    "tokens in 0.25 of the reference's time; attention of a tree of 47 nodes at most 1.1 x that of a chain."
)


def make_decoder() -> Decoder:
    """Make the model that benchmarks/shapes.py writes."""
    with torch.device("meta"):
        model = Decoder(read_config({**COMMON, **TARGET}))
    model.load_state_dict(tensors(TARGET, torch.arange(VOCABULARY)), strict=False, assign=True)
    return model.to(torch.bfloat16).requires_grad_(False).eval()


def row_after(cache: KVCache, seq_id: int, count: int, tree: DraftTree | None = None) -> Batch:
    """Reserve `count` positions, as if they had been fed, one more row and a draft."""
    cache.reserve(seq_id, count)
    return build_batch([SequenceInput(seq_id, [5], tree or DraftTree.empty())], cache, torch.device("cpu"))


def some(model: NativeDecoder, batch: Batch, cache: KVCache, wanted: Callable[[Op], bool]) -> Callable[[], None]:
    """Return a run of those operations of a pass."""
    chosen = [op for op in model.program.ops if wanted(op)]
    ops, layout = (Op * len(chosen))(*chosen), model.layout(batch, cache.storage)
    return lambda: model.kernels.run(ops, layout.on)


def drafts(model: NativeDecoder, cache: KVCache) -> dict[str, Callable[[], None]]:
    """Return runs of the attention over a chain and over a tree."""
    trees = {
        "attention, chain": DraftTree.chain([5] * len(PARENTS)),
        "attention, tree": DraftTree.of([5] * len(PARENTS), PARENTS),
    }
    return {
        name: some(model, row_after(cache, seq_id, DRAFTED, tree), cache, lambda op: op.code == Code.ATTEND)
        for seq_id, (name, tree) in enumerate(trees.items(), start=3)
    }


def prompt_pass(model: Decoder | NativeDecoder, tokens: list[int], cache: KVCache) -> Tensor:
    """Feed a prompt to an empty sequence, and forget it."""
    batch = build_batch([SequenceInput(9, tokens, DraftTree.empty())], cache, torch.device("cpu"))
    hidden = model.forward(batch, cache.storage).last
    cache.release(9)
    return hidden


@torch.inference_mode()
def main() -> None:
    """Measure and write results/passes.json."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--rounds", type=int, default=21)
    parser.add_argument("--prompt-rounds", type=int, default=3)  # the reference takes most of a minute for one
    arguments = parser.parse_args()
    kernels = open_kernels()
    assert kernels is not None, "the native kernels are not built"
    reference = make_decoder()
    native = NativeDecoder(reference.config, ModuleWeights(reference), torch.bfloat16, kernels)
    caches = [paged_cache(native.cache_shape, (2 * LONG + 4 * PROMPT) // BLOCK, BLOCK) for _ in range(2)]
    for cache in caches:
        for layer in range(TARGET["num_hidden_layers"]):
            for stored in cache.storage.layer(layer):
                stored.normal_()
    short, long = row_after(caches[0], 1, SHORT), row_after(caches[0], 2, LONG)
    tokens = torch.randint(VOCABULARY, (PROMPT,)).tolist()
    prompt_pass(native, tokens, caches[0])  # makes room for the rows
    size = LONG * native.cache_shape.bytes_per_token
    stored = torch.ones(size, dtype=torch.uint8)
    subjects: dict[str, Callable[[], Any]] = {
        "pass": some(native, short, caches[0], lambda op: True),
        "linear": some(native, short, caches[0], lambda op: op.code == Code.LINEAR),
        "attention, 8k": some(native, long, caches[0], lambda op: op.code == Code.ATTEND),
        "read, 8k": partial(kernels.read_seconds, stored),
        **drafts(native, caches[0]),
    }
    prompts: dict[str, Callable[[], Any]] = {
        "prompt, native": partial(prompt_pass, native, tokens, caches[0]),
        "prompt, reference": partial(prompt_pass, reference, tokens, caches[1]),
    }
    times = interleave(subjects, arguments.rounds) | interleave(prompts, arguments.prompt_rounds)
    figures = {
        "instruction_set": kernels.isa,
        "seconds": {name: spread(values) for name, values in times.items()},
        "linear_over_pass": ratio(times, "linear", "pass"),
        "attention_over_read_at_8k": ratio(times, "attention, 8k", "read, 8k"),
        "tree_over_chain": ratio(times, "attention, tree", "attention, chain"),
        "native_over_reference_for_a_prompt": ratio(times, "prompt, native", "prompt, reference"),
    }
    write("passes", PREDICTED, figures)


if __name__ == "__main__":
    main()
