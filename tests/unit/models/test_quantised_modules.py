"""GPTQ and AWQ checkpoints give the logits of the numbers that they stand for; what does not fit is refused."""

from __future__ import annotations

import json
import logging
import shutil
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import Tensor

from speculant.cli import inspect_model
from speculant.kernels import Type, usable_sets
from speculant.models import PackedExperts, PackedMlp, load_model
from speculant.models.weights import cache as weight_cache
from tests.models import Shape, write_checkpoint
from tests.quantised_folders import Gptq, Tensors, awq_config, awq_module, edit_config, quantise
from tests.unit.models.families import EXPERTS, PADDED, VARIANTS, make_pair
from tests.unit.models.loaded import (
    MOST_ERROR,
    Written,
    change_tensors,
    error,
    load,
    load_twice,
    logits,
    packed_of,
    refused,
)

pytestmark = pytest.mark.usefixtures("families_are_looked_up_once")
native = pytest.mark.skipif(not usable_sets(), reason="the native kernels are not built")
CASES: dict[str, tuple[Gptq, Type]] = {
    "asymmetric": (Gptq(), Type.ZERO4),
    "symmetric": (Gptq(sym=True), Type.Q4_0),
    "8 bits": (Gptq(bits=8, size=64), Type.ZERO8),
    "8 bits, symmetric": (Gptq(bits=8, size=64, sym=True), Type.Q8_0),
    "2 bits": (Gptq(bits=2), Type.ZERO4),
    "one group": (Gptq(size=-1), Type.ZERO4),
    "act-order": (Gptq(act_order=True), Type.ZERO4),
    "act-order, large groups": (Gptq(bits=8, size=64, sym=True, act_order=True), Type.Q8_0),
    "v2": (Gptq(form="gptq_v2", act_order=True), Type.ZERO4),
    "bfloat16 scales": (Gptq(scales=torch.bfloat16), Type.ZERO4),
    "small groups": (Gptq(size=16, act_order=True), Type.BF16),
    "odd groups": (Gptq(size=48), Type.BF16),
    "float32 scales": (Gptq(scales=torch.float32), Type.BF16),
}


