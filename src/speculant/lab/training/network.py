"""New models in Llama's format, and the folders that trained models are written to."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch
from tokenizers import Tokenizer
from torch import Tensor, nn

from speculant.lab.checkpoints import save_tensors, write_json, written_description
from speculant.lab.training.config import TrainingConfig
from speculant.lab.training.corpus import END_OF_TEXT
from speculant.models import Decoder, read_description

# The model is trained on program text only, so a conversation becomes comments.
CHAT_TEMPLATE = """\
{{- bos_token -}}
{%- for message in messages -%}
{{- '# ' + message['role'] + ':\\n' + message['content'] + '\\n\\n' -}}
{%- endfor -%}
{%- if add_generation_prompt -%}
{{- '# assistant:\\n' -}}
{%- endif -%}
"""


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


def export_model(
    folder: Path, model: Decoder, hf_config: dict[str, Any], tokenizer: Tokenizer, dtype: torch.dtype = torch.bfloat16
) -> None:
    """Write config, weights in `dtype` and tokenizer; a tied head is stored once."""
    save_weights(folder, model, hf_config, dtype)
    write_json(folder / "generation_config.json", {"bos_token_id": 0, "eos_token_id": 0})
    tokenizer.save(str(folder / "tokenizer.json"))
    write_json(folder / "tokenizer_config.json", _tokenizer_config(hf_config["max_position_embeddings"]))


def save_weights(folder: Path, model: Decoder, hf_config: dict[str, Any], dtype: torch.dtype = torch.bfloat16) -> None:
    """Write config and weights in `dtype` to a folder, which is made if it is missing.

    hf_config: the config.json of a checkpoint of the model's family, as safetensors.
    """
    folder.mkdir(parents=True, exist_ok=True)
    names = read_description(hf_config).tensors
    save_tensors(dict(model.named_parameters()), names, folder / "model.safetensors", dtype)
    write_json(folder / "config.json", {**hf_config, "dtype": str(dtype).removeprefix("torch.")})


def _tokenizer_config(max_positions: int) -> dict[str, Any]:
    return {
        "tokenizer_class": "PreTrainedTokenizerFast",
        "bos_token": END_OF_TEXT,
        "eos_token": END_OF_TEXT,
        "model_max_length": max_positions,
        "clean_up_tokenization_spaces": False,
        "chat_template": CHAT_TEMPLATE,
    }
