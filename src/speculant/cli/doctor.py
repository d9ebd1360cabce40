"""`speculant doctor`: this machine's features and the cost of missing ones, or a model's sizes and types."""

from __future__ import annotations

import json
import math
import os
import platform
import re
import time
from collections import Counter, defaultdict
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import asdict, dataclass
from importlib.metadata import PackageNotFoundError, version
from itertools import chain, takewhile
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer
from rich.table import Table

from speculant import __version__
from speculant.cli.flags import NamedModel, model_first
from speculant.cli.terminal import examples, print_json, progress, results
from speculant.errors import ModelError
from speculant.files import cache_folder, lost_with
from speculant.gguf_file import GgufFile

if TYPE_CHECKING:
    import torch

    from speculant.models import Backend, Checkpoint, CheckpointFiles, DecoderConfig, Packing, WeightTypes


UNITS = {"_gib": "GiB", "_mib": "MiB", "_kib": "KiB", "_gb_per_s": "GB/s"}


@dataclass(frozen=True)
class Finding:
    """One thing that is present, missing or slow: its cost, and the fix."""

    status: str  # ok, missing, note
    what: str
    cost: str = ""
    fix: str = ""


def show_report(sections: Mapping[str, Mapping[str, Any]], findings: Sequence[Finding]) -> None:
    """Print sections by title, then findings. The names of facts end in their units, see UNITS."""
    console = results()
    for title, section in sections.items():
        console.print(_label(title).title(), style="bold")
        console.print(_table(section))
    console.print("Findings", style="bold")
    for finding in findings:
        console.print(f"  {finding.status}: ", style="green" if finding.status == "ok" else "yellow", end="")
        console.print(finding.what)
        if finding.cost:
            console.print(f"      costs: {finding.cost}")
        if finding.fix:
            console.print(f"      fix: {finding.fix}")


def _table(section: Mapping[str, Any]) -> Table:
    table = Table.grid(padding=(0, 2))
    for name, value in section.items():
        table.add_row(f"  {name if isinstance(value, Mapping) else _label(name)}", _text(value))
    return table


def _label(name: str) -> str:
    for suffix, unit in UNITS.items():
        if name.endswith(suffix):
            return f"{name.removesuffix(suffix).replace('_', ' ')} ({unit})"
    return name.replace("_", " ")


def _text(value: Any) -> str:
    if isinstance(value, bool):
        return "yes" if value else "no"
    if isinstance(value, Mapping):
        return ", ".join(f"{_label(name)} {_text(item)}" for name, item in value.items())
    if isinstance(value, (list, tuple)):
        return ", ".join(str(item) for item in value) or "none"
    if isinstance(value, float):
        return f"{value:.1f}"
    return "not installed" if value is None else str(value)


KIB, MIB = 2**10, 2**20
FLOATS = ("f64", "f32", "f16", "bf16")
LEAST_WIDE = 64 * MIB  # matrices in float32 of more bytes than this are a finding

Kept = Callable[[str, Sequence[int]], tuple[str, int]]  # the type and the bytes of a matrix in memory


@dataclass(frozen=True)
class ModelReport:
    """The facts of a model. matrices: by their types in the files."""

    model: dict[str, Any]
    matrices: dict[str, dict[str, Any]]
    kernels: dict[str, Any]
    findings: list[Finding]


@dataclass(frozen=True)
class Matrix:
    """A matrix of a model: its types and bytes in the files and in memory."""

    name: str
    kind: str
    stored: int
    kept_as: str
    kept: int


def inspect_model(source: str, model_backend: str = "auto") -> ModelReport:
    """Collect the facts of a model by path, hub id or "demo". Raises ModelError for one that can't be used.

    model_backend: see `EngineConfig`; a model that transformers computes is loaded.
    """
    import torch

    from speculant.models import CheckpointFiles, choose_backend, load_model, resolve_source

    if model_backend != "auto":
        return _inspect_loaded(load_model(source, model_backend=model_backend))
    place = resolve_source(source)
    files = CheckpointFiles.open(place)
    dtype = files.dtype("auto")
    backend, says = choose_backend("auto", None, files.decoder, dtype, torch.device("cpu"), weights=files.weights)
    matrices = _matrices(files, _kept(files, backend, dtype))
    return ModelReport(
        model=_model(files, place),
        matrices=_by_kind(matrices),
        kernels={"in_use": says, **_model_memory(files, matrices, dtype)},
        findings=[
            _tokenizer_finding(place),
            _computing_finding(backend, says),
            *_head_finding(files, place),
            *_type_findings(matrices),
        ],
    )


