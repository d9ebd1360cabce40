"""Where a checkpoint comes from: the embedded pair, a local folder or GGUF file, or the Hugging Face hub."""

from __future__ import annotations

import re
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from speculant.errors import ModelError
from speculant.files import read_json, read_optional_json
from speculant.gguf_file import SUFFIX, GgufFile, is_gguf, parts_of
from speculant.models.entries import text_config
from speculant.models.gguf import read_gguf_config

_DEMO = Path(__file__).parents[1] / "assets" / "demo"
_HUB_ID = re.compile(r"[\w-][\w.-]*(/[\w-][\w.-]*)?")
_TOKENIZER = ["*.json", "tokenizer*", "*.jinja", "spiece.model", "*.spm"]
_WANTED = [*_TOKENIZER, "*.safetensors"]
_UNWANTED = ["consolidated*", "*/*"]  # other formats of the same weights
_WEIGHTS = "*.safetensors"
_NO_MODEL = re.compile(r"mmproj|imatrix", re.IGNORECASE)  # GGUF files of image encoders, and of statistics
_SHOWN = 12  # files in a message


def resolve_source(
    source: str, role: str = "target", revision: str | None = None, download_dir: str | None = None
) -> Path:
    """Return the place of a checkpoint: its folder, or its GGUF file (the first part of a split one).

    source: "demo" is the embedded pair, of which `role` ("target" or "draft") selects one. Else the path of a folder or
    GGUF file, which takes precedence over a hub id of the same name; a folder without safetensors stands for its only
    GGUF model. Else a hub id, of which the needed files are downloaded: "org/name:file.gguf" is one of its GGUF files,
    and "org/name:Q4_K_M" the one with this word in its name.
    revision: a branch, a tag or a commit. download_dir: where downloads are kept; None = the hub's own cache.

    With HF_HUB_OFFLINE=1, only what has been downloaded before is found. Raises ModelError.
    """
    if source == "demo":
        return _demo(role)
    path = _local(source)
    if path is not None:
        return _in_folder(path) if path.is_dir() else _file(path)
    name, wanted = _on_hub(source)
    return _download_gguf(name, wanted, revision, download_dir) if wanted else _download(name, revision, download_dir)


def resolve_folder(source: str, role: str) -> Path:
    """Return the folder of a checkpoint that can't be a GGUF file, such as a head; see `resolve_source`.

    Raises ModelError.
    """
    if source == "demo":
        return _demo(role)
    path = _local(source)
    if path is not None and path.is_dir():
        return path
    name, wanted = (source, source) if path is not None else _on_hub(source)
    if wanted:
        raise ModelError(f"{source} is a file, and a folder is needed here", "name a folder that holds safetensors.")
    return _snapshot(name, None, None, _WANTED, _UNWANTED)


def resolve_tokenizer(source: str, revision: str | None = None, download_dir: str | None = None) -> Path:
    """Return the place of a tokenizer: a folder with tokenizer.json, of any weights; else the place of the model."""
    path = _local(source)
    if path is None and source != "demo" and not _on_hub(source)[1]:
        path = _snapshot(source, revision, download_dir, _TOKENIZER, _UNWANTED)
    if path is not None and (path / "tokenizer.json").is_file():
        return path
    return resolve_source(source, revision=revision, download_dir=download_dir)


def read_model_config(place: Path) -> dict[str, Any]:
    """Return config.json of a folder, or the metadata of a GGUF file in its keys. Raises ModelError."""
    if place.is_dir():
        return text_config(read_json(place / "config.json"))
    return read_gguf_config(GgufFile.open(place))


def read_optional_config(place: Path) -> dict[str, Any]:
    """Return the same as `read_model_config`, but nothing for a folder without config.json."""
    return text_config(read_optional_json(place / "config.json")) if place.is_dir() else read_model_config(place)


def embedded_heads() -> list[str]:
    """Return the methods that the embedded target has a head for."""
    return sorted(folder.name for folder in (_DEMO / "heads").glob("*/"))


def _demo(role: str) -> Path:
    folder = _DEMO / role
    if not folder.is_dir():
        if role.startswith("heads/"):
            raise ModelError(
                f"there is no embedded head for the method {role.removeprefix('heads/')!r}",
                f"use one of {', '.join(embedded_heads())}, or train a head by `speculant train head`.",
            )
        raise ModelError(
            f"this installation has no embedded {role} model ({folder} is missing)",
            "reinstall speculant, or name a folder or a Hugging Face id.",
        )
    return folder


def _local(source: str) -> Path | None:
    """Return the path that a source names; None = there is nothing."""
    try:
        path = Path(source).expanduser()
        return path if path.exists() else None
    except (OSError, RuntimeError) as error:  # not allowed, too long, or the home of an unknown user
        raise ModelError(f"{source!r} can't be looked up: {error}", "check the path.") from error


def _on_hub(source: str) -> tuple[str, str]:
    """Return the repository and the GGUF file that a source names; "" = none. Raises ModelError if it names neither."""
    name, _, wanted = source.partition(":")
    if _HUB_ID.fullmatch(name) and not wanted.startswith("/") and not name.lower().endswith(SUFFIX):
        return name, wanted
    kind = "file" if source.lower().endswith(SUFFIX) else "folder"
    raise ModelError(
        f"there is no {kind} {source}",
        "check the path, or give a Hugging Face id such as org/name, or org/name:file.gguf.",
    )


