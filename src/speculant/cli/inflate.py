"""`speculant inflate`: gives a small model the cost of a large one, for measurements."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import asdict, replace
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from speculant.cli.terminal import examples, messages, print_json, progress
from speculant.errors import ConfigError, suggest

if TYPE_CHECKING:
    from speculant.bench.model_shapes import Shape

EXAMPLES = examples(
    "speculant inflate demo 1b-target --shape 1b",
    "speculant inflate demo 50m-draft --role draft --shape 50m",
    "speculant inflate demo wide --hidden-size 1024 --layers 12",
)
ROLES = ("target", "draft")


def inflate(
    model: Annotated[str, typer.Argument(help="A Llama model: a folder, a Hugging Face id or demo.")],
    out: Annotated[Path, typer.Argument(help="The folder to write, a new or empty one.")],
    shape: Annotated[
        str | None, typer.Option(help="A shape by name: 50m, 1b or 3b. Left out: the model's own.")
    ] = None,
    role: Annotated[str, typer.Option(help="Which model of the pair demo: target or draft.")] = "target",
    hidden_size: Annotated[int | None, typer.Option(help="In place of the shape's: a multiple of the model's.")] = None,
    intermediate_size: Annotated[int | None, typer.Option(help="The rows of the MLP, in place of the shape's.")] = None,
    layers: Annotated[int | None, typer.Option(help="The layers, in place of the shape's.")] = None,
    noise: Annotated[
        float, typer.Option(help="Noise in the weights, in standard deviations: lowers acceptance.")
    ] = 0.0,
    as_json: Annotated[bool, typer.Option("--json", help="Print what was written as JSON.")] = False,
) -> None:
    """Write a model of a larger shape that computes the same function.

    Its text and acceptance are the small model's, its cost is that of the shape: for measurements, not for use. The
    folder's README.md says so too.
    """
    from speculant.bench.inflation import inflate as write
    from speculant.models.source import resolve_source

    if role not in ROLES:
        raise ConfigError(f"the role {role!r} is unknown", suggest(role, ROLES))
    sizes = {"hidden_size": hidden_size, "intermediate_size": intermediate_size, "num_hidden_layers": layers}
    folder = resolve_source(model, role)
    wanted = _shape(folder, shape, {name: size for name, size in sizes.items() if size is not None})
    with progress(f"Writing {out}"):
        write(folder, out, wanted, noise)
    size = sum(file.stat().st_size for file in out.glob("*.safetensors"))
    if as_json:
        print_json({"folder": str(out), "bytes": size, "noise": noise, **asdict(wanted)})
    else:
        messages().print(f"{out}: {size / 2**20:,.0f} MiB, the function of {model} at the cost of its shape")


def _shape(folder: Path, name: str | None, sizes: Mapping[str, int]) -> Shape:
    """Return the named shape, or else the model's own, with other sizes."""
    from speculant.bench.inflation import shape_of
    from speculant.bench.model_shapes import named_shape

    small, head_dim = shape_of(folder)
    if name is None and not sizes:
        raise ConfigError("no shape was named", "add --shape 1b, or sizes such as --layers 24.")
    return replace(small if name is None else named_shape(name, head_dim), **sizes)
