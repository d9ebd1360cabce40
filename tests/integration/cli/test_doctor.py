"""`speculant doctor` reports facts, and the cost of each missing part."""

from __future__ import annotations

import json
import platform
import tomllib
from functools import partial
from importlib.metadata import version
from pathlib import Path
from types import SimpleNamespace

import pytest

from speculant.cli import doctor
from speculant.errors import ModelError
from speculant.kernels import BuiltSet, usable_sets
from speculant.models import GOOD, NativeDecoder, load_model
from tests.backends import FakeBackend
from tests.commands import error_of, invoke, json_of
from tests.gguf_models import convert
from tests.models import Shape, write_checkpoint


def test_json_has_every_section() -> None:
    value = json_of("doctor")
    assert value["speculant"]["python"] == platform.python_version()
    assert value["torch"]["version"]
    assert value["torch"]["threads"] >= 1
    assert value["packages"]["tokenizers"] == version("tokenizers")
    assert value["memory"]["total_gib"] > 0.1
    assert 0.1 < value["memory"]["read_bandwidth_gb_per_s"] < 10_000
    assert value["kernels"]["in_use"].startswith("native" if usable_sets() else "reference")
    assert 0.1 < value["kernels"]["torch_linear_gb_per_s"] < 10_000
    assert ("native_linear_gb_per_s" in value["kernels"]) == bool(usable_sets())
    assert value["processor"]["cores"] >= 1
    assert value["findings"]


