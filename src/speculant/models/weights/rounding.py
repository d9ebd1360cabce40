"""The types that weights are rounded to, by the role of a matrix.

Least squares choose the scales (csrc/rounding.h). int4 keeps more bits where errors cost most: in the
embedding, the head and the values, and in matrices whose results are added to the residual stream. Rows whose length is
not a multiple of 256 have types with blocks of 32, which have more bits.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field

from speculant.kernels import BLOCK_SIZES, Type

ROUNDED = (
    Type.Q8_0, Type.Q4_0, Type.Q5_0, Type.Q5_1, Type.Q4_K, Type.Q5_K, Type.Q6_K, Type.ZERO4, Type.ZERO8,
)  # fmt: skip
"""The types that csrc/rounding.h rounds to."""
_UNDIVIDED = {Type.Q4_K: Type.Q5_0, Type.Q5_K: Type.Q5_1, Type.Q6_K: Type.Q8_0}


@dataclass(frozen=True)
class Rounding:
    """The type of most matrices, and those of matrices with a certain part in their name."""

    most: Type
    roles: Mapping[str, Type] = field(default_factory=dict)

    def type_of(self, name: str, k: int) -> Type:
        """Return the type of a matrix [n, k]. name: as in `tensor_shapes`; "" = a matrix without a role."""
        type_ = next((type_ for part, type_ in self.roles.items() if part in name.split(".")), self.most)
        return type_ if k % BLOCK_SIZES[type_][0] == 0 else _UNDIVIDED.get(type_, type_)


ROUNDINGS: Mapping[str, Rounding] = {
    "int8": Rounding(Type.Q8_0),
    "int4": Rounding(
        Type.Q4_K,
        {
            **dict.fromkeys(("embed_tokens", "lm_head", "v_proj"), Type.Q6_K),
            **dict.fromkeys(("o_proj", "down_proj"), Type.Q5_K),
        },
    ),
}
