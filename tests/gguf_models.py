"""Small GGUF files, written by the gguf package from checkpoints in Hugging Face's form, and back."""

from __future__ import annotations

import json
import re
import shutil
from collections.abc import Callable, Iterable, Mapping
from pathlib import Path
from typing import Any

import gguf
import numpy as np
import torch
from gguf import GGML_QUANT_SIZES, GGMLQuantizationType, GGUFReader, GGUFWriter
from gguf.quants import dequantize, quantize
from numpy.typing import NDArray
from safetensors.torch import load_file, save_file

from speculant.lab.quantize import model_entries, rope_tensors
from speculant.models import CheckpointFiles, DecoderConfig, gguf_families
from tests import gguf_blocks

FLOATS = ("F32", "F16", "BF16")
SMALL_BLOCKS = ("Q8_0", "Q4_0", "Q4_1", "Q5_0", "Q5_1", "IQ4_NL", "MXFP4")  # of 32 weights
LARGE_BLOCKS = ("Q4_K", "Q5_K", "Q6_K")  # of 256
DECODED = ("Q2_K", "Q3_K", "IQ4_XS", "TQ2_0")  # no kernel computes with these
ZERO = "\u0100"  # the byte 0 in byte-level tokens
PAIRED = ("llama", "mistral", "mixtral", "smollm3", "granite", "granitemoehybrid", "ministral3")  # in the files alone
TILED = ("qwen3_5_text", "qwen3_5_moe_text")  # heads of values
SHIFTED = ("gemma2", "gemma3_text", *TILED, "qwen3_next")  # norms, to which 1 is added
SQUEEZED = ("conv1d.weight", "conv.conv.weight")  # of dimensions of 1
FLOAT = re.compile(r"ffn_gate_inp|ssm_conv1d|shortconv.conv|ssm_[ad]$|ssm_norm")  # matrices that are not rounded
COLUMNS = ("mamba.A_log", "mamba.D")  # vectors that are a column of a matrix in files
OF_HEAD = {"fc": "eh_proj", "pre_fc_norm_embedding": "enorm", "pre_fc_norm_hidden": "hnorm", "norm": "shared_head.norm"}
EXPERT = re.compile(r"experts\.[0-9]+\.")  # whose tensors are stacked
_SCALES = {"Q2_K": (80, 82), "Q3_K": (108,), "IQ4_XS": (0,), "TQ2_0": (64,)}  # places in a block, in float16


