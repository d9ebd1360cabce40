"""New models in Llama's format, their folders, and training passes: whole sequences without a cache.

Without sliding windows no masks are needed, and causal attention skips the half of the scores that no row sees. A test
compares the states with those of a pass with a cache, for every family.
"""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any, cast

import torch
from tokenizers import Tokenizer
from torch import Tensor, nn
from torch.nn import functional
from typing_extensions import override

from speculant.kernels import attend
from speculant.lab.checkpoints import save_tensors, write_json, written_description
from speculant.lab.training.config import TrainingConfig
from speculant.lab.training.corpus import END_OF_TEXT
from speculant.models import (
    Attend,
    Attention,
    Decoder,
    Learned,
    WholeTexts,
    buckets_of,
    distance_scores,
    load_model,
    read_description,
)

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


def load_plain(source: str, role: str = "target", device: str = "cpu") -> Decoder:
    """Load a model in float32."""
    return cast(Decoder, load_model(source, "float32", device, role=role).model)


def hidden_states(model: Decoder, tokens: Tensor) -> Tensor:
    """Run token sequences [B, n] through a model: [B * n, hidden]."""
    return states_of_layers(model, tokens, [model.num_layers + 1])[0].flatten(0, 1)


def states_of_layers(
    model: Decoder, tokens: Tensor, layers: Sequence[int], attend: Attend | None = None
) -> list[Tensor]:
    """Return the states [B, n, hidden] of such sequences, for layers as `DrafterNeeds.hidden_layers` counts them.

    attend: None = `CausalTexts`; `AttendToSources` for an encoder-decoder model.
    """
    found, embedded = dict[int, Tensor](), model.look_up(tokens)
    positions = torch.arange(tokens.shape[1], device=tokens.device)
    for index, x in enumerate(model.states(embedded, positions, attend or CausalTexts(), tokens=tokens)):
        if index in layers:
            found[index] = x
    found[model.num_layers + 1] = model.model.norm(x)
    return [found[layer] for layer in layers]


def attend_causally(layer: int, of: Attention, query: Tensor, key: Tensor, value: Tensor, learned: Learned) -> Tensor:
    """Let rows [B, n, heads, dim] see themselves and those before them in their sequence; see `Attend`."""
    assert not of.source, "a source has a pass of its own: AttendToSources"
    positions, window = torch.arange(query.shape[1], device=query.device), of.window
    if of.distances is None and not (window and window < len(positions)):
        return attend_masked(of, query, key, value, None, learned)
    added = _distances(of, positions, learned)
    return attend_masked(of, query, key, value, within_window(positions, positions, window), learned, added)


def attend_masked(
    of: Attention,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    mask: Tensor | None,
    learned: Learned,
    added: Tensor | None = None,
) -> Tensor:
    """Attend with queries [B, r, heads, dim] to k keys.

    mask [r, k], or one for each sequence [B, 1, r or 1, k]: which keys a row sees, None = causal attention. added
    [heads, r, k]: numbers that are added to scores, with a mask.
    """
    query, key, value = (each.transpose(1, 2) for each in (query, key, value))
    if of.softcap is None and learned.sinks is None:
        seen = mask if mask is None or added is None else added.masked_fill(~mask, -torch.inf)
        out = functional.scaled_dot_product_attention(
            query, key, value, attn_mask=seen, is_causal=mask is None, scale=of.score_scale, enable_gqa=of.groups > 1
        )
    else:
        seen = (
            torch.ones(query.shape[2], key.shape[2], dtype=torch.bool, device=query.device).tril()
            if mask is None
            else mask
        )
        hidden = torch.zeros(seen.shape, device=query.device) if added is None else added
        key, value = (each.repeat_interleave(of.groups, dim=1) for each in (key, value))
        sinks = None if learned.sinks is None else learned.sinks.view(-1, 1, 1)
        hidden = hidden.masked_fill(~seen, -torch.inf)
        out = attend(query, key, value, hidden, of.score_scale, of.softcap, sinks)
    return out.transpose(1, 2)


def _distances(of: Attention, positions: Tensor, learned: Learned) -> Tensor | None:
    """Return what distances add to the scores [heads, n, n] of rows at positions [n]; None = nothing."""
    if of.distances is None:
        return None
    return distance_scores(learned, buckets_of(of.distances, positions[:, None] - positions))


def within_window(queries: Tensor, keys: Tensor, window: int | None) -> Tensor:
    """Return which keys each row sees [r, k], by positions [r] and [k]: those up to its own, within the window."""
    distance = queries[:, None] - keys
    return distance >= 0 if window is None else (distance >= 0) & (distance < window)


class CausalTexts(Attend, WholeTexts):
    """Whole texts [B, n, ...]: see `attend_causally`."""

    @override
    def __call__(
        self, layer: int, of: Attention, query: Tensor, key: Tensor, value: Tensor, learned: Learned
    ) -> Tensor:
        return attend_causally(layer, of, query, key, value, learned)


class AttendToSources(Attend):
    """Attention of texts [B, n, ...] that are decoded from sources of the same batch."""

    def __init__(self, model: Decoder, encoded: Tensor, lengths: Tensor) -> None:
        self._keys, self._seen = list(model.source_keys(encoded)), _within(encoded, lengths)

    @override
    def __call__(
        self, layer: int, of: Attention, query: Tensor, key: Tensor, value: Tensor, learned: Learned
    ) -> Tensor:
        if not of.source:
            return attend_causally(layer, of, query, key, value, learned)
        return attend_masked(of, query, *self._keys[layer], self._seen, learned)


def encoded_sources(model: Decoder, sources: Tensor, lengths: Tensor) -> Tensor:
    """Encode sources [B, m], whose first `lengths` [B] tokens count: [B, m, hidden], after the encoder's norm."""
    embedded = model.look_up(sources)
    seen, positions = _within(embedded, lengths), torch.arange(sources.shape[1], device=sources.device)

    def attend_to_all(layer: int, of: Attention, query: Tensor, key: Tensor, value: Tensor, learned: Learned) -> Tensor:
        return attend_masked(of, query, key, value, seen, learned, _distances(of, positions, learned))

    assert model.encoder is not None, "the model has no encoder"
    encoded: Tensor = model.encoder(embedded, positions, attend_to_all)
    return encoded


def decoded_states(model: Decoder, tokens: Tensor, encoded: Tensor, lengths: Tensor) -> Tensor:
    """Run texts [B, n], which begin with a start token, through an encoder-decoder model: [B, n, hidden].

    encoded, lengths: those of their sources, see `encoded_sources`. Texts may be padded at the end with any tokens.
    """
    return states_of_layers(model, tokens, [model.num_layers + 1], AttendToSources(model, encoded, lengths))[0]


def _within(rows: Tensor, lengths: Tensor) -> Tensor:
    """Return which keys [B, 1, 1, m] are within the lengths [B] of sequences of rows [B, m, ...]."""
    places = torch.arange(rows.shape[1], device=rows.device)
    return (places < lengths[:, None])[:, None, None]
