"""Loading holds no second copy: in a process of its own, memory peaks at the loaded model and one tensor."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from safetensors.torch import save_file

from speculant.kernels import usable_sets
from speculant.models import tensor_shapes
from speculant.models.families.llama import read_config
from tests.gguf_models import convert

pytestmark = pytest.mark.slow  # each loads 100 MB and more in a new process
native = pytest.mark.skipif(not usable_sets(), reason="the native kernels are not built")
CONFIG = {
    "model_type": "llama", "vocab_size": 1024, "hidden_size": 1024, "intermediate_size": 16384, "num_hidden_layers": 1,
    "num_attention_heads": 16, "num_key_value_heads": 16, "max_position_embeddings": 128, "torch_dtype": "bfloat16",
}  # fmt: skip
SLACK = 40 * 2**20  # what the allocator keeps of chunks that were converted, and torch and the interpreter besides

PROBE = """
import sys
from pathlib import Path
from speculant.models.weights.load import load_model

def memory(field):
    lines = Path("/proc/self/status").read_text().splitlines()
    return next(1024 * int(line.split()[1]) for line in lines if line.startswith(field))

load_model(sys.argv[1], kernels=sys.argv[3])
Path("/proc/self/clear_refs").write_text("5")  # the peak begins anew
before, owned = memory("VmRSS"), memory("RssAnon")
model = load_model(sys.argv[2], sys.argv[4], kernels=sys.argv[3]).model
print(memory("VmHWM") - before, memory("RssAnon") - owned)
"""


def write_checkpoint(folder: Path, config: dict[str, object]) -> None:
    """Write a checkpoint in bfloat16; the values do not matter."""
    folder.mkdir()
    (folder / "config.json").write_text(json.dumps(config), encoding="utf-8")
    shapes = tensor_shapes(read_config(config))
    save_file(
        {name: torch.ones(shape, dtype=torch.bfloat16) for name, shape in shapes.items()}, folder / "model.safetensors"
    )


@pytest.fixture(scope="module")
def folders(tmp_path_factory: pytest.TempPathFactory) -> list[str]:
    """A small checkpoint and one of 108 MB."""
    made = tmp_path_factory.mktemp("checkpoints")
    write_checkpoint(made / "small", {**CONFIG, "hidden_size": 64, "intermediate_size": 64})
    write_checkpoint(made / "large", CONFIG)
    return [str(made / "small"), str(made / "large")]


@pytest.mark.skipif(not Path("/proc/self/clear_refs").exists(), reason="needs Linux's /proc")
@pytest.mark.parametrize(
    ("kernels", "dtype"), [("reference", "bfloat16"), pytest.param("native", "float32", marks=native)]
)
def test_loading_peaks_at_one_tensor_more(kernels: str, dtype: str, folders: list[str]) -> None:
    command = [sys.executable, "-c", PROBE, *folders, kernels, dtype]
    peak, _ = map(int, subprocess.run(command, capture_output=True, text=True, check=True).stdout.split())
    stored = Path(folders[1], "model.safetensors").stat().st_size
    kept, largest = stored * (1 if dtype == "bfloat16" else 2), 2 * 16384 * 1024  # the file's tensors are in bfloat16
    assert 0.95 * kept < peak < kept + largest + SLACK


@native
@pytest.mark.skipif(not Path("/proc/self/clear_refs").exists(), reason="needs Linux's /proc")
def test_blocks_take_the_memory_of_their_file(folders: list[str], tmp_path: Path) -> None:
    """At most 3% more, and at the peak one matrix more."""
    paths = [convert(folder, tmp_path / f"{index}.gguf", "Q8_0") for index, folder in enumerate(folders)]
    command = [sys.executable, "-c", PROBE, *map(str, paths), "native", "auto"]
    peak, kept = map(int, subprocess.run(command, capture_output=True, text=True, check=True).stdout.split())
    size = paths[1].stat().st_size
    assert 0.95 * size < kept < 1.03 * size + SLACK // 10
    assert peak < 1.03 * size + 16384 * 1024 * 34 // 32 + SLACK // 4
