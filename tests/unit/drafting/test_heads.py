"""Heads against references that are written out, token by token and layer by layer; and files that do not fit."""

from __future__ import annotations

import functools
import json
import os
import shlex
import shutil
import subprocess
import sys
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import Tensor
from torch.nn import functional
from transformers import AutoConfig
from transformers.models.qwen3_5.modeling_qwen3_5 import Qwen3_5DecoderLayer, Qwen3_5TextRotaryEmbedding

from speculant import LLM, plugins
from speculant.cache import paged_cache
from speculant.config import Limits
from speculant.drafting import UNKNOWN, Drafter, likeliest, product_tree, save_head_tokens
from speculant.errors import ConfigError, ModelError, PairError, SpeculantError
from speculant.kernels import usable_sets
from speculant.lengths import Calibration
from speculant.models import CausalLM, load_model
from speculant.params import SamplingParams
from speculant.types import CommittedRows, DraftTree, Request
from tests.fakes import drafter_context
from tests.heads import (
    LAYER,
    MTP_NAMES,
    WRITERS,
    Shown,
    fresh_rows,
    fresh_states,
    head_context,
    medusa_tensors,
    write_eagle,
    write_eagle3,
    write_head,
    write_medusa as write_medusa_head,
    write_mtp,
    write_with_head,
)
from tests.models import HIDDEN_SIZE, VOCAB_SIZE, Checkpoints, make_request

pytestmark = pytest.mark.covering(1)
H, V = HIDDEN_SIZE, VOCAB_SIZE
TEXT = [7, 1, 2, 3, 4, 1, 2, 250, 5, 1, 2]
GREEDY = SamplingParams(temperature=0, max_tokens=None)
DEPTH = 4
PICKLE = "medusa_lm_head.pt"
KERNELS = ["reference", *(["native"] if usable_sets() else [])]


def build(method: str, folder: str, target: CausalLM, **options: Any) -> Drafter:
    """Make a drafter that is shown the states of fresh passes."""
    drafter: Drafter = plugins.load("speculant.drafting", method).build(head_context(folder, target, options))
    return Shown(drafter, target)


@torch.inference_mode()
def draft(drafter: Drafter, limit: int = DEPTH) -> list[int]:
    request = make_request(TEXT, params=GREEDY)
    drafter.begin(request)
    (tree,) = drafter.propose([request], [limit])
    drafter.end(request)
    return tree.token_list


@torch.inference_mode()
def drawn(drafter: Drafter) -> tuple[list[int], Tensor]:
    """Return a drawn chain, and the distributions [n, V] that it was drawn from."""
    request = make_request(TEXT, params=SamplingParams(temperature=1.0, max_tokens=None), shared_noise=False)
    drafter.begin(request)
    (tree,) = drafter.propose([request], [DEPTH])
    assert tree.probs is not None
    return tree.token_list, tree.probs


def assert_drawn_from(probs: Tensor, logits: Sequence[Tensor]) -> None:
    torch.testing.assert_close(probs, torch.stack(list(logits)).softmax(-1).double(), atol=1e-5, rtol=1e-4)


def load_target(checkpoints: Checkpoints, kernels: str = "reference") -> CausalLM:
    return loaded(checkpoints.target, kernels)


@functools.cache
def loaded(folder: str, kernels: str) -> CausalLM:
    """Load a model once; no test changes it."""
    return load_model(folder, "float32", kernels=kernels).model


def head_logits(target: CausalLM, states: Tensor) -> Tensor:
    return target.logits(states)


def last_state(target: CausalLM) -> Tensor:
    (states,) = fresh_states(target, TEXT[:-1], (target.num_layers + 1,))
    return states[-1]


@pytest.mark.parametrize("kernels", KERNELS)
@pytest.mark.parametrize("own", [False, True])
@pytest.mark.parametrize("layers", [1, 2])
def test_medusa_is_its_ten_lines(
    tmp_path: Path, checkpoints: Checkpoints, layers: int, own: bool, kernels: str
) -> None:
    target = load_target(checkpoints, kernels)
    folder = write_medusa_head(tmp_path / "head", H, V, own, layers=layers)
    tensors, expected = load_file(f"{folder}/model.safetensors"), list[Tensor]()
    for head in range(3):
        x = last_state(target)
        for layer in range(layers):
            block = tensors[f"{head}.{layer}.linear.weight"] @ x + tensors[f"{head}.{layer}.linear.bias"]
            x = x + functional.silu(block)
        logits = tensors[f"{head}.{layers}.weight"] @ x if own else head_logits(target, x[None])[0]
        expected.append(logits)
    drafter = build("medusa", folder, target, tree="chain")
    assert draft(drafter) == [int(logits.argmax()) for logits in expected]
    assert_drawn_from(drawn(drafter)[1], expected)


@pytest.mark.parametrize("kernels", KERNELS)
def test_blockwise_is_its_ten_lines(tmp_path: Path, checkpoints: Checkpoints, kernels: str) -> None:
    target = load_target(checkpoints, kernels)
    folder = WRITERS["blockwise"](tmp_path / "head", H, V)
    tensors, expected = load_file(f"{folder}/model.safetensors"), list[Tensor]()
    for head in range(3):
        name, x = f"heads.{head}.", last_state(target)
        inner = torch.relu(tensors[name + "up.weight"] @ x + tensors[name + "up.bias"])
        x = x + tensors[name + "down.weight"] @ inner + tensors[name + "down.bias"]
        expected.append(head_logits(target, x[None])[0])
    drafter = build("blockwise", folder, target)
    assert draft(drafter) == [int(logits.argmax()) for logits in expected]
    assert_drawn_from(drawn(drafter)[1], expected)


