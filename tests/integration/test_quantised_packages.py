"""Modules that AutoGPTQ and AutoAWQ pack are read as the numbers that these packages multiply by.

They are used where they are installed without their dependencies, in .venv/oracle or elsewhere on the path:

    pip install --no-deps --target .venv/oracle auto-gptq autoawq accelerate

Only the files with the modules are imported: the packages themselves need libraries for graphics cards.
"""

from __future__ import annotations

import importlib
import logging
import sys
from collections.abc import Iterator
from importlib.machinery import PathFinder
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from speculant.models import load_model
from tests.models import Shape, write_checkpoint
from tests.quantised_folders import Gptq, Rounded, Tensors, awq_config, edit_config, quantise
from tests.unit.models.families import Session, random_tokens

PROMPT = random_tokens(24)
OPTIONS = {
    "4 bits": Gptq(),
    "symmetric": Gptq(sym=True, size=64),
    "8 bits": Gptq(bits=8),
    "act-order": Gptq(act_order=True),
    "one group": Gptq(size=-1, sym=True),
}
CLOSE = 2e-3  # of float16 products


@pytest.fixture
def bare(monkeypatch: pytest.MonkeyPatch) -> Iterator[Any]:
    """Return a function that imports a file of a package without the package's own code, or skips the test."""
    known = set(sys.modules)

    def import_file(name: str) -> ModuleType:
        path = [str(Path(sys.prefix) / "oracle"), *sys.path]
        parents = name.split(".")[:-1]
        for count in range(1, len(parents) + 1):
            _bare_package(".".join(parents[:count]), path)
        monkeypatch.syspath_prepend(path[0])
        return importlib.import_module(name)

    yield import_file
    for name in set(sys.modules) - known:
        if name.startswith(("auto_gptq", "awq", "autogptq_cuda", "accelerate")):
            del sys.modules[name]


def _bare_package(name: str, path: list[str]) -> None:
    """Make a package whose modules can be imported; its own code does not run."""
    parent, _, own = name.rpartition(".")
    found = PathFinder.find_spec(own, list(sys.modules[parent].__path__) if parent else path)
    if found is None or not found.submodule_search_locations:
        pytest.skip(f"{name} is not installed")
    package = ModuleType(name)
    package.__path__ = list(found.submodule_search_locations)
    sys.modules[name] = package


def linear_of(made: Rounded) -> nn.Linear:
    """Return a layer with the numbers that integers stand for, which a package rounds to the same integers."""
    numbers = torch.from_numpy(made.decoded())
    linear = nn.Linear(numbers.shape[1], numbers.shape[0], bias=False)
    linear.weight.data = numbers
    return linear


def parts_of(module: nn.Module) -> Tensors:
    """Return the tensors that a package saves of a module."""
    return {name: tensor.half() if name == "scales" else tensor for name, tensor in module.state_dict().items()}


def logits(folder: Path) -> Tensor:
    return Session(load_model(str(folder), "float32").model).extend(PROMPT)


@pytest.mark.parametrize("case", OPTIONS)
def test_modules_of_autogptq_are_read(case: str, bare: Any, tmp_path: Path) -> None:
    logging.getLogger("auto_gptq.nn_modules.qlinear.qlinear_cuda").setLevel(logging.ERROR)
    package, own = bare("auto_gptq.nn_modules.qlinear.qlinear_cuda"), OPTIONS[case]
    modules: list[tuple[nn.Module, Rounded]] = []

    def pack(options: Gptq, made: Rounded) -> Tensors:
        module = package.QuantLinear(options.bits, options.size, made.q.shape[1], made.q.shape[0], bias=False)
        scales, zeros = torch.from_numpy(made.scales), torch.from_numpy(made.zeros.copy())  # it is changed
        module.pack(linear_of(made), scales, zeros, torch.from_numpy(made.groups).int())
        modules.append((module, made))
        return parts_of(module)

    source = Path(write_checkpoint(tmp_path / "plain", Shape(hidden_size=64)))
    quantise(source, tmp_path / "packed", tmp_path / "numbers", own, write=pack)
    assert torch.equal(logits(tmp_path / "packed"), logits(tmp_path / "numbers"))
    for module, made in modules:  # their own product: with the unit matrix, the numbers
        products = module(torch.eye(made.q.shape[1]))
        assert torch.allclose(products.T, torch.from_numpy(made.decoded()), rtol=CLOSE, atol=1e-5)


def test_modules_of_autoawq_are_read(bare: Any, tmp_path: Path) -> None:
    package, modules = bare("awq.modules.linear.gemm"), []

    def pack(options: Gptq, made: Rounded) -> Tensors:
        scales, zeros = torch.from_numpy(made.scales.T.copy()), torch.from_numpy(made.zeros.T.copy())
        module = package.WQLinear_GEMM.from_linear(linear_of(made), 4, options.size, scales=scales, zeros=zeros)
        modules.append((module, made))
        return parts_of(module)

    source = Path(write_checkpoint(tmp_path / "plain", Shape(hidden_size=64)))
    quantise(source, tmp_path / "packed", tmp_path / "numbers", Gptq(size=32), write=pack)
    edit_config(tmp_path / "packed", quantization_config=awq_config(32))
    assert torch.equal(logits(tmp_path / "packed"), logits(tmp_path / "numbers"))
    for module, made in modules:
        products = module(torch.eye(made.q.shape[1]).half()).float()
        assert torch.allclose(products.T, torch.from_numpy(made.decoded()), rtol=CLOSE, atol=1e-5)
