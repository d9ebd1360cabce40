"""Programs of the native kernels are refused if an operation could use memory beyond its arrays."""

from __future__ import annotations

import ctypes
from array import array
from collections.abc import Iterator

import pytest
import torch

from speculant.errors import ModelError
from speculant.kernels import Bounds, Code, Op, Sizes
from speculant.models import DecoderConfig, EncoderProgram, Experts, NativeDecoder, Program
from speculant.models.families import gemma4_text
from tests.contracts.test_native_descriptions import make_models, random_description
from tests.contracts.test_native_state_models import describe as random_states
from tests.descriptions import BART, SHARED, describe, describe_pair
from tests.native import SETS, needs_kernels
from tests.unit.models.families import SMALL, VARIANTS

pytestmark = needs_kernels
EXACT = {"weight", "scale", "bias", "key_scale", "key_bias", "sinks", "order", "distances"}  # others may have gaps
DESCRIPTIONS = {
    "random": random_description(3),
    "other": random_description(8),
    "experts": describe(experts=Experts(4, 2, 24, bias=True)),
    "shared": describe(experts=SHARED),
    "pair": describe_pair(),
    "bart": describe_pair(**BART),
    "states": random_states(7),
    "other states": random_states(0),
    "inputs": gemma4_text.read_config({**SMALL, **VARIANTS["gemma4_text"]["plain"]}),
}


def native(config: DecoderConfig) -> NativeDecoder:
    return make_models(config, SETS[0])[1]


def programs(model: NativeDecoder) -> Iterator[tuple[Program, Op | None]]:
    yield model.program, model._head
    if model.config.encoder:
        yield EncoderProgram(model.packed, model._buffers), None


def check(model: NativeDecoder, ops: ctypes.Array[Op], head: Op | None) -> None:
    program = object.__new__(Program)
    program.ops = ops
    model._checked(program, head)


@pytest.mark.parametrize("name", DESCRIPTIONS)
def test_a_program_with_any_shorter_array_is_refused(name: str) -> None:
    """Of every operation, each array in turn has nothing, or one number too few."""
    model, seen = native(DESCRIPTIONS[name]), set[int]()
    for program, head in programs(model):
        check(model, program.ops, head)
        for index, op in enumerate(program.ops):
            seen.add(op.code)
            for field, *_ in Sizes._fields_:
                has = getattr(op.has, field)
                for fewer in {0, has - 1} if field in EXACT else {0}:
                    if not has or (op.code == Code.EXPERTS and field == "weight" and fewer):
                        continue
                    setattr(op.has, field, fewer)
                    with pytest.raises(ModelError, match=f"operation {index}, {Code(op.code).name}"):
                        check(model, program.ops, head)
                setattr(op.has, field, has)
        check(model, program.ops, head)
    assert {Code.EMBED, Code.LINEAR, Code.ROTATE, Code.ATTEND} <= seen


@pytest.mark.parametrize("field", ["n", "k", "layer", "group", "rope", "rotated", "dim", "kv_heads", "heads", "used"])
@pytest.mark.parametrize("name", ["random", "experts", "shared", "inputs", "states"])
def test_a_program_with_a_larger_size_is_refused(name: str, field: str) -> None:
    model = native(DESCRIPTIONS[name])
    changed = 0
    for op in model.program.ops:
        ungrouped = field == "group" and op.code in (Code.CONVOLVE, Code.RECUR)
        if ungrouped or not (op.kv_heads if field in ("layer", "group") else getattr(op, field)):
            continue  # the operation does not read it
        known = getattr(op, field)
        setattr(op, field, known + 1000)
        with pytest.raises(ModelError, match="do not fit together"):
            check(model, model.program.ops, model._head)
        setattr(op, field, known)
        changed += 1
    assert changed or field in ("rope", "rotated", "used")


def test_a_table_of_angles_of_another_width_is_refused() -> None:
    """As if two layers whose heads differ shared a table."""
    model = native(DESCRIPTIONS["inputs"])
    assert [*model._angles.widths] == [4, 8]
    model._angles.widths = array("q", [4, 4])
    with pytest.raises(ModelError, match="ROTATE, of the native kernels would have a table of angles of another width"):
        model.program  # noqa: B018


@pytest.mark.parametrize("tokens", [(1, 2, 95), (-1, 2, 3), (1, 2, 96)])
def test_the_tokens_of_a_short_head_are_those_of_the_model(tokens: tuple[int, ...]) -> None:
    model = native(describe(head_tokens=(1, 2, 3)))
    model._head_tokens = torch.tensor(tokens)
    if tokens[-1] == 95:
        assert model.program
    else:
        with pytest.raises(ModelError, match="a token that the model does not have"):
            model.program  # noqa: B018
    model._programs.clear()
    model._head_tokens = torch.tensor([1, 2])
    with pytest.raises(ModelError, match="a head with other rows than tokens"):
        model.program  # noqa: B018


def test_more_rows_than_the_buffers_have_are_refused() -> None:
    model = native(DESCRIPTIONS["inputs"])
    program = model.program
    bounds = Bounds(rows=model._buffers.room + 1, tokens=model.vocab_size)
    with pytest.raises(ModelError, match="operation 0, EMBED, of the native kernels would have a smaller output"):
        model.kernels.check(program.ops, bounds)
