"""What quantised weights cost in quality: loss and perplexity of the embedded pair on held-out text, by weight type.

    python benchmarks/quantisation.py [--windows 200]

Windows of up to 256 tokens of the files that training held out, on the native kernels. `kl` is the mean divergence of
a target's distributions from the float32 target's, in nats; `alpha` the mean of sum min(p, q) of a pair of that type.
Each quantised model is its own exact target: this is the quality of the model, not of speculation.
"""

from __future__ import annotations

import argparse
import json
import math
from typing import Any

import torch
from measuring import keep
from torch import Tensor
from torch.nn import functional

from speculant.cache.factory import slotted_cache
from speculant.lab.training.corpus import read_corpus, standard_library
from speculant.lab.training.tokenizer import END_OF_TEXT, encode, load_tokenizer
from speculant.lab.training.windows import held_out_windows
from speculant.models.base import CausalLM, SequenceInput, build_batch
from speculant.models.source import resolve_source
from speculant.models.weights.load import load_model
from speculant.types import DraftTree

LENGTH = 256
TYPES: dict[str, dict[str, Any]] = {
    "float32": {"dtype": "float32"},
    "bfloat16": {"dtype": "bfloat16"},
    "int8": {"dtype": "bfloat16", "quantization": "int8"},
    "int4": {"dtype": "bfloat16", "quantization": "int4"},
}
PREDICTED = (
    "The target's loss: int8 within 0.005 nats of bfloat16, int4 within 0.1; alpha falls by less than 0.005 and 0.02."
)


def distributions_of(model: CausalLM, window: Tensor) -> Tensor:
    """Return the log-distributions [n, V] after each token of a window but the last."""
    cache = slotted_cache(model.cache_shape, 1, LENGTH)
    batch = build_batch([SequenceInput(0, window[:-1].tolist(), DraftTree.empty())], cache, torch.device("cpu"))
    return model.logits(model.forward(batch, cache.storage).last).double().log_softmax(-1)


def measure(windows: list[Tensor], target: CausalLM, draft: CausalLM, exact: CausalLM) -> dict[str, float]:
    """Measure one weight type on all windows."""
    loss = draft_loss = divergence = common = count = 0.0
    for window in windows:
        p, q, reference = (distributions_of(model, window) for model in (target, draft, exact))
        loss += float(functional.nll_loss(p, window[1:], reduction="sum"))
        draft_loss += float(functional.nll_loss(q, window[1:], reduction="sum"))
        divergence += float(functional.kl_div(p, reference, reduction="sum", log_target=True))
        common += float(torch.minimum(p, q).exp().sum())
        count += len(p)
    return {
        "loss": loss / count,
        "perplexity": math.exp(loss / count),
        "kl": divergence / count,
        "draft_loss": draft_loss / count,
        "draft_perplexity": math.exp(draft_loss / count),
        "alpha": common / count,
        "tokens": count,
    }


@torch.inference_mode()
def main() -> None:
    """Measure and write results/quantisation.json."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--windows", type=int, default=200)
    wanted = parser.parse_args().windows
    tokenizer = load_tokenizer(resolve_source("demo", "target"))
    documents = encode(tokenizer, read_corpus((standard_library(),)).held_out)
    windows = held_out_windows(documents, LENGTH, tokenizer.token_to_id(END_OF_TEXT))
    windows = windows[:: max(1, len(windows) // wanted)]
    exact = load_model("demo", "float32", kernels="native").model
    seen = {}
    for name, arguments in TYPES.items():
        pair = [load_model("demo", role=role, kernels="native", **arguments).model for role in ("target", "draft")]
        seen[name] = measure(windows, *pair, exact)
        keep("quantisation", PREDICTED, seen)  # a later one may fail
    print(json.dumps(seen, indent=2))


if __name__ == "__main__":
    main()