def _inspect_loaded(checkpoint: Checkpoint) -> ModelReport:
    """Report on a model that transformers computes."""
    model, shape = checkpoint.model, checkpoint.model.cache_shape
    slower = Finding(
        "note",
        f"it is computed by {checkpoint.kernels}",
        "slower than Speculant's own kernels; and speculation can change which of two nearly equal tokens is chosen",
        "leave model_backend out if Speculant's kernels compute this model",
    )
    return ModelReport(
        model={
            "place": str(checkpoint.folder),
            "architecture": checkpoint.config["model_type"],
            "layers": model.num_layers,
            "hidden_size": model.hidden_size,
            "vocabulary": model.vocab_size,
            "context": model.max_positions,
            "tokenizer": _tokenizer_kind(checkpoint.folder),
        },
        matrices={},
        kernels={
            "in_use": checkpoint.kernels,
            "weights": str(checkpoint.dtype).removeprefix("torch."),
            "each_position_kib": shape.bytes_per_token / KIB,
        },
        findings=[_tokenizer_finding(checkpoint.folder), slower],
    )


def _model(files: CheckpointFiles, place: Path) -> dict[str, Any]:
    from speculant.models import parameters

    decoder = files.decoder
    return {
        "place": str(place),
        "architecture": files.config["model_type"],
        "parameters": parameters(decoder),
        "layers": decoder.num_layers,
        **({} if decoder.encoder is None else {"encoder_layers": len(decoder.encoder.layers)}),
        "hidden_size": decoder.hidden_size,
        "vocabulary": decoder.vocab_size,
        "context": decoder.max_positions,
        "tokenizer": _tokenizer_kind(place),
        "files_mib": sum(stamp.size for stamp in files.tensors.stamps()) / MIB,
    }


def _tokenizer_kind(place: Path) -> str | None:
    """Return the algorithm of a model's tokenizer; for a GGUF file, also how it splits texts into words."""
    if place.is_file():
        metadata = GgufFile.open(place).metadata
        names = [metadata.get(f"tokenizer.ggml.{key}") for key in ("model", "pre")]
        return ", ".join(str(name) for name in names if name) or None
    with suppress(OSError, ValueError, KeyError, TypeError):
        return str(json.loads((place / "tokenizer.json").read_text(encoding="utf-8"))["model"]["type"])
    return None


def _kept(files: CheckpointFiles, backend: Backend, dtype: torch.dtype) -> Kept:
    """Return the function from a matrix's name and shape to its type and bytes in memory."""
    from speculant.kernels import likely_bytes
    from speculant.models import CODED, NativeBackend, WeightTypes, packing_of, tensor_shapes

    if isinstance(backend, NativeBackend) and (kernels := backend.kernels) is not None:
        types = WeightTypes(files.weights, dtype, packing_of(backend).name == CODED)
        found = {name: types.of(name) for name, shape in tensor_shapes(files.decoder).items() if len(shape) == 2}
        found |= dict.fromkeys(_unified(files, types), types.common)
        return lambda name, shape: (found[name].name.lower(), likely_bytes(kernels, found[name], *shape))
    kind = str(dtype).removeprefix("torch.").replace("loat", "")
    return lambda name, shape: (kind, math.prod(shape) * dtype.itemsize)


def _unified(files: CheckpointFiles, types: WeightTypes) -> Iterator[str]:
    """Yield the names of matrices that do not keep their types; see `WeightReader.unified`."""
    from speculant.models import LAYER, TABLE, Experts, expert_matrices

    if types.have_orders([TABLE]):
        yield TABLE
    for index, layer in enumerate(files.decoder.layers):
        if isinstance(layer.mlp, Experts):
            groups = [[f"{LAYER.format(index)}mlp.{name}" for name in group] for group in expert_matrices(layer.mlp)]
            if types.have_orders(chain(*groups)) or types.mixed(groups):
                yield from chain(*groups)


def _matrices(files: CheckpointFiles, kept: Kept) -> list[Matrix]:
    from speculant.models import stored_bytes, tensor_shapes

    kind, shapes = files.weights.kind, tensor_shapes(files.decoder)
    return [
        Matrix(name, kind(name).lower(), stored_bytes(kind(name), shape), *kept(name, shape))
        for name, shape in shapes.items()
        if len(shape) == 2
    ]


def _by_kind(matrices: Sequence[Matrix]) -> dict[str, dict[str, Any]]:
    """Return numbers and sizes of matrices by their type in the files, the largest first."""
    found = defaultdict[str, list[Matrix]](list)
    for matrix in matrices:
        found[matrix.kind].append(matrix)
    return {
        kind: {
            "matrices": len(own),
            "in_files_mib": sum(each.stored for each in own) / MIB,
            "in_memory_mib": sum(each.kept for each in own) / MIB,
            "kept_as": sorted({each.kept_as for each in own}),
        }
        for kind, own in sorted(found.items(), key=lambda item: -sum(each.stored for each in item[1]))
    }


