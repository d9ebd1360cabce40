"""Heads in int8 and int4: texts stay those without a draft, and drafts hardly change."""

from __future__ import annotations

import functools
import json
import tempfile
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file

from speculant import LLM, SamplingParams, plugins
from speculant.drafting import Drafter, Method
from speculant.engine import DraftSample, Precision, drawn, hosting, precision
from speculant.errors import ConfigError, ModelError
from speculant.models import load_model
from speculant.types import DraftTree
from tests.exactness.test_native_decoder import make_native, tokens_of
from tests.heads import WRITERS, Shown, head_context
from tests.models import Checkpoints, make_request
from tests.native import SETS

KIND = "speculant.drafting"
TYPES = ("int8", "int4")
FACTS: dict[str, Method] = {name: plugins.load(KIND, name).METHOD for name in plugins.names(KIND)}
METHODS = [name for name, facts in FACTS.items() if facts.uses_head]
PARAMS = [SamplingParams(temperature=0, max_tokens=20), SamplingParams(seed=5, max_tokens=20, temperature=1.2)]
PROMPTS = ["def f", "import"]

native = pytest.mark.skipif(not SETS, reason="the native kernels are not built")


@functools.cache
def head_of(method: str, hidden: int, vocab_size: int) -> str:
    folder = Path(tempfile.mkdtemp(prefix="heads-"))
    options: dict[str, Any] = {"draft_vocab": vocab_size // 2} if method == "eagle3" else {}
    return WRITERS[method](folder, hidden, vocab_size, **options)


def sizes_of(target: str) -> tuple[int, int]:
    config = json.loads((Path(target) / "config.json").read_text())
    return config["hidden_size"], config["vocab_size"]


def engine(checkpoints: Checkpoints, method: str, **arguments: Any) -> LLM:
    head = head_of(method, *sizes_of(checkpoints.target))
    spec = {"method": method, "model": head, "draft_length": "fixed", "num_speculative_tokens": 3}
    return LLM(checkpoints.target, speculative_config=spec, **{"dtype": "bfloat16", "max_num_seqs": 2, **arguments})


def texts_of(llm: LLM) -> list[list[int]]:
    return [out.outputs[0].token_ids for out in llm.generate(PROMPTS, PARAMS)]


def test_every_head_is_here() -> None:
    assert set(WRITERS) - {"pass"} <= set(METHODS), "look-ahead embeddings are no matrix"


@native
@pytest.mark.covering(1)
@pytest.mark.parametrize("target_type", [None, "int8"])
@pytest.mark.parametrize("dtype", ["bfloat16", "float32"])
@pytest.mark.parametrize("quantization", TYPES)
@pytest.mark.parametrize("method", METHODS)
def test_rounding_a_head_changes_no_text(
    checkpoints: Checkpoints, method: str, quantization: str, dtype: str, target_type: str | None
) -> None:
    common: dict[str, Any] = {"dtype": dtype, "quantization": target_type, "max_num_seqs": 2}
    plain = LLM(checkpoints.target, use_speculative_decoding=False, **common)
    llm = engine(checkpoints, method, draft_quantization=quantization, **common)
    assert texts_of(llm) == texts_of(plain)
    assert llm.engine.metrics.drafter_errors == 0
    outs = llm.generate(PROMPTS, PARAMS)
    assert all(out.metrics.speculative_decoding.num_draft_tokens > 0 for out in outs)


@torch.inference_mode()
def draft_of(method: str, quantization: str | None) -> DraftTree:
    target = make_native()
    host = target if quantization is None else target.rounding_heads(quantization)
    options = {"tree": "chain"} if method == "medusa" else {}
    drafter: Drafter = plugins.load(KIND, method).build(head_context(head_of(method, 32, 96), host, options))
    shown, request = Shown(drafter, target), make_request(tokens_of(3)[:20], shared_noise=False)
    shown.begin(request)
    (tree,) = shown.propose([request], [1])
    return tree


@native
@pytest.mark.parametrize("method", METHODS)
def test_rounding_a_head_changes_its_drafts_a_little(method: str) -> None:
    whole, *others = (draft_of(method, quantization) for quantization in (None, *TYPES))
    assert whole.probs is not None
    overlaps = list[float]()
    for tree in others:
        assert tree.probs is not None
        assert not torch.equal(tree.probs, whole.probs), "the weights were not rounded"
        overlaps.append(float(torch.minimum(tree.probs, whole.probs).sum()))
    of_int8, of_int4 = overlaps
    assert of_int8 > 0.97
    assert of_int8 > of_int4 > 0.7


@native
def test_target_stays_as_it_is() -> None:
    target = make_native()
    hidden = torch.randn(5, 32, generator=torch.Generator().manual_seed(1))
    for quantization in TYPES:
        host = target.rounding_heads(quantization)
        assert torch.equal(host.logits(hidden).clone(), target.logits(hidden).clone())
        assert host.packed is target.packed, "the weights take no memory twice"


@native
@pytest.mark.parametrize(
    ("method", "most"),
    [
        ("eagle", (0.02, 0.06)),
        pytest.param("eagle3", (0.02, 0.06), marks=pytest.mark.slow),
        ("medusa", (0.02, 0.06)),
    ],
)
def test_embedded_heads_lose_little_acceptance(method: str, most: tuple[float, float]) -> None:
    target = load_model("demo", "bfloat16", kernels="native")
    sample = DraftSample.of(target, drawn(target, target.model.vocab_size, 48))
    found = list[Precision]()
    for quantization in (None, *TYPES):
        context = head_context("demo", hosting(target.model, quantization), {})
        found.append(sample.measure(quantization, plugins.load(KIND, method).build(context), []))
    whole, *others = (each.acceptance for each in found)
    assert whole > 0.15
    assert all(whole - own < loss for own, loss in zip(others, most, strict=True)), found


def test_kernels_that_round_no_head_say_so(checkpoints: Checkpoints) -> None:
    with pytest.raises(ConfigError, match="compute no rounded heads"):
        engine(checkpoints, "eagle", dtype="float64", draft_quantization="int8")
    for given in ("auto", "none"):
        assert (
            "draft weights" not in engine(checkpoints, "eagle", dtype="float64", draft_quantization=given).speculation
        )
    spec = {"method": "ngram"}
    LLM(checkpoints.target, dtype="float64", draft_quantization="int8", speculative_config=spec)


@pytest.fixture
def kept(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    return tmp_path / "speculant" / "costs"


@native
@pytest.mark.parametrize("method", ["eagle", pytest.param("medusa", marks=pytest.mark.slow)])
def test_type_of_a_head_is_chosen_and_kept(
    checkpoints: Checkpoints, kept: Path, method: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    first = engine(checkpoints, method)
    chosen = first.speculation.partition("draft weights in ")[2].partition(" ")[0]
    assert chosen in ("bfloat16", *TYPES)
    (file,) = kept.glob("*.precision.json")
    file.write_text('{"draft_quantization": "int3", "spread": 1}')
    assert "draft weights in " in engine(checkpoints, method).speculation, "a damaged choice is made again"
    file.write_text('{"draft_quantization": "int4", "spread": 1}')
    monkeypatch.setattr(precision, "timed", lambda *given: pytest.fail("it was measured again"))
    again = engine(checkpoints, method)
    assert "draft weights in int4 (fastest here)" in again.speculation
    assert texts_of(again) == texts_of(first)


@native
def test_another_head_in_the_folder_is_measured(checkpoints: Checkpoints, kept: Path, tmp_path: Path) -> None:
    """A choice is not kept for other weights, which may not be finite."""
    head = WRITERS["eagle"](tmp_path / "head", *sizes_of(checkpoints.target))
    spec = {"method": "eagle", "model": head}
    LLM(checkpoints.target, dtype="bfloat16", speculative_config=spec)
    (file,) = kept.glob("*.precision.json")
    file.write_text('{"draft_quantization": "int8", "spread": 1}')
    stored = tmp_path / "head" / "model.safetensors"
    save_file({**load_file(stored), "fc.weight": torch.full_like(load_file(stored)["fc.weight"], torch.inf)}, stored)
    assert "draft weights in bfloat16" in LLM(checkpoints.target, dtype="bfloat16", speculative_config=spec).speculation
    assert len(list(kept.glob("*.precision.json"))) == 2


@native
def test_sub_drafters_heads_are_rounded_too(checkpoints: Checkpoints) -> None:
    head = head_of("eagle", *sizes_of(checkpoints.target))
    spec = {"method": "merge", "model": head, "members": ["suffix", "eagle"]}
    llm = LLM(checkpoints.target, dtype="bfloat16", speculative_config=spec)
    assert "draft weights in " in llm.speculation


@native
@pytest.mark.parametrize("method", ["eagle", "eagle3", "medusa"])
def test_weights_that_are_not_finite_stay_as_they_are(checkpoints: Checkpoints, tmp_path: Path, method: str) -> None:
    hidden, vocab_size = sizes_of(checkpoints.target)
    head = WRITERS[method](tmp_path / "head", hidden, vocab_size)
    file = tmp_path / "head" / "model.safetensors"
    tensors = load_file(file)
    matrix = "0.0.linear.weight" if method == "medusa" else "fc.weight"
    tensors[matrix][0, 0] = torch.inf
    save_file(tensors, file)
    spec = {"method": method, "model": head}
    with pytest.raises(ModelError, match="can't be rounded to int8"):
        LLM(checkpoints.target, dtype="bfloat16", speculative_config=spec, draft_quantization="int8")
    llm = LLM(checkpoints.target, dtype="bfloat16", speculative_config=spec)
    assert "draft weights in bfloat16" in llm.speculation


@pytest.mark.parametrize(("draft_s", "faster"), [(0.0, True), (0.5, False)])
def test_speed_counts_the_time_of_every_draft(draft_s: float, faster: bool) -> None:
    whole, rounded = Precision(None, 0.8, 0.1), Precision("int8", 0.8, 0.05, draft_s)
    assert (rounded.speed(lambda rows: 1.0) > whole.speed(lambda rows: 1.0)) is faster
