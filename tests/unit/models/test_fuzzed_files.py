"""Loading a checkpoint whose files were changed gives a model that runs, or a ModelError."""

from __future__ import annotations

import json
import struct
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import HealthCheck, given, settings, strategies as st

from speculant import plugins
from speculant.errors import ModelError
from speculant.models import Checkpoint, DecoderConfig, Rotary, load_model
from speculant.models.families import llama
from tests.examples import examples
from tests.json_faults import EXTREMES, changed, changed_deep, values
from tests.models import Shape, write_checkpoint
from tests.unit.models.families import LLAMA3, SMALL, VARIANTS, Session

pytestmark = pytest.mark.usefixtures("families_are_looked_up_once")
FAMILIES = ["llama", "mistral", "qwen2", "qwen3"]
KEYS = (
    "rope_scaling", "rope_parameters", "rope_theta", "sliding_window", "use_sliding_window", "max_window_layers",
    "layer_types", "rms_norm_eps", "tie_word_embeddings", "attention_bias", "mlp_bias", "hidden_act", "torch_dtype",
    "dtype", "partial_rotary_factor", "original_max_position_embeddings", "quantization_config", "auto_map",
)  # fmt: skip
quick = settings(
    max_examples=examples(25), suppress_health_check=[HealthCheck.too_slow, HealthCheck.function_scoped_fixture]
)


