"""Every backend, found by its file: the reference's distributions, draws and texts, and one tensor at a time.

A backend of a test, found like any other, is used by the whole engine.
"""

from __future__ import annotations

import sys
import weakref
from collections.abc import Callable, Collection, Sequence
from dataclasses import dataclass
from importlib.metadata import EntryPoint
from types import ModuleType
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor

from speculant import LLM, SamplingParams, plugins
from speculant.errors import ConfigError, ModelError
from speculant.kernels import REFERENCE, SamplingSettings
from speculant.models import (
    KIND,
    Backend,
    Decoder,
    DecoderConfig,
    Mapped,
    QuantizedBlocks,
    ReferenceBackend,
    StoredWeights,
    WeightSource,
    choose_backend,
    find_backends,
    kind_of,
    load_model,
    tensor_shapes,
)
from speculant.sampling import mix
from tests.backends import FakeBackend
from tests.descriptions import describe, describe_pair
from tests.models import Checkpoints
from tests.stored_weights import ModuleWeights
from tests.unit.models.families import Session

CPU = torch.device("cpu")
SIZES: dict[str, Any] = {
    "vocab_size": 300, "hidden_size": 64, "intermediate_size": 96, "head_dim": 16, "max_positions": 128,
    "windows": (None, 5),
}  # fmt: skip
CONFIG = describe(**SIZES)
VARIANTS = {
    "plain": CONFIG,
    "biased": describe(**SIZES, qkv_bias=True, output_bias=True),
    "tied": describe(**SIZES, tie_embeddings=True, qk_norm=True),
    "encoder": describe_pair(vocab_size=300, hidden_size=64, head_dim=16, max_positions=128),
}
SETTINGS = [
    SamplingSettings(0.0),
    SamplingSettings(0.8),
    SamplingSettings(1.3, top_k=7),
    SamplingSettings(0.7, top_p=0.9),
    SamplingSettings(1.0, top_p=0.8, min_p=0.01, top_k=50),
]
FAKE = "fake_backend_for_tests"


def usable(name: str) -> Backend:
    """Open a backend; skip where it can't run."""
    backend: Backend = plugins.load(KIND, name).open_backend()
    if (why := backend.why_not(CONFIG)) is not None:
        pytest.skip(f"{name}: {why}")
    return backend


@pytest.fixture(params=plugins.names(KIND))
def backend(request: pytest.FixtureRequest) -> Backend:
    return usable(request.param)


@pytest.fixture
def register(monkeypatch: pytest.MonkeyPatch) -> Callable[[FakeBackend], FakeBackend]:
    """Return what makes a backend known as another package would."""

    def add(fake: FakeBackend) -> FakeBackend:
        module = ModuleType(FAKE)
        vars(module)["open_backend"] = lambda: fake
        monkeypatch.setitem(sys.modules, FAKE, module)
        point = EntryPoint("fake", FAKE, KIND)
        monkeypatch.setattr(plugins, "_entry_points", lambda kind: {point.name: point} if kind == KIND else {})
        return fake

    return add


@pytest.fixture
def fake(register: Callable[[FakeBackend], FakeBackend]) -> FakeBackend:
    return register(FakeBackend())


def random_decoder(config: DecoderConfig) -> Decoder:
    torch.manual_seed(3)
    decoder = Decoder(config).requires_grad_(False).eval()
    for name, parameter in decoder.named_parameters():
        parameter.copy_((1 if name.endswith("norm.weight") else 0) + 0.2 * torch.randn(parameter.shape))
    return decoder


def random_logits(rows: int, width: int = 3000) -> Tensor:
    return 3 * torch.randn(rows, width, generator=torch.Generator().manual_seed(1))


# --- what every backend does


def test_backend_announces_itself(backend: Backend) -> None:
    assert backend.name in plugins.names(KIND)
    assert torch.float32 in backend.dtypes
    assert backend.devices is None or "cpu" in backend.devices
    assert isinstance(backend.row_invariant, bool)
    assert all(isinstance(name, str) for name in backend.quantizations)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_backend_distributions_are_the_reference(backend: Backend, dtype: torch.dtype) -> None:
    logits, settings = random_logits(2 * len(SETTINGS)).to(dtype), [*SETTINGS, *reversed(SETTINGS)]
    expected, found = (
        sampler.distribution(logits, settings, [None] * len(logits)) for sampler in (REFERENCE, backend.sampler)
    )
    assert found.dtype == torch.float64
    assert torch.equal(found > 0, expected > 0)
    torch.testing.assert_close(found, expected, rtol=1e-12, atol=0)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