@pytest.fixture(scope="module")
def source(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A plain checkpoint, whose rows have 64 and 128 numbers."""
    return Path(write_checkpoint(tmp_path_factory.mktemp("source") / "plain", Shape(hidden_size=64)))


def made(source: Path, root: Path, own: Gptq, **options: Any) -> tuple[Path, Path]:
    """Return the folders of a quantised checkpoint and of its numbers."""
    quantise(source, root / "packed", root / "numbers", own, **options)
    return root / "packed", root / "numbers"


@pytest.fixture(scope="module")
def written(source: Path, tmp_path_factory: pytest.TempPathFactory) -> Written:
    return Written(source, tmp_path_factory.mktemp("written"), quantise)


@pytest.mark.parametrize("case", CASES)
def test_logits_are_those_of_the_numbers(case: str, source: Path, written: Written) -> None:
    packed, expected = written[CASES[case][0]]
    assert torch.equal(logits(packed), expected)
    assert error(logits(source), expected) > 1e-4, "rounding changed nothing"


@native
@pytest.mark.parametrize("case", CASES)
def test_native_matrices_keep_their_grid(case: str, written: Written) -> None:
    packed, expected = written[CASES[case][0]]
    loaded = load(packed, "native")
    assert error(logits(loaded), expected) < MOST_ERROR
    types = {weight.type for layer in packed_of(loaded).layers for weight in layer.attention.matrices}
    assert types == {CASES[case][1]}


@pytest.mark.parametrize("kernels", ["reference", pytest.param("native", marks=native)])
def test_awq_is_read_on_both_backends(kernels: str, source: Path, tmp_path: Path) -> None:
    own = Gptq(size=64, modules={"v_proj": None})
    packed, numbers = made(source, tmp_path, own, write=awq_module)
    edit_config(packed, quantization_config={**awq_config(64), "modules_to_not_convert": ["v_proj"]})
    loaded = load(packed, kernels)
    difference = error(logits(loaded), logits(numbers))
    assert difference < MOST_ERROR if kernels == "native" else difference == 0
    if kernels == "native":
        assert packed_of(loaded).layers[0].attention.out.type == Type.ZERO4


@native
def test_only_matrices_of_one_order_are_one(source: Path, tmp_path: Path) -> None:
    """q and k have the same order in the first layer; gate and up in both."""
    packed, numbers = made(source, tmp_path, Gptq(sym=True, act_order=True))
    tensors = load_file(packed / "model.safetensors")
    layers = packed_of(load(packed, "native")).layers
    assert [[weight.n for weight in layer.attention.qkv] for layer in layers] == [[64, 32, 32]] * 2
    assert all(weight.order is not None for layer in layers for weight in (*layer.attention.matrices, layer.mlp.down))
    assert [len(layer.mlp.inner) for layer in layers] == [2, 2]
    shared = {
        ("model.layers.0.self_attn.q_proj", "model.layers.0.self_attn.k_proj"),
        *((f"model.layers.{i}.mlp.gate_proj", f"model.layers.{i}.mlp.up_proj") for i in range(2)),
    }
    for one, other in shared:
        regroup(tensors, load_file(numbers / "model.safetensors"), one, other)
    save_file(tensors, packed / "model.safetensors")
    layers = packed_of(load(packed, "native")).layers
    assert [[weight.n for weight in layer.attention.qkv] for layer in layers] == [[96, 32], [64, 32, 32]]
    assert [len(layer.mlp.inner) for layer in layers] == [1, 1]
    assert error(logits(load(packed, "native")), logits(packed)) < MOST_ERROR


def regroup(tensors: Tensors, numbers: Tensors, one: str, other: str) -> None:
    """Give a module the groups of another one; its numbers become others."""
    assert not torch.equal(tensors[f"{one}.g_idx"], tensors[f"{other}.g_idx"])
    tensors[f"{other}.g_idx"] = tensors[f"{one}.g_idx"].clone()


@native
def test_orders_survive_the_weight_cache(written: Written, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(weight_cache, "LEAST_BYTES", 0)
    packed, _ = written.copy(Gptq(act_order=True), tmp_path)
    again, expected = load_twice(packed, tmp_path / "cache")
    assert packed_of(again).layers[0].attention.out.order is not None
    assert torch.equal(logits(again), expected)
    edit_config(packed, quantization_config={**Gptq(act_order=True).config, "checkpoint_format": "gptq_v2"})
    corrected = load(packed, "native", weight_cache=tmp_path / "cache")
    assert corrected.source != weight_cache.MAPPED, "zero points of another config.json"
    assert not torch.equal(logits(corrected), expected)


FAMILIES: dict[str, dict[str, Any]] = {
    "phi3": {**PADDED, "sliding_window": None},
    "gpt2": {"n_inner": 96},
    "qwen3_moe": {**EXPERTS, "moe_intermediate_size": 32, "head_dim": 16, "norm_topk_prob": True},
    "gemma2": {"head_dim": 16, "query_pre_attn_scalar": 16},
    "opt": {"ffn_dim": 96, "word_embed_proj_dim": 64},
}


@pytest.mark.covering(1)
@pytest.mark.parametrize("act_order", [False, True])
@pytest.mark.parametrize("family", FAMILIES)
def test_families_are_read(family: str, act_order: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Fused and transposed matrices, experts and biases. Native rows that use other experts differ by more."""
    settings = {"hidden_size": 64, "intermediate_size": 96, **FAMILIES[family]}
    monkeypatch.setitem(VARIANTS, family, {"quantised": settings})
    make_pair(tmp_path / "plain", family, "quantised")
    own = Gptq(size=32, act_order=act_order)
    packed, numbers = made(tmp_path / "plain", tmp_path, own, transposed=family == "gpt2")
    expected = logits(numbers)
    assert torch.equal(logits(packed), expected)
    if not usable_sets():
        return
    loaded = load(packed, "native")
    errors = (logits(loaded) - expected).norm(dim=1) / expected.norm(dim=1)
    assert float(errors.median()) < 0.15
    layer = packed_of(loaded).layers[0]
    assert (layer.attention.out.type, layer.attention.out.order is not None) == (Type.ZERO4, act_order)
    if isinstance(layer.mlp, PackedExperts):
        assert layer.mlp.down.weights[0].type == (Type.BF16 if act_order else Type.ZERO4)
    else:
        assert isinstance(layer.mlp, PackedMlp)
        assert layer.mlp.down.type == Type.ZERO4


DIFFERENT = {"gate_proj": {"bits": 8}, "up_proj": {"scales": torch.float32}, "down_proj": None}  # options of one matrix


@pytest.fixture(scope="module")
def experts(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A plain checkpoint with experts."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setitem(VARIANTS, "qwen3_moe", {"quantised": {"hidden_size": 64, **FAMILIES["qwen3_moe"]}})
        folder = tmp_path_factory.mktemp("experts") / "plain"
        make_pair(folder, "qwen3_moe", "quantised")
    return folder


@native
@pytest.mark.parametrize(
    "matrix", [pytest.param(each, marks=[] if each == "up_proj" else pytest.mark.slow) for each in DIFFERENT]
)
def test_experts_of_a_layer_get_one_type(
    matrix: str, experts: Path, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """One expert of the second layer differs; then all of that layer are decoded, and no others."""
    own = Gptq(size=32, sym=True, modules={f"1.mlp.experts.1.{matrix}": DIFFERENT[matrix]})
    packed, numbers = made(experts, tmp_path, own)
    entry = json.loads((packed / "config.json").read_text())["quantization_config"]
    edit_config(packed, quantization_config={**entry, "dynamic": {"-:x": {}}})
    weight_cache.say_once.cache_clear()
    with caplog.at_level(logging.WARNING):
        loaded = load(packed, "native")
    first, second, *_ = (layer.mlp for layer in packed_of(loaded).layers)
    assert {weight.type for each in (*first.inner, first.down) for weight in each.weights} == {Type.Q4_0}
    assert {weight.type for each in (*second.inner, second.down) for weight in each.weights} == {Type.BF16}
    (text,) = [record.getMessage() for record in caplog.records if "all experts" in record.getMessage()]
    assert "experts of model.layers.1.mlp are kept in bfloat16, because some are stored in another type" in text
    errors = (logits(loaded) - logits(numbers)).norm(dim=1) / logits(numbers).norm(dim=1)
    assert float(errors.median()) < 0.15
    kept = {kind: each["kept_as"] for kind, each in inspect_model(str(packed)).matrices.items()}
    assert kept["q4_0"] == ["bf16", "q4_0"]


@native
def test_gates_may_have_a_type_of_their_own(experts: Path, tmp_path: Path) -> None:
    own = Gptq(size=32, sym=True, modules={"gate_proj": {"bits": 8}})
    packed, _ = made(experts, tmp_path, own)
    entry = json.loads((packed / "config.json").read_text())["quantization_config"]
    edit_config(packed, quantization_config={**entry, "dynamic": {"+:.*gate_proj": {"bits": 8}}})
    for layer in packed_of(load(packed, "native")).layers:
        assert [each.weights[0].type for each in (*layer.mlp.inner, layer.mlp.down)] == [
            Type.Q8_0, Type.Q4_0, Type.Q4_0,
        ]  # fmt: skip


@native
def test_plain_experts_may_have_several_types(experts: Path, tmp_path: Path) -> None:
    """float16 and float32 among them give the logits that all in float32 give."""
    shutil.copytree(experts, mixed := tmp_path / "mixed")
    tensors = load_file(mixed / "model.safetensors")
    name = "model.layers.0.mlp.experts.1.up_proj.weight"
    tensors[name] = tensors[name].half()
    save_file(tensors, mixed / "model.safetensors")
    found = logits(load(mixed, "native"))
    tensors[name] = tensors[name].float()
    save_file(tensors, mixed / "model.safetensors")
    assert torch.equal(found, logits(load(mixed, "native")))


@native
def test_modules_may_be_plain_or_have_other_bits(source: Path, tmp_path: Path) -> None:
    own = Gptq(size=64, modules={"v_proj": None, "0.mlp.down_proj": {"bits": 8, "size": 32}, "lm_head": {}})
    packed, numbers = made(source, tmp_path, own)
    entry = json.loads((packed / "config.json").read_text())["quantization_config"]
    edit_config(packed, quantization_config={**entry, "dynamic": {"-:.*v_proj": {}, "+:x": {"bits": 8}}})
    assert torch.equal(logits(packed), logits(numbers))
    loaded = packed_of(load(packed, "native"))
    assert loaded.head.type == Type.ZERO4
    assert [[weight.type for weight in layer.attention.qkv] for layer in loaded.layers] == [[Type.ZERO4, Type.F32]] * 2
    assert [layer.mlp.down.type for layer in loaded.layers] == [Type.ZERO8, Type.ZERO4]
    edit_config(packed, quantization_config=entry)
    refused(packed, "do not fit integers of 4 bits", "2, 4 or 8 bits")


@pytest.mark.parametrize("kernels", ["reference", pytest.param("native", marks=native)])
def test_tied_heads_are_the_plain_table(kernels: str, tmp_path: Path) -> None:
    shape = Shape(hidden_size=64, tied=True)
    packed, numbers = made(Path(write_checkpoint(tmp_path / "plain", shape)), tmp_path, Gptq())
    assert error(logits(load(packed, kernels)), logits(numbers)) < (MOST_ERROR if kernels == "native" else 1e-9)


def test_a_quantised_head_is_not_tied(source: Path, tmp_path: Path) -> None:
    packed, _ = made(source, tmp_path, Gptq(modules={"lm_head": {}}))
    edit_config(packed, tie_word_embeddings=True)
    refused(packed, "lm_head.weight differs from", "set tie_word_embeddings to false")


@pytest.mark.parametrize("value", [0.0, 0.5])
def test_biases_that_the_model_lacks_must_be_zeros(value: float, written: Written, tmp_path: Path) -> None:
    packed, expected = written.copy(Gptq(), tmp_path)
    bias = {"model.layers.0.mlp.down_proj.bias": torch.full((64,), value, dtype=torch.float16)}
    change_tensors(packed, lambda tensors: tensors.update(bias))
    if value:
        refused(packed, "unexpected (model.layers.0.mlp.down_proj.bias)")
    else:
        assert torch.equal(logits(packed), expected)


@pytest.mark.parametrize("method", ["gptq", "awq"])
def test_options_may_be_in_a_file_of_their_own(method: str, source: Path, tmp_path: Path) -> None:
    write = {"write": awq_module} if method == "awq" else {}
    packed, numbers = made(source, tmp_path, Gptq(size=64), **write)
    entry = json.loads((packed / "config.json").read_text())["quantization_config"]
    edit_config(packed, quantization_config=None)
    old = {"w_bit": 4, "q_group_size": 64, "zero_point": True, "version": "GEMM"} if method == "awq" else entry
    del entry["quant_method"], entry["checkpoint_format"]
    (packed / ("quant_config.json" if method == "awq" else "quantize_config.json")).write_text(json.dumps(old))
    assert torch.equal(logits(packed), logits(numbers))


def test_decoding_says_why_once(source: Path, tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    packed, _ = made(source, tmp_path, Gptq(size=48, modules={"v_proj": {"scales": torch.float32, "size": 48}}))
    with caplog.at_level(logging.WARNING):
        load(packed)
    (text,) = [record.getMessage() for record in caplog.records if "decode" in record.getMessage()]
    assert "14 (model.layers.0.mlp.down_proj.weight ...), because groups have 48 weights, which is not a" in text


def test_unknown_options_are_named(written: Written, tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    packed, expected = written.copy(Gptq(), tmp_path)
    entry = json.loads((packed / "config.json").read_text())["quantization_config"]
    edit_config(packed, quantization_config={**entry, "damp_percent": 0.1, "novelty": 3, "absent": None})
    with caplog.at_level(logging.WARNING, "speculant.models.weights.formats"):
        assert torch.equal(logits(packed), expected)
    (text,) = [record.getMessage() for record in caplog.records if record.name.endswith("formats")]
    assert text.endswith("have no effect: novelty = 3")


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"bits": 3}, "(gptq) has bits = 3, which can't be read: only 2 or 4 or 8 can"),
        ({"bits": True}, "bits = True"),
        ({"bits": None}, "bits = None"),
        ({"group_size": 0}, "group_size = 0, which is not the size"),
        ({"group_size": "128"}, "group_size = '128'"),
        ({"checkpoint_format": "marlin"}, "checkpoint_format = 'marlin'"),
        ({"format": "gptq_v2"}, "format = 'gptq_v2', which can't be read: only gptq can"),
        ({"pack_dtype": "int64"}, "pack_dtype = 'int64'"),
        ({"is_marlin_format": True}, "is_marlin_format = True, which changes the numbers"),
        ({"rotation": "hadamard"}, "rotation = 'hadamard'"),
        ({"adapter": {"rank": 4}}, "adapter = {'rank': 4}"),
        ({"activation": {"bits": 8}}, "activation = {'bits': 8}, which changes the numbers"),
        ({"desc_act": 3}, "desc_act = 3"),
        ({"quant_method": "awq", "version": "gemv"}, "(awq) has version = 'gemv'"),
        ({"quant_method": "awq", "format": "llm-awq"}, "(awq) has format = 'llm-awq'"),
        ({"quant_method": "awq", "zero_point": False}, "zero_point = False"),
        ({"quant_method": "awq", "bits": 8}, "(awq) has bits = 8"),
    ],
    ids=str,
)
def test_options_that_change_numbers_are_refused(
    changes: dict[str, Any], words: str, written: Written, tmp_path: Path
) -> None:
    packed, _ = written.copy(Gptq(), tmp_path)
    entry = json.loads((packed / "config.json").read_text())["quantization_config"]
    edit_config(packed, quantization_config={**entry, **changes})
    refused(packed, words)


def _remove(part: str) -> Callable[[Tensors], None]:
    def removed(tensors: Tensors) -> None:
        del tensors[f"{MODULE}.{part}"]

    return removed


def _replace(part: str, change: Callable[[Tensor], Tensor]) -> Callable[[Tensors], None]:
    def changed(tensors: Tensors) -> None:
        tensors[f"{MODULE}.{part}"] = change(tensors[f"{MODULE}.{part}"]).contiguous()

    return changed


def _three_groups(tensors: Tensors) -> None:
    for part in ("qzeros", "scales"):
        _replace(part, lambda each: each[:-1])(tensors)


MODULE = "model.layers.1.mlp.down_proj"
DAMAGE: dict[str, tuple[Callable[[Tensors], None], str]] = {
    "no scales": (_remove("scales"), "down_proj.scales is missing"),
    "no zeros": (_remove("qzeros"), "down_proj.qzeros is missing"),
    "no integers": (_remove("qweight"), "down_proj.weight"),
    "no groups": (_remove("g_idx"), "down_proj.g_idx is missing"),
    "few scales": (_replace("scales", lambda each: each[:-1]), "scales is F16 [3, 64] instead of"),
    "few zeros": (_replace("qzeros", lambda each: each[:, :-1]), "do not fit integers of 4 bits"),
    "few groups of zeros": (_replace("qzeros", lambda each: each[:-1]), "scales is F16 [4, 64] instead of"),
    "groups that do not divide": (_three_groups, "has 3 groups, and 128 inputs in groups of 32 are 4"),
    "short g_idx": (_replace("g_idx", lambda each: each[1:]), "g_idx is I32 [127] instead of"),
    "few integers": (_replace("qweight", lambda each: each[:-1]), "g_idx is I32 [128] instead of"),
    "few outputs": (_replace("qweight", lambda each: each[:, :-8]), "do not fit integers"),
    "a vector": (_replace("qweight", lambda each: each[0]), "which are not matrices"),
    "no outputs": (_replace("qweight", lambda each: each[:, :0]), "which are not matrices"),
    "integers as floats": (_replace("qweight", Tensor.float), "qweight is F32"),
    "zeros as floats": (_replace("qzeros", Tensor.float), "qzeros is F32"),
    "scales as integers": (_replace("scales", lambda each: each.int()), "scales is I32"),
    "g_idx as floats": (_replace("g_idx", Tensor.float), "g_idx is F32"),
    "a large group": (_replace("g_idx", lambda each: each + 1), "does not divide the inputs"),
    "a negative group": (_replace("g_idx", lambda each: each - 1), "does not divide the inputs"),
    "an unused group": (_replace("g_idx", lambda each: each.clamp(min=1)), "does not divide the inputs"),
}


@pytest.mark.parametrize("damage", DAMAGE)
def test_damaged_modules_are_refused(damage: str, written: Written, tmp_path: Path) -> None:
    packed, _ = written.copy(Gptq(act_order=True), tmp_path)
    change, words = DAMAGE[damage]
    change_tensors(packed, change)
    refused(packed, words)


def test_groups_need_no_index_without_an_act_order(written: Written, tmp_path: Path) -> None:
    packed, expected = written.copy(Gptq(), tmp_path)
    tensors = {name: each for name, each in load_file(packed / "model.safetensors").items() if "g_idx" not in name}
    save_file(tensors, packed / "model.safetensors")
    assert torch.equal(logits(packed), expected)


@pytest.mark.parametrize("part", ["qweight", "qzeros", "scales"])
def test_damaged_awq_modules_are_refused(part: str, source: Path, tmp_path: Path) -> None:
    packed, _ = made(source, tmp_path, Gptq(size=64), write=awq_module)
    edit_config(packed, quantization_config=awq_config(64))
    tensors = load_file(packed / "model.safetensors")
    for change in (_replace(part, lambda each: each[:-1]), _replace(part, lambda each: each.double()), _remove(part)):
        changed = dict(tensors)
        change(changed)
        save_file(changed, packed / "model.safetensors")
        refused(packed, "down_proj")


def test_the_type_of_a_quantised_model_is_bfloat16(source: Path, written: Written, tmp_path: Path) -> None:
    """Its keys and values have it, as those of a GGUF file do; without quantised matrices it would be float32."""
    packed, _ = written.copy(Gptq(), tmp_path)
    edit_config(packed, torch_dtype="float16")
    assert load_model(str(packed)).dtype == torch.bfloat16
    edit_config(
        source_copy := made(source, tmp_path / "other", replace(Gptq(), modules={"proj": None}))[0],
        torch_dtype="float16",
    )
    assert load_model(str(source_copy)).dtype == torch.float32
