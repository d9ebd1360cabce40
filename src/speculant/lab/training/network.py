"""New models in Llama's format: their configuration and initial weights."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn

from speculant.lab.checkpoints import written_description
from speculant.lab.training.config import TrainingConfig
from speculant.models import Decoder


def hf_config(config: TrainingConfig, vocab_size: int) -> dict[str, Any]:
    """Return the config.json of a new model. Token 0 begins and ends every text."""
    return {
        "architectures": ["LlamaForCausalLM"],
        "model_type": "llama",
        "dtype": "bfloat16",
        "vocab_size": vocab_size,
        "hidden_size": config.hidden,
        "intermediate_size": config.intermediate,
        "num_hidden_layers": config.layers,
        "num_attention_heads": config.heads,
        "num_key_value_heads": config.kv_heads,
        "head_dim": config.hidden // config.heads,
        "hidden_act": "silu",
        "rms_norm_eps": 1e-6,
        "rope_theta": 10000.0,
        "max_position_embeddings": config.max_positions,
        "attention_bias": False,
        "mlp_bias": False,
        "tie_word_embeddings": True,
        "bos_token_id": 0,
        "eos_token_id": 0,
    }


def new_network(hf: dict[str, Any], seed: int) -> Decoder:
    """Make the model of a config.json with random weights, the same for the same seed.

    Matrices are normal with deviation 0.5 / sqrt(columns); those that write to the residual stream
    are smaller by sqrt(2 * layers), so that its size does not grow with depth.
    """
    generator = torch.Generator().manual_seed(seed)
    model = Decoder(written_description(hf))
    for name, parameter in model.named_parameters():
        if parameter.ndim == 2:
            nn.init.normal_(parameter, std=_deviation(name, parameter.shape[1], model), generator=generator)
    return model


def _deviation(name: str, columns: int, model: Decoder) -> float:
    if "embed_tokens" in name or "lm_head" in name:
        return 0.02
    writes_residual = "o_proj" in name or "down_proj" in name
    shrink = (2 * model.config.num_layers) ** 0.5 if writes_residual else 1.0
    return float(0.5 / columns**0.5 / shrink)


def project_embedding(draft: Decoder, target: Decoder) -> None:
    """Initialise the tables of a narrower draft, its embedding and its head, with the best projections of its target's.

    Tokens with similar embeddings in the target are then similar in the draft from the first step on. The tables have
    most of a small model's weights.
    """
    _project(target.model.embed_tokens.weight, draft.model.embed_tokens.weight)
    if not draft.config.head.tied:
        _project(target.lm_head.weight, draft.lm_head.weight)


@torch.no_grad()
def _project(wide: Tensor, narrow: Tensor) -> None:
    if wide.shape[1] <= narrow.shape[1]:
        return
    values, vectors = torch.linalg.eigh(wide.T @ wide)  # ascending
    basis = vectors[:, values.argsort(descending=True)[: narrow.shape[1]]]  # [wide, narrow]
    narrow.copy_(wide @ basis)


def tie_stored(model: Decoder) -> Decoder:
    """Let parameters that the files hold as one tensor be one, such as keys and values with the same matrix."""
    first = dict[str, nn.Parameter]()
    for name, parameter in model.named_parameters(remove_duplicate=False):
        stored = model.config.tensors.expression(name)
        if isinstance(stored, str) and first.setdefault(stored, parameter) is not parameter:
            module, _, own = name.rpartition(".")
            setattr(model.get_submodule(module), own, first[stored])
    return model


def parameter_count(model: nn.Module) -> int:
    """Return the number of weights; a tied head counts once."""
    return sum(parameter.numel() for parameter in model.parameters())
