"""The format of a checkpoint's weights, and its options in config.json.

A format that can't be read is refused with its name and a remedy. Pickles run code when they are opened. They are
refused with the command that converts them.
"""

from __future__ import annotations

import logging
import re
import shlex
from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from speculant.errors import ModelError
from speculant.files import read_optional_json
from speculant.models.config import is_whole, listed, show

logger = logging.getLogger(__name__)

_ROUNDS = '--quantization int4 (in Python quantization="int4") rounds it to 4 bits while it is loaded.'
_MOST_NAME, _MOST_BITS = 60, 100  # that are shown
_PICKLES = (".bin", ".pt", ".pth", ".ckpt")
_NO_WEIGHTS = (
    "training_args",
    "optimizer",
    "scheduler",
    "rng_state",
    "scaler",
)  # files that trainers write next to weights
_SNAPSHOT = re.compile(r"models--(.+)/snapshots/([^/]+)")  # the end of a folder in the hub's cache
_DESCRIBES = re.compile(r"(?!.*\.bin\.)([\w.-]+\.(json|jinja)|tokenizer[\w.-]*)")  # files next to weights
_ENTRIES = {"quantization_config": None, "compression_config": "compressed-tensors"}  # and the format without a name
_BESIDE = {"quantize_config.json": "gptq", "quant_config.json": "awq"}  # files of options, and their formats
_BY_TRANSFORMERS = ' Or set model_backend="transformers" (extra transformers), which runs others too, slower.'
_CONVERT = (
    "import sys, torch, safetensors.torch as s; w = {}; "
    "[w.update(torch.load(f, map_location='cpu', weights_only=True)) for f in sys.argv[2:]]; "
    "s.save_file({k: v.clone().contiguous() for k, v in w.items()}, sys.argv[1])"
)


def _entry_of(config: Mapping[str, Any]) -> tuple[str, Any]:
    """Return the key and the entry of config.json for the quantised format. A null entry counts as absent."""
    return next(((key, config[key]) for key in _ENTRIES if config.get(key) is not None), ("", None))


def quantised_format(config: Mapping[str, Any]) -> str | None:
    """Return the name of the quantised format that a config.json names for its weights; None = it names none."""
    key, entry = _entry_of(config)
    if not key:
        return None
    named = _name_of(entry) if isinstance(entry, dict) else None
    return named or _ENTRIES[key] or f"{key} does not name the format"


def quantization_of(config: Mapping[str, Any]) -> Mapping[str, Any]:
    """Return the options of the quantised format; an empty mapping if there are none."""
    _, entry = _entry_of(config)
    return entry if isinstance(entry, dict) else {}


def method_of(config: Mapping[str, Any]) -> str | None:
    """Return the `quant_method` of the quantised format; None = config.json names none."""
    method = quantization_of(config).get("quant_method") or _ENTRIES.get(_entry_of(config)[0])
    return method if isinstance(method, str) else None


def with_options_beside(config: dict[str, Any], folder: Path) -> dict[str, Any]:
    """Return a config.json with the options that older programs wrote to another file of the folder.

    Raises ModelError for a file that can't be read.
    """
    if quantised_format(config) is None:
        for file, method in _BESIDE.items():
            if options := read_optional_json(folder / file):
                return {**config, "quantization_config": {"quant_method": method, **options}}
    return config


def _name_of(entry: Mapping[str, Any]) -> str | None:
    """Return the format that a quantization config names, with its bits."""
    named = next((entry[key] for key in ("quant_method", "quant_algo") if entry.get(key) is not None), None)
    loaded = next((bits for bits in (4, 8) if entry.get(f"load_in_{bits}bit") is True), None)  # by bitsandbytes
    bits = loaded if entry.get("bits") is None else entry["bits"]
    if named is None and loaded is None:
        return None
    name = "bitsandbytes" if named is None else named if isinstance(named, str) else show(named)
    return name[:_MOST_NAME] + (f", {bits} bits" if isinstance(bits, int) and 1 < bits < _MOST_BITS else "")


def check_readable(config: Mapping[str, Any], known: Sequence[str]) -> None:
    """Raise ModelError for a checkpoint whose config.json says that its weights are in a format that is not known."""
    name = quantised_format(config)
    if name is not None and (method_of(config) or "").replace("-", "_") not in known:
        listed = ", ".join(each.replace("_", "-") for each in known)
        raise ModelError(
            f"this checkpoint is quantised ({name}); these formats can be read: {listed}, and GGUF files",
            f"name a checkpoint in one of them, or the unquantised one that it was made from; {_ROUNDS}",
        )


def unknown_family(config: Mapping[str, Any], known: Sequence[str]) -> ModelError:
    """Return the error for a config.json whose model_type is not a known family.

    It suggests the family whose class config.json names under `architectures`, which a misspelt model_type leaves as it
    is. Another family with a similar name would compute something else.
    """
    family = config.get("model_type")
    if not isinstance(family, str):
        return ModelError("config.json names no model_type", f"name one of: {', '.join(known)}.")
    use = f"use a checkpoint of one of these families: {', '.join(known)}."
    if config.get("auto_map") is not None:
        own_code = "and would run code of its own (auto_map), which is never done"
        return ModelError(f"model_type {show(family)} is unknown {own_code}", use)
    meant = _named_class(config, known)
    advice = f"did you mean {meant!r}? config.json names its class under architectures. Else " if meant else ""
    return ModelError(f"model_type {show(family)} is no family that is implemented", advice + use + _BY_TRANSFORMERS)


def _named_class(config: Mapping[str, Any], known: Sequence[str]) -> str | None:
    named = config.get("architectures")
    classes = {name.lower() for name in named if isinstance(name, str)} if isinstance(named, list) else set()
    return next((family for family in known if f"{family.replace('_', '')}forcausallm" in classes), None)


