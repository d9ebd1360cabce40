"""The kernels decode matrices of trained models as the `gguf` package does, and multiply by them with small errors."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
import torch
from gguf import GGUFReader

from speculant.kernels import BLOCK_TYPES, usable_sets
from tests.contracts.test_native_blocks import pack
from tests.gguf_blocks import decode
from tests.native import bits, error, look_up, on, random, run
from tests.real.conftest import file_of

pytestmark = pytest.mark.skipif(not usable_sets(), reason="the native kernels are not built")


@pytest.fixture(scope="module", params=["smollm2", "gemma3"])
def matrices(request: pytest.FixtureRequest) -> list[tuple[str, np.ndarray]]:
    """Return the type and the first 500 rows of a matrix of each kind in a file, the tables of tokens among them."""
    path: Path = file_of(request.param)
    found = {(tensor.tensor_type.name, *tensor.shape): tensor for tensor in GGUFReader(path).tensors}
    blocks = [(key[0], np.array(tensor.data[:500])) for key, tensor in found.items() if key[0].lower() in BLOCK_TYPES]
    assert len(blocks) > 3
    return blocks


@pytest.mark.parametrize("isa", usable_sets())
def test_matrices_are_the_files(matrices: list[tuple[str, np.ndarray]], isa: str) -> None:
    for kind, blocks in matrices:
        packed, expected = pack(on(isa), kind, blocks), torch.from_numpy(decode(kind, blocks))
        assert torch.equal(bits(look_up(on(isa), packed)), bits(expected)), kind
        x = random(7, packed.k)
        assert 0.002 < error(run(on(isa), packed, x), x.double() @ expected.double().T) < 0.008, kind