@pytest.fixture(scope="module")
def folders(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    """One checkpoint for each family."""
    root = tmp_path_factory.mktemp("families")
    return {family: Path(write_checkpoint(root / family, Shape(family, layers=1))) for family in FAMILIES}


@pytest.fixture
def folder(folders: dict[str, Path]) -> Path:
    return folders["llama"]


def load(folder: Path) -> Checkpoint | None:
    """Return the loaded model, which must be able to run; None if it is refused."""
    try:
        checkpoint = load_model(str(folder))
    except ModelError:
        return None
    logits = Session(checkpoint.model, max_len=8).extend([1, 2, 3])
    assert logits.shape == (3, checkpoint.model.vocab_size)
    assert all(0 <= token < checkpoint.model.vocab_size for token in checkpoint.eos_token_ids)
    return checkpoint


def with_content(file: Path, content: str | bytes, then: Callable[[], Any]) -> Any:
    """Run something while a file has another content."""
    before = file.read_bytes() if file.exists() else None
    file.write_bytes(content.encode("utf-8", "surrogatepass") if isinstance(content, str) else content)
    try:
        return then()
    finally:
        file.unlink() if before is None else file.write_bytes(before)


@quick
@given(data=st.data())
@pytest.mark.parametrize("family", FAMILIES)
def test_a_changed_config_gives_a_model_or_an_error(family: str, folders: dict[str, Path], data: st.DataObject) -> None:
    file = folders[family] / "config.json"
    content = data.draw(changed(json.loads(file.read_text(encoding="utf-8")), KEYS))
    with_content(file, json.dumps(content), lambda: load(folders[family]))


@settings(max_examples=examples(100))
@given(data=st.data())
@pytest.mark.parametrize("family", FAMILIES)
def test_a_changed_variant_is_read_or_refused(family: str, folders: dict[str, Path], data: st.DataObject) -> None:
    """Rotary settings, windows and biases of every variant, one level deeper."""
    variant = data.draw(st.sampled_from(sorted(VARIANTS[family])))
    content = json.loads((folders[family] / "config.json").read_text(encoding="utf-8"))
    content = data.draw(changed_deep({**content, **VARIANTS[family][variant]}))
    content.update(num_hidden_layers=2, model_type=family)  # what load_model has checked by then
    try:
        config = plugins.load("speculant.models", family).read_config(content)
    except ModelError:
        return
    assert isinstance(config, DecoderConfig)
    assert all(layer.attention.window is None or layer.attention.window >= 1 for layer in config.layers)


@pytest.mark.covering(1)
@pytest.mark.parametrize("name", ["factor", "low_freq_factor", "high_freq_factor", "rope_theta"])
@pytest.mark.parametrize("kind", ["default", "linear", "dynamic", "llama3"])
def test_rotary_angles_are_finite_or_refused(name: str, kind: str) -> None:
    for value in [*EXTREMES, 1e-30, 1e30, 1e-6, 1e6, 4.0, 3.9999999]:
        hf = {**SMALL, "model_type": "llama", "rope_parameters": {**LLAMA3, "rope_type": kind, name: value}}
        try:
            of = llama.read_config(hf).attention
        except ModelError:
            continue
        angles = Rotary(of.rope, of.head_dim).angles(torch.tensor([0, 1, 127, 2**20]), torch.float32)
        assert all(torch.isfinite(each).all() for each in angles), value


@quick
@given(
    content=values | changed({"do_sample": True, "temperature": 0.6, "top_k": 20, "top_p": 0.9, "eos_token_id": [1]})
)
def test_a_generation_config_is_read_or_refused(folder: Path, content: Any) -> None:
    with_content(folder / "generation_config.json", json.dumps(content), lambda: load(folder))


@pytest.mark.parametrize("file", ["config.json", "generation_config.json"])
@pytest.mark.parametrize(
    "text",
    ["[" * 10**5, '{"a":' * 10**5, '{"a":' * 500 + "1" + "}" * 500, '{"a": "\\ud800"}', "\xff", "9" * 5000, "\0"],
)
def test_json_that_no_one_can_read_is_refused(folder: Path, file: str, text: str) -> None:
    assert with_content(folder / file, text, lambda: load(folder)) is None


def split(file: Path) -> tuple[dict[str, Any], bytes]:
    """Return the header and the data of a safetensors file."""
    raw = file.read_bytes()
    (length,) = struct.unpack("<Q", raw[:8])
    return json.loads(raw[8 : 8 + length]), raw[8 + length :]


def joined(header: str | bytes, data: bytes) -> bytes:
    encoded = header.encode() if isinstance(header, str) else header
    return struct.pack("<Q", len(encoded)) + encoded + data


def entries(header: dict[str, Any]) -> st.SearchStrategy[dict[str, Any]]:
    """Change one tensor's type, shape or offsets, or its name."""
    kinds = st.sampled_from(["F32", "F16", "BF16", "F64", "I8", "U8", "BOOL", "F8_E4M3", "F4", "C64", "XX", ""])
    sizes = st.integers(-1, 70) | st.sampled_from([2**31, 2**63, 2**64])
    change = st.one_of(
        kinds.map(lambda kind: {"dtype": kind}),
        st.lists(sizes, max_size=4).map(lambda shape: {"shape": shape}),
        st.lists(sizes, max_size=3).map(lambda offsets: {"data_offsets": offsets}),
        values.map(lambda value: {"shape": value}),
    )
    names = st.sampled_from(sorted(header))
    digits = st.sampled_from(["9" * 30, "9" * 6000, "-1", "٣", "0x1", "007", ""])
    renamed = st.tuples(names, digits).map(
        lambda pair: {f"model.layers.{pair[1]}.norm" if k == pair[0] else k: v for k, v in header.items()}
    )
    return renamed | st.tuples(names, change).map(lambda pair: {**header, pair[0]: {**header[pair[0]], **pair[1]}})


@quick
@given(data=st.data())
def test_a_changed_header_is_read_or_refused(folder: Path, data: st.DataObject) -> None:
    file = folder / "model.safetensors"
    header, body = split(file)
    text = json.dumps(data.draw(entries(header) | changed(header)))
    with_content(file, joined(text, body), lambda: load(folder))


@quick
@given(data=st.data())
def test_changed_bytes_are_read_or_refused(folder: Path, data: st.DataObject) -> None:
    file = folder / "model.safetensors"
    raw = bytearray(file.read_bytes())
    for _ in range(data.draw(st.integers(0, 3))):
        raw[data.draw(st.integers(0, 400))] = data.draw(st.integers(0, 255))
    with_content(file, bytes(raw[: data.draw(st.integers(0, 600) | st.just(len(raw)))]), lambda: load(folder))


def test_a_repeated_name_is_refused(folder: Path) -> None:
    """The second entry claims the bytes of another tensor, the first one's are left over."""
    file = folder / "model.safetensors"
    header, body = split(file)
    name, other = "model.layers.0.mlp.up_proj.weight", "model.layers.0.mlp.gate_proj.weight"
    text = json.dumps(header)[:-1] + f", {json.dumps(name)}: {json.dumps(header[other])}" + "}"
    assert with_content(file, joined(text, body), lambda: load(folder)) is None


@quick
@given(data=st.data())
def test_an_index_is_read_or_refused(folder: Path, data: st.DataObject) -> None:
    whole = folder / "model.safetensors"
    weight_map = dict.fromkeys(split(whole)[0].keys() - {"__metadata__"}, "model-1.safetensors")
    right = {"metadata": {}, "weight_map": weight_map}
    lacking = {"weight_map": {**weight_map, "b": "model-2.safetensors"}}
    index = data.draw(values | changed(right) | changed_deep(lacking))
    whole.rename(folder / "model-1.safetensors")
    try:
        assert with_content(folder / "model.safetensors.index.json", json.dumps(right), lambda: load(folder))
        with_content(folder / "model.safetensors.index.json", json.dumps(index), lambda: load(folder))
    finally:
        (folder / "model-1.safetensors").rename(whole)


@pytest.mark.parametrize(
    "name", ["", ".", "..", "a" * 300, "é" * 200, "a\0b", "\ud800", "a/b", "..\\b", None, 3, ["a"]]
)
def test_odd_shard_names_are_refused(folder: Path, name: Any) -> None:
    whole = folder / "model.safetensors"
    whole.rename(folder / "elsewhere")
    try:
        index = json.dumps({"weight_map": {"a": name}})
        assert with_content(folder / "model.safetensors.index.json", index, lambda: load(folder)) is None
    finally:
        (folder / "elsewhere").rename(whole)