def no_weights(folder: Path, lacks: str) -> ModelError:
    """Return the error for a folder without safetensors. It lists the files that are there, or on the hub.

    lacks: for the message, such as "no *.safetensors file".
    """
    hub = _SNAPSHOT.fullmatch("/".join(folder.parts[-3:]))
    if hub is None:
        return _error(str(folder), lacks, sorted(path.name for path in folder.iterdir()), folder)
    name = hub[1].replace("--", "/", 1)
    files = _files_on_hub(name, hub[2])
    if files is None:
        return ModelError(
            f"{name} has {lacks}, and the list of its other files could not be read from the hub",
            "connect to the network to see them, or name a folder with safetensors weights.",
        )
    local = Path(name.rpartition("/")[2])
    needed = [file for file in files if _is_weights(file) or _DESCRIBES.fullmatch(file)]
    download = f"hf download {_words([name, *needed])} --local-dir {local} && "
    return _error(f"{name} on the hub", lacks, files, local, download)


def _error(where: str, lacks: str, files: Sequence[str], folder: Path, before: str = "") -> ModelError:
    """Return the error for a place with these files. before: the commands that bring them to the folder."""
    pickles = [file for file in files if _is_weights(file)]
    if not pickles:
        found = f"its files are {listed(files)}" if files else "it is empty"
        return ModelError(f"{where} has {lacks}; {found}", "name a folder with safetensors weights.")
    paths = [folder / file for file in ("model.safetensors", *pickles)]
    command = f'{before}python -c "{_CONVERT}" {_words(paths)}'
    then = f", and name the folder {folder}" if before else ""
    return ModelError(
        f"{where} has only pickled weights ({listed(pickles)}), and pickles are refused because they can run code"
        " when they are opened",
        f"convert them to safetensors once{then}: {command}",
    )


def _files_on_hub(name: str, revision: str) -> list[str] | None:
    """Return the files of a repository; None = the hub can't be reached."""
    from huggingface_hub import list_repo_files

    try:
        return sorted(file for file in list_repo_files(name, revision=revision) if not file.startswith("."))
    except Exception:  # noqa: BLE001 - which errors a dead network raises depends on the client's version
        return None


def _is_weights(file: str) -> bool:
    return file.endswith(_PICKLES) and not Path(file).name.startswith(_NO_WEIGHTS)


def _words(values: Iterable[object]) -> str:
    return " ".join(shlex.quote(str(value)) for value in values)


BELONGS = "use the config.json that belongs to these weights, or download the checkpoint again."
OTHER = "use another checkpoint of the model, such as a GGUF file."
MOST_SIZE = 2**24  # of a group
HARMLESS = (  # entries of AutoGPTQ and GPTQModel without an effect on the numbers that files stand for
    "act_group_aware", "backend", "batch_size", "block_name_to_quantize", "cache_block_outputs",
    "damp_auto_increment", "damp_percent", "dataset", "desc_act", "disable_exllama", "dynamic", "exllama_config",
    "gptaq", "hessian", "hyb_act", "lm_head", "max_input_length", "meta", "method",
    "model_file_base_name", "model_name_or_path", "model_seqlen", "module_name_preceding_first_block",
    "modules_in_block_to_quantize", "mse", "offload_to_disk", "pack_impl", "pad_token_id", "quantizer",
    "static_groups", "sym", "tokenizer", "true_sequential", "use_cuda_fp16", "use_exllama",
)  # fmt: skip


@dataclass(frozen=True)
class Options:
    """The entries of a quantization_config. Entries that are null count as absent."""

    method: str
    entries: Mapping[str, Any]
    _seen: set[str] = field(default_factory=lambda: {"quant_method"})

    def get(self, key: str, default: Any = None) -> Any:
        """Return an entry."""
        self._seen.add(key)
        found = self.entries.get(key)
        return default if found is None else found

    def one_of(self, key: str, known: Collection[Any], default: Any = None) -> Any:
        """Return an entry that must have one of these values. Raises ModelError for others."""
        found = self.get(key, default)
        if not any(type(found) is type(each) and found == each for each in known):
            listed = " or ".join(map(str, sorted(known)))
            raise self.error(key, found, f"can't be read: only {listed} can")
        return found

    def is_set(self, key: str) -> bool:
        """Return an entry that is true or false; an absent one is false. Raises ModelError for others."""
        return bool(self.one_of(key, (False, True), False))

    def group_size(self, key: str = "group_size") -> int:
        """Return the size of groups; -1 = one group. Raises ModelError."""
        found = self.get(key, -1)
        if not is_whole(found) or not (found == -1 or 0 < found <= MOST_SIZE):
            raise self.error(key, found, "is not the size of a group")
        return int(found)

    def refuse(self, *keys: str) -> None:
        """Raise ModelError for an entry that changes numbers in a way that is not implemented."""
        for key in keys:
            if self.get(key):
                raise self.error(key, self.get(key), "changes the numbers in a way that is not implemented")

    def warn_of_others(self, harmless: Collection[str]) -> None:
        """Warn of unknown entries, other than harmless ones."""
        others = {key: value for key, value in self.entries.items() if key not in self._seen and value}
        unknown = [f"{key} = {show(value)}" for key, value in sorted(others.items()) if key not in harmless]
        if unknown:
            logger.warning(
                "the quantization_config (%s) has options that are unknown and have no effect: %s",
                self.method, ", ".join(unknown),
            )  # fmt: skip

    def error(self, key: str, value: Any, problem: str) -> ModelError:
        """Return the error of an entry."""
        return ModelError(f"the quantization_config ({self.method}) has {key} = {show(value)}, which {problem}", OTHER)
