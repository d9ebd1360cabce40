"""The page on adding a drafter is true: its code, dropped in from another package, drafts and changes no text."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from speculant import LLM, SamplingParams, plugins
from speculant.drafting.base import DrafterNeeds, Method
from speculant.errors import ConfigError
from tests.models import Checkpoints

PAGE = (Path(__file__).parents[3] / "docs" / "adding-a-drafter.md").read_text(encoding="utf-8")
GREEDY = SamplingParams(temperature=0, max_tokens=48, ignore_eos=True)
PROMPTS = ["def read(path):", "import os", "hello world " * 4]


@pytest.fixture
def installed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> str:
    """Install the page's code as the page says other packages do it; return the method's name."""
    (code,) = re.findall(r"```python\n(.*?)```", PAGE, flags=re.DOTALL)
    (entry,) = re.findall(r'    (\[project\.entry-points\."speculant\.drafting"\])\n    (.*)\n', PAGE)
    name, module = re.fullmatch(r'(\w+) = "([\w.]+)"', entry[1]).groups()
    package = tmp_path / Path(*module.split(".")[:-1])
    package.mkdir(parents=True)
    (package / "__init__.py").write_text("", encoding="utf-8")
    (package / f"{name}.py").write_text(code, encoding="utf-8")
    info = tmp_path / "their_drafter-1.0.dist-info"
    info.mkdir()
    (info / "METADATA").write_text("Metadata-Version: 2.1\nName: their-drafter\nVersion: 1.0\n", encoding="utf-8")
    (info / "entry_points.txt").write_text(f"[speculant.drafting]\n{name} = {module}\n", encoding="utf-8")
    monkeypatch.syspath_prepend(str(tmp_path))
    return name


def test_it_is_found_and_leaves_greedy_text_as_it_was(installed: str, checkpoints: Checkpoints) -> None:
    assert installed in plugins.names("speculant.drafting")
    plain = LLM(checkpoints.target, dtype="float64").generate(PROMPTS, GREEDY)
    settings = {"method": installed, "window": 128, "draft_length": "fixed"}  # whatever it costs here
    llm = LLM(checkpoints.target, dtype="float64", speculative_config=settings)
    results = llm.generate(PROMPTS, GREEDY)
    assert [each.outputs[0].text for each in results] == [each.outputs[0].text for each in plain]
    assert [each.outputs[0].token_ids for each in results] == [each.outputs[0].token_ids for each in plain]
    assert sum(each.metrics.speculative_decoding.num_accepted_draft_tokens for each in results) > 0
    assert llm.speculation.startswith(f"{installed}, 3 tokens a step")


def test_its_options_are_checked(installed: str, checkpoints: Checkpoints) -> None:
    with pytest.raises(ConfigError, match="did you mean 'window'"):
        LLM(checkpoints.target, speculative_config={"method": installed, "windw": 128})


def test_it_is_gone_when_it_is_uninstalled(checkpoints: Checkpoints) -> None:
    with pytest.raises(ConfigError, match="no drafting plugin called 'echo'"):
        LLM(checkpoints.target, speculative_config={"method": "echo"})


def test_the_page_names_what_exists() -> None:
    for name in re.findall(r"`(\w+)` in `drafting/base.py`|`needs` on the drafter itself \(`(\w+)`\)", PAGE):
        assert "".join(name) in {Method.__name__, DrafterNeeds.__name__}
    for path in re.findall(r"`((?:tests|src)/[\w/]+\.py)`", PAGE):
        assert (Path(__file__).parents[3] / path).exists(), path
