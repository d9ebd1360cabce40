"""The page on adding a head is true: its code, saved here or in another package, drafts and changes no text."""

from __future__ import annotations

import re
import textwrap
from pathlib import Path
from typing import Any

import pytest
import torch

from speculant import LLM, SamplingParams
from speculant.drafting import heads
from speculant.errors import PairError
from tests.architecture.drafters import drafter_names, leaks
from tests.architecture.source import Module, load_package
from tests.heads import Random, write_head
from tests.models import HIDDEN_SIZE, VOCAB_SIZE, Checkpoints

ROOT = Path(__file__).parents[3]
PAGE = (ROOT / "docs" / "adding-a-head.md").read_text(encoding="utf-8")
(CODE,) = re.findall(r"```python\n(.*?)```", PAGE, flags=re.DOTALL)
(WRITER, *_) = re.findall(r"((?:^    .*\n)+)", PAGE[PAGE.index("\n    def write_") :], flags=re.MULTILINE)
NAME = "linear_heads"


@pytest.fixture(params=[pytest.param("in the room", marks=pytest.mark.slow), "another package"])
def installed(request: pytest.FixtureRequest, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Save the page's code in the room of heads, or install it as another package does."""
    if request.param == "in the room":
        assert "Saved as `linear_heads.py` in `src/speculant/drafting/heads/`" in PAGE
        (tmp_path / f"{NAME}.py").write_text(CODE, encoding="utf-8")
        monkeypatch.setattr(heads, "__path__", [*heads.__path__, str(tmp_path)])
        return
    (tmp_path / "their_head.py").write_text(CODE, encoding="utf-8")
    info = tmp_path / "their_head-1.0.dist-info"
    info.mkdir()
    (info / "METADATA").write_text("Metadata-Version: 2.1\nName: their-head\nVersion: 1.0\n", encoding="utf-8")
    (info / "entry_points.txt").write_text(f"[speculant.drafting]\n{NAME} = their_head\n", encoding="utf-8")
    monkeypatch.syspath_prepend(str(tmp_path))


def write(folder: Path, size: int) -> str:
    return write_head(folder, {"speculant_head": NAME}, {f"{i}.weight": torch.eye(size) for i in range(2)})


def test_its_drafts_change_no_text(installed: None, checkpoints: Checkpoints, tmp_path: Path) -> None:
    params = SamplingParams(temperature=0, max_tokens=48, ignore_eos=True)
    prompts = ["def read(path):", "import os", "hello world " * 4]
    plain = LLM(checkpoints.target, dtype="float64").generate(prompts, params)
    config = {"method": NAME, "model": write(tmp_path / "head", HIDDEN_SIZE), "num_speculative_tokens": 2}
    results = LLM(checkpoints.target, dtype="float64", speculative_config=config).generate(prompts, params)
    assert [each.outputs[0].token_ids for each in results] == [each.outputs[0].token_ids for each in plain]
    assert sum(each.metrics.speculative_decoding.num_draft_tokens for each in results) > 0


def test_the_page_s_random_head_fits(installed: None, checkpoints: Checkpoints, tmp_path: Path) -> None:
    names: dict[str, Any] = {"Path": Path, "Random": Random, "write_head": write_head}
    exec(textwrap.dedent(WRITER), names)
    head = names[f"write_{NAME}"](tmp_path / "head", HIDDEN_SIZE, VOCAB_SIZE)
    assert LLM(checkpoints.target, speculative_config={"method": NAME, "model": head}).speculation.startswith(NAME)


@pytest.mark.slow
def test_saved_in_the_room_it_passes_the_check_of_names() -> None:
    modules = [each for each in load_package() if not each.name.endswith(f".{NAME}")]
    modules.append(Module(f"drafting.heads.{NAME}", CODE))
    names = drafter_names(modules)
    assert NAME in names
    assert [leak for module in modules for leak in leaks(module, names)] == []


def test_a_head_of_another_target_is_refused(installed: None, checkpoints: Checkpoints, tmp_path: Path) -> None:
    config = {"method": NAME, "model": write(tmp_path / "head", 2 * HIDDEN_SIZE)}
    with pytest.raises(PairError, match=r"0.weight is \[64, 64\] and must be \[32, 32\]"):
        LLM(checkpoints.target, speculative_config=config)


def test_the_page_names_what_exists() -> None:
    for path in re.findall(r"`((?:tests|lab|drafting|models)/[\w/]+(?:\.py|/))`", PAGE):
        assert (ROOT / path).exists() or (ROOT / "src" / "speculant" / path).exists(), path
