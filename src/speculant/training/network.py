"""New models in Llama's format: their configuration, their parameter count, their first weights."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
from torch import nn

from speculant.errors import ConfigError
from speculant.models.decoder import Decoder
from speculant.models.llama import read_config


@dataclass(frozen=True)
class NetworkSize:
    """What decides how large a new model is."""

    hidden: int = 256
    intermediate: int = 704
    layers: int = 8
    heads: int = 4
    kv_heads: int = 2
    max_positions: int = 1024

    def __post_init__(self) -> None:
        if self.hidden % self.heads or (self.hidden // self.heads) % 2:
            raise ConfigError(
                f"a hidden size of {self.hidden} can't be cut into {self.heads} heads of even size",
                "choose --hidden as a multiple of twice --heads.",
            )
        if self.heads % self.kv_heads:
            raise ConfigError(
                f"{self.heads} heads can't share {self.kv_heads} key heads evenly",
                "choose --heads as a multiple of --kv-heads.",
            )

    def hf_config(self, vocab_size: int) -> dict[str, Any]:
        """Return the config.json of such a model. Token 0 begins and ends every text."""
        return {
            "architectures": ["LlamaForCausalLM"],
            "model_type": "llama",
            "dtype": "bfloat16",
            "vocab_size": vocab_size,
            "hidden_size": self.hidden,
            "intermediate_size": self.intermediate,
            "num_hidden_layers": self.layers,
            "num_attention_heads": self.heads,
            "num_key_value_heads": self.kv_heads,
            "head_dim": self.hidden // self.heads,
            "hidden_act": "silu",
            "rms_norm_eps": 1e-6,
            "rope_theta": 10000.0,
            "max_position_embeddings": self.max_positions,
            "attention_bias": False,
            "mlp_bias": False,
            "tie_word_embeddings": True,
            "bos_token_id": 0,
            "eos_token_id": 0,
        }


def new_network(hf_config: dict[str, Any], seed: int) -> Decoder:
    """Make a model with random weights, the same for the same seed.

    Matrices are normal with deviation 0.5 / sqrt(columns); those that write to the residual stream
    are smaller by sqrt(2 * layers), so that its size does not grow with depth.
    """
    generator = torch.Generator().manual_seed(seed)
    model = Decoder(read_config(hf_config))
    for name, parameter in model.named_parameters():
        if parameter.ndim == 2:
            nn.init.normal_(parameter, std=_deviation(name, parameter.shape[1], model), generator=generator)
    return model


def _deviation(name: str, columns: int, model: Decoder) -> float:
    if "embed_tokens" in name:
        return 0.02
    writes_residual = "o_proj" in name or "down_proj" in name
    shrink = (2 * model.config.num_layers) ** 0.5 if writes_residual else 1.0
    return float(0.5 / columns**0.5 / shrink)


def parameter_count(model: nn.Module) -> int:
    """Count the weights that one pass reads; a tied head counts once."""
    return sum(parameter.numel() for parameter in model.parameters())
