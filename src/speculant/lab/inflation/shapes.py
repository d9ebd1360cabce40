"""Sizes of models, some of them by name."""

from __future__ import annotations

from dataclasses import asdict, dataclass

from speculant.errors import ConfigError, suggest


@dataclass(frozen=True)
class Shape:
    """The sizes of a model that may grow; the vocabulary and the heads' dimension stay.

    Raises ConfigError for sizes that no model has.
    """

    hidden_size: int
    intermediate_size: int
    num_hidden_layers: int
    num_attention_heads: int
    num_key_value_heads: int

    def __post_init__(self) -> None:
        for name, size in asdict(self).items():
            if size < 1:
                raise ConfigError(f"the shape has {name} = {size}, not a positive number", f"choose another {name}.")
        if self.num_attention_heads % self.num_key_value_heads:
            raise ConfigError(
                f"the shape has {self.num_attention_heads} attention heads, not a multiple of"
                f" {self.num_key_value_heads} key heads",
                "choose a number of attention heads that the key heads divide.",
            )

    @property
    def group_size(self) -> int:
        """The attention heads that share a key head."""
        return self.num_attention_heads // self.num_key_value_heads


# hidden size, intermediate size, layers, attention heads per key head
SHAPES = {"50m": (512, 2048, 8, 4), "1b": (2048, 8192, 16, 4), "3b": (3072, 8192, 28, 3)}


def named_shape(name: str, head_dim: int) -> Shape:
    """Return the shape of this name, whose heads of `head_dim` dimensions make up the hidden size.

    Raises ConfigError for an unknown name, and for heads that do not divide the shape.
    """
    if name not in SHAPES:
        raise ConfigError(f"the shape {name!r} is unknown", suggest(name, SHAPES))
    hidden, intermediate, layers, group = SHAPES[name]
    if head_dim < 1 or hidden % (head_dim * group):
        raise ConfigError(
            f"the hidden size {hidden} of the shape {name!r} is not a whole number of groups of {group} heads of"
            f" {head_dim} dimensions",
            "give a Shape of your own.",
        )
    return Shape(hidden, intermediate, layers, hidden // head_dim, hidden // head_dim // group)