def test_text_names_every_section_and_finding(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(doctor, "measure_speeds", lambda: doctor.Speeds(20.0, 8.0, None))  # slow: a cost, and a fix
    result = invoke("doctor")
    for title in ("Speculant", "Processor", "Memory", "Torch", "Cuda", "Kernels", "Packages", "Embedded Models"):
        assert title in result.stdout
    assert "costs: " in result.stdout
    assert "fix: " in result.stdout


def test_doctor_names_the_cost_of_missing_native_kernels(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(doctor, "measure_speeds", lambda: doctor.Speeds(20.0, 8.0, None))
    findings = [finding for finding in doctor.inspect_machine().findings if "native kernels" in finding.what]
    assert [finding.status for finding in findings] == ["missing"]
    assert "8.0 GB/s" in findings[0].cost
    assert "20.0" in findings[0].cost
    assert "compiler" in findings[0].fix


FLAGS = ("avx2", "f16c", "fma", "avx_vnni", "amx_int8", "amx_bf16")


@pytest.mark.parametrize(("built", "chosen", "flags", "said"), [
    ({"avxvnni": (True, False), "avx2": (True, True)}, None, FLAGS[:4], ["avxvnni is usable", "SPECULANT_ISA=avxvnni"]),
    ({"avxvnni": (True, False), "avx2": (True, True)}, "avxvnni", FLAGS[:4], []),
    ({"avx2": (True, True), "portable": (True, True)}, "portable", FLAGS[:3], []),
    ({"avx2": (True, True)}, None, FLAGS[:4], ["built without it", "newer compiler"]),
    ({"amx": (False, False), "avx2": (True, True)}, None, FLAGS[4:], ["does not let this process", "container"]),
    ({"amx": (False, False), "avx2": (True, True)}, None, FLAGS[:3], []),
])  # fmt: skip
def test_doctor_names_what_a_better_set_needs(
    monkeypatch: pytest.MonkeyPatch, built: dict[str, tuple[bool, bool]], chosen: str | None, flags: tuple[str, ...],
    said: list[str],
) -> None:  # fmt: skip
    sets = [BuiltSet(name, place, *facts) for place, (name, facts) in enumerate(built.items())]
    used = chosen or next(each.name for each in sets if each.usable and each.by_default)
    monkeypatch.setattr("speculant.kernels.built_sets", lambda: sets)
    monkeypatch.setattr("speculant.kernels.open_kernels", lambda: SimpleNamespace(isa=used))
    findings = [*doctor.set_findings(flags)]
    assert len(findings) == bool(said)
    for finding in findings:
        assert all(words in finding.what + finding.fix for words in said)
        assert used in finding.cost


def test_missing_embedded_models_are_found(monkeypatch: pytest.MonkeyPatch) -> None:
    def missing(source: str, role: str) -> None:
        raise ModelError("gone", "reinstall")

    monkeypatch.setattr("speculant.models.resolve_source", missing)
    monkeypatch.setattr(doctor, "measure_speeds", lambda: doctor.Speeds(20.0, 8.0, None))
    findings = [finding for finding in doctor.inspect_machine().findings if "embedded" in finding.what]
    assert [finding.status for finding in findings] == ["missing"]
    assert "target/model.safetensors" in findings[0].what
    assert "speculant demo" in findings[0].cost


def test_missing_packages_are_found(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(doctor, "REQUIRED_PACKAGES", ("torch", "no-such-package"))
    monkeypatch.setattr(doctor, "measure_speeds", lambda: doctor.Speeds(20.0, 8.0, None))
    found = doctor.inspect_machine()
    assert found.packages["no-such-package"] is None
    assert [finding.status for finding in found.findings if "no-such-package" in finding.what] == ["missing"]


def test_the_required_packages_are_those_of_the_project() -> None:
    project = tomllib.loads((Path(__file__).parents[3] / "pyproject.toml").read_text())["project"]
    assert {name.partition(">=")[0] for name in project["dependencies"]} == set(doctor.REQUIRED_PACKAGES)


# --- a model

KINDS = {"attn_v": "Q6_K", "ffn_down": "Q6_K", "attn_output": "TQ2_0", "token_embd": "F16"}  # else Q4_K


@pytest.fixture(scope="module")
def source(tmp_path_factory: pytest.TempPathFactory) -> str:
    return write_checkpoint(tmp_path_factory.mktemp("source") / "model", Shape(hidden_size=256))


@pytest.fixture(scope="module")
def file(source: str) -> str:
    path = Path(source).parent / "model.gguf"
    return str(convert(source, path, lambda name: KINDS.get(name.split(".")[-2], "Q4_K")))


report = partial(json_of, "doctor")


@pytest.mark.skipif(not usable_sets(), reason="the native kernels are not built")
def test_doctor_counts_the_types_of_a_files_matrices(file: str) -> None:
    found = report(file)
    assert found["model"]["architecture"] == "llama"
    assert (found["model"]["layers"], found["model"]["context"], found["model"]["tokenizer"]) == (2, 256, "gpt2, gpt-2")
    counts = {kind: (own["matrices"], own["kept_as"]) for kind, own in found["matrices"].items()}
    assert counts == {
        "q4_k": (9, ["q4_k"]), "q6_k": (4, ["q6_k"]), "tq2_0": (2, ["bf16"]), "f16": (1, ["f16"]),
    }  # fmt: skip
    assert found["model"]["files_mib"] == pytest.approx(Path(file).stat().st_size / 2**20)
    size = sum(own["in_files_mib"] for own in found["matrices"].values())
    assert 0.95 * found["model"]["files_mib"] < size < found["model"]["files_mib"]
    assert found["kernels"]["in_use"].endswith("q4_k 9 matrices, q6_k 4, tq2_0 2, f16 1, tq2_0 decoded)")
    assert found["kernels"]["read_in_each_pass_mib"] == pytest.approx(
        found["kernels"]["weights_mib"] - found["matrices"]["f16"]["in_memory_mib"]
    )


@pytest.mark.skipif(not usable_sets(), reason="the native kernels are not built")
def test_doctor_reports_the_memory_that_a_model_takes(file: str, source: str) -> None:
    """Except for the padding of small matrices, of which the kernels join some."""
    for model in (file, source):
        loaded = load_model(model, kernels="native").model
        assert isinstance(loaded, NativeDecoder)
        found = report(model)["kernels"]
        assert found["read_in_each_pass_mib"] == pytest.approx(loaded.bytes_per_pass / 2**20, rel=0.02)
        assert found["weights_mib"] == pytest.approx(loaded.weight_bytes / 2**20, rel=0.02)
        assert found["each_position_kib"] == loaded.cache_shape.bytes_per_token / 2**10
        assert found["whole_context_mib"] == 256 * found["each_position_kib"] / 2**10


def test_doctor_counts_what_layers_with_a_window_keep(tmp_path: Path) -> None:
    """Three of four layers keep 16 of 512 positions."""
    model = write_checkpoint(tmp_path / "model", Shape(family="qwen2", layers=4, max_positions=512))
    path = tmp_path / "model/config.json"
    config = json.loads(path.read_text(encoding="utf-8"))
    config |= {"use_sliding_window": True, "max_window_layers": 1, "sliding_window": 16}
    path.write_text(json.dumps(config), encoding="utf-8")
    found = report(model)["kernels"]
    assert found["whole_context_mib"] == found["each_position_kib"] / 4 * (512 + 3 * 16) / 2**10


@pytest.mark.skipif(not usable_sets(), reason="the native kernels are not built")
def test_doctor_names_what_is_slow(
    file: str, source: str, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    (note,) = [each for each in report(file)["findings"] if each["status"] == "note"]
    assert "its tokenizer can be read" in [each["what"] for each in report(file)["findings"]]
    assert note["what"] == "tq2_0 2 matrices are decoded to bf16"
    assert not caplog.records  # the report says it
    assert note["cost"] == "0.3 MiB in memory instead of 0.0, which each pass reads"
    assert not [each for each in report(source)["findings"] if each["status"] == "note"]
    monkeypatch.setattr(doctor, "LEAST_WIDE", 0)
    (note,) = [each for each in report(source)["findings"] if each["status"] == "note"]
    assert "16 matrices are kept in float32" in note["what"]
    assert "--dtype bfloat16" in note["fix"]


@pytest.mark.skipif(not usable_sets(), reason="the native kernels are not built")
def test_doctor_does_not_advise_to_round_matrices_beside_blocks(
    source: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Neither --dtype nor --quantization rounds the matrices of such a file."""
    monkeypatch.setattr(doctor, "LEAST_WIDE", 0)
    path = convert(source, tmp_path / "mixed.gguf", lambda name: "Q4_K" if "ffn" in name else "F32")
    (note,) = [each for each in report(str(path))["findings"] if each["status"] == "note"]
    assert "10 matrices are kept in float32" in note["what"]
    assert note["fix"] == f"use a file of the model in {GOOD}"


def test_doctor_reports_what_torch_computes(file: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("speculant.models.backends.native.open_kernels", lambda: None)
    found = report(file)
    assert {(kind, *own["kept_as"]) for kind, own in found["matrices"].items()} == {
        ("q4_k", "bf16"), ("q6_k", "bf16"), ("tq2_0", "bf16"), ("f16", "bf16")
    }  # fmt: skip
    (missing,) = [each for each in found["findings"] if "native" in each["what"]]
    assert (missing["status"], "they were not built" in missing["what"]) == ("missing", True)


def test_doctor_names_the_kernels_that_compute_a_model(source: str, monkeypatch: pytest.MonkeyPatch) -> None:
    backend = FakeBackend(row_invariant=True)
    monkeypatch.setattr("speculant.models.choose_backend", lambda *given, **more: (backend, "fake"))
    (found,) = [each for each in report(source)["findings"] if "kernels" in each["what"]]
    assert found["what"].startswith("the fake kernels compute it: the same bits")


def test_doctor_prints_a_model_and_its_findings(source: str, tmp_path: Path) -> None:
    result = invoke("doctor", source)
    for text in ("Model", "Matrices", "Kernels", "Findings", "f32  matrices 16", "ok: its tokenizer can be read"):
        assert text in result.stdout
    (Path(source) / "tokenizer.json").rename(tmp_path / "tokenizer.json")
    result = invoke("doctor", source)
    (tmp_path / "tokenizer.json").rename(Path(source) / "tokenizer.json")
    assert "missing: " in result.stdout
    assert "has no tokenizer.json" in result.stdout


def test_doctor_refuses_what_is_no_model(tmp_path: Path) -> None:
    error = error_of("doctor", tmp_path)
    assert isinstance(error, ModelError)
    assert "has no config.json" in str(error)
