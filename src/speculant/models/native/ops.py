"""The operations of native programs. Their caller must keep the tensors and weights alive."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from torch import Tensor

from speculant.kernels import Activation, Code, Flag, Op, Sizes, Type, Weight


def embedding(
    table: Weight, out: Tensor, factor: float = 1.0, learned: Tensor | None = None, flags: Flag = Flag.NONE
) -> Op:
    """Return the operation that looks tokens up in a table packed from [vocabulary, hidden].

    learned: rows [positions, hidden] that are added by position. With the flag TOKENS, rows with input embeddings of
    their own are looked up too.
    """
    return make_op(
        Code.EMBED, table.type, n=table.k, k=table.n, weight=table, out=out, factor=factor, learned=learned, flags=flags
    )  # fmt: skip


def copying(source: Tensor, out: Tensor, factor: float = 1.0) -> Op:
    """Return the operation out = factor * source, of the same width."""
    return make_op(Code.COPY, n=source.shape[1], source=source, out=out, factor=factor)


def gating(source: Tensor, out: Tensor, n: int, activation: Activation) -> Op:
    """Return the operation out = activation(source) * out, of rows of n numbers."""
    return make_op(Code.GATE, n=n, source=source, out=out, activation=activation)


def linear(
    weight: Weight, source: Tensor | None, out: Tensor | None, bias: Tensor | None = None, flags: Flag = Flag.NONE,
    *, activation: Activation = Activation.NONE, factor: float = 1.0, softcap: float | None = None,
) -> Op:  # fmt: skip
    """Return the operation out (+)= activation(factor * (source weight^T + bias)), limited by a soft cap if given.

    With the flag GATED the operation is out = activation(gate) * up instead, from the same source, without factor and
    soft cap.
    """
    return make_op(
        Code.LINEAR, weight.type, n=weight.n, k=weight.k, weight=weight, source=source, out=out, bias=bias,
        flags=flags, activation=activation, factor=factor, softcap=softcap, order=weight.order,
    )  # fmt: skip


def linears(
    weights: Sequence[Weight], source: Tensor, out: Tensor, bias: Tensor | None = None, flags: Flag = Flag.NONE
) -> Iterator[Op]:
    """Yield the operations of a matrix that consists of these weights, by rows; each writes its own columns."""
    first = 0
    for weight in weights:
        op = linear(weight, source, out[:, first:], None if bias is None else bias[first:], flags)
        op.stride = out.stride(0)
        yield op
        first += weight.n


def make_op(code: Code, type_: Type = Type.F32, **fields: Tensor | Weight | float | None) -> Op:
    """Return an operation; None = a field is not set. It does not keep tensors and weights alive."""
    values = {name: _address(value) for name, value in fields.items() if value is not None}
    arrays = {name: value for name, value in fields.items() if isinstance(value, Tensor | Weight)}
    return Op(code=code, type=type_, has=Sizes(**{name: _extent(value) for name, value in arrays.items()}), **values)


def _extent(array: Tensor | Weight) -> int:
    """Return the bytes of a weight, or the number of a tensor's items from the first to the last, gaps included."""
    if isinstance(array, Weight):
        return array.memory.numel()
    gaps = zip(array.shape, array.stride(), strict=True)
    return 1 + sum((size - 1) * stride for size, stride in gaps) if array.numel() else 0


def _address(value: Tensor | Weight | float) -> float:
    if isinstance(value, Tensor):
        return value.data_ptr()
    return value.address if isinstance(value, Weight) else value
