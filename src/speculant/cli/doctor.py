"""`speculant doctor`: this machine's features and the cost of missing ones, or a model's sizes and types."""

from __future__ import annotations

import os
import platform
import re
import time
from collections.abc import Callable
from dataclasses import asdict, dataclass
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from speculant import __version__
from speculant.cli.model_report import ModelReport, inspect_model
from speculant.cli.report import Finding, show_report
from speculant.cli.terminal import examples, print_json, progress
from speculant.errors import ModelError
from speculant.files import cache_folder

if TYPE_CHECKING:
    from speculant.models import Packing

EXAMPLES = examples(
    "speculant doctor",
    "speculant doctor model-Q4_K_M.gguf",
    "speculant doctor --json | python -m json.tool",
)
MIB = 2**20
GIB = 2**30

ROLES = ("target", "draft")  # of the embedded pair
REQUIRED_PACKAGES = (
    "torch",
    "numpy",
    "safetensors",
    "tokenizers",
    "jinja2",
    "huggingface-hub",
    "lazy-loader",
    "gguf",
    "rich",
    "typer",
)
MODEL_FILES = ("config.json", "model.safetensors", "tokenizer.json")

# Instruction sets that determine which kernels can run; the names are those of /proc/cpuinfo.
INSTRUCTION_SETS = (
    *("avx2", "f16c", "fma", "avx512f", "avx512bw", "avx512_vnni", "avx512_bf16", "avx512_fp16", "avx_vnni"),
    *("amx_tile", "amx_int8", "amx_bf16"),
    *("asimd", "asimddp", "fphp", "i8mm", "bf16", "sve", "sve2"),
)

REPEATS = 5  # the best one is reported
BANDWIDTH_BYTES = 256 * 2**20  # well beyond the caches
N, K = 8192, 6144  # 96 MiB of bfloat16
DEPTHS = (2048, 8192)  # of a model of a billion weights


def doctor(
    model: Annotated[
        str | None, typer.Argument(help="Report on a model instead: a GGUF file, a folder, a Hugging Face id, or demo.")
    ] = None,
    model_backend: Annotated[
        str, typer.Option(help="With transformers, load the model by that package and show how it runs there.")
    ] = "auto",
    as_json: Annotated[bool, typer.Option("--json", help="Print everything as JSON.")] = False,
) -> None:
    """Report this machine's features and the cost of missing ones; or a model's sizes and types."""
    if model is not None:
        report: Machine | ModelReport = inspect_model(model, model_backend)
    else:
        with progress("Measuring memory bandwidth"):
            report = inspect_machine()
    sections = asdict(report)
    if as_json:
        print_json(sections)
    else:
        del sections["findings"]
        show_report(sections, report.findings)


@dataclass(frozen=True)
class Machine:
    """All that doctor reports, one mapping per section. Sizes are in GiB, bandwidth in GB/s."""

    speculant: dict[str, Any]
    processor: dict[str, Any]
    memory: dict[str, Any]
    torch: dict[str, Any]
    cuda: dict[str, Any]
    kernels: dict[str, Any]
    packages: dict[str, str | None]
    embedded_models: dict[str, Any]
    findings: list[Finding]


def inspect_machine() -> Machine:
    """Collect the facts. Measuring the speeds takes one or two seconds."""
    cuda, speeds = _cuda(), measure_speeds()
    packages = _packages()
    return Machine(
        speculant={"version": __version__, "python": platform.python_version(), "platform": platform.platform()},
        processor=_processor(),
        memory=_memory(speeds),
        torch=_torch(),
        cuda=cuda,
        kernels=_kernels(speeds),
        packages=packages,
        embedded_models=_embedded_models(),
        findings=[
            *_package_findings(packages),
            *_model_findings(),
            _kernel_finding(speeds),
            *_packing_finding(speeds),
            _cuda_finding(cuda),
        ],
    )


