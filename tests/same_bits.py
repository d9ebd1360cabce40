"""Digests of texts and logits of small models of integers, the same on every processor.

    python -m tests.same_bits FOLDER             prints those of the instruction set in use; SPECULANT_ISA chooses it
    python -m tests.same_bits FOLDER --record    also writes them to tests/same_bits.json

Models that FOLDER lacks are written first. Their weights come from hashes of names and places, because the random
numbers of torch depend on the processor. Processors without the packages that write models can be given the folder.
"""

from __future__ import annotations

import argparse
import hashlib
import json
import math
import shutil
import zlib
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
import torch
from safetensors.torch import load_file, save_file
from torch import Tensor

from speculant import LLM, SamplingParams
from speculant.cache import slotted_cache
from speculant.kernels import Kernels, NativeSampler, RowDraw, SamplingSettings, open_kernels
from speculant.models import SequenceInput, build_batch, load_model
from speculant.types import DraftTree

RECORDED = Path(__file__).with_suffix(".json")
LONG = 600  # tokens: beyond a span of 512 keys
HIDDEN = 256  # so that the largest blocks fill rows
VOCAB = 264


@dataclass(frozen=True)
class Case:
    """A model, and how it is used. kind: of the blocks of a GGUF file; "" = a folder. rounded: see `quantization`."""

    family: str
    settings: dict[str, Any] = field(default_factory=dict)
    kind: str = ""
    bits: int = 0  # of integers in GPTQ's format; negative: in compressed-tensors'
    rounded: str | None = None
    keys: str = "auto"


YARN = {"rope_type": "yarn", "rope_theta": 1e4, "factor": 4.0, "original_max_position_embeddings": 64}
LLAMA3 = {
    "rope_type": "llama3", "rope_theta": 500000.0, "factor": 8.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0,
    "original_max_position_embeddings": 64,
}  # fmt: skip
GEMMA = {"head_dim": 64, "query_pre_attn_scalar": 12, "sliding_window": 70}
EXPERTS = {"num_experts": 6, "num_experts_per_tok": 3, "moe_intermediate_size": 64, "head_dim": 64}
DELTA = {
    "head_dim": 64, "linear_key_head_dim": 24, "linear_value_head_dim": 32, "linear_num_key_heads": 2,
    "linear_num_value_heads": 4, "linear_conv_kernel_dim": 4, "layer_types": ["linear_attention", "full_attention"],
}  # fmt: skip
MAMBA = {
    "num_local_experts": 4, "num_experts_per_tok": 2, "shared_intermediate_size": 96, "mamba_n_heads": 8,
    "mamba_d_state": 20, "pad_token_id": 0, "layer_types": ["linear_attention", "full_attention"],
}  # fmt: skip
OSS = {
    "head_dim": 64, "num_local_experts": 4, "num_experts_per_tok": 2, "sliding_window": 70,
    "layer_types": ["sliding_attention", "full_attention"],
}  # fmt: skip
T5 = {"pad_token_id": 0, "num_layers": 2, "d_ff": 192, "d_kv": 64, "decoder_start_token_id": 0}
KINDS = ("Q8_0", "Q4_0", "Q4_1", "Q5_0", "Q5_1", "Q4_K", "Q5_K", "Q6_K", "IQ4_NL", "MXFP4")
CASES = {
    "llama int4": Case("llama", {"rope_parameters": YARN}, rounded="int4"),
    "llama int8, keys in int8": Case("llama", {"rope_parameters": LLAMA3}, rounded="int8", keys="int8"),
    "llama gptq": Case("llama", bits=4, keys="int8"),
    "llama in rows of int8": Case("llama", bits=-8),
    "llama gptq of 8 bits": Case("llama", {"attention_bias": True}, bits=8),
    **{f"llama {kind}": Case("llama", kind=kind, keys="float32" if kind == "Q8_0" else "auto") for kind in KINDS},
    "gemma2 int4": Case("gemma2", GEMMA, rounded="int4"),
    "gpt2 int8": Case("gpt2", {"n_inner": 512, "n_positions": 1024}, rounded="int8"),
    "qwen3_moe int4": Case("qwen3_moe", EXPERTS, rounded="int4"),
    "qwen3_moe MXFP4": Case("qwen3_moe", EXPERTS | {"moe_intermediate_size": 256}, kind="MXFP4"),
    "gpt_oss int8": Case("gpt_oss", OSS, rounded="int8"),
    "qwen3_5_text int4": Case("qwen3_5_text", DELTA, rounded="int4"),
    "granitemoehybrid int8": Case("granitemoehybrid", MAMBA, rounded="int8"),
    "t5 int8": Case("t5", T5, rounded="int8"),
}


