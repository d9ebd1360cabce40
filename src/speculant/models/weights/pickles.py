"""Weights that are stored as pickles, which run code when they are opened: refused, with the way to convert them."""

from __future__ import annotations

import re
import shlex
from collections.abc import Iterable, Sequence
from pathlib import Path

from speculant.errors import ModelError

_PICKLES = (".bin", ".pt", ".pth", ".ckpt")
_NO_WEIGHTS = ("training_args", "optimizer", "scheduler", "rng_state", "scaler")  # what trainers write beside weights
_SNAPSHOT = re.compile(r"models--(.+)/snapshots/([^/]+)")  # the end of a folder in the hub's cache
_DESCRIBES = re.compile(r"(?!.*\.bin\.)([\w.-]+\.(json|jinja)|tokenizer[\w.-]*)")  # beside weights
_SHOWN = 5
_CONVERT = (
    "import sys, torch, safetensors.torch as s; w = {}; "
    "[w.update(torch.load(f, map_location='cpu', weights_only=True)) for f in sys.argv[2:]]; "
    "s.save_file({k: v.clone().contiguous() for k, v in w.items()}, sys.argv[1])"
)


def no_weights(folder: Path, lacks: str) -> ModelError:
    """Return the error for a folder without safetensors: it says what is there, in the hub's repository too.

    lacks: what the folder has not, as "no *.safetensors file".
    """
    hub = _SNAPSHOT.fullmatch("/".join(folder.parts[-3:]))
    if hub is None:
        return _error(str(folder), lacks, sorted(path.name for path in folder.iterdir()), folder)
    name = hub[1].replace("--", "/", 1)
    files = _files_on_hub(name, hub[2])
    if files is None:
        return ModelError(
            f"{name} has {lacks}, and the hub could not be asked for its other files",
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
        found = f"its files are {_listed(files)}" if files else "it is empty"
        return ModelError(f"{where} has {lacks}; {found}", "name a folder with safetensors weights.")
    paths = [folder / file for file in ("model.safetensors", *pickles)]
    command = f'{before}python -c "{_CONVERT}" {_words(paths)}'
    then = f", and name the folder {folder}" if before else ""
    return ModelError(
        f"{where} has only pickled weights ({_listed(pickles)}), and pickles are refused because they can run code"
        " when they are opened",
        f"convert them to safetensors once{then}: {command}",
    )


def _files_on_hub(name: str, revision: str) -> list[str] | None:
    """Return the files of a repository; None = the hub can't be asked."""
    from huggingface_hub import list_repo_files

    try:
        return sorted(file for file in list_repo_files(name, revision=revision) if not file.startswith("."))
    except Exception:  # noqa: BLE001 - which errors a dead network raises depends on the client's version
        return None


def _is_weights(file: str) -> bool:
    return file.endswith(_PICKLES) and not Path(file).name.startswith(_NO_WEIGHTS)


def _words(values: Iterable[object]) -> str:
    return " ".join(shlex.quote(str(value)) for value in values)


def _listed(names: Sequence[str]) -> str:
    more = f", and {len(names) - _SHOWN} more" if len(names) > _SHOWN else ""
    return ", ".join(names[:_SHOWN]) + more
