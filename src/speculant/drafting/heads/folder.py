"""The folder of a head: config.json and a file of safetensors, checked against the target before anything is read."""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from torch import Tensor

from speculant.errors import ConfigError, ModelError, PairError
from speculant.files import read_json
from speculant.models.base import CausalLM
from speculant.models.fields import show
from speculant.models.source import resolve_source
from speculant.models.tensors import TensorFiles

KIND = "speculant_head"  # our own key of config.json: the method that a head is made for
_PICKLES = ("*.pt", "*.bin", "*.pth", "*.ckpt")
_SHOWN = 6
_OTHER = "use a head that was trained for this target: `speculant train head --target ...` makes one."
_TYPES = ("F64", "F32", "BF16", "F16")


@dataclass(frozen=True)
class HeadFolder:
    """An open folder: a `WeightSource` with the names that the file has."""

    folder: Path
    config: dict[str, Any]
    files: TensorFiles

    @classmethod
    def open(cls, source: str, kind: str) -> HeadFolder:
        """Open a head by folder, hub id or "demo"; `kind` is the method that it has to be made for.

        Raises ModelError for a folder without safetensors, PairError for one that says that it is of another kind.
        """
        folder = resolve_source(source, f"heads/{kind}")
        config = read_json(folder / "config.json")
        own = config.get(KIND, kind)
        if own != kind:
            raise PairError(
                f"{folder} is a head of the kind {own!r} and the method is {kind!r}", f'use "method": "{own}".'
            )
        return cls(folder, config, TensorFiles.of_file(_weights_of(folder)))

    def names(self) -> Collection[str]:
        """See `WeightSource.names`."""
        return self.files.entries.keys()

    def shape(self, name: str) -> tuple[int, ...]:
        """See `WeightSource.shape`."""
        return self.files.shape(name)

    def read(self, name: str) -> Tensor:
        """See `WeightSource.read`."""
        return self.files.read(name)

    def check_size(self, found: object, expected: int, what: str) -> None:
        """Compare a number of config.json with the target's; None = it has none. Raises PairError."""
        if found is not None and found != expected:
            raise PairError(
                f"the head in {self.folder} was made for {what} {show(found)}, and the target has {expected}", _OTHER
            )


@dataclass(frozen=True)
class Renamed:
    """A `WeightSource` whose tensors have the names that a model asks for: `stored` maps these to the file's."""

    source: HeadFolder
    stored: Mapping[str, str]

    def names(self) -> Collection[str]:
        """See `WeightSource.names`."""
        return self.stored.keys()

    def shape(self, name: str) -> tuple[int, ...]:
        """See `WeightSource.shape`."""
        return self.source.shape(self.stored[name])

    def read(self, name: str) -> Tensor:
        """See `WeightSource.read`."""
        return self.source.read(self.stored[name])

    def check(self, wanted: Mapping[str, tuple[int, ...]], kind: str) -> None:
        """Compare names and shapes with those of a head of this kind for this target.

        Raises ModelError for other names, PairError for other shapes, each with what was found and expected.
        """
        missing, unexpected = sorted(wanted.keys() - self.stored.keys()), sorted(self.stored.keys() - wanted.keys())
        if missing or unexpected:
            found = [f"{len(names)} {what} ({_listed(names)})" for names, what in ((missing, "missing"),
                     (unexpected, "unexpected")) if names]  # fmt: skip
            raise ModelError(
                f"the tensors in {self.source.folder} are not those of a {kind!r} head: {' and '.join(found)}",
                "name the method that the head was trained for, or download it again.",
            )
        kinds = sorted({self.source.files.entries[name].kind for name in self.stored.values()} - {*_TYPES})
        if kinds:
            raise ModelError(
                f"{self.source.folder} has weights of the type {_listed(kinds)}", f"store them as {_listed(_TYPES)}."
            )
        wrong = [
            f"{self.stored[name]} is {list(self.shape(name))} and must be {list(shape)}"
            for name, shape in sorted(wanted.items())
            if self.shape(name) != shape
        ]
        if wrong:
            raise PairError(
                f"the head in {self.source.folder} does not fit the target: {'; '.join(wrong[:_SHOWN])}",
                _OTHER,
            )


def require_target(target: CausalLM | None) -> CausalLM:
    """Return the target; raises ConfigError where a drafter is made without one."""
    if target is None:
        raise ConfigError("this method drafts from the target's hidden states, and there is no target", "name another.")
    return target


def _weights_of(folder: Path) -> Path:
    found = sorted(folder.glob("*.safetensors"))
    usual = [path for path in found if path.name == "model.safetensors"]
    if len(usual or found) == 1:
        return (usual or found)[0]
    if found:
        raise ModelError(
            f"{folder} has {len(found)} safetensors files ({_listed([path.name for path in found])})",
            "keep the head's weights in one file, model.safetensors.",
        )
    pickles = [path.name for pattern in _PICKLES for path in sorted(folder.glob(pattern))]
    if not pickles:
        raise ModelError(f"{folder} has no *.safetensors file", "name the folder of a head, or download it again.")
    converted = pickles[0].rpartition(".")[0] + ".safetensors"
    raise ModelError(
        f"{folder} has only pickle weights ({_listed(pickles)}), which can run code when they are opened",
        'if you trust them, convert them once: python -c "import torch; from safetensors.torch import save_file; '
        f"weights = torch.load('{pickles[0]}', map_location='cpu', weights_only=True); "
        f"save_file({{name: w.contiguous() for name, w in weights.items()}}, '{converted}')\"",
    )


def _listed(names: Sequence[str]) -> str:
    more = f", and {len(names) - _SHOWN} more" if len(names) > _SHOWN else ""
    return ", ".join(names[:_SHOWN]) + more