@pytest.mark.parametrize("shared_noise", [True, False])
def test_backend_draws_are_the_reference(backend: Backend, shared_noise: bool, dtype: torch.dtype) -> None:
    weights = random_logits(1)[0].exp().to(dtype)
    weights[::3] = 0
    keys = [mix(5, i) for i in range(200)]
    expected, found = ([each.draw(weights, shared_noise, key) for key in keys] for each in (REFERENCE, backend.sampler))
    assert found == expected
    assert len(set(found)) > 50


@pytest.mark.parametrize("variant", VARIANTS)
def test_backend_logits_are_the_reference(backend: Backend, variant: str) -> None:
    config, tokens = VARIANTS[variant], list(range(2, 90, 4))
    decoder = random_decoder(config)
    expected = Session(decoder).extend(tokens)
    weights = Mapped(ModuleWeights(decoder), tensor_shapes(config))
    model = backend.load(config, weights, torch.float32, CPU)
    weights.check(backend.name)
    assert (model.cache_shape, model.vocab_size, model.max_positions) == (decoder.cache_shape, 300, 128)
    torch.testing.assert_close(Session(model).extend(tokens), expected, atol=1e-4, rtol=1e-4)


PARAMS = [
    SamplingParams(temperature=0.0, max_tokens=12),
    SamplingParams(temperature=0.9, top_p=0.9, seed=3, max_tokens=12),
    SamplingParams(temperature=1.0, max_tokens=12),  # drawn from the engine's seed
]


def texts(kernels: str, checkpoints: Checkpoints, draft: str | None) -> list[Sequence[int]]:
    drafts: dict[str, Any] = {"use_speculative_decoding": False}
    if draft is not None:
        drafts = {"draft_model": draft, "speculative_config": {"num_speculative_tokens": 3, "draft_length": "fixed"}}
    llm = LLM(checkpoints.target, dtype="float32", kernels=kernels, max_model_len=64, seed=1, **drafts)
    assert llm.kernels.startswith(kernels)
    outputs = llm.generate([[70, 71, 72]] * len(PARAMS), PARAMS)
    assert bool(draft) == any(out.metrics.speculative_decoding.num_draft_tokens for out in outputs)
    return [out.outputs[0].token_ids for out in outputs]


@pytest.mark.covering(1)
@pytest.mark.parametrize("drafting", [False, True])
def test_backend_texts_are_the_reference(backend: Backend, checkpoints: Checkpoints, drafting: bool) -> None:
    draft = checkpoints.near if drafting else None
    assert texts(backend.name, checkpoints, draft) == texts("reference", checkpoints, draft)


# --- weights are read one at a time


class LiveWeights(WeightSource):
    """Random tensors of a config; counts the ones that are still held."""

    def __init__(self, config: DecoderConfig, dtype: type[np.floating]) -> None:
        self._shapes, self._dtype = tensor_shapes(config), dtype
        self.live: set[str] = set()

    def names(self) -> Collection[str]:
        return self._shapes.keys()

    def shape(self, name: str) -> tuple[int, ...]:
        return self._shapes[name]

    def kind(self, name: str) -> str:
        return kind_of(torch.from_numpy(np.empty(0, self._dtype)))

    def read(self, name: str) -> Tensor:
        assert not self.live, f"{name} is read while {self.live} are held"
        memory = np.random.default_rng(0).standard_normal(self._shapes[name]).astype(self._dtype)
        self.live.add(name)
        weakref.finalize(memory, self.live.remove, name)
        return torch.from_numpy(memory)  # whatever shares this memory keeps the array alive


