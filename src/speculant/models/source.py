"""Where a checkpoint comes from: the embedded pair, a local folder, or the Hugging Face hub."""

from __future__ import annotations

import re
from pathlib import Path

from speculant.errors import ModelError
from speculant.files import read_json as read_json
from speculant.models.weights.formats import check_not_gguf, gguf_error, has_weights, is_named_gguf

_DEMO = Path(__file__).parents[1] / "assets" / "demo"
_HUB_ID = re.compile(r"[\w-][\w.-]*(/[\w-][\w.-]*)?")
_WANTED = ["*.json", "*.safetensors", "tokenizer*", "*.jinja"]
_UNWANTED = ["consolidated*", "*/*"]  # other formats of the same weights


def resolve_source(
    source: str, role: str = "target", revision: str | None = None, download_dir: str | None = None
) -> Path:
    """Return the folder of a checkpoint, downloading it first if `source` is a hub id.

    revision: a branch, a tag or a commit. download_dir: where downloads are kept; None = the hub's own cache.

    "demo" is the embedded pair, of which `role` ("target" or "draft") selects one. A folder that
    exists takes precedence over a hub id of the same name. With HF_HUB_OFFLINE=1, only hub ids that
    have been downloaded before are found. Raises ModelError.
    """
    if source == "demo":
        return _demo(role)
    try:
        folder = Path(source).expanduser()
        is_folder, exists = folder.is_dir(), folder.exists()
        check_not_gguf(source)
    except (OSError, RuntimeError) as error:  # not allowed, too long, or the home of an unknown user
        raise ModelError(f"{source!r} can't be looked up: {error}", "check the path.") from error
    if is_folder:
        return folder
    if exists:
        raise ModelError(f"{source} is a file, not a folder", "name the folder that holds config.json.")
    if not _HUB_ID.fullmatch(source):
        if is_named_gguf(source):
            raise gguf_error(f"{source} names GGUF files")
        raise ModelError(f"there is no folder {source}", "check the path, or give a Hugging Face id such as org/name.")
    return _download(source, revision, download_dir)


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


def _download(name: str, revision: str | None, folder: str | None) -> Path:
    """Download a snapshot from the hub, resumable and with progress; offline, take it from the local cache."""
    from huggingface_hub import snapshot_download

    try:
        found = snapshot_download(
            name, revision=revision, cache_dir=folder, allow_patterns=_WANTED, ignore_patterns=_UNWANTED
        )
    except Exception as error:  # which errors a dead network raises depends on the client's version
        raise _hub_error(name, error) from error
    if is_named_gguf(name) and not has_weights(Path(found)):
        raise gguf_error(f"{name} holds GGUF files alone")
    return Path(found)


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
        f"{name} is no folder here, has not been downloaded before, and {cause}",
        "connect to the network" + (" and unset HF_HUB_OFFLINE" if offline else "") + ", or give a local folder.",
    )


def _is_offline() -> bool:
    from huggingface_hub import constants

    return bool(constants.HF_HUB_OFFLINE)
