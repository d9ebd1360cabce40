"""Runs lm-eval's `local-completions` against a server of the embedded pair, and compares its figures with ours.

lm-eval has an environment of its own, this script runs in Speculant's:

    python -m venv lm-eval && lm-eval/bin/pip install -c constraints.txt "lm_eval[api]==0.4.11"
    python tests/clients/lm_eval/run.py --lm-eval lm-eval/bin/lm_eval
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import tempfile
from pathlib import Path
from typing import Any

from speculant import LLM, SamplingParams
from speculant.lab.cli.bench_serve import own_server

HERE = Path(__file__).resolve().parent
TASKS = "speculant_choice,speculant_text"


def main() -> None:
    """Run both tokenizer backends; exit with an error where a figure differs."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--lm-eval", default="lm_eval", help="lm-eval's command")
    command = str(Path(parser.parse_args().lm_eval).absolute())
    llm = LLM("demo", draft_model="demo")
    with own_server({"SPECULANT_MODEL": "demo", "SPECULANT_DRAFT_MODEL": "demo"}) as url:
        for backend in ("remote", "huggingface"):
            for size in (1, 4):
                samples = evaluate(command, url, backend, size)
                print(f"{backend} tokenizer, batches of {size}: {check(llm, samples)} answers agree")


def evaluate(command: str, url: str, backend: str, batch_size: int) -> list[dict[str, Any]]:
    """Return the logged samples of one evaluation."""
    import speculant

    assert speculant.__file__ is not None
    folder = Path(speculant.__file__).parent / "assets" / "demo" / "target"
    tokenizer = f",tokenizer={folder}" if backend == "huggingface" else ""
    model = f"model=demo,base_url={url}/v1/completions,tokenizer_backend={backend}{tokenizer},max_length=1024"
    with tempfile.TemporaryDirectory() as output:
        arguments = ["--model", "local-completions", "--model_args", model, "--batch_size", str(batch_size)]
        arguments += ["--tasks", TASKS, "--include_path", str(HERE), "--log_samples", "--output_path", output]
        offline = {"HF_HUB_OFFLINE": "1", "HF_DATASETS_OFFLINE": "1", "HF_HOME": f"{output}/cache"}
        subprocess.run([command, *arguments], cwd=HERE, env={**os.environ, **offline}, check=True)
        files = sorted(Path(output).rglob("samples_*.jsonl"))
        return [json.loads(line) for file in files for line in file.read_text(encoding="utf-8").splitlines()]


def check(llm: LLM, samples: list[dict[str, Any]]) -> int:
    """Compare every answer with the library's own; return how many there are."""
    count = 0
    for sample in samples:
        for asked, got in zip(sample["arguments"].values(), sample["resps"], strict=True):
            context, rest = asked["arg_0"], asked["arg_1"]
            expected = text(llm, context, rest) if isinstance(rest, dict) else likelihood(llm, context, rest)
            found = got[0] if isinstance(rest, dict) else tuple(_number(each) for each in got[0])
            assert found == expected, (context, rest, found, expected)
            count += 1
    assert count > 0
    return count


def likelihood(llm: LLM, context: str, continuation: str) -> tuple[float, bool]:
    """Return the log-probability of a continuation, and whether it is the most likely one token by token."""
    tokenizer = llm.tokenizer
    whole = tokenizer.encode(context + continuation, add_special_tokens=False)
    start = len(tokenizer.encode(context, add_special_tokens=False))
    output = llm.generate([whole], SamplingParams(max_tokens=1, prompt_logprobs=1))[0]
    assert output.prompt_logprobs is not None
    entries = [(entry[token], entry) for token, entry in zip(whole, output.prompt_logprobs, strict=True) if entry]
    chosen = entries[start - 1 :]
    total = sum(value.logprob for value, _ in chosen)
    return total, all(value.logprob == max(each.logprob for each in entry.values()) for value, entry in chosen)


def text(llm: LLM, context: str, settings: dict[str, Any]) -> str:
    """Return the greedy answer up to one of the ends."""
    tokens = llm.tokenizer.encode(context, add_special_tokens=False)
    params = SamplingParams(temperature=0, max_tokens=settings["max_gen_toks"], stop=settings["until"])
    return llm.generate([tokens], params)[0].outputs[0].text


def _number(value: str) -> float | bool:
    return {"True": True, "False": False}[value] if value in ("True", "False") else float(value)


if __name__ == "__main__":
    main()
