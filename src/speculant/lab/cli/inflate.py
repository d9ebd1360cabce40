"""`speculant inflate`: gives a small model the cost of a large one, for measurements."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import fields, replace
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from speculant.cli import NamedModel, examples, messages, model_first, print_json, progress
from speculant.errors import ConfigError, suggest

if TYPE_CHECKING:
    from speculant.lab.inflation import Shape

EXAMPLES = examples(
    "speculant inflate demo 1b-target --shape 1b",
    "speculant inflate demo 50m-draft --role draft --shape 50m",
    "speculant inflate demo wide --hidden-size 1024 --layers 12",
    "speculant inflate my-eagle-head 1b-eagle --shape 1b",
)


def inflate(
    model: Annotated[
        str | None, typer.Argument(help="A model: a folder, a Hugging Face id or demo. Or the folder of a head.")
    ] = None,
    out: Annotated[str | None, typer.Argument(help="The folder to write, a new or empty one.")] = None,
    named: NamedModel = None,
    shape: Annotated[
        str | None, typer.Option(help="A shape by name: 50m, 1b or 3b. Left out: the model's own.")
    ] = None,
    role: Annotated[
        str, typer.Option(help="Which of the embedded models: target, draft, or the method of a head.")
    ] = "target",
    hidden_size: Annotated[int | None, typer.Option(help="Instead of the shape's: a multiple of the model's.")] = None,
    intermediate_size: Annotated[int | None, typer.Option(help="The rows of the MLP, instead of the shape's.")] = None,
    layers: Annotated[int | None, typer.Option(help="The number of layers, instead of the shape's.")] = None,
    noise: Annotated[
        float, typer.Option(help="Noise in the weights, in standard deviations; it lowers acceptance.")
    ] = 0.0,
    as_json: Annotated[bool, typer.Option("--json", help="Print what was written as JSON.")] = False,
) -> None:
    """Write a model of a larger shape that computes the same function.

    The result has the texts and the acceptance of the small model at the cost of the shape: it is for measurements, not
    for use. A head among the weights grows with them; a head in a folder is written for its model at the same shape.
    """
    from speculant.lab.inflation import head_kind, inflate as inflate_model, inflate_head
    from speculant.models import embedded_heads, resolve_folder

    target, place = model_first(named, model, out, needed=("model", "folder to write"))
    written, heads = Path(place), embedded_heads()
    if role not in (roles := ["target", "draft", *heads]):
        raise ConfigError(f"the role {role!r} is unknown", suggest(role, roles))
    sizes = {"hidden_size": hidden_size, "intermediate_size": intermediate_size, "num_hidden_layers": layers}
    folder = resolve_folder(target, f"heads/{role}" if role in heads else role)
    is_head = head_kind(folder) is not None
    wanted = _shape(folder, is_head, shape, {name: size for name, size in sizes.items() if size is not None})
    with progress(f"Writing {written}"):
        (inflate_head if is_head else inflate_model)(folder, written, wanted, noise)
    size = sum(file.stat().st_size for file in written.glob("*.safetensors"))
    if as_json:
        print_json({"folder": str(written), "bytes": size, "noise": noise, **_written_sizes(written)})
    else:
        messages().print(f"{written}: {size / 2**20:,.0f} MiB, the function of {target} at the cost of its shape")


def _shape(folder: Path, is_head: bool, name: str | None, sizes: Mapping[str, int]) -> Shape:
    """Return the named shape, or else the model's own, with other sizes."""
    from speculant.lab.inflation import fitting_shape, head_shape, named_shape, shape_of
    from speculant.models import read_model_config

    if is_head and "num_hidden_layers" in sizes:
        raise ConfigError("a head keeps its number of layers", "leave out --layers.")
    small, head_dim = head_shape(folder) if is_head else shape_of(folder)
    if name is None and not sizes:
        raise ConfigError("no shape was named", "add --shape 1b, or sizes such as --layers 24.")
    if name is None:
        return replace(small, **sizes)
    shape = replace(named_shape(name, head_dim), **sizes)
    return shape if is_head else fitting_shape(read_model_config(folder), shape)


def _written_sizes(folder: Path) -> dict[str, int]:
    """Return the sizes that config.json has, with those of a head's blocks."""
    from speculant.files import read_json
    from speculant.lab.inflation import Shape

    config = read_json(folder / "config.json")
    names = [*(field.name for field in fields(Shape)), "inner_size"]
    return {name: config[name] for name in names if name in config}
