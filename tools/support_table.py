"""Writes the table of families in docs/models.md, from the families' code and the variants that tests run.

python tools/support_table.py
"""

from __future__ import annotations

import sys
from collections.abc import Iterable, Iterator
from pathlib import Path

from transformers import CONFIG_MAPPING, AutoConfig

ROOT = Path(__file__).parents[1]
sys.path.insert(0, str(ROOT))

from speculant import plugins  # noqa: E402
from speculant.models import (  # noqa: E402
    DecoderConfig,
    Experts,
    Layer,
    NativeDecoder,
)
from tests.unit.models.families import SMALL, VARIANTS  # noqa: E402

PAGE = ROOT / "docs" / "models.md"
END = "<!-- end -->"


def updated(page: str) -> str:
    """Return a page whose table is that of the code."""
    return replaced(page, "families", table())


def replaced(page: str, name: str, lines: Iterable[str]) -> str:
    """Return a page with other lines in the table of a name."""
    begin = f"<!-- table: {name} -->\n"
    before, _, rest = page.partition(begin)
    return before + begin + "\n".join(lines) + "\n" + END + rest.partition(END)[2]


def table() -> Iterator[str]:
    """Yield the lines of the table."""
    yield "| family | GGUF | special parts |"
    yield "|---|---|---|"
    for family in plugins.names("speculant.models"):
        configs = described(family)
        parts = sorted({part for config in configs for part in parts_of(config)})
        if any(NativeDecoder.why_not(config) for config in configs):
            parts.append("no native kernels")
        if family not in CONFIG_MAPPING:
            parts.append("not compared with transformers")
        yield f"| `{family}` | {architecture(family)} | {', '.join(parts)} |"


def architecture(family: str) -> str:
    """Return the family's name in GGUF files."""
    gguf = getattr(plugins.load("speculant.models", family), "GGUF", None)
    return f"`{gguf.architecture}`" if gguf else ""


def described(family: str) -> list[DecoderConfig]:
    """Return the descriptions of the variants that the contract tests run."""
    read, found = plugins.load("speculant.models", family).read_config, []
    for given in VARIANTS.get(family, {"default": {}}).values():
        settings = {**SMALL, **given}
        hf = AutoConfig.for_model(family, **settings).to_dict() if family in CONFIG_MAPPING else settings
        found.append(read(hf))
    return found


def parts_of(config: DecoderConfig) -> Iterator[str]:
    """Yield the names of a decoder's parts that not every family has."""
    if config.embedding.scale != 1 or config.head.scale != 1:
        yield "multipliers"
    if config.embedding.positions:
        yield "sinusoids" if config.embedding.sinusoids else "learned positions"
    if config.embedding.norm:
        yield "norm of embeddings"
    if config.head.bias:
        yield "bias of logits"
    if config.head.softcap:
        yield "softcaps"
    if config.encoder:
        yield "encoder"
    for layer in dict.fromkeys((*config.layers, *(config.encoder.layers if config.encoder else ()))):
        yield from parts_of_layer(layer)


def parts_of_layer(layer: Layer) -> Iterator[str]:
    """Yield the names of a layer's parts."""
    of = layer.attention
    if of is None:
        state = layer.state
        assert state
        yield "short convolutions" if not state.heads else "Mamba 2" if state.steps else "gated delta rule"
        return
    found = {
        "sliding windows": of.window,
        "gated attention": of.gated,
        "QK norms": of.qk_norm,
        "biases": of.bias or of.output_bias or layer.mlp.bias,
        "softcaps": of.softcap,
        "attention sinks": of.sinks,
        "distances": of.distances,
        "norms after blocks": layer.after_attention or layer.after_mlp,
        "norms of the residual stream": layer.end_attention,
        "parallel blocks": layer.parallel,
        "multipliers": layer.residual_scale != 1,
        "experts": isinstance(layer.mlp, Experts),
        "shared experts": getattr(layer.mlp, "shared", None),
        "sigmoid routing": getattr(layer.mlp, "sigmoid", False),
        "ungated MLP": not getattr(layer.mlp, "gated", True),
        "layers without RoPE": of.rope is None,
        "partial RoPE": of.rope and of.rotated < of.head_dim,
        "RoPE scaling": of.rope and of.rope.kind != "default",
        "separate RoPE factors for long texts": of.rope and of.rope.long_factors,
    }
    yield from (name for name, has in found.items() if has)


if __name__ == "__main__":
    PAGE.write_text(updated(PAGE.read_text(encoding="utf-8")), encoding="utf-8")
    print(f"wrote the table of {PAGE.relative_to(ROOT)}")