@pytest.mark.parametrize("kernels", KERNELS)
@pytest.mark.parametrize("kind", ["blockwise", "eagle", "medusa"])
@pytest.mark.parametrize("given", ["option", "folder"])
def test_a_short_head_predicts_its_tokens_alone(
    tmp_path: Path, checkpoints: Checkpoints, kind: str, given: str, kernels: str
) -> None:
    """The first drafted token has the same logits among them as with the whole output head."""
    target, folder = load_target(checkpoints, kernels), WRITERS[kind](tmp_path / "head", H, V)
    options: dict[str, Any] = {"tree": "chain"} if kind == "medusa" else {}
    _, whole = drawn(build(kind, folder, target, **options))
    tokens = list(range(1, V, 3))
    file = tmp_path / "head" / "head_tokens.json" if given == "folder" else tmp_path / "tokens.json"
    save_head_tokens(file, tokens)
    drafter = build(kind, folder, target, **options, **({"head_tokens": str(file)} if given == "option" else {}))
    assert set(draft(drafter)) <= set(tokens)
    _, probs = drawn(drafter)
    assert not probs[:, [token for token in range(V) if token not in tokens]].any()
    expected = whole[0, tokens] / whole[0, tokens].sum()
    torch.testing.assert_close(probs[0, tokens], expected, atol=1e-5, rtol=1e-4)


def test_a_short_head_of_another_vocabulary_is_refused(tmp_path: Path, checkpoints: Checkpoints) -> None:
    target, folder = load_target(checkpoints), WRITERS["medusa"](tmp_path / "head", H, V)
    save_head_tokens(tmp_path / "tokens.json", [1, V])
    with pytest.raises(PairError, match=f"the token {V} and the target has {V}"):
        build("medusa", folder, target, head_tokens=str(tmp_path / "tokens.json"))
    own = write_medusa_head(tmp_path / "own", H, V, True)
    save_head_tokens(tmp_path / "tokens.json", [1, 2])
    with pytest.raises(ConfigError, match="output heads of their own"):
        build("medusa", own, target, head_tokens=str(tmp_path / "tokens.json"))


class Layer:
    """One decoder layer over a growing list of rows, as the papers and Hugging Face's Llama have it."""

    def __init__(self, tensors: dict[str, Tensor], prefix: str) -> None:
        self._tensors, self._prefix = tensors, prefix
        self._keys, self._values = list[Tensor](), list[Tensor]()

    def __call__(self, name: str, x: Tensor) -> Tensor:
        return self._tensors[f"{self._prefix}{name}.weight"] @ x

    def norm(self, name: str, x: Tensor) -> Tensor:
        scale = torch.rsqrt((x * x).mean() + LAYER["rms_norm_eps"])
        return self._tensors[f"{name}.weight"] * x * scale

    def attend(self, x: Tensor, position: int) -> Tensor:
        heads, groups, dim = LAYER["num_attention_heads"], 2, LAYER["head_dim"]
        query = rotated(self("self_attn.q_proj", x).view(heads, dim), position)
        self._keys.append(rotated(self("self_attn.k_proj", x).view(-1, dim), position))
        self._values.append(self("self_attn.v_proj", x).view(-1, dim))
        keys, values = (torch.stack(each).repeat_interleave(groups, 1) for each in (self._keys, self._values))
        weights = (torch.einsum("hd,thd->ht", query, keys) / dim**0.5).softmax(-1)
        return self("self_attn.o_proj", torch.einsum("ht,thd->hd", weights, values).flatten())

    def mlp(self, x: Tensor) -> Tensor:
        gated = functional.silu(self("mlp.gate_proj", x)) * self("mlp.up_proj", x)
        return self("mlp.down_proj", gated)


def rotated(x: Tensor, position: int) -> Tensor:
    dim = x.shape[-1]
    angles = position / LAYER["rope_theta"] ** (torch.arange(0, dim, 2) / dim)
    first, second = x.chunk(2, -1)
    return torch.cat((first * angles.cos() - second * angles.sin(), second * angles.cos() + first * angles.sin()), -1)


Row = Callable[[int, int, Tensor], tuple[Tensor, Tensor]]  # position, token, state -> logits, the next row's state


def assert_row_by_row(drafter: Drafter, row: Row, states: Sequence[Tensor]) -> None:
    """Compare a drawn chain's distributions with those of rows that are computed one after the other."""
    tokens, probs = drawn(drafter)
    assert len(tokens) == DEPTH
    expected = list[Tensor]()
    for position, token in enumerate(TEXT[1:]):
        logits, carried = row(position, token, states[position])
    for place, token in enumerate(tokens):
        expected.append(logits)
        logits, carried = row(len(TEXT) - 1 + place, token, carried)
    assert_drawn_from(probs, expected)


