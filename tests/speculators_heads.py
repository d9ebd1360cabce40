"""Random EAGLE-3 heads in the `speculators` package's own module, and what that module predicts.

`make test` installs the package without its dependencies, in .venv/oracle: its limits on versions exclude some of those
in constraints.txt. Of what is missing it imports `datasets` alone, which the module does not use.
"""

from __future__ import annotations

import functools
import sys
from collections.abc import Sequence
from functools import partial
from importlib.util import find_spec
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
import torch
from safetensors.torch import load_file
from torch import Tensor, nn
from transformers import AutoConfig, PreTrainedModel

from tests.heads import LAYER, Random

FOLDER = Path(sys.prefix) / "oracle"


class StandIn(ModuleType):
    """A module that has every name."""

    def __getattr__(self, name: str) -> object:
        if name.startswith("__"):
            raise AttributeError(name)
        return object


@functools.cache
def package() -> Any:
    """Return `speculators`, or None where it is not installed."""
    if FOLDER.is_dir():
        sys.path.append(str(FOLDER))
    if find_spec("speculators") is None:
        return None
    stands_in = find_spec("datasets") is None
    if stands_in:
        sys.modules["datasets"] = StandIn("datasets")
    try:
        import speculators.proposals.greedy
    finally:
        if stands_in:
            del sys.modules["datasets"]
    return speculators


def make_module(
    family: str,
    vocab_size: int,
    known: Sequence[int] | None,
    layers: Sequence[int] | None,
    window: int | None = None,
    mask: int | None = None,
    num_layers: int = 1,
    **flags: bool,
) -> PreTrainedModel:
    """Make a random head, its embedding and output head included.

    known: the tokens of its output head, None = all. window: of its attention; Qwen's alone can have one. mask: the
    mask token of a P-EAGLE head; None = an EAGLE-3 head.
    """
    speculators = package()
    if speculators is None:
        pytest.skip(f"the package `speculators` is not in {FOLDER}, where `make test` installs it")
    sizes = {**LAYER, "vocab_size": vocab_size, "num_hidden_layers": num_layers, "attn_implementation": "eager"}
    sliding = {"use_sliding_window": True, "sliding_window": window, "layer_types": ["sliding_attention"] * num_layers}
    kind, made, read = "eagle3", speculators.Eagle3DraftModel, speculators.Eagle3SpeculatorConfig
    if mask is not None:
        from speculators.models import peagle

        kind, made, read = "peagle", peagle.PEagleDraftModel, partial(peagle.PEagleSpeculatorConfig, mask_token_id=mask)
    config = read(
        transformer_layer_config=AutoConfig.for_model(family, **sizes, **(sliding if window else {})),
        draft_vocab_size=vocab_size if known is None else len(known),
        eagle_aux_hidden_state_layer_ids=None if layers is None else list(layers),
        speculators_config=speculators.SpeculatorsConfig(
            algorithm=kind,
            proposal_methods=[speculators.proposals.greedy.GreedyTokenProposalConfig(speculative_tokens=3)],
            default_proposal_method="greedy",
            verifier=speculators.VerifierConfig(name_or_path=None, architectures=["LlamaForCausalLM"]),
        ),
        **flags,
    )
    module: PreTrainedModel = made(config).eval()
    random = Random()
    for parameter in module.parameters():
        size = tuple(parameter.shape)
        parameter.data = random.norm(*size) if len(size) == 1 else random.matrix(*size)
    if known is not None:
        knows = torch.zeros(vocab_size, dtype=torch.bool).index_fill(0, torch.tensor(known), True)
        module.load_vocab_mappings(knows, torch.tensor(known) - torch.arange(len(known)))
    return module


def read_into(module: PreTrainedModel, folder: str, target: PreTrainedModel) -> None:
    """Read a head's files, in the form of the hub, into a module. The target supplies tensors that they lack."""
    tensors = load_file(f"{folder}/model.safetensors")
    state = {name.replace("midlayer.", "layers.0."): tensor for name, tensor in tensors.items()}
    state.setdefault("embed_tokens.weight", target.get_input_embeddings().weight)
    state.setdefault("lm_head.weight", target.get_output_embeddings().weight)
    missing, unexpected = module.load_state_dict(state, strict=False)
    assert all(name.startswith("verifier_") for name in missing), missing
    assert not unexpected