def _processor() -> dict[str, Any]:
    text = _read("/proc/cpuinfo")
    name = re.search(r"^model name\s*:\s*(.+)$", text, re.MULTILINE)
    flags = re.search(r"^(?:flags|Features)\s*:\s*(.+)$", text, re.MULTILINE)
    present = set(flags.group(1).split()) if flags else set()
    return {
        "model": name.group(1) if name else platform.processor() or platform.machine(),
        "cores": os.cpu_count(),
        "usable_cores": len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count(),
        "instruction_sets": [name for name in INSTRUCTION_SETS if name in present],
    }


def _read(path: str) -> str:
    try:
        return Path(path).read_text()
    except OSError:
        return ""


def _memory(speeds: Speeds) -> dict[str, Any]:
    """Return sizes and speed, with the most that keys and values take by default: it bounds a large model's context."""
    import torch

    from speculant.engine import SHARE_OF_FREE, free_memory

    page = os.sysconf("SC_PAGE_SIZE")
    available = re.search(r"^MemAvailable:\s*(\d+) kB$", _read("/proc/meminfo"), re.MULTILINE)
    return {
        "total_gib": page * os.sysconf("SC_PHYS_PAGES") / GIB,
        "available_gib": int(available.group(1)) * 1024 / GIB if available else None,
        "most_for_keys_and_values_gib": SHARE_OF_FREE * free_memory(torch.device("cpu")) / GIB,
        "read_bandwidth_gb_per_s": speeds.read,
    }


def _torch() -> dict[str, Any]:
    import torch

    return {
        "version": torch.__version__,
        "cpu_capability": torch.backends.cpu.get_cpu_capability(),
        "threads": torch.get_num_threads(),
        "interop_threads": torch.get_num_interop_threads(),
        "onednn": torch.backends.mkldnn.is_available(),  # type: ignore[no-untyped-call]
    }


def _cuda() -> dict[str, Any]:
    import torch

    count = torch.cuda.device_count() if torch.cuda.is_available() else 0
    return {"available": count > 0, "devices": [torch.cuda.get_device_name(index) for index in range(count)]}


def _packages() -> dict[str, str | None]:
    return {name: _version(name) for name in REQUIRED_PACKAGES}


def _version(name: str) -> str | None:
    try:
        return version(name)
    except PackageNotFoundError:
        return None


def _embedded_models() -> dict[str, Any]:
    sizes = {role: sum(path.stat().st_size for path in _model_files(role)) for role in ROLES}
    return {f"{role}_mib": size / MIB if size else None for role, size in sizes.items()}


def _model_files(role: str) -> list[Path]:
    from speculant.models import resolve_source

    try:
        return sorted(resolve_source("demo", role).glob("*"))
    except ModelError:
        return []


def _package_findings(packages: dict[str, str | None]) -> list[Finding]:
    missing = [name for name, found in packages.items() if found is None]
    if not missing:
        return [Finding("ok", "all required packages are installed")]
    return [
        Finding(
            "missing", f"packages: {', '.join(missing)}", "parts of Speculant fail", "reinstall with constraints.txt"
        )
    ]


def _model_findings() -> list[Finding]:
    present = {f"{role}/{path.name}" for role in ROLES for path in _model_files(role)}
    missing = [file for file in (f"{role}/{name}" for role in ROLES for name in MODEL_FILES) if file not in present]
    if not missing:
        return [Finding("ok", "the embedded models are complete")]
    return [
        Finding(
            "missing",
            f"the embedded models lack {', '.join(missing)}",
            "`speculant demo` and --model demo do not work",
            "reinstall speculant",
        )
    ]


def _kernels(speeds: Speeds) -> dict[str, Any]:
    """Return the kernels in use on the CPU, and how fast they read bfloat16 weights when one row is decoded."""
    from speculant.kernels import open_kernels, usable_sets

    kernels = open_kernels()
    facts: dict[str, Any] = {"in_use": "reference", "native": "not built"}
    if kernels is not None:
        facts = {"in_use": f"native, {kernels.isa}", "threads": kernels.threads, "instruction_sets": usable_sets()}
        facts["native_linear_gb_per_s"] = speeds.native_linear
        facts["weight_packing"] = str(speeds.packing)
        facts["weight_cache"] = _weight_cache()
    return {**facts, "torch_linear_gb_per_s": speeds.torch_linear}


