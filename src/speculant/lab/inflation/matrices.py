"""Matrices of a small model at a larger shape, in which the residual stream is the small one repeated.

stream   | x | x | x |    its norms, of either kind, repeat as well with the same epsilon
readers  |W/2|W/2| 0 |    the quotient is a power of two, so that no bit is lost
writers  | W | W | W |    as rows

The small model's heads and rows come first. The others hold random weights, which are read and multiplied as usual, and
their results meet zeros. Where one norm is of all heads together, further heads repeat the queries and keys of the
small model's, so that the norm stays the same.
"""

from __future__ import annotations

import math
from collections.abc import Collection
from dataclasses import dataclass, field

import torch
from torch import Tensor

from speculant.drafting.heads.folder import Part, Role
from speculant.errors import ConfigError, ModelError
from speculant.lab.inflation.shapes import Shape
from speculant.models.weights.source import WeightSource, read_plain

_SEED, _NOISE_SEED, _SCALE = 0, 1, 0.02  # of the random weights, and of noise


class NoisyFiles:
    """Tensors of floating-point numbers; matrices get normal noise of `noise` times their standard deviation.

    Raises ConfigError for a negative or infinite noise.
    """

    def __init__(self, files: WeightSource, noise: float) -> None:
        if not 0 <= noise < math.inf:
            raise ConfigError(f"noise={noise} is not a share of a standard deviation", "use 0 or more; 0.1 is much.")
        self._files, self._noise = files, noise
        self._generator = torch.Generator().manual_seed(_NOISE_SEED)

    def names(self) -> Collection[str]:
        """Return the names of all tensors."""
        return self._files.names()

    def read(self, name: str) -> Tensor:
        """Read a tensor, each time with new noise."""
        stored = read_plain(self._files, name)
        if not self._noise or stored.ndim < 2:
            return stored
        drawn = torch.randn(stored.shape, generator=self._generator)
        return (stored.float() + self._noise * stored.float().std() * drawn).to(stored.dtype)


