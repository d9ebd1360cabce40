"""bfloat16 weights in 12 bits beside plain ones: linear layers of a 1B shape, then a 1.04B target end to end.

Both hold the same numbers and give the same bits, which is checked too. Layers: 16 of Llama 3.2 1B's sizes, every one
with weights of its own. End to end: greedy tokens after a prompt, by plain decoding and with four drafts a step of a
draft model of a twentieth whose acceptance is about 0.85. `plain_over_12bit` is a ratio of times, round by round.
"""

from __future__ import annotations

import argparse
import sys
import tempfile
from collections.abc import Iterator
from functools import partial
from pathlib import Path
from typing import Any

import torch

sys.path.append(str(Path(__file__).parents[1]))  # for its neighbour, however the script is started

from benchmarks.linear import LAYERS, SHAPES, Native

from speculant import LLM, SamplingParams
from speculant.kernels import Kernels, Type, aligned, open_kernels
from speculant.lab.bench import Benchmark, quartiles, ratio, timed
from speculant.lab.inflation import VOCABULARY, write_pair
from speculant.models import NativeDecoder

PACKINGS = {"plain": Type.BF16, "12bit": Type.BF12}
FEW, PROMPTS = (1, 2, 4, 5, 8), (64, 256)
PROMPT, TOKENS, DRAFTS, AGREEMENT = 128, 96, 4, 0.85
WAYS = {"plain decoding": False, "speculative": True}


def compare_layers(kernels: Kernels, rounds: int) -> dict[str, Any]:
    """Time all layers with both packings, and compare the bits of their results."""
    matrices = [torch.randn(shape).mul_(0.02).bfloat16() for _ in range(LAYERS) for shape in SHAPES]
    native = {name: Native.pack(kernels, type_, matrices, (*FEW, *PROMPTS)) for name, type_ in PACKINGS.items()}
    plain, coded = (each.buffers for each in native.values())
    for mine, other in zip(plain, coded, strict=True):
        other.copy_(mine)  # the same inputs
    probe = aligned(native["plain"].num_bytes).fill_(1)
    reads = {f"{name}, read": partial(each.read, probe) for name, each in native.items()}
    few, many = (
        {f"{name}, rows {rows}": partial(each.run, rows) for rows in sizes for name, each in native.items()}
        for sizes in (FEW, PROMPTS)
    )
    times = timed(reads | few, rounds) | timed(many, max(3, rounds // 3))
    seconds = {name: quartiles(values) for name, values in times.items()}
    sizes = {name: each.num_bytes for name, each in native.items()}
    bits = [(a.view(torch.int32), b.view(torch.int32)) for a, b in zip(plain, coded, strict=True)]
    return {
        "same_bits": all(torch.equal(a, b) for a, b in bits),
        "bytes": sizes,
        "seconds": seconds,
        "gb_per_s": {name: sizes[name.partition(",")[0]] / own["median"] / 1e9 for name, own in seconds.items()},
        "plain_over_12bit": {
            rows: ratio(times, f"plain, rows {rows}", f"12bit, rows {rows}") for rows in (*FEW, *PROMPTS)
        },
    }


def compare_engines(rounds: int) -> dict[str, Any]:
    """Generate with both packings in turn, with and without drafts; the texts must be the same."""
    prompt = torch.randint(VOCABULARY, (PROMPT,), generator=torch.Generator().manual_seed(5)).tolist()
    with tempfile.TemporaryDirectory() as folder:
        target, draft = write_pair(Path(folder), AGREEMENT)
        llms = {
            name: LLM(
                str(target), str(draft), spec_length=DRAFTS, dtype="bfloat16", draft_quantization="none",
                weight_packing=name, max_num_seqs=1, max_model_len=512,
            )
            for name in PACKINGS
        }  # fmt: skip
    times: dict[str, list[float]] = {f"{way}, {name}": [] for way in WAYS for name in llms}
    texts = set()
    for _ in range(rounds):
        for name, llm in llms.items():
            for way, speculation in WAYS.items():
                params = SamplingParams(temperature=0.0, max_tokens=TOKENS, ignore_eos=True, speculation=speculation)
                found = llm.generate([prompt], params)[0]
                texts.add(tuple(found.outputs[0].token_ids))
                times[f"{way}, {name}"].append(1 / found.metrics.timing.tokens_per_s)
    return {
        "same_texts": len(texts) == 1,
        "bytes": {name: packed_bytes(llm) for name, llm in llms.items()},
        "tokens_per_s": {name: quartiles([1 / each for each in values]) for name, values in times.items()},
        "plain_over_12bit": {way: ratio(times, f"{way}, plain", f"{way}, 12bit") for way in WAYS},
    }


def packed_bytes(llm: LLM) -> int:
    """Return how many bytes of weights one pass of the target reads."""
    model = llm._runtime.checkpoint.model
    assert isinstance(model, NativeDecoder)
    return model.bytes_per_pass


@torch.inference_mode()
def measure(arguments: argparse.Namespace) -> Iterator[dict[str, Any]]:
    """Compare layers and engines, or one of them."""
    kernels = open_kernels()
    assert kernels is not None, "the native kernels are not built"
    seen: dict[str, Any] = {"instruction_set": kernels.isa}
    if arguments.only != "engines":
        seen["layers"] = compare_layers(kernels, arguments.rounds)
        yield seen
    if arguments.only != "layers":
        seen["engines"] = compare_engines(arguments.rounds)
        yield seen


BENCHMARK = Benchmark(
    __file__, __doc__,
    predicted="A pass of few rows waits for memory, and 12 bits are three quarters of the bytes: 1.28 x at 1 and 2 "
    "rows, 1.2 at 5. Eight rows are half bound by arithmetic, and decoding takes a tenth of it: 1.05. Prompts "
    "decode a panel once for 128 rows: 0.99. End to end plain 1.25, speculative 1.15.",
    measure=measure, rounds=9, options={"only": {"choices": ("layers", "engines")}},
)  # fmt: skip

if __name__ == "__main__":
    BENCHMARK.main()
