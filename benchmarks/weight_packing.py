"""bfloat16 weights in 12 bits beside plain ones: linear layers of a 1B shape, then a 1.04B target end to end.

    python benchmarks/weight_packing.py [--rounds 9] [--only layers]

Both hold the same numbers and give the same bits, which is checked here too. Layers: 16 of Llama 3.2 1B's sizes, every
one with weights of its own. End to end: greedy tokens after a prompt, plain decoding and four drafts a step of a draft
of a twentieth whose acceptance is about 0.85 (shapes.py). `plain_over_12bit` is a ratio of times, round by round.
"""

from __future__ import annotations

import argparse
import tempfile
from functools import partial
from pathlib import Path
from typing import Any

import torch
from linear import LAYERS, SHAPES, Native
from measuring import interleave, ratio, spread, write
from one_billion import packed_bytes
from shapes import VOCABULARY, write_pair

from speculant import LLM, SamplingParams
from speculant.kernels.memory import aligned
from speculant.kernels.native import Kernels, Type, open_kernels

PACKINGS = {"plain": Type.BF16, "12bit": Type.BF12}
FEW, PROMPTS = (1, 2, 4, 5, 8), (64, 256)
PROMPT, TOKENS, DRAFTS, AGREEMENT = 128, 96, 4, 0.85
PREDICTED = (
    "A pass of few rows waits for memory, and 12 bits are three quarters of the bytes: 1.28 x at 1 and 2 rows, 1.2 at "
    "5. Eight rows are half bound by arithmetic, and decoding takes a tenth of it: 1.05. Prompts decode a panel once "
    "for 128 rows: 0.99. End to end plain 1.25, speculative 1.15."
)


def compare_layers(kernels: Kernels, rounds: int) -> dict[str, Any]:
    """Time all layers with both packings, and check that their results have the same bits."""
    matrices = [torch.randn(shape).mul_(0.02).bfloat16() for _ in range(LAYERS) for shape in SHAPES]
    native = {name: Native.pack(kernels, type_, matrices, (*FEW, *PROMPTS)) for name, type_ in PACKINGS.items()}
    for mine, other in zip(*(each.buffers for each in native.values()), strict=True):
        other.copy_(mine)  # the same inputs
    probe = aligned(native["plain"].num_bytes).fill_(1)
    subjects: dict[str, Any] = {f"{name}, read": partial(each.read, probe) for name, each in native.items()}
    for rows in FEW:
        subjects |= {f"{name}, rows {rows}": partial(each.run, rows) for name, each in native.items()}
    times = interleave(subjects, rounds)
    subjects = {f"{name}, rows {rows}": partial(each.run, rows) for rows in PROMPTS for name, each in native.items()}
    times |= interleave(subjects, max(3, rounds // 3))
    plain, coded = (each.buffers for each in native.values())
    return {
        "same_bits": all(
            torch.equal(a.view(torch.int32), b.view(torch.int32)) for a, b in zip(plain, coded, strict=True)
        ),
        "bytes": {name: each.num_bytes for name, each in native.items()},
        "seconds": {name: spread(values) for name, values in times.items()},
        "gb_per_s": {
            name: native[name.partition(",")[0]].num_bytes / spread(values)["median"] / 1e9
            for name, values in times.items()
        },
        "plain_over_12bit": {
            rows: ratio(times, f"plain, rows {rows}", f"12bit, rows {rows}") for rows in (*FEW, *PROMPTS)
        },
    }


def compare_engines(rounds: int) -> dict[str, Any]:
    """Generate with both packings in turn, with and without drafts; the texts must be the same."""
    prompt = torch.randint(VOCABULARY, (PROMPT,), generator=torch.Generator().manual_seed(5)).tolist()
    with tempfile.TemporaryDirectory() as folder:
        target, draft = write_pair(Path(folder), AGREEMENT)
        llms = {name: make(name, target, draft) for name in PACKINGS}
    rows: dict[str, list[float]] = {f"{way}, {name}": [] for way in ("plain decoding", "speculative") for name in llms}
    texts = set()
    for _ in range(rounds):
        for name, llm in llms.items():
            for way, speculation in (("plain decoding", False), ("speculative", True)):
                params = SamplingParams(temperature=0.0, max_tokens=TOKENS, ignore_eos=True, speculation=speculation)
                found = llm.generate([prompt], params)[0]
                texts.add(tuple(found.outputs[0].token_ids))
                rows[f"{way}, {name}"].append(1 / found.metrics.timing.tokens_per_s)
    return {
        "same_texts": len(texts) == 1,
        "bytes": {name: packed_bytes(llm) for name, llm in llms.items()},
        "tokens_per_s": {name: spread([1 / each for each in values]) for name, values in rows.items()},
        "plain_over_12bit": {
            way: ratio(rows, f"{way}, plain", f"{way}, 12bit") for way in ("plain decoding", "speculative")
        },
    }


def make(packing: str, target: Path, draft: Path) -> LLM:
    """Load the pair, its weights stored so."""
    return LLM(
        str(target), str(draft), spec_length=DRAFTS, dtype="bfloat16", draft_quantization="none",
        weight_packing=packing, max_num_seqs=1, max_model_len=512,
    )  # fmt: skip


@torch.inference_mode()
def main() -> None:
    """Measure and write results/weight_packing.json."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--rounds", type=int, default=9)
    parser.add_argument("--only", choices=("layers", "engines"))
    arguments = parser.parse_args()
    kernels = open_kernels()
    assert kernels is not None, "the native kernels are not built"
    seen: dict[str, Any] = {"instruction_set": kernels.isa}
    if arguments.only != "engines":
        seen["layers"] = compare_layers(kernels, arguments.rounds)
    if arguments.only != "layers":
        seen["engines"] = compare_engines(arguments.rounds)
    write("weight_packing", PREDICTED, seen)


if __name__ == "__main__":
    main()