@dataclass(frozen=True)
class Enlargement:
    """From a small shape to a larger one; the heads' dimension stays. Random weights are of the type `dtype`.

    normed_together: whether one norm is of all query heads, and one of all key heads.
    Raises ConfigError if a part of the small shape has no place in the large one.
    """

    small: Shape
    large: Shape
    head_dim: int
    dtype: torch.dtype
    normed_together: bool = False
    _generator: torch.Generator = field(default_factory=lambda: torch.Generator().manual_seed(_SEED))

    def __post_init__(self) -> None:
        names = ("intermediate_size", "num_hidden_layers", "num_key_value_heads", "group_size")
        pairs = [(name, getattr(self.large, name), getattr(self.small, name)) for name in names]
        problems = [f"{name} {size} is below the model's {least}" for name, size, least in pairs if size < least]
        wide, narrow = self.large.hidden_size, self.small.hidden_size
        if wide % narrow:
            problems.insert(0, f"hidden_size {wide} is not a multiple of the model's {narrow}")
        if problems:
            raise ConfigError(
                f"the shape does not hold the model: {', '.join(problems)}",
                "choose a multiple of the hidden size, and no other size below the model's (group_size ="
                " num_attention_heads / num_key_value_heads).",
            )
        self._check_heads()

    def _check_heads(self) -> None:
        sizes = (self.large.num_key_value_heads, self.small.num_key_value_heads), (
            self.large.group_size, self.small.group_size
        )  # fmt: skip
        if self.normed_together and any(wide % narrow for wide, narrow in sizes):
            raise ConfigError(
                "the model normalises all heads together, and the shape's heads are not a multiple of the model's",
                "choose a num_key_value_heads, and a group_size = num_attention_heads / num_key_value_heads, that are"
                " multiples of the model's.",
            )

    @property
    def copies(self) -> int:
        """The number of copies of the small stream in the large one."""
        return self.large.hidden_size // self.small.hidden_size

    def written(self, tensor: Tensor) -> Tensor:
        """Repeat rows [hidden, ...] that are added to the stream, or scale it."""
        return tensor.repeat(self.copies, *[1] * (tensor.ndim - 1))

    def table(self, rows: Tensor) -> Tensor:
        """Repeat vectors [n, hidden] that are put into the stream."""
        return rows.repeat(1, self.copies)

    def reading(self, matrix: Tensor, name: str, streams: int = 1) -> Tensor:
        """Spread a matrix [n, streams * hidden] that reads one stream or several. Raises ModelError if that rounds."""
        return torch.cat([_spread(part, self.copies, name) for part in matrix.chunk(streams, dim=1)], dim=1)

    def grown(self, part: Part, tensor: Tensor, name: str) -> Tensor:
        """Return the tensor of this part and name at the large shape. Raises ModelError if that rounds."""
        match part.role:
            case Role.STATE:
                return torch.cat([self.written(state) for state in tensor.chunk(part.streams)])
            case Role.TABLE:
                return self.table(tensor)
            case Role.OUTPUT:
                return self.reading(tensor, name)
            case Role.BETWEEN:
                return self.written(self.reading(tensor, name, part.streams))
            case Role.READER:
                return self.reader(tensor, name, part.streams)
            case Role.READER_BIAS:
                return self.read_bias(tensor, name)
            case Role.WRITER:
                return self.writer(tensor, name)
            case Role.HEADS:
                return self._repeated(tensor, name) if self._repeats(name) else tensor
            case Role.TOKENS:
                return tensor

    def reader(self, matrix: Tensor, name: str, streams: int = 1) -> Tensor:
        """Put a layer's matrix [n, streams * hidden] that reads the stream before random rows; see `reading`."""
        if self._repeats(name):
            return self._repeated(self.reading(matrix, name, streams), name)
        made, rows, places = self.random_reader(name, streams), self._units(name, self.small), self._places(name)
        made.view(*places, -1)[: rows[0], : rows[1]] = self.reading(matrix, name, streams).view(*rows, -1)
        return made

    def read_bias(self, bias: Tensor, name: str) -> Tensor:
        """Put the bias [n] of such a matrix before zeros."""
        if self._repeats(name):
            return self._repeated(bias, name)
        rows, places = self._units(name, self.small), self._places(name)
        made = torch.zeros(math.prod(places), dtype=bias.dtype)
        made.view(places)[: rows[0], : rows[1]] = bias.view(rows)
        return made

    def writer(self, matrix: Tensor, name: str) -> Tensor:
        """Put a layer's matrix [hidden, n] that writes the stream before columns of zeros."""
        made, columns, places = self.empty_writer(name), self._units(name, self.small), self._places(name)
        made.view(-1, *places)[:, : columns[0], : columns[1]] = self.written(matrix).view(-1, *columns)
        return made

    def random_reader(self, name: str, streams: int = 1) -> Tensor:
        """Make the matrix of this name with random rows alone."""
        size = math.prod(self._places(name)), streams * self.large.hidden_size
        return torch.empty(size, dtype=self.dtype).normal_(0, _SCALE, generator=self._generator)

    def empty_writer(self, name: str) -> Tensor:
        """Make the matrix of this name with zeros alone."""
        return torch.zeros(self.large.hidden_size, math.prod(self._places(name)), dtype=self.dtype)

    def _places(self, name: str) -> tuple[int, int, int]:
        return self._units(name, self.large)

    def _units(self, name: str, shape: Shape) -> tuple[int, int, int]:
        """Return the side of a matrix that is not the stream's: its groups, the heads of each, a head's dimensions."""
        if "self_attn." not in name:
            return shape.intermediate_size, 1, 1
        per_group = 1 if any(part in name for part in ("k_proj", "v_proj", "k_norm")) else shape.group_size
        return shape.num_key_value_heads, per_group, 1 if "sinks" in name else self.head_dim

    def _repeats(self, name: str) -> bool:
        """Whether further heads repeat those of the small model in the tensor of this name."""
        return self.normed_together and any(part in name for part in ("q_proj", "k_proj", "q_norm", "k_norm"))

    def _repeated(self, tensor: Tensor, name: str) -> Tensor:
        """Repeat the heads of a tensor [n, ...]."""
        rows, places = self._units(name, self.small), self._places(name)
        times = [wide // narrow for wide, narrow in zip(places, rows, strict=True)]
        made = tensor.view(*rows, -1).repeat(*times, 1)
        return made.view(math.prod(places), *tensor.shape[1:])


def _spread(matrix: Tensor, copies: int, name: str) -> Tensor:
    """Spread a matrix [n, hidden] that reads the stream over its copies. Raises ModelError if that would round."""
    used = 1 << (copies.bit_length() - 1)  # the largest power of two that is not above `copies`
    part = matrix / used
    if not torch.equal(part * used, matrix):
        raise ModelError(
            f"{name} holds numbers that {matrix.dtype} can't hold divided by {used}, so that the function would change",
            "convert the checkpoint to float32, which holds smaller numbers.",
        )
    return torch.cat([*[part] * used, *[torch.zeros_like(part)] * (copies - used)], dim=1)