def _file(path: Path) -> Path:
    if not is_gguf(path):
        raise ModelError(
            f"{path} is a file, neither a folder nor in the GGUF format", "name the folder that holds config.json."
        )
    return parts_of(path)[0]


def _in_folder(folder: Path) -> Path:
    """Return a folder, or the GGUF file that is its only model."""
    if any(folder.glob(_WEIGHTS)):
        return folder
    try:
        files = [path.name for path in folder.iterdir() if path.suffix.lower() == SUFFIX]
    except OSError as error:
        raise ModelError(f"{folder} can't be looked up: {error}", "check the path.") from error
    return folder / _choose(files, "", str(folder), "/")[0] if files else folder


def _choose(files: Sequence[str], wanted: str, where: str, separator: str) -> list[str]:
    """Return the parts of one model among GGUF files: the wanted one, or the only one.

    wanted: a file's name, or a word in it such as Q4_K_M. The user names a file by `where`, `separator` and its own
    name. Raises ModelError if there is not exactly one.
    """
    found = {str(parts_of(Path(file))[0]) for file in files}
    if wanted.lower().endswith(SUFFIX):
        first = str(parts_of(Path(wanted))[0])
        found = {file for file in found if first in (file, Path(file).name)}
    else:
        word = re.compile(rf"(?<![a-z0-9]){re.escape(wanted)}(?![a-z0-9_])" if wanted else "", re.IGNORECASE)
        found = {file for file in found if not _NO_MODEL.search(Path(file).name) and word.search(file)}
    if len(found) == 1:
        return [str(part) for part in parts_of(Path(found.pop()))]
    named = f" that {wanted} stands for" if wanted else ""
    listed = ", ".join(f"{where}{separator}{file}" for file in sorted(found or files)[:_SHOWN])
    raise ModelError(
        f"{where} has {len(found) or 'no'} GGUF models{named}",
        f"name one file: {listed}." if listed else "name another repository.",
    )


def _download(name: str, revision: str | None, folder: str | None) -> Path:
    """Download a checkpoint from the hub: its safetensors, else its only GGUF model."""
    found = _snapshot(name, revision, folder, _WANTED, _UNWANTED)
    if any(found.glob(_WEIGHTS)):
        return found
    try:
        files = _gguf_files(name, revision, folder)
    except Exception as error:
        raise _hub_error(name, error) from error
    return _download_gguf(name, "", revision, folder) if files else found


def _download_gguf(name: str, wanted: str, revision: str | None, folder: str | None) -> Path:
    """Download all parts of one GGUF model."""
    try:
        files = _gguf_files(name, revision, folder)
    except Exception as error:
        raise _hub_error(name, error) from error
    parts = _choose(files, wanted, name, ":")
    return _snapshot(name, revision, folder, parts, None) / parts[0]


def _gguf_files(name: str, revision: str | None, folder: str | None) -> list[str]:
    """Return the GGUF files of a repository; if the hub can't be reached, those that have been downloaded."""
    from huggingface_hub import list_repo_files, snapshot_download

    try:
        return [file for file in list_repo_files(name, revision=revision) if file.lower().endswith(SUFFIX)]
    except Exception:
        try:
            local = Path(snapshot_download(name, revision=revision, cache_dir=folder, local_files_only=True))
        except Exception:  # noqa: BLE001 - the first error says more
            local = None
        paths = local.rglob("*") if local else ()
        found = [path.relative_to(local).as_posix() for path in paths if local and path.suffix.lower() == SUFFIX]
        if not found:
            raise
        return found


def _snapshot(
    name: str, revision: str | None, folder: str | None, wanted: list[str], unwanted: list[str] | None
) -> Path:
    """Download files from the hub, resumable and with progress; offline, take them from the local cache."""
    from huggingface_hub import snapshot_download

    try:
        return Path(
            snapshot_download(
                name, revision=revision, cache_dir=folder, allow_patterns=wanted, ignore_patterns=unwanted
            )
        )
    except Exception as error:  # which errors a dead network raises depends on the client's version
        raise _hub_error(name, error) from error


def _hub_error(name: str, error: Exception) -> ModelError:
    from huggingface_hub.errors import (
        GatedRepoError,
        HFValidationError,
        OfflineModeIsEnabled,
        RepositoryNotFoundError,
        RevisionNotFoundError,
    )

    reason = str(error).strip().split("\n")[0]
    if isinstance(error, GatedRepoError):
        return ModelError(f"access to {name} is restricted on the hub", "ask for it there, then run `hf auth login`.")
    if isinstance(error, RevisionNotFoundError):
        return ModelError(f"{name} on the hub has no such revision ({reason})", "check the revision.")
    if isinstance(error, RepositoryNotFoundError | HFValidationError):
        return ModelError(
            f"{name} is neither a folder here nor a model on the hub ({reason})",
            "check the spelling; for a private one run `hf auth login`.",
        )
    offline = isinstance(error, OfflineModeIsEnabled) or _is_offline()
    cause = "HF_HUB_OFFLINE is set" if offline else f"the hub could not be reached ({type(error).__name__}: {reason})"
    return ModelError(
        f"{name} is no folder here, some of its files have not been downloaded before, and {cause}",
        "connect to the network" + (" and unset HF_HUB_OFFLINE" if offline else "") + ", or give a local folder.",
    )


def _is_offline() -> bool:
    from huggingface_hub import constants

    return bool(constants.HF_HUB_OFFLINE)
