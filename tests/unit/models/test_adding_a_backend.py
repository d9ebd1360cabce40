"""The page on adding a backend works as written: its code keeps the contract, and is chosen by its name."""

from __future__ import annotations

import re
from pathlib import Path

import pytest
import torch

from speculant import LLM, SamplingParams, plugins
from speculant.models import KIND, Backend, Mapped, backends, choose_backend, tensor_shapes
from tests.contracts.test_backends import VARIANTS, random_decoder
from tests.descriptions import describe
from tests.models import Checkpoints
from tests.stored_weights import ModuleWeights
from tests.unit.models.families import Session

PAGE = (Path(__file__).parents[3] / "docs" / "adding-a-backend.md").read_text(encoding="utf-8")
CPU = torch.device("cpu")


@pytest.fixture
def backend(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Backend:
    """Save the page's code where the package looks for backends."""
    (code,) = re.findall(r"```python\n(.*?)```", PAGE, flags=re.DOTALL)
    (name,) = re.findall(r"Saved as `(\w+)\.py`", PAGE)
    (tmp_path / f"{name}.py").write_text(code, encoding="utf-8")
    monkeypatch.setattr(backends, "__path__", [*backends.__path__, str(tmp_path)])
    found: Backend = plugins.load(KIND, name).open_backend()
    assert found.name == name
    return found


@pytest.mark.parametrize("variant", VARIANTS)
def test_backend_page_backend_reads_every_tensor(backend: Backend, variant: str) -> None:
    config, tokens = VARIANTS[variant], list(range(2, 60, 4))
    decoder = random_decoder(config)
    weights = Mapped(ModuleWeights(decoder), tensor_shapes(config))
    model = backend.load(config, weights, torch.bfloat16, CPU)
    weights.check(backend.name)
    assert model.cache_shape.dtype == torch.float32
    assert torch.equal(Session(model).extend(tokens), Session(decoder).extend(tokens))


def test_backend_page_backend_is_chosen_by_name_alone(backend: Backend) -> None:
    config = describe(head_dim=2**12)  # too large for the native kernels
    for wanted, name in (("auto", "reference"), (backend.name, backend.name)):
        assert choose_backend(wanted, None, config, torch.float32, CPU)[0].name == name


def test_backend_page_backend_runs_the_engine(backend: Backend, checkpoints: Checkpoints) -> None:
    params = SamplingParams(temperature=0, max_tokens=16)
    texts = []
    for kernels, dtype in ((backend.name, "bfloat16"), ("reference", "float32")):
        llm = LLM(checkpoints.target, checkpoints.near, kernels=kernels, dtype=dtype)
        assert llm.kernels.startswith(kernels)
        texts.append(llm.generate("import os", params)[0].outputs[0].token_ids)
    assert texts[0] == texts[1]


def test_backend_page_names_what_exists() -> None:
    fields = re.findall(r"^\| `(\w+)` \|", PAGE, flags=re.MULTILINE)
    assert fields
    assert set(fields) <= set(Backend.__annotations__)
    for path in re.findall(r"`((?:tests|src)/[\w/]+\.py)`", PAGE):
        assert (Path(__file__).parents[3] / path).exists(), path