@torch.inference_mode()
def predicted(module: PreTrainedModel, states: Tensor, text: Sequence[int], draft: Sequence[int]) -> Tensor:
    """Return the logits [len(draft), V] of each token of a draft behind a text, by the module's own `forward`.

    states [len(text) - 1, 3 * hidden]: the target's. The module is made for training with teacher forcing: at step s
    each row goes on with its own state of the step before and the input token s places further on, and attends to the
    rows up to its own in step 0 and to itself in later ones. So the last row of a text that the draft continues is the
    chain of drafts.
    """
    logits, last = list[Tensor](), len(text) - 2
    tokens = torch.tensor([[*text[1:], *draft[:-1]]])
    padded = nn.functional.pad(states, (0, 0, 0, len(draft) - 1))[None]
    hook = module.lm_head.register_forward_hook(lambda *call: logits.append(call[2][0, last]))
    module(padded, tokens, torch.zeros_like(tokens), ttt_steps=len(draft))
    hook.remove()
    return _of_all_tokens(module, torch.stack(logits))


def _of_all_tokens(module: PreTrainedModel, own: Tensor) -> Tensor:
    """Return logits of all tokens, -inf for those that the output head does not predict."""
    if module.d2t is None:
        return own
    everything = own.new_full((len(own), len(module.t2d)), -torch.inf)
    return everything.index_copy(1, torch.arange(len(module.d2t)) + module.d2t, own)


@torch.inference_mode()
def predicted_at_masks(module: PreTrainedModel, states: Tensor, text: Sequence[int], depth: int) -> Tensor:
    """Return the logits [depth, V] that a P-EAGLE module's own `forward` computes at the masks after a text.

    It is made for training: chains of masks begin at many places, and are thinned out unless the ratio is large.
    """
    from speculators.losses import resolve_loss_config
    from speculators.models.peagle.data import generate_cod_sample_indices

    logits, last = list[Tensor](), len(text) - 2
    size = last + depth
    tokens = torch.tensor([[*text[1:], *[0] * (size - last - 1)]])
    padded = nn.functional.pad(states, (0, 0, 0, size - last - 1))[None]
    chosen = (torch.arange(size) >= last).float()[None]
    thin = {"num_depths": depth, "down_sample_ratio": 1e3}
    hook = module.lm_head.register_forward_hook(lambda *call: logits.append(call[2][0]))
    own = torch.zeros(1, size, module.hidden_size)
    eager = resolve_loss_config("kl_div", "eager")
    module(padded, tokens, torch.zeros_like(tokens), torch.arange(size)[None], chosen, own, eager, **thin)
    hook.remove()
    anchors, depths = generate_cod_sample_indices(size, chosen, **thin)
    rows = [int(((anchors == last) & (depths == each)).nonzero()) for each in range(depth)]
    return _of_all_tokens(module, logits[0][rows])


def make_dflash_module(
    vocab_size: int,
    known: Sequence[int] | None,
    layers: Sequence[int],
    windows: Sequence[int | None] = (None, None),
    **config: Any,
) -> PreTrainedModel:
    """Make a random DFlash head, its embedding and output head included; windows: those of its layers, all equal."""
    speculators = package()
    if speculators is None:
        pytest.skip(f"the package `speculators` is not in {FOLDER}, where `make test` installs it")
    from speculators.models import dflash

    sizes = {**LAYER, "vocab_size": vocab_size, "num_hidden_layers": len(windows), "attn_implementation": "eager"}
    sizes["layer_types"] = ["sliding_attention" if window else "full_attention" for window in windows]
    if any(windows):
        sizes |= {"use_sliding_window": True, "sliding_window": max(window or 0 for window in windows)}
    made = dflash.DFlashSpeculatorConfig(
        transformer_layer_config=AutoConfig.for_model("qwen3", **sizes),
        draft_vocab_size=vocab_size if known is None else len(known),
        aux_hidden_state_layer_ids=list(layers),
        mask_token_id=9,
        speculators_config=speculators.SpeculatorsConfig(
            algorithm="dflash",
            proposal_methods=[speculators.proposals.greedy.GreedyTokenProposalConfig(speculative_tokens=3)],
            default_proposal_method="greedy",
            verifier=speculators.VerifierConfig(name_or_path=None, architectures=["Qwen3ForCausalLM"]),
        ),
        **config,
    )
    module: PreTrainedModel = dflash.DFlashDraftModel(made).eval()
    random = Random()
    for parameter in module.parameters():
        size = tuple(parameter.shape)
        parameter.data = random.norm(*size) if len(size) == 1 else random.matrix(*size)
    if known is not None:
        knows = torch.zeros(vocab_size, dtype=torch.bool).index_fill(0, torch.tensor(known), True)
        module.load_vocab_mappings(knows, torch.tensor(known) - torch.arange(len(known)))
    return module


