"""The roles of a head's tensors, as data for code that works on heads of any kind."""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from enum import Enum

from speculant import plugins
from speculant.drafting.heads.folder import HeadFolder
from speculant.drafting.methods import KIND


class Role(Enum):
    """The sides of a tensor: hidden = the width of a state, n = attention heads or rows of an MLP, V = a vocabulary."""

    STATE = "[hidden], a bias or the scales of a norm"
    TABLE = "[V, hidden], its rows take a state's place"
    OUTPUT = "[V, hidden], reads a state"
    BETWEEN = "[hidden, streams * hidden], reads states and writes one"
    READER = "[n, streams * hidden], reads states"
    READER_BIAS = "[n]"
    WRITER = "[hidden, n], writes a state"
    HEADS = "[n] or [dimensions of a head], scales of queries or keys"
    TOKENS = "[V], ids"


@dataclass(frozen=True)
class Part:
    """A tensor's role; `streams` states lie side by side in its columns."""

    role: Role
    streams: int = 1


@dataclass(frozen=True, eq=False)
class HeadParts:
    """The tensors of a kind of head, in the drafter's module under the name HEAD.

    parts: by patterns of names, of which the first that matches counts; the first of all reads the target's states.
    rename: from a file's name to that name; None = the tensor is one of the target's. check: raises ModelError for a
    head whose config.json does not name the layers that it reads, which then depend on the target's number of layers.
    """

    parts: Mapping[str, Part]
    rename: Callable[[str], str | None] = str
    check: Callable[[HeadFolder], None] | None = None

    def part(self, name: str) -> Part | None:
        """Return the part that a model's name has; None = it has none."""
        return next((part for pattern, part in self.parts.items() if re.fullmatch(pattern, name)), None)


def head_parts(method: str) -> HeadParts | None:
    """Return the parts of the heads that a method drafts with; None = it has none. Raises ConfigError if unknown."""
    parts: HeadParts | None = getattr(plugins.load(KIND, method), "HEAD", None)
    return parts


LAYER_PARTS = {
    r"layers\.\d+\.(input|post_attention)_layernorm\.weight": Part(Role.STATE),
    r"layers\.\d+\.(self_attn\.[qkv]|mlp\.gate|mlp\.up)_proj\.weight": Part(Role.READER),
    r"layers\.\d+\.(self_attn\.o|mlp\.down)_proj\.weight": Part(Role.WRITER),
}
