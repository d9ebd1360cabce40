"""Imports go one way."""

from __future__ import annotations

import subprocess
import sys

import pytest

from tests.architecture.layers import ALLOWED, layer_violations, native_violations
from tests.architecture.source import Module, load_package


def test_modules_import_only_what_their_layer_may() -> None:
    assert [violation for module in load_package() for violation in layer_violations(module)] == []


def test_native_parts_stay_behind_a_backend() -> None:
    assert [violation for module in load_package() for violation in native_violations(module)] == []


@pytest.mark.parametrize(
    ("name", "line", "found"),
    [
        ("drafting.model.runner", "from speculant.models.native.decoder import NativeDecoder", 1),
        ("engine.step", "from speculant.kernels.native import Kernels", 1),
        ("sampling.choice", "from ..kernels import native", 1),
        ("models.weights.load", "from speculant.models.backends import native", 1),
        ("models.backends.native", "from speculant.models.native.decoder import NativeDecoder", 0),
        ("engine.step", "from speculant.kernels.base import Sampler", 0),
    ],
)
def test_native_import_is_found(name: str, line: str, found: int) -> None:
    assert len(native_violations(Module(name, line + "\n"))) == found


@pytest.mark.parametrize(
    ("name", "line"),
    [
        ("kernels.reference", "import speculant.models"),
        ("models.families.llama", "from speculant.engine.llm import LLM"),
        ("models.families.llama", "from speculant import drafting"),
        ("drafting.tree", "from speculant.verification.base import Verifier"),
        ("verification.base", "from speculant.scheduling import policy"),
        ("verification.base", "from ..drafting.base import Drafter"),
        ("scheduling.scheduler", "from speculant.cache.storage import TensorStorage"),
        ("scheduling.scheduler", "from speculant.cache import storage"),
        ("scheduling.scheduler", "from speculant.models.base import Batch"),
        ("cache.base", "from speculant.plugins import load"),
        ("sampling.choice", "from speculant.cache.base import KVCache"),
        ("engine.step", "from speculant.lab.training import lm"),
        ("engine.step", "from speculant.lab.theory.speedup import best_length"),
        ("text", "from speculant.models.base import CausalLM"),
        ("text.tokenizer", "import speculant.kernels"),
        ("types", "from .config import EngineConfig"),
        ("errors", "from speculant.types import Request"),
        ("lab.theory.speedup", "import torch"),
        ("lab.theory.speedup", "from speculant.models import base"),
        ("lab.training.lm", "from speculant.lab.bench import workloads"),
        ("serving.app", "from speculant.cli import main"),
        ("cli.doctor", "from speculant.lab.bench import runs"),
        ("lab.bench.runs", "from speculant.lab.exactness.laws import Pair"),
        ("engine.step", "from speculant.lab.exactness import enumeration"),
        ("lab.exactness.proofs", "from speculant.lab.bench import workloads"),
        ("engine.step", "def f():\n    from speculant.cli import main"),
        ("engine.step", "import speculant"),
        ("surprise.module", "import math"),
    ],
)
def test_forbidden_import_is_found(name: str, line: str) -> None:
    assert len(layer_violations(Module(name, line + "\n"))) == 1


@pytest.mark.parametrize(
    ("name", "line"),
    [
        ("scheduling.scheduler", "from speculant.cache.base import KVCache"),
        ("scheduling.scheduler", "from speculant.scheduling.scheduler import Policy"),
        ("drafting.base", "from speculant.text.vocabulary import compare"),
        ("drafting.base", "from . import tree\nfrom .tree import Tree\nfrom ..models import base"),
        ("lab.theory.speedup", "import numpy as np\nimport math\nfrom speculant.metrics import Counters"),
        ("lab.cli.train", "from speculant.lab.training import lm\nfrom speculant import __version__"),
        ("", "from speculant.engine.llm import LLM"),
    ],
)
def test_allowed_import_passes(name: str, line: str) -> None:
    assert layer_violations(Module(name, line + "\n")) == []


def test_a_package_resolves_relative_imports_from_itself() -> None:
    module = Module("drafting", "from .base import Drafter\nfrom ..verification import base\n", is_package=True)
    assert layer_violations(module) == ["drafting:2: drafting may not import speculant.verification.base"]


def test_the_three_policies_are_strangers() -> None:
    for name in ("drafting", "verification", "scheduling"):
        assert not ALLOWED[name] & ({"drafting", "verification", "scheduling"} - {name})


def test_nothing_in_the_library_imports_the_laboratory() -> None:
    users = {name for name, allowed in ALLOWED.items() if any(part.split(".")[0] == "lab" for part in allowed)}
    assert {name for name in users if not name.startswith("lab")} == set()


def _heavy_modules_after(statement: str) -> str:
    code = f"import sys\n{statement}\nprint(*sorted({{'torch', 'numpy', 'transformers'}} & set(sys.modules)))"
    result = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    return result.stdout.strip()


MOST_FILES = {  # of the package, after each import in turn
    "import speculant.cli.main": 5,
    "from speculant import LLM": 109,
    "from speculant.serving import make_app": 136,
}
A_SERVER = """
import speculant.cli.serve, speculant.ray
from speculant.serving.options import ServerOptions
make_app(lambda: None, ServerOptions(access_log="json"))
print(*(name for name in sys.modules if name == "ray" or name.startswith("opentelemetry.sdk")))
"""


def test_an_import_loads_few_files() -> None:
    """A count stands for the seconds, which depend on the machine. A plain server loads no package of an extra."""
    count = "print(sum(name.startswith('speculant.') for name in sys.modules))"
    code = "\n".join(["import sys", *(f"{each}\n{count}" for each in MOST_FILES), A_SERVER])
    result = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    *counts, of_extras = result.stdout.splitlines()
    for most, found in zip(MOST_FILES.values(), map(int, counts), strict=True):
        assert found <= most, counts
    assert of_extras == ""


@pytest.mark.parametrize("statement", ["import speculant", "import speculant.cli.main"])
def test_import_is_cheap(statement: str) -> None:
    assert _heavy_modules_after(statement) == ""


@pytest.mark.parametrize("module", ["base", "paged"])
def test_cache_bookkeeping_imports_no_torch(module: str) -> None:
    """Tables may live in another process than tensors."""
    assert _heavy_modules_after(f"import speculant.cache.{module}") == ""


def test_a_costly_import_is_seen() -> None:
    assert _heavy_modules_after("import numpy") == "numpy"