def _model_memory(files: CheckpointFiles, matrices: Sequence[Matrix], dtype: torch.dtype) -> dict[str, Any]:
    """Return the size of a model in memory, and the part that each pass reads."""
    from speculant.models import pass_matrices, source_matrices

    parts = {"read_in_each_pass_mib": {name for name, _, _ in pass_matrices(files.decoder)}}
    if files.decoder.encoder is not None:
        parts["read_to_encode_mib"] = {name for name, _ in source_matrices(files.decoder)}
    return {
        "weights_mib": sum(matrix.kept for matrix in matrices) / MIB,
        **{part: sum(each.kept for each in matrices if each.name in read) / MIB for part, read in parts.items()},
        "keys_and_values": str(dtype).removeprefix("torch."),
        **_cache_sizes(files.decoder, dtype),
    }


def _cache_sizes(decoder: DecoderConfig, dtype: torch.dtype) -> dict[str, float]:
    """Return the size of keys and values in a type, and in int8, which kv_cache_dtype chooses."""
    import torch

    from speculant.models import cache_shape

    found, length = dict[str, float](), decoder.max_positions
    for name, stored in (("", None), ("_in_int8", torch.int8)):
        shape = cache_shape(decoder, dtype, torch.device("cpu"), stored)
        needed = sum(shape.bytes_of(group.layers) * min(length, group.window or length) for group in shape.groups)
        found |= {f"each_position{name}_kib": shape.bytes_per_token / KIB, f"whole_context{name}_mib": needed / MIB}
    return found | ({"states_of_each_sequence_mib": 2 * shape.state_bytes / MIB} if shape.states else {})


def _tokenizer_finding(place: Path) -> Finding:
    from speculant.text import Tokenizer

    try:
        Tokenizer.load(place)
    except ModelError as error:
        return Finding(
            "missing", error.problem, "the model needs the tokenizer of another checkpoint, by --tokenizer", error.fix
        )
    return Finding("ok", "its tokenizer can be read")


def _computing_finding(backend: Backend, says: str) -> Finding:
    if backend.row_invariant:
        computed = f"the {backend.name} kernels compute it: the same bits for any batch, with or without speculation"
        return Finding("ok", computed)
    return Finding(
        "missing",
        f"the native kernels do not compute it: {says}",
        "speed; and speculation can change which of two nearly equal tokens is chosen",
        "`speculant doctor` without a model shows the kernels of this machine",
    )


def _head_finding(files: CheckpointFiles, place: Path) -> list[Finding]:
    from speculant.drafting import method_within

    method = method_within(place, files.decoder.num_layers)
    what = f"its files have a head that drafts for it by default, beside looked-up drafts (method {method})"
    return [Finding("ok", what)] if method else []


def _type_findings(matrices: Sequence[Matrix]) -> list[Finding]:
    """Find the types of a model's matrices that are slow."""
    from speculant.models import GOOD, listed_kinds

    decoded = [each for each in matrices if each.kind not in FLOATS and each.kept_as != each.kind]
    wide = [each for each in matrices if each.kept_as == "f32" and each not in decoded]
    has_blocks = any(each.kind not in FLOATS for each in matrices)  # such a file's matrices can't be rounded
    found = list[Finding]()
    if decoded:
        kept_as = " and ".join(sorted({each.kept_as for each in decoded}))
        found.append(
            Finding(
                "note",
                f"{listed_kinds(Counter(each.kind for each in decoded))} are decoded to {kept_as}",
                f"{_mib(decoded, 'kept')} MiB in memory instead of {_mib(decoded, 'stored')}, which each pass reads",
                f"use a file of the model in {GOOD}, which are multiplied as they are",
            )
        )
    if sum(each.kept for each in wide) > LEAST_WIDE:
        found.append(
            Finding(
                "note",
                f"{len(wide)} matrices are kept in float32, {_mib(wide, 'kept')} MiB",
                "passes take twice as long to read them as in bfloat16",
                f"use a file of the model in {GOOD}"
                if has_blocks
                else "round them, by --dtype bfloat16 or, to fewer bits, --quantization int8",
            )
        )
    return found or [Finding("ok", "no type of its matrices is slow here")]


def _mib(matrices: Sequence[Matrix], field: str) -> str:
    return f"{sum(getattr(each, field) for each in matrices) / MIB:.1f}"


EXAMPLES = examples(
    "speculant doctor",
    "speculant doctor model-Q4_K_M.gguf",
    "speculant doctor --json | python -m json.tool",
)
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
    "typing-extensions",
)
MODEL_FILES = ("config.json", "model.safetensors", "tokenizer.json")

# Instruction sets that determine which kernels can run; the names are those of /proc/cpuinfo.
INSTRUCTION_SETS = (
    *("avx2", "f16c", "fma", "avx512f", "avx512bw", "avx512_vnni", "avx512_bf16", "avx512_fp16", "avx_vnni"),
    *("amx_tile", "amx_int8", "amx_bf16"),
    *("asimd", "asimddp", "fphp", "i8mm", "bf16", "sve", "sve2"),
)