@torch.inference_mode()
def predicted_by_block(module: PreTrainedModel, states: Tensor, text: Sequence[int], depth: int) -> Tensor:
    """Return the logits [depth, V] that a DFlash module's own `forward` computes in the block after a text.

    states [len(text) - 1, layers * hidden]: the target's. The module is made for training: blocks begin at tokens that
    the loss does not leave out, here the last one alone. Later states are not seen.
    """
    from speculators.losses import resolve_loss_config

    logits, last, rest = list[Tensor](), len(text) - 1, module.block_size
    tokens = torch.tensor([[*text, *[0] * rest]])
    padded = nn.functional.pad(states, (0, 0, 0, 1 + rest), value=7.0)[None]
    chosen = (torch.arange(tokens.shape[1]) == last).float()[None]
    own = torch.zeros(1, tokens.shape[1], module.config.transformer_layer_config.hidden_size)
    hook = module.lm_head.register_forward_hook(lambda *call: logits.append(call[2][0]))
    eager = resolve_loss_config("kl_div", "eager")
    module(padded, tokens, chosen, own, torch.zeros_like(tokens), loss_config=eager, max_anchors=1)
    hook.remove()
    first = 0 if module.config.sample_from_anchor else 1
    return _of_all_tokens(module, logits[0][first : first + depth])


def make_mtp_module(vocab_size: int) -> PreTrainedModel:
    """Make a random head for multi-token prediction; embedding and output head are those of the target."""
    if package() is None:
        pytest.skip(f"the package `speculators` is not in {FOLDER}, where `make test` installs it")
    from speculators.models import mtp

    sizes = {**LAYER, "vocab_size": vocab_size, "num_hidden_layers": 1, "attn_implementation": "eager"}
    speculators = package()
    config = mtp.MTPSpeculatorConfig(
        transformer_layer_config=AutoConfig.for_model("qwen3", **sizes),
        speculators_config=speculators.SpeculatorsConfig(
            algorithm="mtp",
            proposal_methods=[speculators.proposals.greedy.GreedyTokenProposalConfig(speculative_tokens=3)],
            default_proposal_method="greedy",
            verifier=speculators.VerifierConfig(name_or_path=None, architectures=["Qwen3ForCausalLM"]),
        ),
    )
    module: PreTrainedModel = mtp.MTPDraftModel(config).eval()
    random = Random()
    for parameter in module.parameters():
        size = tuple(parameter.shape)
        parameter.data = random.norm(*size) if len(size) == 1 else random.matrix(*size)
    return module


@torch.inference_mode()
def predicted_by_mtp(
    module: PreTrainedModel, target: PreTrainedModel, states: Tensor, text: Sequence[int], draft: Sequence[int]
) -> Tensor:
    """Return the logits [len(draft), V] that the module's layer computes for each drafted token after a text.

    states [len(text) - 1, hidden]: the target's after its final norm. Drafted rows take in the layer's own results.
    """
    logits, rows = list[Tensor](), states[None]
    for drafted in range(len(draft)):
        tokens = torch.tensor([[*text[1:], *draft[:drafted]]])
        size = tokens.shape[1]
        positions = torch.arange(size)[None]
        hidden = torch.full((size, size), -torch.inf).triu(1)[None, None]
        out = module.mtp_layers[0](
            hidden_states=rows, token_embeddings=target.get_input_embeddings()(tokens), attention_mask=hidden,
            position_ids=positions, position_embeddings=module.rotary_emb(rows, positions),
        )  # fmt: skip
        logits.append(target.get_output_embeddings()(out[0, -1]))
        rows = torch.cat((rows, out[:, -1:]), dim=1)
    return torch.stack(logits)
