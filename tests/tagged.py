"""Tokenizers and checkpoints whose tags are added tokens, and random texts of a form in their tokens."""

from __future__ import annotations

import random
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

from tokenizers import AddedToken, Tokenizer as Backend, decoders, models, pre_tokenizers

from speculant.text import Tokenizer
from tests.automata import allowed
from tests.models import ALPHABET, Shape, write_checkpoint

HARMONY = ("<|channel|>", "<|constrain|>", "<|message|>", "<|start|>", "<|end|>", "<|call|>", "<|return|>")
HARMONY_TEMPLATE = """
{%- for m in messages %}<|start|>{% if m.tool_calls %}{% set f = m.tool_calls[0].function %}assistant to=functions.
{{- f.name }}<|channel|>commentary json<|message|>{{ f.arguments | tojson }}<|call|>
{%- elif m.role == 'assistant' %}assistant<|channel|>
{%- if m.thinking %}analysis<|message|>{{ m.thinking }}<|end|><|start|>assistant<|channel|>{% endif -%}
final<|message|>{{ m.content }}<|return|>{% else %}{{ m.role }}<|message|>{{ m.content }}<|end|>{% endif %}
{%- endfor %}
{%- if add_generation_prompt %}<|start|>assistant{% endif %}"""
CALLS_TEMPLATE = """{%- if tools %}<tool_call>{{ tools | tojson }}</tool_call>{% endif -%}
{%- for message in messages %}{{ '[' + message.role + ']' }}
{%- if message.reasoning_content %}{{ '<think>' + message.reasoning_content + '</think>' }}{% endif %}
{{- message.content }}
{%- for call in message.tool_calls or [] %}{{ '<tool_call>' + (call.function | tojson) + '</tool_call>' }}{% endfor %}
{{- '[end]' }}{% endfor -%}
{%- if add_generation_prompt %}{{ '[assistant]' }}{% if enable_thinking %}<think>{% endif %}{% endif %}{# </think> #}"""
TAGS = (
    *HARMONY,
    "<tool_call>",
    "</tool_call>",
    "<think>",
    "</think>",
    "[TOOL_CALLS]",
    "[ARGS]",
    "<|python_tag|>",
    "two words",
    *("<arg_key>", "</arg_key>", "<arg_value>", "</arg_value>"),  # GLM's
    *("<minimax:tool_call>", "</minimax:tool_call>", "\uff5cDSML\uff5c"),
    *("<|tool_call|>", "<|/tool_call|>", "<|tool_call>", "<tool_call|>", '<|"|>'),  # Phi's, Gemma's
    *("<|tool_call_start|>", "<|tool_call_end|>"),
    *("<|tool_calls_section_begin|>", "<|tool_call_begin|>", "<|tool_call_argument_begin|>", "<|tool_call_end|>"),
)
_LONG = Shape(max_positions=1024)
MERGES = [("<", "t"), ("o", "o"), ("oo", "l"), ("<t", "ool"), ("p", "l"), ("{", '"'), ('"', "}"), ("}", "}")]


def tokenizer_with_tags(special: bool, template: str | None = None) -> Tokenizer:
    """Return a byte-level tokenizer whose tags are added tokens, as Qwen's are (not special) or Mistral's (special)."""
    vocab = {token: i for i, token in enumerate([*ALPHABET, *("".join(pair) for pair in MERGES)])}
    backend = Backend(models.BPE(vocab=vocab, merges=MERGES))
    backend.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    backend.decoder = decoders.ByteLevel()
    backend.add_special_tokens(["<end>"])
    backend.add_tokens([AddedToken(tag, special=special, normalized=False) for tag in TAGS])
    return Tokenizer(backend, {"eos_token": "<end>"}, template)


def write_tagged(
    folder: Path, template: str, tags: Sequence[str] = (), shape: Shape = _LONG, special: bool = False
) -> str:
    """Write a checkpoint with a chat template, whose tokenizer has tags as tokens; return its folder as text."""
    path, file = write_checkpoint(folder, shape), str(folder / "tokenizer.json")
    backend = Backend.from_file(file)
    backend.add_tokens([AddedToken(tag, special=special, normalized=False) for tag in tags])
    backend.save(file)
    (folder / "chat_template.jinja").write_text(template, encoding="utf-8")
    return path


def write(
    constraint: Any,
    tokenizer: Tokenizer,
    rng: random.Random,
    choose: Callable[[list[int]], int] | None = None,
    most: int = 400,
) -> list[int]:
    """Return up to `most` tokens of a random text of a form, in which forced tokens are the only ones allowed.

    choose: picks one of the allowed tokens; None = any.
    """
    written: list[int] = []
    end, size = tokenizer.eos_id, tokenizer.vocab_size
    while not constraint.is_done and len(written) < most:
        forced = constraint.forced()
        for place, token in enumerate(forced):
            assert allowed(constraint.mask(forced[:place]), size) == [token]
        token = forced[0] if forced else (choose or rng.choice)(allowed(constraint.mask(()), size))
        constraint.advance([token])
        if token == end:
            break
        written.append(token)
    return written