DRAWS = "draws"
NAMES = (*CASES, DRAWS)


def numbers(name: str, shape: Sequence[int]) -> Tensor:
    """Return numbers from -1 to 1, hashes (splitmix64) of a name and of places."""
    x = np.arange(math.prod(shape), dtype=np.uint64) + np.uint64(zlib.crc32(name.encode()) << 32)
    x *= np.uint64(0x9E3779B97F4A7C15)
    x = (x ^ (x >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
    x = (x ^ (x >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
    whole = (x ^ (x >> np.uint64(31))) >> np.uint64(40)
    return torch.from_numpy(whole.astype(np.float32) / np.float32(2**23) - np.float32(1)).view(*shape)


def write(case: Case, path: Path) -> None:
    """Write a model."""
    from tests.gguf_models import convert
    from tests.models import Shape, write_checkpoint
    from tests.quantised_folders import LINEAR, Gptq, compressed, edit_config, integers, quantise

    plain = path.parent / "plain"
    shutil.rmtree(plain, ignore_errors=True)
    settings = {"head_dim": 64, "tie_word_embeddings": False, **case.settings}
    write_checkpoint(plain, Shape(case.family, hidden_size=HIDDEN, max_positions=1024, settings=(*settings.items(),)))
    weights = {name: _weight(name, each) for name, each in load_file(plain / "model.safetensors").items()}
    save_file(weights, plain / "model.safetensors")
    if case.kind:
        convert(plain, path, case.kind)
    elif case.bits > 0:
        own = Gptq(bits=case.bits)
        quantise(plain, path, path.parent / "numbers", own)
        edit_config(path, quantization_config=own.config)
    elif case.bits:
        writes = {LINEAR: integers(-case.bits, 0, dtype=torch.float32)}
        form = compressed("int-quantized", writes, {"num_bits": -case.bits, "strategy": "channel"})
        quantise(plain, path, path.parent / "numbers", form)
    else:
        plain.rename(path)
    for other in ("plain", "numbers"):
        shutil.rmtree(path.parent / other, ignore_errors=True)


def _weight(name: str, like: Tensor) -> Tensor:
    own = numbers(name, like.shape)
    return (1 + own / 8 if name.endswith("norm.weight") else own / 4).to(like.dtype)


def path_of(name: str, folder: Path) -> Path:
    """Return where a model is."""
    return folder / (name.replace(" ", "-").replace(",", "") + (".gguf" if CASES[name].kind else ""))


def digest_of(path: Path) -> str:
    """Return the digest of a model's weights."""
    of = hashlib.sha256()
    for each in [path] if path.is_file() else sorted(path.glob("*.safetensors")):
        of.update(each.read_bytes())
    return of.hexdigest()[:16]


def measure(name: str, folder: Path) -> dict[str, str]:
    """Return the digests of a model's weights, its logits and its texts, with and without drafts.

    Raises AssertionError if drafts, chunks or batches change a text.
    """
    path, case = path_of(name, folder), CASES[name]
    if not path.exists():
        write(case, path)
    found = {"weights": digest_of(path)}
    dtype = {"dtype": "bfloat16", "kernels": "native", "kv_cache_dtype": case.keys, "quantization": case.rounded}
    if case.family != "t5":
        found["logits"] = _digest(logits(path, dtype).numpy().tobytes())
    for kind, params in _params():
        texts = _texts(path, params, dtype, use_speculative_decoding=False)
        drafted = {"speculative_config": {"method": "prompt_lookup", "num_speculative_tokens": 4}}
        most = 256 if case.family == "t5" else 48  # a source is read in one pass
        others = _texts(path, params, dtype, **drafted, max_num_batched_tokens=most)
        assert others == texts, f"{name}: drafts change {kind} texts"
        assert len({tuple(text) for text in texts}) > 1, f"{name}: all {kind} texts are equal, a weak test"
        found[kind] = _digest(json.dumps(texts).encode())
    return found


def _params() -> Iterator[tuple[str, list[SamplingParams]]]:
    common: dict[str, Any] = {"max_tokens": 24, "ignore_eos": True}
    yield "greedy", [SamplingParams(temperature=0.0, repetition_penalty=1 + place / 4, **common) for place in range(3)]
    own: list[dict[str, Any]] = [{}, {"top_p": 0.8, "min_p": 0.01}, {"top_k": 40, "presence_penalty": 0.5}]
    yield "seeded", [SamplingParams(temperature=0.8, seed=7, **common, **each) for each in own]


def _texts(path: Path, params: list[SamplingParams], dtype: dict[str, Any], **arguments: Any) -> list[list[int]]:
    llm = LLM(str(path), max_model_len=256, **dtype, **arguments)
    prompts = [[70, 71, 72, 80, 71, 72], [*range(90, 220), 71, 72, 90, 91], [75] * 40]
    return [list(out.outputs[0].token_ids) for out in llm.generate(prompts, params)]


@torch.inference_mode()
def logits(path: Path, dtype: dict[str, Any]) -> Tensor:
    """Return the logits of a long text, read in chunks of several sizes."""
    model = load_model(str(path), **dtype).model
    cache, rows, first = slotted_cache(model.cache_shape, 1, 1024), list[Tensor](), 0
    tokens = (numbers("tokens", [LONG]) * 128 + 128).long().tolist()
    for count in (500, 64, 5, 1, 1, 29):
        fed = SequenceInput(0, tokens[first : first + count], DraftTree.empty())
        batch = build_batch([fed], cache, torch.device("cpu"))
        rows.append(model.logits(model.forward(batch, cache.storage).last).clone())
        first += count
    return torch.cat(rows)


def _digest(content: bytes) -> str:
    return hashlib.sha256(content).hexdigest()[:16]


def digests(folder: Path, names: Sequence[str]) -> dict[str, Any]:
    """Return the digests of models, and the instruction set that computed them."""
    kernels = open_kernels(None, 1)
    assert kernels is not None, "the native kernels are not built"
    found = {DRAWS: drawn(kernels)} if DRAWS in names else {}
    for name in names:
        if name == DRAWS:
            continue
        found[name] = measure(name, folder)
    return {"set": kernels.isa, "models": found}


def drawn(kernels: Kernels) -> dict[str, str]:
    """Return the digests of distributions over more tokens than a model here has, and of draws from them."""
    settings = [
        SamplingSettings(1.0), SamplingSettings(0.6, top_p=0.9), SamplingSettings(1.3, min_p=0.02),
        SamplingSettings(0.9, top_p=0.8, min_p=0.01, top_k=40), SamplingSettings(2.0, top_p=0.999),
    ]  # fmt: skip
    probs = kernels.probs(10 * numbers("scores", [len(settings), 9001]), settings).clone()
    draws = [RowDraw(row, noise, 2**50 * key + 1) for row in range(5) for noise in (False, True) for key in range(99)]
    tokens = NativeSampler(kernels).draw_rows(probs, draws)
    return {"probs": _digest(probs.numpy().tobytes()), "tokens": _digest(json.dumps(tokens).encode())}


def main() -> None:
    """Print the digests as JSON."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("folder", type=Path)
    parser.add_argument("names", nargs="*", default=[*NAMES], metavar="NAME", help="of models; none = all")
    parser.add_argument("--record", action="store_true")
    given = parser.parse_args()
    given.folder.mkdir(parents=True, exist_ok=True)
    found = digests(given.folder, given.names)
    if given.record:
        RECORDED.write_text(json.dumps(found["models"], indent=1) + "\n", encoding="utf-8")
    print(json.dumps(found, indent=1))


if __name__ == "__main__":
    main()