@pytest.mark.parametrize("kernels", KERNELS)
@pytest.mark.parametrize("bias", [False, True])
def test_eagle_is_the_paper_s_layer(tmp_path: Path, checkpoints: Checkpoints, bias: bool, kernels: str) -> None:
    target = load_target(checkpoints, kernels)
    folder = write_eagle(tmp_path / "head", H, V, bias)
    tensors = load_file(f"{folder}/model.safetensors")
    layer = Layer(tensors, "layers.0.")

    def row(position: int, token: int, state: Tensor) -> tuple[Tensor, Tensor]:
        x = tensors["fc.weight"] @ torch.cat((target.embed(torch.tensor([token]))[0], state))
        x = x + tensors["fc.bias"] if bias else x
        x = x + layer.attend(x, position)
        x = x + layer.mlp(layer.norm("layers.0.post_attention_layernorm", x))
        return head_logits(target, x[None])[0], x

    (states,) = fresh_states(target, TEXT[:-1], (target.num_layers + 1,))
    assert_row_by_row(build("eagle", folder, target), row, list(states))


@pytest.mark.parametrize("kernels", KERNELS)
@pytest.mark.parametrize("draft_vocab", [None, 100])
@pytest.mark.parametrize("own", [True, False])
@pytest.mark.parametrize(
    "flags", [{}, {"norm_before_residual": True}, {"norm_output": True}], ids=lambda flags: "-".join(flags) or "plain"
)
def test_eagle3_is_the_paper_s_layer(
    tmp_path: Path, checkpoints: Checkpoints, flags: dict[str, bool], own: bool, draft_vocab: int | None, kernels: str
) -> None:
    if draft_vocab and not own:
        pytest.skip("a reduced vocabulary has an output head of its own")
    target = load_target(checkpoints, kernels)
    folder = write_eagle3(tmp_path / "head", H, V, draft_vocab=draft_vocab, own=own, **flags)
    tensors = load_file(f"{folder}/model.safetensors")
    layer = Layer(tensors, "midlayer.")

    def row(position: int, token: int, state: Tensor) -> tuple[Tensor, Tensor]:
        normed = layer.norm("midlayer.hidden_norm", state)
        embedded = layer.norm("midlayer.input_layernorm", target.embed(torch.tensor([token]))[0])
        x = layer.attend(torch.cat((embedded, normed)), position)
        x = x + (normed if "norm_before_residual" in flags else state)
        x = x + layer.mlp(layer.norm("midlayer.post_attention_layernorm", x))
        last = layer.norm("norm", x)
        logits = tensors["lm_head.weight"] @ last if own else head_logits(target, last[None])[0]
        if draft_vocab:
            places = torch.arange(draft_vocab) + tensors["d2t"]
            logits = torch.full((V,), -torch.inf).index_copy(0, places, logits)
        return logits, last if "norm_output" in flags else x

    taps = fresh_states(target, TEXT[:-1], (0, 1, 2))
    states = torch.cat(taps, -1) @ tensors["fc.weight"].T
    assert_row_by_row(build("eagle3", folder, target), row, list(states))


def test_speculators_configs_are_read(tmp_path: Path, checkpoints: Checkpoints) -> None:
    target = load_target(checkpoints)
    hub = write_eagle3(tmp_path / "hub", H, V, draft_vocab=100)
    tensors = load_file(f"{hub}/model.safetensors")
    renamed = {name.replace("midlayer.", "layers.0."): tensor for name, tensor in tensors.items()}
    config = {
        "speculators_model_type": "eagle3",
        "transformer_layer_config": {**LAYER, "model_type": "llama", "vocab_size": V},
        "draft_vocab_size": 100,
        "eagle_aux_hidden_state_layer_ids": [0, 1, 2],
    }
    theirs = write_head(tmp_path / "theirs", config, renamed)
    assert draft(build("eagle3", theirs, target)) == draft(build("eagle3", hub, target))


def without_norms(head: str) -> str:
    """Take the norms of an EAGLE-3 head's input out of its file."""
    tensors = load_file(f"{head}/model.safetensors")
    save_file({name: tensor for name, tensor in tensors.items() if "fc_norm" not in name}, f"{head}/model.safetensors")
    return head


REFUSED: dict[str, tuple[str, Callable[[Path], str], type[SpeculantError], str]] = {
    "another width": (
        "medusa",
        lambda at: write_medusa_head(at, 2 * H, V),
        PairError,
        r"\[64, 64\] and must be \[32, 32\]",
    ),
    "another vocabulary": ("medusa", lambda at: write_medusa_head(at, H, V + 1, True), PairError, r"265.*must be.*264"),
    "another head": ("medusa", lambda at: write_eagle(at, H, V), ModelError, "no tensors such as"),
    "eagle3 for eagle": ("eagle", lambda at: write_eagle3(at, H, V), ModelError, "missing.*unexpected"),
    "eagle for eagle3": ("eagle3", lambda at: write_eagle(at, H, V), PairError, "takes in the layers"),
    "eagle of another target": ("eagle", lambda at: write_eagle(at, 16, V), PairError, "made for hidden states of 16"),
    "eagle of another text": ("eagle", lambda at: write_eagle(at, H, 99), PairError, "a vocabulary of 99.*has 264"),
    "tokens beyond": ("eagle3", lambda at: write_eagle3(at, H, V + 9, draft_vocab=270), PairError, "d2t"),
    "norms that exclude one another": (
        "eagle3",
        lambda at: write_eagle3(at, H, V, norm_before_fc=True, fc_norm=True),
        ModelError,
        "norm_before_fc and fc_norm, which exclude",
    ),
    "a norm that is missing": (
        "eagle3",
        lambda at: without_norms(write_eagle3(at, H, V, fc_norm=True)),
        ModelError,
        r"3 missing \(encoder.norm.0.weight",
    ),
    "layers beyond": (
        "eagle3",
        lambda at: write_eagle3(at, H, V, eagle_config={"eagle_aux_hidden_state_layer_ids": [0, 1, 7]}),
        PairError,
        r"layers \[0, 1, 7\], and the target has 0 to 2",
    ),
    "heads without end": (
        "medusa",
        lambda at: write_head(at, {}, {**medusa_tensors(H), "9999.9999.linear.weight": torch.zeros(1)}),
        ModelError,
        "10000 heads of 10000 layers, and the most is 64",
    ),
    "width without end": (
        "blockwise",
        lambda at: write_head(at, {"num_heads": 64, "inner_size": 2**20}, medusa_tensors(H)),
        ModelError,
        "missing",
    ),
    "said kind": (
        "medusa",
        lambda at: write_head(at, {"speculant_head": "eagle"}, medusa_tensors(H)),
        PairError,
        "of the kind 'eagle' and the method is 'medusa'",
    ),
}