@pytest.mark.parametrize("stored", [np.float16, np.float32])
@pytest.mark.parametrize("quantized", [False, True])
@pytest.mark.parametrize("variant", VARIANTS)
def test_backend_holds_one_tensor_at_a_time(
    backend: Backend, variant: str, quantized: bool, stored: type[np.floating]
) -> None:
    weights = LiveWeights(VARIANTS[variant], stored)
    for quantization in backend.quantizations if quantized else [None]:
        model = backend.load(VARIANTS[variant], weights, torch.float32, CPU, quantization)
        assert model.vocab_size == 300
        assert not weights.live, "the model shares memory with the source"


@dataclass(frozen=True)
class Blocks(WeightSource):
    """A source in which some matrices are stored in blocks of one layout, of 32 weights in `size` bytes."""

    source: WeightSource
    layout: str
    size: int

    def names(self) -> Collection[str]:
        return self.source.names()

    def shape(self, name: str) -> tuple[int, ...]:
        return self.source.shape(name)

    def kind(self, name: str) -> str:
        return self.layout.upper() if name.endswith("down_proj.weight") else self.source.kind(name)

    def read(self, name: str) -> Tensor | QuantizedBlocks:
        if not name.endswith("down_proj.weight"):
            return self.source.read(name)
        n, k = self.shape(name)
        return QuantizedBlocks(self.layout, (n, k), torch.zeros(n, k // 32 * self.size, dtype=torch.uint8))


def test_backend_reads_blocks(backend: Backend) -> None:
    """Blocks of zeros are a matrix of zeros."""
    decoder, tokens = random_decoder(CONFIG), list(range(2, 90, 4))
    blocks = Blocks(ModuleWeights(decoder), "q4_0", 18)
    model = backend.load(CONFIG, blocks, torch.float32, CPU)
    found = Session(model).extend(tokens)
    for name, parameter in decoder.named_parameters():
        if name.endswith("down_proj.weight"):
            parameter.zero_()
    torch.testing.assert_close(found, Session(decoder).extend(tokens), atol=1e-4, rtol=1e-4)


# --- a backend of another package


@pytest.mark.parametrize(
    "drafting", [pytest.param(each, marks=[] if not each else pytest.mark.slow) for each in (False, True)]
)
def test_another_backend_runs_the_engine(fake: FakeBackend, checkpoints: Checkpoints, drafting: bool) -> None:
    draft = checkpoints.near if drafting else None
    assert texts("fake", checkpoints, draft) == texts("reference", checkpoints, draft)
    calls = fake.calls
    assert calls["load None"] == 1 + drafting
    assert min(calls["distribution"], calls["draw"]) >= 3
    assert (calls["chains"] > 0) == drafting


def test_auto_takes_the_highest_priority(register: Callable[[FakeBackend], FakeBackend]) -> None:
    register(FakeBackend(priority=99))
    assert choose_backend("auto", None, CONFIG, torch.float32, CPU)[1] == "fake (of a test)"
    assert choose_backend("auto", "fp8", CONFIG, torch.float32, CPU)[1] == "fake (of a test, fp8 weights)"
    assert choose_backend("reference", None, CONFIG, torch.float32, CPU)[1] == "reference"


def test_auto_names_the_backends_that_it_skips(register: Callable[[FakeBackend], FakeBackend]) -> None:
    register(FakeBackend(reason="they are away"))
    chosen, says = choose_backend("auto", None, CONFIG, torch.float64, CPU)
    assert chosen.name == "reference"
    assert says.startswith("reference (not the native ones: ")
    assert says.endswith(", not the fake ones: they are away)")


def test_the_description_counts_blocks_by_their_layout() -> None:
    usable("native")
    weights = Blocks(ModuleWeights(random_decoder(CONFIG)), "q4_0", 18)
    for wanted, says in (
        ("native", "f32 14 matrices, q4_0 2)"),
        ("reference", "f32 14 matrices, q4_0 2, q4_0 decoded)"),
    ):
        assert choose_backend(wanted, None, CONFIG, torch.float32, CPU, weights=weights)[1].endswith(says)
    assert "q4_0" not in choose_backend("native", "int8", CONFIG, torch.float32, CPU, weights=weights)[1]


def test_native_kernels_say_why_not() -> None:
    usable("native")
    wide = describe(**SIZES, num_heads=66)
    cases: list[tuple[DecoderConfig, torch.dtype, str, str]] = [
        (CONFIG, torch.float64, "cpu", "they compute float32 and bfloat16 weights, not float64"),
        (CONFIG, torch.float32, "cuda:0", "they run on the CPU and the device is cuda:0"),
        (wide, torch.float32, "cpu", "heads of 16 in groups of 33 are too large for them"),
    ]
    for config, dtype, device, why in cases:
        says = choose_backend("auto", None, config, dtype, torch.device(device))[1]
        assert says == f"reference (not the native ones: {why})"
        for wanted, quantization in (("native", None), ("auto", "int8"), ("native", "int4")):
            with pytest.raises(ConfigError, match=f"the native kernels can't compute this model: {why}") as caught:
                choose_backend(wanted, quantization, config, dtype, torch.device(device))
            assert 'use kernels="auto" without quantization' in caught.value.fix


def test_native_kernels_that_are_not_built_say_so(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("speculant.models.backends.native.open_kernels", lambda: None)
    says = choose_backend("auto", None, CONFIG, torch.float64, CPU)[1]
    assert says == "reference (not the native ones: they were not built)"


@pytest.mark.parametrize(("kernels", "warnings"), [("auto", 1), ("reference", 0)])
def test_the_first_model_without_native_kernels_warns(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture, kernels: str, warnings: int
) -> None:
    monkeypatch.setattr("speculant.models.backends.native.open_kernels", lambda: None)
    warn = sys.modules["speculant.models.backends.native"]._warn
    warn.cache_clear()
    for _ in range(2):
        load_model("demo", kernels=kernels)
    said = [record.getMessage() for record in caplog.records if "native kernels" in record.getMessage()]
    assert len(said) == warnings
    assert all("Install a C++ compiler" in each and "speculant doctor" in each for each in said)


@pytest.mark.parametrize(
    ("wanted", "quantization", "problem", "fix"),
    [
        ("fast", None, "kernels='fast' is unknown", "auto, native, reference"),
        (None, None, "kernels=None is unknown", "auto"),
        ("auto", "int3", "quantization='int3' is unknown", "int4, int8"),
        ("reference", "int8", "quantization='int8' needs the native kernels", 'leave kernels at "auto"'),
    ],
)
def test_bad_choices_are_refused(wanted: str, quantization: str | None, problem: str, fix: str) -> None:
    with pytest.raises(ConfigError, match=problem) as caught:
        find_backends(wanted, quantization)
    assert fix in caught.value.fix


@pytest.mark.parametrize("option", ["quantization", "draft_quantization"])
def test_engine_refuses_a_choice_before_it_loads(option: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("speculant.engine.build.load_model", lambda *_, **__: pytest.fail("something was loaded"))
    with pytest.raises(ConfigError, match=f"{option}='int3' is unknown"):
        LLM("nowhere", **{option: "int3"})  # type: ignore[arg-type]
    with pytest.raises(ConfigError, match="kernels='fast' is unknown"):
        LLM("nowhere", kernels="fast")


# --- loading checks what a backend returns


class Forgetful(ReferenceBackend):
    """Leaves a tensor out."""

    def load(
        self,
        config: DecoderConfig,
        weights: WeightSource,
        dtype: torch.dtype,
        device: torch.device,
        quantization: str | None = None,
    ) -> Decoder:
        for name in weights.names():
            if not name.endswith("1.mlp.up_proj.weight"):
                weights.read(name)
        return random_decoder(config)


def test_unused_tensor_is_an_error(checkpoints: Checkpoints, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("speculant.models.backends.reference.open_backend", Forgetful)
    with pytest.raises(ModelError, match=r"leave 1 tensors of this model unused \(model.layers.1.mlp.up_proj.weight\)"):
        load_model(checkpoints.target, kernels="reference")


def test_nothing_is_read_before_the_choice(checkpoints: Checkpoints, monkeypatch: pytest.MonkeyPatch) -> None:
    """Of a model that no backend can compute, nothing is read."""
    monkeypatch.setattr(StoredWeights, "read", lambda *_: pytest.fail("a tensor was read"))
    with pytest.raises(ConfigError, match="can't compute this model"):
        load_model(checkpoints.target, dtype="float64", kernels="native")