# Sets of the native kernels, the best first, and the flags of processors that have them.
SET_FLAGS = {
    "amx": ("amx_int8", "amx_bf16"), "avx512bf16": ("avx512_bf16", "avx512_vnni"), "avx512vnni": ("avx512_vnni",),
    "avx512": ("avx512f", "avx512bw"), "avxvnni": ("avx_vnni",), "avx2": ("avx2", "f16c", "fma"),
    "neoni8mm": ("i8mm",), "neondot": ("asimddp",), "neon": ("asimd",),
}  # fmt: skip

REPEATS = 5  # the best one is reported
BANDWIDTH_BYTES = 256 * 2**20  # well beyond the caches
N, K = 8192, 6144  # 96 MiB of bfloat16
DEPTHS = (2048, 8192)  # of a model of a billion weights


def doctor(
    model: Annotated[
        str | None, typer.Argument(help="Report on a model instead: a GGUF file, a folder, a Hugging Face id, or demo.")
    ] = None,
    named: NamedModel = None,
    model_backend: Annotated[
        str, typer.Option(help="With transformers, load the model by that package and show how it runs there.")
    ] = "auto",
    as_json: Annotated[bool, typer.Option("--json", help="Print everything as JSON.")] = False,
) -> None:
    """Report this machine's features and the cost of missing ones; or a model's sizes and types."""
    (model,) = model_first(named, model)
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
    cuda, speeds, processor = _cuda(), measure_speeds(), _processor()
    packages = {name: _version(name) for name in REQUIRED_PACKAGES}
    return Machine(
        speculant={"version": __version__, "python": platform.python_version(), "platform": platform.platform()},
        processor=processor,
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
            *set_findings(processor["instruction_sets"]),
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
    from speculant.kernels import built_sets, open_kernels, usable_sets

    kernels = open_kernels()
    facts: dict[str, Any] = {"in_use": "reference", "native": "not built"}
    if kernels is not None:
        facts = {"in_use": f"native, {kernels.isa}", "threads": kernels.threads, "instruction_sets": usable_sets()}
        facts["opt_in_sets"] = [each.name for each in built_sets() if each.usable and not each.by_default]
        facts["native_linear_gb_per_s"] = speeds.native_linear
        facts["weight_packing"] = str(speeds.packing)
        facts["weight_cache"] = _weight_cache()
    return {**facts, "torch_linear_gb_per_s": speeds.torch_linear}


def _weight_cache() -> str:
    """Return the content of the default folder of packed weights."""
    from speculant.models import LIMIT_BYTES, cache_files

    folder = cache_folder("weights")
    sizes = [entry.size for entry in cache_files(folder)]
    lost = lost_with(folder)
    unused = f"; none is added, as this {lost} would lose it" if lost else ""
    return f"{len(sizes)} models, {sum(sizes) / GIB:.1f} of at most {LIMIT_BYTES / GIB:.0f} GiB, in {folder}{unused}"


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


def set_findings(flags: Collection[str]) -> Iterator[Finding]:
    """Find sets that are better than the one in use; flags: the processor's."""
    from speculant.kernels import built_sets, open_kernels

    kernels, built = open_kernels(), {each.name: each for each in built_sets()}
    if kernels is None:
        return
    used = f"the native kernels use {kernels.isa}, which may be slower"
    for name in takewhile(lambda name: name != kernels.isa, SET_FLAGS):
        own, has_flags = built.get(name), all(flag in flags for flag in SET_FLAGS[name])
        here = f"this processor has {', '.join(SET_FLAGS[name])} for the instruction set {name}"
        if own is not None and own.usable and not own.by_default:
            what = f"the instruction set {name} is usable, but its speed was never measured on a processor that has it"
            fix = f"try it with SPECULANT_ISA={name}; `speculant bench` measures the speed"
        elif own is None and has_flags:
            what = f"{here}, and the native kernels were built without it"
            fix = "install speculant again with a newer compiler, without SETS=own"
        elif own is not None and not own.usable and has_flags:
            what = f"{here}, but the system does not let this process use it"
            fix = "run Speculant outside of this container or sandbox, or on a newer Linux kernel"
        else:
            continue
        yield Finding("note", what, used, fix)


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
    from speculant.models import choose, gains_of, linear, time_packings, timed_bytes

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
    return Speeds(read, by_torch, native, choose(gains_of(time_packings(kernels, DEPTHS, timed_bytes()))))


def _best(work: Callable[[], object]) -> float:
    """Return the shortest time of REPEATS runs, in seconds."""
    best = float("inf")
    for _ in range(REPEATS):
        started = time.perf_counter()
        work()
        best = min(best, time.perf_counter() - started)
    return best