@pytest.mark.parametrize("name", REFUSED)
def test_heads_that_do_not_fit_are_refused(tmp_path: Path, checkpoints: Checkpoints, name: str) -> None:
    method, write, error, message = REFUSED[name]
    with pytest.raises(error, match=message):
        LLM(checkpoints.target, speculative_config={"method": method, "model": write(tmp_path / "head")})


@pytest.mark.parametrize(("run", "shards"), [("here", 1), pytest.param("as shown", 2, marks=pytest.mark.slow)])
def test_pickles_are_refused_with_a_command_to_convert(
    tmp_path: Path, checkpoints: Checkpoints, run: str, shards: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The command works, though the folder has spaces and files that a trainer leaves."""
    folder = pickled(tmp_path / "a head's folder", shards)
    config = {"method": "medusa", "model": str(folder)}
    with pytest.raises(ModelError, match=r"only pickled weights \(medusa(?s:.*)because they can run code") as caught:
        LLM(checkpoints.target, speculative_config=config)
    assert "training_args" not in str(caught.value)
    if run == "here":
        monkeypatch.chdir(tmp_path)
        _, _, code, *arguments = shlex.split(command_in(caught.value.fix))
        monkeypatch.setattr(sys, "argv", ["-c", *arguments])
        exec(code, {})
    else:
        run_shown(caught.value.fix, tmp_path)
    assert LLM(checkpoints.target, speculative_config=config).speculation.startswith("medusa")


@pytest.mark.slow
def test_pickles_on_the_hub_are_named_with_the_commands(
    tmp_path: Path, checkpoints: Checkpoints, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A snapshot has no pickles: the repository's files are listed, and the commands fetch and convert them."""
    snapshot = Path(write_medusa_head(tmp_path / "hub" / "models--some-org--medusa-7b" / "snapshots" / "abc", H, V))
    (snapshot / "model.safetensors").unlink()
    asked = list[tuple[str, str]]()

    def list_files(name: str, revision: str) -> list[str]:
        asked.append((name, revision))
        return [".gitattributes", "config.json", "medusa_lm_head.pt", "README.md"]

    monkeypatch.setattr("huggingface_hub.snapshot_download", lambda name, **options: str(snapshot))
    monkeypatch.setattr("huggingface_hub.list_repo_files", list_files)
    config = {"method": "medusa", "model": "some-org/medusa-7b"}
    with pytest.raises(ModelError, match=r"some-org/medusa-7b on the hub has only pickled weights") as caught:
        LLM(checkpoints.target, speculative_config=config)
    assert asked == [("some-org/medusa-7b", "abc")]
    fetch, _, convert = caught.value.fix.partition(" && ")
    assert fetch.endswith("hf download some-org/medusa-7b config.json medusa_lm_head.pt --local-dir medusa-7b")
    pickled(tmp_path / "medusa-7b", 1)  # as the first command leaves it
    run_shown(convert, tmp_path)
    local = {"method": "medusa", "model": str(tmp_path / "medusa-7b")}
    assert LLM(checkpoints.target, speculative_config=local).speculation.startswith("medusa")

    monkeypatch.setattr("huggingface_hub.list_repo_files", lambda name, revision: ["config.json", "head.gguf"])
    with pytest.raises(ModelError, match="its files are config.json, head.gguf"):
        LLM(checkpoints.target, speculative_config=config)
    monkeypatch.setattr("huggingface_hub.list_repo_files", lambda name, revision: 1 / 0)
    with pytest.raises(ModelError, match="could not be read from the hub"):
        LLM(checkpoints.target, speculative_config=config)


def pickled(folder: Path, shards: int) -> Path:
    """Write a head as pickles."""
    Path(write_medusa_head(folder, H, V))
    (folder / "model.safetensors").unlink()
    tensors = list(medusa_tensors(H).items())
    for shard in range(shards):
        torch.save(dict(tensors[shard::shards]), folder / f"medusa_{shard}.pt" if shards > 1 else folder / PICKLE)
    torch.save({}, folder / "training_args.bin")
    return folder


def command_in(fix: str) -> str:
    """Return the command that a fix ends with."""
    return "python -c" + fix.partition("python -c")[2].removesuffix(".")


def run_shown(fix: str, folder: Path) -> None:
    """Run the command that a fix ends with, in a shell."""
    path = {**os.environ, "PATH": f"{Path(sys.executable).parent}:{os.environ['PATH']}"}
    subprocess.run(command_in(fix), shell=True, check=True, cwd=folder, env=path)


def vllm_medusa(tensors: dict[str, Tensor], biased: bool = True) -> dict[str, Tensor]:
    """Return the tensors of heads on the hub by vLLM's names."""
    found = dict[str, Tensor]()
    for name, tensor in tensors.items():
        head, layer, *rest = name.split(".")
        if rest == ["weight"]:
            found[f"lm_heads.{head}.weight"] = tensor
        elif biased or rest != ["linear", "bias"]:
            found[f"blocks.{head}.layers.{layer}.{rest[1]}"] = tensor
    return found


@pytest.mark.parametrize("kernels", KERNELS)
@pytest.mark.parametrize("layers", [1, 2])
@pytest.mark.parametrize("own", [None, V])
@pytest.mark.parametrize("biased", [True, False])
def test_heads_in_vllm_s_form_draft_as_those_of_the_hub(
    tmp_path: Path, checkpoints: Checkpoints, kernels: str, layers: int, own: int | None, biased: bool
) -> None:
    target, tensors = load_target(checkpoints, kernels), medusa_tensors(H, layers=layers, own=own)
    if not biased:
        tensors = {name: torch.zeros_like(each) if name.endswith("bias") else each for name, each in tensors.items()}
    config = {"architectures": ["MedusaModel"], "hidden_size": H, "num_heads": 3, "num_hidden_layers": layers}
    ours = write_head(tmp_path / "hub", {}, tensors)
    theirs = write_head(tmp_path / "vllm", config, vllm_medusa(tensors, biased))
    assert draft(build("medusa", ours, target, tree="chain")) == draft(build("medusa", theirs, target, tree="chain"))


@pytest.mark.parametrize("kernels", KERNELS)
def test_vllm_s_short_and_shared_output_heads(tmp_path: Path, checkpoints: Checkpoints, kernels: str) -> None:
    """`token_map` has the ids of the rows; the head that all share is the target's own one."""
    target, tensors = load_target(checkpoints, kernels), medusa_tensors(H, own=V)
    known = torch.randperm(V, generator=torch.Generator().manual_seed(0))[:90]
    named = vllm_medusa(tensors)
    short = {name: each[known] if name.startswith("lm_heads") else each for name, each in named.items()}
    folder = write_head(tmp_path / "short", {"truncated_vocab_size": 90}, {**short, "token_map": known})
    tokens, probs = drawn(build("medusa", folder, target, tree="chain"))
    _, whole = drawn(build("medusa", write_head(tmp_path / "whole", {}, tensors), target, tree="chain"))
    among = torch.zeros(V, dtype=torch.bool).index_fill(0, known, True)
    assert {*tokens} <= {*known.tolist()}
    torch.testing.assert_close(probs[0], whole[0] * among / (whole[0] * among).sum(), atol=1e-6, rtol=1e-5)

    shared = {name: each for name, each in named.items() if not name.startswith("lm_heads")}
    plain = write_head(tmp_path / "plain", {}, {n: e for n, e in tensors.items() if "linear" in n})
    expected = draft(build("medusa", plain, target, tree="chain"))
    for number, also in enumerate(({"lm_head.weight": torch.ones(V, H)}, {"lm_heads.0.weight": torch.ones(V, H)})):
        at = write_head(tmp_path / f"shared{number}", {"original_lm_head": True}, {**shared, **also})
        assert draft(build("medusa", at, target, tree="chain")) == expected


@pytest.mark.parametrize("kernels", KERNELS)
def test_a_token_map_of_all_tokens_is_a_permutation(tmp_path: Path, checkpoints: Checkpoints, kernels: str) -> None:
    target, tensors = load_target(checkpoints, kernels), medusa_tensors(H, own=V)
    rows, named = torch.randperm(V, generator=torch.Generator().manual_seed(0)), vllm_medusa(tensors)
    moved = {name: each[rows] if name.startswith("lm_heads") else each for name, each in named.items()}
    plain, theirs = (write_head(tmp_path / name, {}, each) for name, each in (("plain", tensors), ("moved", moved)))
    save_file({**moved, "token_map": rows}, f"{theirs}/model.safetensors")
    (tokens, probs), (their_tokens, their_probs) = (
        drawn(build("medusa", folder, target, tree="chain")) for folder in (plain, theirs)
    )
    assert tokens == their_tokens
    torch.testing.assert_close(probs, their_probs, atol=1e-6, rtol=1e-5)
    save_file({**moved, "token_map": rows[:90].clone()}, f"{theirs}/model.safetensors")
    with pytest.raises(SpeculantError):
        build("medusa", theirs, target, tree="chain")


@pytest.mark.parametrize("said", [2, 3])
def test_configs_may_name_fewer_heads_than_the_file_has(tmp_path: Path, checkpoints: Checkpoints, said: int) -> None:
    folder = write_head(tmp_path / "head", {"medusa_num_heads": said, "medusa_num_layers": 1}, medusa_tensors(H))
    assert build("medusa", folder, load_target(checkpoints), tree="chain").needs.max_nodes == 3


@pytest.mark.parametrize("kernels", KERNELS)
@pytest.mark.parametrize("prefix", ["medusa_head.", "medusa_heads.", "model.", "model.medusa_head."])
def test_heads_within_a_model_are_found(tmp_path: Path, checkpoints: Checkpoints, prefix: str, kernels: str) -> None:
    target, tensors = load_target(checkpoints, kernels), medusa_tensors(H, own=V)
    plain = write_head(tmp_path / "plain", {}, tensors)
    others = {"model.layers.0.mlp.up_proj.weight": torch.ones(2, 2)} if "head" in prefix else {}
    within = write_head(tmp_path / "within", {}, {prefix + name: each for name, each in tensors.items()} | others)
    assert draft(build("medusa", plain, target)) == draft(build("medusa", within, target))


@pytest.mark.parametrize("kernels", KERNELS)
@pytest.mark.parametrize("method", ["eagle", "eagle3"])
def test_layers_within_a_model_are_found(tmp_path: Path, checkpoints: Checkpoints, method: str, kernels: str) -> None:
    """Prefixes are dropped, and tables of rotary frequencies that older programs kept are not read."""
    target, plain = load_target(checkpoints, kernels), WRITERS[method](tmp_path / "plain", H, V)
    tensors = load_file(f"{plain}/model.safetensors")
    for prefix in ("model.", "model.model."):
        config = json.loads((Path(plain) / "config.json").read_text(encoding="utf-8"))
        named = {prefix + name: each for name, each in tensors.items()}
        kept = {"model.layers.0.self_attn.rotary_emb.inv_freq": torch.ones(4), "rotary_emb.inv_freq": torch.ones(4)}
        within = write_head(tmp_path / prefix, config, {**named, **kept})
        assert draft(build(method, plain, target)) == draft(build(method, within, target))


def test_a_tensor_that_is_there_twice_is_refused(tmp_path: Path, checkpoints: Checkpoints) -> None:
    tensors = load_file(f"{write_eagle(tmp_path / 'plain', H, V)}/model.safetensors")
    twice = write_head(tmp_path / "twice", {**LAYER}, {**tensors, "model.fc.weight": tensors["fc.weight"].clone()})
    with pytest.raises(ModelError, match=r"fc\.weight(?s:.*)one tensor of a head"):
        build("eagle", twice, load_target(checkpoints))


@pytest.mark.parametrize("kernels", KERNELS)
def test_eagle_in_vllm_s_form_drafts_as_that_of_the_hub(tmp_path: Path, checkpoints: Checkpoints, kernels: str) -> None:
    """Its layer is a whole one, whose first and last norms are there and skipped; the output head may be short."""
    target, plain = load_target(checkpoints, kernels), write_eagle(tmp_path / "plain", H, V)
    tensors = load_file(f"{plain}/model.safetensors")
    own = {name if name.startswith("fc.") else f"model.{name}": each for name, each in tensors.items()}
    own |= {"model.embed_tokens.weight": torch.ones(V, H), "lm_head.weight": torch.ones(V, H)}
    own |= {name: torch.full((H,), 3.0) for name in ("model.norm.weight", "model.layers.0.input_layernorm.weight")}
    config = {"model_type": "eagle", "architectures": ["EAGLEModel"], "model": {**LAYER, "hidden_size": H}}
    theirs = write_head(tmp_path / "vllm", config, own)
    assert draft(build("eagle", plain, target)) == draft(build("eagle", theirs, target))
    known = torch.tensor([9, 40, 3, 77, 120, 200])
    short = write_head(tmp_path / "short", config, {**own, "token_map": known})
    assert {*drawn(build("eagle", short, target))[0]} <= {*known.tolist()}
    normed = write_head(tmp_path / "normed", {**config, "model": {**config["model"], "skip_prenorm": False}}, own)
    with pytest.raises(ModelError, match=r"unexpected \(layers.0.input_layernorm"):
        build("eagle", normed, target)


@pytest.mark.parametrize("kernels", KERNELS)
@pytest.mark.parametrize("form", [form for form in MTP_NAMES if form != "speculators"])
def test_forms_of_multi_token_prediction(tmp_path: Path, checkpoints: Checkpoints, form: str, kernels: str) -> None:
    """Every publisher's names are those of one head. DeepSeek's hands on its state before the final norm."""
    target = load_target(checkpoints, kernels)
    usual, theirs = (write_mtp(tmp_path / each, H, V, each, target.num_layers) for each in ("speculators", form))
    (tokens, probs), (their_tokens, their_probs) = (drawn(build("mtp", folder, target)) for folder in (usual, theirs))
    assert tokens[0] == their_tokens[0]
    assert torch.equal(probs[0], their_probs[0])
    assert torch.equal(probs, their_probs) == (form != "deepseek")


@pytest.mark.parametrize("kernels", KERNELS)
def test_qwen3_5_s_head_is_a_layer_of_transformers(tmp_path: Path, kernels: str) -> None:
    """Rows before the drafted ones read the target's states after its final norm, the others the head's own."""
    folder = write_with_head(tmp_path)
    target = loaded(folder, kernels)
    tensors = {
        name.removeprefix("mtp."): each
        for name, each in load_file(f"{folder}/model.safetensors").items()
        if name.startswith("mtp.")
    }
    config = AutoConfig.from_pretrained(folder)
    config._attn_implementation = "eager"
    layer, rotary = Qwen3_5DecoderLayer(config, 1), Qwen3_5TextRotaryEmbedding(config)
    layer.load_state_dict({name.removeprefix("layers.0."): each for name, each in tensors.items() if "layers" in name})
    rows = list[Tensor]()

    def norm(name: str, x: Tensor) -> Tensor:
        return (1 + tensors[f"{name}.weight"]) * x * torch.rsqrt((x * x).mean() + config.rms_norm_eps)

    def row(position: int, token: int, state: Tensor) -> tuple[Tensor, Tensor]:
        entering = norm("pre_fc_norm_embedding", target.embed(torch.tensor([token]))[0])
        rows.append(tensors["fc.weight"] @ torch.cat((entering, norm("pre_fc_norm_hidden", state))))
        x, mask = torch.stack(rows)[None], torch.full((len(rows), len(rows)), -torch.inf).triu(1)[None, None]
        angles = rotary(x, torch.arange(len(rows))[None, None])
        last = norm("norm", layer(x, position_embeddings=angles, attention_mask=mask)[0, -1])
        return head_logits(target, last[None])[0], last

    (states,) = fresh_states(target, TEXT[:-1], (target.num_layers + 1,))
    with torch.inference_mode():
        assert_row_by_row(build("mtp", folder, target), row, list(states))


def test_a_target_s_own_folder_may_have_the_head(tmp_path: Path, checkpoints: Checkpoints) -> None:
    target, head = load_target(checkpoints), write_mtp(tmp_path / "head", H, V, "mimo")
    folder = tmp_path / "whole"
    shutil.copytree(checkpoints.target, folder)
    own = load_file(folder / "model.safetensors") | load_file(f"{head}/model.safetensors")
    save_file(own, folder / "model.safetensors")
    shutil.copyfile(f"{head}/config.json", folder / "config.json")  # the head's sizes
    assert draft(build("mtp", str(folder), target)) == draft(build("mtp", head, target))
    with pytest.raises(ModelError, match="no head for multi-token prediction"):
        build("mtp", checkpoints.target, target)


KINDS = {
    "mlp_speculator": {"model_type": "mlp_speculator", "architectures": ["MLPSpeculatorPreTrainedModel"]},
    "pard2": {"model_type": "llama", "spd_type": "pard2"},
}


@pytest.mark.parametrize("method", [None, "medusa", "eagle", "eagle3"])
@pytest.mark.parametrize("name", KINDS)
def test_unsupported_kinds_are_refused_by_name(
    tmp_path: Path, checkpoints: Checkpoints, name: str, method: str | None
) -> None:
    """As a head, and as a draft model."""
    folder, kind = write_eagle3(tmp_path / "head", H, V, **KINDS[name]), name.split()[0]
    given = {"draft_model": folder} if method is None else {"speculative_config": {"method": method, "model": folder}}
    with pytest.raises(ModelError, match=f"a draft of the kind '{kind}'(?s:.*)not supported"):
        LLM(checkpoints.target, **given, **({"spec_length": 3} if method is None else {}))


def test_a_parallel_head_is_known_by_its_mask(tmp_path: Path, checkpoints: Checkpoints) -> None:
    tensors = load_file(f"{write_eagle3(tmp_path / 'plain', H, V)}/model.safetensors")
    folder = write_head(tmp_path / "head", {**LAYER}, {**tensors, "mask_hidden": torch.ones(1, 1, 3 * H)})
    with pytest.raises(PairError, match='kind \'peagle\'(?s:.*)use "method": "peagle"'):
        build("eagle3", folder, load_target(checkpoints))


def test_a_head_named_as_a_draft_model_drafts_as_a_head(tmp_path: Path, checkpoints: Checkpoints) -> None:
    folder = write_eagle3(tmp_path / "head", H, V, speculators_model_type="eagle3")
    assert "eagle3" in LLM(checkpoints.target, draft_model=folder, spec_length=3).speculation


def test_without_a_target_there_is_no_head(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="no target"):
        plugins.load("speculant.drafting", "medusa").build(drafter_context(V, model=str(tmp_path)))


def test_product_tree_takes_the_likeliest_paths() -> None:
    shares = [[0.5, 0.3, 0.4], [0.6, 0.1]]
    tree = product_tree(shares, 5)
    assert tree.ranked == ((0,), (0, 0), (1,), (2,), (1, 0))  # .5, .3, .3, .3 (falling), .18
    assert tree.within(2).paths == {(0,), (0, 0)}
    whole = product_tree([UNKNOWN] * 3)
    assert all(whole.within(size).is_whole() for size in range(1, whole.most_nodes))


def test_ranked_candidates_are_those_of_draws_by_rank(tmp_path: Path, checkpoints: Checkpoints) -> None:
    """Greedy drafts by rank equal the trees that are drawn node by node for edited distributions."""
    target = load_target(checkpoints)
    drafter = build("medusa", write_medusa_head(tmp_path / "head", H, V), target)
    by_rank = draft(drafter, 12)
    request = make_request(TEXT, params=SamplingParams(temperature=0, max_tokens=None, logit_bias={3: 1e-30}))
    drafter.begin(request)
    (tree,) = drafter.propose([request], [12])
    assert tree.token_list == by_rank
    assert len(by_rank) == 12
    shape = product_tree([UNKNOWN] * 3).within(12)
    assert likeliest(torch.eye(3, 40), shape).size == 12


def test_early_exit_is_a_model_of_the_first_layers(tmp_path: Path, checkpoints: Checkpoints) -> None:
    """Its draft is that of a checkpoint with as many layers."""
    target = load_target(checkpoints)
    folder = tmp_path / "first"
    folder.mkdir()
    config = json.loads((Path(checkpoints.target) / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps({**config, "num_hidden_layers": 1}))
    tensors = load_file(Path(checkpoints.target) / "model.safetensors")
    save_file({n: t for n, t in tensors.items() if "layers.1." not in n}, folder / "model.safetensors")
    small = load_model(str(folder), "float32").model
    request = make_request(TEXT, params=GREEDY)
    made = []
    for method, options in (("early_exit", {"layers": 1}), ("draft_model", {})):
        context = drafter_context(
            V, options, load=lambda source, head_tokens=(): small, make_cache=lambda shape: paged_cache(shape, 64, 4),
            target=target,
        )  # fmt: skip
        drafter: Drafter = plugins.load("speculant.drafting", method).build(context)
        drafter.begin(request)
        with torch.inference_mode():
            made.append(drafter.propose([request], [DEPTH])[0].token_list)
    assert made[0] == made[1]
    assert len(made[0]) == DEPTH


@pytest.mark.parametrize("layers", [0, 2, True, "1"])
def test_early_exit_refuses_layers_that_are_not_there(checkpoints: Checkpoints, layers: object) -> None:
    with pytest.raises(ConfigError, match="of a target with 2"):
        LLM(checkpoints.target, speculative_config={"method": "early_exit", "layers": layers})


@torch.inference_mode()
def test_a_layer_begins_with_the_first_state_that_it_sees(tmp_path: Path, checkpoints: Checkpoints) -> None:
    """Rows whose states were not observed are left out; then it drafts as for a text that begins there."""
    target = load_model(checkpoints.target, "float64").model
    folder = write_eagle(tmp_path / "head", H, V)
    (states,) = fresh_states(target, TEXT[:-1], (target.num_layers + 1,))
    found = list[Tensor]()
    for text, missing in ((TEXT, 4), (TEXT[4:], 0)):
        request = make_request(text, params=SamplingParams(max_tokens=None), shared_noise=False, seed=7)
        drafter = unshown(build("eagle", folder, target))
        drafter.begin(request)
        if missing:
            drafter.observe(request, CommittedRows(0, text[:2], (), (states[:2],)))
        drafter.observe(request, CommittedRows(missing, text[missing:-1], (), (states[4:],)))
        (tree,) = drafter.propose([request], [DEPTH])
        assert tree.probs is not None
        found.append(tree.probs)
    torch.testing.assert_close(found[0], found[1], atol=1e-9, rtol=0)


def unshown(drafter: Drafter) -> Drafter:
    """Return the drafter itself."""
    assert isinstance(drafter, Shown)
    return drafter.drafter


@torch.inference_mode()
def test_a_sequence_without_states_gets_no_draft(tmp_path: Path, checkpoints: Checkpoints) -> None:
    target = load_target(checkpoints)
    for method in WRITERS:
        drafter = unshown(build(method, WRITERS[method](tmp_path / method, H, V), target))
        request, alone = make_request(TEXT, params=GREEDY), make_request(TEXT[:1], params=GREEDY, seq_id=2)
        for each in (request, alone):
            drafter.begin(each)
            assert drafter.propose([each], [DEPTH])[0].size == 0, "nothing is computed yet"
        drafter.observe(request, fresh_rows(drafter, target, TEXT[:3]))
        assert drafter.propose([request], [DEPTH])[0].size == 0, "the newest state is missing"
        drafter.observe(request, fresh_rows(drafter, target, TEXT[:-1], start=3))
        assert drafter.propose([request], [2])[0].size == 2


@pytest.mark.parametrize(
    ("method", "written"),
    [("eagle", {}), ("peagle", {}), ("dflash", {"block_size": 17}), ("mtp", {"modules": 16})],
    ids=["eagle", "peagle", "dflash", "modules"],
)
def test_costs_of_heads_are_those_of_real_drafts(
    tmp_path: Path, checkpoints: Checkpoints, method: str, written: dict[str, int]
) -> None:
    """A head drafts nothing without states, and would then seem to cost nothing."""
    target = load_model(checkpoints.target, "float32")
    drafter = unshown(build(method, WRITERS[method](tmp_path / "head", H, V, **written), target.model))
    sizes, propose = list[int](), drafter.propose

    def noting(requests: Sequence[Request], limits: Sequence[int]) -> list[DraftTree]:
        trees = propose(requests, limits)
        if len(requests[0].tokens) <= 64:
            sizes.extend(tree.size - limit for tree, limit in zip(trees, limits, strict=True))
        return trees

    drafter.propose = noting  # type: ignore[method-assign]
    cache = paged_cache(target.model.cache_shape, 64, 4)
    limits = Limits(128, 1, 128)
    identity = (str(tmp_path),)
    calibration = Calibration(target.model, cache, target.backend.sampler, {"head": drafter}, limits, identity)
    costs = calibration.costs()
    calibration.finish()
    assert sizes
    assert set(sizes) == {0}
    assert costs.readings["head"].seconds(0, 100) > 0