def _weight_cache() -> str:
    """Return the content of the default folder of packed weights."""
    from speculant.models import LIMIT_BYTES, cache_files

    folder = cache_folder("weights")
    sizes = [status.st_size for _, status in cache_files(folder)]
    return f"{len(sizes)} models, {sum(sizes) / GIB:.1f} of at most {LIMIT_BYTES / GIB:.0f} GiB, in {folder}"


def _kernel_finding(speeds: Speeds) -> Finding:
    if speeds.native_linear is not None:
        return Finding(
            "ok",
            "the native kernels are built: the same bits for any batch, with or without speculation; one row takes "
            f"{speeds.torch_linear / speeds.native_linear:.2f} of the time that torch needs, in bfloat16",
        )
    return Finding(
        "missing",
        "the native kernels were not built; everything runs on torch's",
        f"speed: torch's read bfloat16 weights at {speeds.torch_linear:.1f} GB/s, memory delivers {speeds.read:.1f}; "
        "int8 and int4 weights; in float32 and bfloat16, speculation can change "
        "which of two nearly equal tokens is chosen",
        "install a C++ compiler (g++ or clang++) and install speculant again",
    )


def _packing_finding(speeds: Speeds) -> list[Finding]:
    if speeds.packing is None:
        return []
    return [Finding("ok", f'weight_packing="auto" stores the bfloat16 weights of large models {speeds.packing}')]


def _cuda_finding(cuda: dict[str, Any]) -> Finding:
    if cuda["available"]:
        return Finding("ok", f"CUDA: {', '.join(cuda['devices'])}; use it with --device cuda")
    return Finding("note", "no CUDA device", "models run on the processor")


@dataclass(frozen=True)
class Speeds:
    """Speeds in GB/s; None = the native kernels were not built."""

    read: float  # all threads together: the bound on decoding at batch 1
    torch_linear: float  # bfloat16 weights, one row
    native_linear: float | None
    packing: Packing | None = None  # what weight_packing="auto" chooses for a large model


def measure_speeds() -> Speeds:
    """Measure the speeds; takes one or two seconds."""
    import torch

    from speculant.kernels import Op, Pass, Type, aligned, open_kernels
    from speculant.models import choose, linear, measure_gains, timed_bytes

    kernels = open_kernels()
    weight, x = torch.ones(N, K, dtype=torch.bfloat16), torch.ones(1, K)
    narrow, num_bytes = x.bfloat16(), 2 * N * K
    with torch.inference_mode():
        by_torch = num_bytes / _best(lambda: torch.nn.functional.linear(narrow, weight)) / 1e9
    if kernels is None:
        data = torch.ones(BANDWIDTH_BYTES // 8, dtype=torch.int64)
        return Speeds(BANDWIDTH_BYTES / _best(data.sum) / 1e9, by_torch, None)
    memory = aligned(BANDWIDTH_BYTES).fill_(1)
    read = BANDWIDTH_BYTES / min(kernels.read_seconds(memory) for _ in range(REPEATS)) / 1e9
    packed, out = kernels.pack(Type.BF16, weight), torch.empty(1, N)
    ops = (Op * 1)(linear(packed, x, out))
    native = num_bytes / _best(lambda: kernels.run(ops, Pass(rows=1))) / 1e9
    return Speeds(read, by_torch, native, choose(measure_gains(kernels, DEPTHS, timed_bytes())))


def _best(work: Callable[[], object]) -> float:
    """Return the shortest time of REPEATS runs, in seconds."""
    best = float("inf")
    for _ in range(REPEATS):
        started = time.perf_counter()
        work()
        best = min(best, time.perf_counter() - started)
    return best
