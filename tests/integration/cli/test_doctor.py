"""`speculant doctor` reports facts, and the cost of each missing part."""

from __future__ import annotations

import json
import platform
import tomllib
from importlib.metadata import version
from pathlib import Path

import pytest
from typer.testing import CliRunner

from speculant.cli import doctor
from speculant.cli.main import app
from speculant.errors import ModelError
from speculant.kernels.native import usable_sets


def test_json_has_every_section() -> None:
    result = CliRunner().invoke(app, ["doctor", "--json"], catch_exceptions=False)
    value = json.loads(result.stdout)
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


def test_text_names_every_section_and_finding() -> None:
    result = CliRunner().invoke(app, ["doctor"], catch_exceptions=False)
    for title in ("Speculant", "Processor", "Memory", "Torch", "Cuda", "Kernels", "Packages", "Embedded Models"):
        assert title in result.stdout
    assert "costs: " in result.stdout


def test_doctor_names_the_cost_of_missing_native_kernels(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(doctor, "measure_speeds", lambda: doctor.Speeds(20.0, 8.0, None))
    findings = [finding for finding in doctor.inspect_machine().findings if "native kernels" in finding.what]
    assert [finding.status for finding in findings] == ["missing"]
    assert "8.0 GB/s" in findings[0].cost
    assert "20.0" in findings[0].cost
    assert "compiler" in findings[0].fix


def test_missing_embedded_models_are_found(monkeypatch: pytest.MonkeyPatch) -> None:
    def missing(source: str, role: str) -> None:
        raise ModelError("gone", "reinstall")

    monkeypatch.setattr(doctor, "resolve_source", missing)
    findings = [finding for finding in doctor.inspect_machine().findings if "embedded" in finding.what]
    assert [finding.status for finding in findings] == ["missing"]
    assert "target/model.safetensors" in findings[0].what
    assert "speculant demo" in findings[0].cost


def test_missing_packages_are_found(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(doctor, "REQUIRED_PACKAGES", ("torch", "no-such-package"))
    found = doctor.inspect_machine()
    assert found.packages["no-such-package"] is None
    assert [finding.status for finding in found.findings if "no-such-package" in finding.what] == ["missing"]


def test_the_required_packages_are_those_of_the_project() -> None:
    project = tomllib.loads((Path(__file__).parents[3] / "pyproject.toml").read_text())["project"]
    assert {name.partition(">=")[0] for name in project["dependencies"]} == set(doctor.REQUIRED_PACKAGES)
