"""The files of a head: a folder with config.json and safetensors, or a GGUF file with its model.

They are checked against the target before anything is read.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass, field
from enum import Enum
from functools import cached_property
from pathlib import Path
from typing import Any

from torch import Tensor
from typing_extensions import override

from speculant import plugins
from speculant.drafting.methods import KIND as DRAFTERS, REFUSED, WITH_BLOCKS, WITH_MASKS, method_within
from speculant.errors import ConfigError, ModelError, PairError
from speculant.files import read_json
from speculant.gguf_file import is_gguf
from speculant.models import (
    FLOATS,
    CausalLM,
    Mapped,
    WeightSource,
    decodable,
    is_whole,
    kind_of,
    no_weights,
    open_file,
    open_folder,
    open_gguf_head,
    read_plain,
    resolve_folder,
    show,
)

KIND = "speculant_head"  # our own key of config.json: the method that a head is made for
SPECULATORS = "speculators_model_type"  # a key of the `speculators` package
MASK_TOKEN, MASK_STATE = "ptd_token_id", "mask_hidden"  # a key and a tensor of heads that read masks
BLOCKS = "dflash_config"  # a key of heads that draft blocks
_PREFIX = re.compile(r"^(model\.)+")
_SHOWN = 6
_OTHER = "use a head that was trained for this target: `speculant train head --target ...` makes one."


@dataclass(frozen=True)
class HeadFolder(WeightSource):
    """An open folder: a `WeightSource` with the names that the file has. A GGUF file has those of a checkpoint."""

    folder: Path
    config: dict[str, Any]
    files: WeightSource

    @classmethod
    def open(cls, source: str, kind: str, among: bool = False) -> HeadFolder:
        """Open a head by folder, hub id or "demo"; `kind` is the method that it must be made for.

        among: the head's tensors may be among a model's, in several files or in a GGUF file. Raises ModelError for a
        folder without safetensors, PairError for one that names another kind.
        """
        if among and is_gguf(Path(source).expanduser()):
            return cls(Path(source).expanduser(), *open_gguf_head(Path(source).expanduser()))
        folder = resolve_folder(source, f"heads/{kind}")
        config = read_json(folder / "config.json")
        check_kind(folder, config, kind)
        opened = cls(folder, config, open_folder(folder) if among else open_file(_weights_of(folder)))
        if MASK_STATE in opened.names() and kind != WITH_MASKS:
            check_kind(folder, {KIND: WITH_MASKS}, kind)
        return opened

    @cached_property
    def stored(self) -> Mapping[str, str]:
        """The file's name of each tensor, by our name.

        Our names have no prefix `model.`; some files hold the head within a model and have it. Tables of rotary
        frequencies are left out: they can be computed. Raises ModelError for a name that occurs twice.
        """
        found = dict[str, str]()
        for name in self.files.names():
            own = _PREFIX.sub("", name)
            if own in found:
                raise ModelError(
                    f"{self.folder} has {found[own]} and {name}, which are one tensor of a head",
                    "keep one of the two.",
                )
            found[own] = name
        return found

    def names(self) -> Collection[str]:
        """See `WeightSource.names`; see `stored`."""
        return self.stored.keys()

    @override
    def shape(self, name: str) -> tuple[int, ...]:
        return self.files.shape(self.stored[name])

    @override
    def kind(self, name: str) -> str:
        kind = self.files.kind(self.stored[name])
        return "F32" if decodable(kind) and kind not in FLOATS else kind  # see `read`

    @override
    def read(self, name: str) -> Tensor:
        return read_plain(self.files, self.stored[name])

    def check_tokens(self, name: str, tokens: Sequence[int], target: CausalLM) -> None:
        """Check that these ids, which the tensor `name` has, are different ones of the target. Raises PairError."""
        if not tokens or min(tokens) < 0 or max(tokens) >= target.vocab_size or len(set(tokens)) < len(tokens):
            raise PairError(
                f"{name} in {self.folder} maps to the tokens {min(tokens, default=0)} to {max(tokens, default=0)},"
                f" {len(set(tokens))} of them different, and the target has {target.vocab_size}",
                _OTHER,
            )

    def check_size(self, found: object, expected: int, what: str) -> None:
        """Compare a number of config.json with the target's; None = it has none. Raises PairError."""
        if found is not None and found != expected:
            raise PairError(
                f"the head in {self.folder} was made for {what} {show(found)}, and the target has {expected}", _OTHER
            )

    def check_sizes(self, target: CausalLM) -> None:
        """Compare the sizes of the target that config.json names, if any, with the target's. Raises PairError."""
        self.check_size(self.config.get("hidden_size"), target.hidden_size, "hidden states of")
        self.check_size(self.config.get("vocab_size"), target.vocab_size, "a vocabulary of")

    def check_mask(self, token: Any, key: str, target: CausalLM) -> int:
        """Return the mask's token, if the target has it; config.json names it as `key`. Raises ModelError."""
        if not is_whole(token) or not 0 <= token < target.vocab_size:
            raise ModelError(
                f"config.json in {self.folder} has the mask token {show(token)}, and the target has"
                f" {target.vocab_size} tokens",
                f"add the token that the head was trained with as {key}.",
            )
        return int(token)