def convert(
    folder: Path | str,
    path: Path,
    kind: str | Callable[[str], str] = "F32",
    parts: int = 1,
    metadata: Mapping[str, Any] | None = None,
    extra: Mapping[str, NDArray[np.float32]] | None = None,
    fused: bool = False,
) -> Path:
    """Write a checkpoint as a GGUF file, as llama.cpp's conversion does, and return the file or its first part.

    kind: of the matrices, or a function of a tensor's name in the file. Vectors are F32. metadata: further entries, or
    others in place of the usual ones; None leaves an entry out. extra: further tensors. fused: queries, keys and values
    are in one tensor, as with the conversion's option.
    """
    folder = Path(folder)
    config = json.loads((folder / "config.json").read_text())
    decoder = CheckpointFiles.open(folder).decoder
    tensors = behind(load_file(folder / "model.safetensors"), decoder.num_layers)
    heads = sum("eh_proj" in name for name in tensors)
    split = -(-len(tensors) // parts) if parts > 1 else 0
    writer = GGUFWriter(path, "", split_max_tensors=split)
    entries = {**model_entries(folder, config, decoder, heads), **_tokenizer(folder, config), **(metadata or {})}
    for key, value in entries.items():
        if value is not None:
            writer.add_key_value(key, value, _type(value))
    changed = converted(tensors, config["model_type"], decoder)
    for stored, tensor in (_fused(changed) if fused else changed).items():
        rows = tensor.float().numpy()
        of_matrix = kind if isinstance(kind, str) else kind(stored)
        _add(writer, stored, rows, "F32" if rows.ndim < 2 or FLOAT.search(stored) else of_matrix)
    for name, values in {**rope_tensors(config, decoder), **(extra or {})}.items():
        _add(writer, name, values, "F32")
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return path if parts == 1 else next(iter(sorted(path.parent.glob(f"{path.stem}-00001-of-*.gguf"))))


# --- the conversion of tensors, by llama.cpp's own names: it shares nothing with the library's readers and writers


def behind(tensors: Mapping[str, torch.Tensor], layers: int) -> dict[str, torch.Tensor]:
    """Return a checkpoint's tensors with those of a head for multi-token prediction as a layer after the others."""

    def named(name: str) -> str:
        outer, part, *rest = name.split(".", 2)
        if outer != "mtp":
            return name
        return f"model.layers.{layers}.{rest[0][2:] if part == 'layers' else f'{OF_HEAD[part]}.{rest[0]}'}"

    return {named(name): each for name, each in tensors.items()}


def stored_names(names: Iterable[str], family: str) -> dict[str, list[str]]:
    """Return a checkpoint's tensors by their names in the file; several of one name are the matrices of experts."""
    architectures = {name: architecture for architecture, name in gguf.MODEL_ARCH_NAMES.items()}
    known = gguf.get_tensor_name_map(architectures[gguf_families()[family].architecture], 64)
    of_heads = gguf.get_tensor_name_map(gguf.MODEL_ARCH.GLM4_MOE, 64)  # which the package's Qwen3.5 lacks
    found: dict[str, list[str]] = {}
    for name in sorted(names, key=lambda name: [(int(part), "") if part.isdigit() else (0, part)
                                                for part in name.split(".")]):  # fmt: skip
        usual = EXPERT.sub("experts.", name).replace(".dt_bias", ".dt_proj.bias")
        usual = usual.replace(".expert_bias", ".expert_bias.bias")
        usual = re.sub(r"^model\.(?=.*feed_forward\.experts)", "", usual)
        stored = next((each for of in (known, of_heads) if (each := of.get_name(usual, (".weight", ".bias")))), None)
        stored = "output.weight" if name == "lm_head.weight" else stored  # which not all architectures have
        assert stored is not None, name
        found.setdefault(stored, []).append(name)
    return found


def divided(tensors: Mapping[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    """Return the tensors of Granite 4 with gate and up apart, under the usual names; others as they are."""
    found = dict[str, torch.Tensor]()
    for name, tensor in tensors.items():
        usual = _usual(name, tensors)
        if "input_linear" in usual:
            for part, own in zip(("gate_proj", "up_proj"), tensor.chunk(2, -2), strict=True):
                found[usual.replace("input_linear", part)] = own
        else:
            found[usual] = tensor
    return found


def _usual(name: str, tensors: Iterable[str]) -> str:
    """Return Granite's name of a tensor, with the usual name of the block that it belongs to."""
    block = "mlp.shared_expert." if any("block_sparse_moe" in each for each in tensors) else "mlp."
    name = re.sub(r"block_sparse_moe.input_linear.*", "mlp.experts.input_linear.weight", name)
    return re.sub(r"shared_mlp\.", block, name).replace("output_linear", "down_proj") if "shared" in name else name


def _undivided(tensors: Mapping[str, torch.Tensor], stored: Iterable[str]) -> dict[str, torch.Tensor]:
    """Return tensors under a checkpoint's names, from those of `divided`."""
    found = dict[str, torch.Tensor]()
    for name in stored:
        usual = _usual(name, stored)
        parts = [usual.replace("input_linear", part) for part in ("gate_proj", "up_proj")]
        found[name] = tensors[usual] if usual in parts else torch.cat([tensors[part] for part in parts], -2)
    return found


def converted(tensors: Mapping[str, torch.Tensor], family: str, of: DecoderConfig) -> dict[str, torch.Tensor]:
    """Return a checkpoint's tensors as the file has them."""
    tensors = divided(_parted(tensors, of))
    return {
        stored: torch.stack(parts) if len(parts) > 1 else parts[0]
        for stored, own in stored_names(tensors, family).items()
        if (parts := [_stored(name, tensors[name], family, of) for name in own])
    }


def _parted(tensors: Mapping[str, torch.Tensor], of: DecoderConfig) -> dict[str, torch.Tensor]:
    """Return the tensors without those that hold several: gates and ups of all experts, and Qwen3-Next's projections.

    These become q, k and v of all keys one after the other, and z.
    """
    found = dict(tensors)
    for name in [name for name in tensors if name.endswith("experts.gate_up_proj")]:
        halves = found.pop(name).chunk(2, dim=1)
        found |= {
            name.replace("gate_up", part) + ".weight": each for part, each in zip(("gate", "up"), halves, strict=True)
        }
        down = name.replace("gate_up", "down")
        found[f"{down}.weight"] = found.pop(down)
    for name in [name for name in tensors if "in_proj_qkvz" in name]:
        parts = [each.flatten(0, 1) for each in _of_keys(found.pop(name), of)]
        found[name.replace("qkvz", "qkv")], found[name.replace("qkvz", "z")] = torch.cat(parts[:3]), parts[3]
    return found


def _of_keys(both: torch.Tensor, of: DecoderConfig) -> tuple[torch.Tensor, ...]:
    """Return q, k, v and z [key_heads, rows, hidden]."""
    state = next(filter(None, of.states))
    values = state.heads // state.key_heads * state.head_dim
    sizes = [state.key_dim, state.key_dim, values, values]
    return both.view(state.key_heads, sum(sizes), -1).split(sizes, dim=1)


def _joined(tensors: dict[str, torch.Tensor], of: DecoderConfig) -> dict[str, torch.Tensor]:
    """Return the tensors of `_parted` as the checkpoint has them."""
    for name in [name for name in tensors if name.endswith("in_proj_z.weight")]:
        both = torch.cat((tensors.pop(name.replace("in_proj_z", "in_proj_qkv")), tensors.pop(name)))
        parts, places = torch.empty_like(both), _of_keys(torch.arange(len(both)), of)
        parts[torch.cat([each.flatten() for each in places])] = both
        tensors[name.replace("in_proj_z", "in_proj_qkvz")] = parts
    return tensors


def _stored(name: str, tensor: torch.Tensor, family: str, of: DecoderConfig) -> torch.Tensor:
    if _is_shifted(name, family):
        return tensor + 1
    tensor = -tensor.exp() if name.endswith("A_log") else tensor
    tensor = tensor[:, None] if name.endswith(COLUMNS) else tensor
    if name.endswith("mamba.norm.weight"):
        tensor = tensor.view(next(each.key_heads for each in of.states if each), -1)
    tensor = tensor.squeeze(1) if name.endswith(SQUEEZED) else tensor
    moved = _moved(name, tensor.shape, family, of)
    tensor = tensor if moved is None else tensor.index_select(*moved)
    return tensor.T.contiguous() if _is_turned(name, family) else tensor


def loaded(name: str, tensor: torch.Tensor, family: str, of: DecoderConfig) -> torch.Tensor:
    """Return a file's tensor as the checkpoint has it."""
    if _is_shifted(name, family):
        return tensor - 1
    tensor = tensor.T if _is_turned(name, family) else tensor
    tensor = tensor.flatten() if name.endswith((*COLUMNS, "mamba.norm.weight")) else tensor
    moved = _moved(name, tensor.shape, family, of)
    tensor = tensor if moved is None else torch.empty_like(tensor).index_copy_(*moved, tensor)
    tensor = tensor.unsqueeze(1) if name.endswith(SQUEEZED) else tensor
    return tensor.neg().log() if name.endswith("A_log") else tensor


def _is_shifted(name: str, family: str) -> bool:
    return family in SHIFTED and name.endswith("norm.weight") and "linear_attn" not in name


def _is_turned(name: str, family: str) -> bool:
    return family == "gpt2" and any(f".{part}.weight" in name for part in ("c_attn", "c_proj", "c_fc"))


def _moved(name: str, shape: torch.Size, family: str, of: DecoderConfig) -> tuple[int, torch.Tensor] | None:
    """Return the dimension whose order differs in the file, and the order; None = there is none."""
    rows, attention = shape[0], of.attention
    heads = next((n for part, n in zip("qk", (attention.heads, attention.kv_heads), strict=True)
                  if f".{part}_proj." in name), 0)  # fmt: skip
    if family in PAIRED and heads:  # the halves of each head, interleaved
        return 0, torch.arange(rows).view(heads, 2, -1).transpose(1, 2).reshape(-1)
    if family == "gpt_neox" and "query_key_value" in name:  # queries of all heads first, then keys, then values
        return 0, torch.arange(rows).view(attention.heads, 3, -1).transpose(0, 1).reshape(-1)
    if family in TILED and ".linear_attn." in name and "linear_attn.norm" not in name:
        return _tiled(name, shape, of)
    return None


def _tiled(name: str, shape: torch.Size, of: DecoderConfig) -> tuple[int, torch.Tensor]:
    """Return the order of the heads of values: the first ones of all keys, then the second ones, and so on."""
    state = next(filter(None, of.states))
    dim = 1 if "out_proj" in name else 0
    ahead = 2 * state.key_heads * state.key_dim if "conv1d" in name or "in_proj_qkv" in name else 0
    places = torch.arange(ahead, shape[dim]).view(state.key_heads, state.heads // state.key_heads, -1)
    return dim, torch.cat((torch.arange(ahead), places.transpose(0, 1).reshape(-1)))


def _fused(tensors: Mapping[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    """Return the tensors of a file with queries, keys and values in one."""
    found: dict[str, list[torch.Tensor]] = {}
    for name in sorted(tensors, key=lambda name: [part in name for part in ("attn_v.", "attn_k.", "attn_q.")]):
        found.setdefault(re.sub(r"attn_[qkv]\.", "attn_qkv.", name), []).append(tensors[name])
    return {name: torch.cat(parts) for name, parts in found.items()}


def decoded(path: Path, folder: Path | str, out: Path) -> Path:
    """Write a copy of a checkpoint's folder with the weights of a GGUF file, as the gguf package decodes them."""
    shutil.copytree(folder, out)
    config = json.loads((out / "config.json").read_text())
    family, of = config["model_type"], CheckpointFiles.open(Path(folder)).decoder
    own = load_file(out / "model.safetensors")
    parted = divided(_parted(own, of))
    names = stored_names(parted, family)
    tensors: dict[str, torch.Tensor] = {}
    first, _, rest = path.name.partition("-00001-of-")
    for part in sorted(path.parent.glob(f"{first}-*-of-{rest}")) if rest else [path]:
        for each in GGUFReader(part).tensors:
            values = torch.from_numpy(dequantize(each.data, each.tensor_type).copy())
            values = values.view(*map(int, each.shape[::-1]))
            found = names.get(each.name, [])  # factors of rotary positions are in config.json
            for name, one in zip(found, [values] if len(found) == 1 else values, strict=True):
                tensors[name] = loaded(name, one, family, of)
    tensors = tensors if parted.keys() == own.keys() else _joined(tensors, of)
    tensors = _undivided(tensors, own)
    save_file({name: tensor.contiguous() for name, tensor in tensors.items()}, out / "model.safetensors")
    return out


def encode(rows: NDArray[np.float32], kind: str) -> NDArray[np.uint8]:
    """Return rows [n, k] in a kind of blocks, [n, bytes]; random blocks of small weights for a kind without encoder."""
    if kind not in DECODED:
        return gguf_blocks.encode(kind, rows)
    of_block, size = GGML_QUANT_SIZES[GGMLQuantizationType[kind]]
    generator = np.random.default_rng(rows.size)
    blocks = generator.integers(0, 256, (len(rows), rows.shape[1] // of_block, size), dtype=np.uint8)
    for place in _SCALES[kind]:
        scales = generator.uniform(1e-4, 4e-4, blocks.shape[:2]).astype(np.float16)
        blocks[..., place : place + 2] = scales[..., None].view(np.uint8)
    return blocks.reshape(len(rows), -1)


def _add(writer: GGUFWriter, name: str, rows: NDArray[np.float32], kind: str) -> None:
    if kind == "F32":
        writer.add_tensor(name, rows)
    elif kind == "F16":
        writer.add_tensor(name, rows.astype(np.float16))
    elif kind == "BF16":
        writer.add_tensor(name, quantize(rows, GGMLQuantizationType.BF16), raw_dtype=GGMLQuantizationType.BF16)
    else:
        blocks = encode(rows.reshape(-1, rows.shape[-1]), kind).reshape(*rows.shape[:-1], -1)
        writer.add_tensor(name, blocks, raw_dtype=GGMLQuantizationType[kind])


def _tokenizer(folder: Path, config: Mapping[str, Any]) -> dict[str, Any]:
    """Return the metadata of a byte-level tokenizer; empty if there is no tokenizer.json."""
    path = folder / "tokenizer.json"
    if not path.exists():
        return {}
    content = json.loads(path.read_text())
    tokens = {index: (text, gguf.TokenType.NORMAL) for text, index in content["model"]["vocab"].items()}
    for each in content["added_tokens"]:
        kind = gguf.TokenType.CONTROL if each["special"] else gguf.TokenType.USER_DEFINED
        tokens[each["id"]] = each["content"], kind
    merges = [each if isinstance(each, str) else " ".join(each) for each in content["model"]["merges"]]
    if not merges:  # a file must have one; this one joins two zero bytes, which no text has
        merges = [f"{ZERO} {ZERO}"]
        tokens[config["vocab_size"] - 1] = ZERO + ZERO, gguf.TokenType.NORMAL
    for index in range(config["vocab_size"]):
        tokens.setdefault(index, (f"[PAD{index}]", gguf.TokenType.UNUSED))
    ordered = [tokens[index] for index in sorted(tokens)]
    ids = {text: index for index, (text, _) in tokens.items()}
    settings = folder / "tokenizer_config.json"
    named = json.loads(settings.read_text()) if settings.exists() else {}
    end = config.get("eos_token_id")
    return {
        "tokenizer.ggml.model": "gpt2",
        "tokenizer.ggml.pre": "gpt-2",
        "tokenizer.ggml.tokens": [text for text, _ in ordered],
        "tokenizer.ggml.token_type": [int(kind) for _, kind in ordered],
        "tokenizer.ggml.merges": merges,
        "tokenizer.ggml.bos_token_id": ids.get("<begin>"),
        "tokenizer.ggml.eos_token_id": end[0] if isinstance(end, list) else end,
        "tokenizer.ggml.add_bos_token": False,
        "tokenizer.chat_template": named.get("chat_template"),
    }


def _type(value: Any) -> gguf.GGUFValueType:
    if isinstance(value, int) and not isinstance(value, bool):
        return gguf.GGUFValueType.UINT32
    return gguf.GGUFValueType.get_type(value)
