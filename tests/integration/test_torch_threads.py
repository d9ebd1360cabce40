"""Steps of native models wake none of torch's own threads: these wait for more work beside those of the kernels."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

from speculant.kernels import usable_sets

SCRIPT = """
import json, os, sys, time
from pathlib import Path
import torch

def threads():
    return set(os.listdir("/proc/self/task"))

def runs():
    return [Path(f"/proc/self/task/{each}/schedstat").read_text() for each in sorted(own)]

torch.set_num_threads(2)
known = threads()
torch.randn(600, 600) @ torch.randn(600, 600)
own = threads() - known
assert own, "torch has no threads of its own here"

from speculant import LLM, SamplingParams

for temperature, config in json.loads(sys.argv[1]):
    draft = None if config["method"] == "token_recycling" else "demo"
    llm = LLM("demo", draft, speculative_config={**config, "draft_length": "fixed"})
    params = SamplingParams(temperature=temperature, max_tokens=24, ignore_eos=True)
    llm.generate("class Counter:", params)
    time.sleep(0.3)  # threads that wait go to sleep
    before = runs()
    found = llm.generate("def read_lines(path):", params)[0]
    assert found.metrics.speculative_decoding.num_draft_tokens, config
    print(json.dumps([before == runs(), temperature, config]))
"""
TREE = {"num_speculative_tokens": 6, "tree": [2, 1, 1]}
CASES = [
    (1.0, {"method": "draft_model", "verification": "block"}),
    (1.0, {"method": "draft_model", **TREE, "verification": "multi_draft"}),
    (0.0, {"method": "eagle", **TREE}),
    (1.0, {"method": "eagle3"}),
    (0.0, {"method": "medusa"}),
    (1.0, {"method": "medusa", "verification": "traversal"}),
    (0.0, {"method": "token_recycling"}),
]


@pytest.mark.slow
@pytest.mark.skipif(not usable_sets(), reason="the native kernels are not built")
@pytest.mark.skipif(not Path("/proc/self/schedstat").exists(), reason="the system does not tell when threads run")
def test_steps_leave_torchs_threads_asleep() -> None:
    command, environment = [sys.executable, "-c", SCRIPT, json.dumps(CASES)], {**os.environ, "OMP_NUM_THREADS": "2"}
    done = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=110, check=False)
    assert done.returncode == 0, done.stderr
    said = [json.loads(line) for line in done.stdout.splitlines() if line.startswith("[")]
    assert len(said) == len(CASES)
    woken = [case for slept, *case in said if not slept]
    assert not woken, (
        "torch has used its threads: compute that by the kernels, by numpy or row by row (sampling/choice.py)"
    )