@dataclass(frozen=True)
class Renamed(WeightSource):
    """A `WeightSource` whose tensors have a model's names: `stored` maps these to the file's.

    made: tensors that take the place of the file's, or that it does not have.
    """

    source: HeadFolder
    stored: Mapping[str, str]
    made: Mapping[str, Tensor] = field(default_factory=dict)

    @override
    def names(self) -> Collection[str]:
        return self.stored.keys() | self.made.keys()

    @override
    def shape(self, name: str) -> tuple[int, ...]:
        return tuple(self.made[name].shape) if name in self.made else self.source.shape(self.stored[name])

    @override
    def kind(self, name: str) -> str:
        return kind_of(self.made[name]) if name in self.made else self.source.kind(self.stored[name])

    @override
    def read(self, name: str) -> Tensor:
        return self.made[name] if name in self.made else self.source.read(self.stored[name])

    def check(self, wanted: Mapping[str, tuple[int, ...]], kind: str) -> None:
        """Compare names and shapes with the tensors of a head of this kind for this target.

        Raises ModelError for other names, PairError for other shapes, each with the found and the expected ones.
        """
        names = set(self.names())
        missing, unexpected = sorted(wanted.keys() - names), sorted(names - wanted.keys())
        if missing or unexpected:
            found = [f"{len(own)} {what} ({_listed(own)})" for own, what in ((missing, "missing"),
                     (unexpected, "unexpected")) if own]  # fmt: skip
            raise ModelError(
                f"the tensors in {self.source.folder} are not those of a {kind!r} head: {' and '.join(found)}",
                "name the method that the head was trained for, or download it again.",
            )
        kinds = sorted({self.kind(name) for name in names} - FLOATS.keys())
        if kinds:
            raise ModelError(
                f"{self.source.folder} has weights of the type {_listed(kinds)}", f"store them as {_listed([*FLOATS])}."
            )
        wrong = [
            f"{self.stored.get(name, name)} is {list(self.shape(name))} and must be {list(shape)}"
            for name, shape in sorted(wanted.items())
            if self.shape(name) != shape
        ]
        if wrong:
            raise PairError(
                f"the head in {self.source.folder} does not fit the target: {'; '.join(wrong[:_SHOWN])}",
                _OTHER,
            )


def renamed(folder: HeadFolder, rename: Callable[[str], str | None] = str) -> Renamed:
    """Return the tensors by the model's names; rename: from the file's, None = it is not the model's."""
    return Renamed(folder, {new: name for name in folder.names() if (new := rename(name)) is not None})


def check_kind(folder: Path, config: Mapping[str, Any], kind: str | None = None) -> None:
    """Check that config.json describes a head of a kind, None = no head. Raises PairError or ModelError."""
    named = named_kind(config)
    if named is None or named == kind:
        return
    if named in REFUSED or named not in plugins.names(DRAFTERS):
        raise _refused(folder, named)
    used = f"the method is {kind!r}" if kind else "not a draft model"
    raise PairError(f"{folder} is a head of the kind {named!r} and {used}", f'use "method": "{named}".')


def named_kind(config: Mapping[str, Any]) -> str | None:
    """Return the kind of head that a config.json names, by the key of any publisher of heads; None = none."""
    if MASK_TOKEN in config:
        return WITH_MASKS
    if BLOCKS in config:
        return WITH_BLOCKS
    names = [config.get(KIND), config.get(SPECULATORS), config.get("spd_type"), config.get("model_type")]
    own, published, *others = (name if isinstance(name, str) else None for name in names)
    return own or published or next((name for name in others if name in REFUSED), None)


def _refused(folder: Path, kind: str) -> ModelError:
    return ModelError(
        f"{folder} is a draft of the kind {kind!r}{f' ({REFUSED[kind]})' if kind in REFUSED else ''}, which is not"
        " supported",
        "use a head or a draft model of another kind: docs/drafters.md lists them.",
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
    raise no_weights(folder, "no *.safetensors file")


def _listed(names: Sequence[str]) -> str:
    more = f", and {len(names) - _SHOWN} more" if len(names) > _SHOWN else ""
    return ", ".join(names[:_SHOWN]) + more


# The roles of a head's tensors, as data for code that works on heads of any kind.


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
    parts: HeadParts | None = getattr(plugins.load(DRAFTERS, method), "HEAD", None)
    return parts


def head_within(place: Path, target: CausalLM) -> tuple[Mapped, Callable[[str], str]] | None:
    """Return the tensors of a head among a model's weights, and the function that gives their names in files.

    The tensors have the model's names. None = there is no head, or the parts of its form are not known.
    """
    method = method_within(place, target.num_layers)
    return None if method is None else plugins.load(DRAFTERS, method).weights_within(place, target)


LAYER_PARTS = {
    r"layers\.\d+\.(input|post_attention)_layernorm\.weight": Part(Role.STATE),
    r"layers\.\d+\.(self_attn\.[qkv]|mlp\.gate|mlp\.up)_proj\.weight": Part(Role.READER),
    r"layers\.\d+\.(self_attn\.o|mlp\.down)_proj\.weight": Part(Role.WRITER),
}
