"""CTranslate2 with T5 models; it has no speculative decoding.

Its own converter for transformers needs torch and a tokenizer; this module writes the same model from the checkpoint's
tensors. Tokens are named by their ids. It converts as a program, in the environment that has ctranslate2:

python -m benchmarks.peers.ctranslate2_t5 CHECKPOINT FOLDER FORMAT
"""

from __future__ import annotations

import json
import sys
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

from benchmarks.peers.base import (
    FLOAT,
    PLAIN,
    Job,
    Measurement,
    Mode,
    Pair,
    PeerError,
    Progress,
    PythonPeer,
    content_key,
    execute,
)

_ACTIVATIONS = {"gelu_new": "GELUTanh", "gelu": "GELU", "relu": "RELU", "silu": "SWISH"}


class CTranslate2(PythonPeer):
    """OpenNMT's CTranslate2."""

    name = "CTranslate2"
    package = "ctranslate2"
    install = (
        "python -m venv ctranslate2 && ctranslate2/bin/pip install ctranslate2==4.8.5; then add --ctranslate2-python"
    )
    formats = {FLOAT: ("float32",), "int8": ("int8",)}  # noqa: RUF012

    def refusal(self, mode: Mode, batch: int) -> str | None:
        """Refuse all drafts."""
        return None if mode.kind == PLAIN else "it has no speculative decoding"

    def prepare(self, models: Pair, weights: str, folder: Path) -> Pair:
        """See `Peer.prepare`; only the target is converted."""
        config = json.loads((Path(models.target) / "config.json").read_text(encoding="utf-8"))
        if config["model_type"] != "t5":
            raise PeerError("this comparison converts only T5 models for CTranslate2")
        key = content_key(models.target, [self.version(), Path(__file__).read_text(encoding="utf-8")])
        made = folder / "ctranslate2" / f"{key}-{weights}"
        if not made.exists():
            execute([self.python, "-m", "benchmarks.peers.ctranslate2_t5", models.target, str(made), weights])
        return Pair(str(made), models.draft)


def measure(job: Job) -> Iterator[tuple[str, Measurement]]:
    """Measure plain decoding."""
    import ctranslate2

    translator = ctranslate2.Translator(
        job.models.target, compute_type=job.format, inter_threads=1, intra_threads=job.threads
    )
    for mode in job.modes:
        _run(translator, job.workload.warm_up, job.workload.tokens)
        yield mode.name, _run(translator, job.workload.prompts, job.workload.tokens)


def _run(translator: Any, prompts: Sequence[Sequence[int]], tokens: int) -> Measurement:
    lengths, outputs = [0] * len(prompts), [list[int]() for _ in prompts]
    progress = Progress(len(prompts))

    def record(step: Any) -> bool:
        outputs[step.batch_id].append(step.token_id)
        lengths[step.batch_id] = step.step + 1
        if step.batch_id == len(prompts) - 1:  # the last one of a step
            progress.record(lengths)
        return False

    translator.translate_batch(
        [list(map(_named, prompt)) for prompt in prompts], beam_size=1, callback=record,
        min_decoding_length=tokens, max_decoding_length=tokens, max_input_length=0,
    )  # fmt: skip
    return progress.end(outputs, 0)


def _named(token: int) -> str:
    return f"<{token}>"


def convert(checkpoint: Path, folder: Path, weights: str) -> None:
    """Write a T5 model in CTranslate2's format, as its own converter for transformers does."""
    from ctranslate2.specs import TransformerSpec, common_spec

    config = json.loads((checkpoint / "config.json").read_text(encoding="utf-8"))
    activation, gated = _feed_forward(config)
    tensors = Tensors(checkpoint / "model.safetensors", config)
    spec = TransformerSpec.from_config(
        (config["num_layers"], config["num_decoder_layers"]), config["num_heads"], pre_norm=True,
        activation=getattr(common_spec.Activation, activation), ffn_glu=gated, relative_attention_bias=True,
        rms_norm=True,
    )  # fmt: skip
    _fill_stack(spec.encoder, tensors, "encoder")
    _fill_stack(spec.decoder, tensors, "decoder")
    tied = config["tie_word_embeddings"]
    spec.decoder.projection.weight = tensors["shared" if tied else "lm_head"]
    if tied:
        spec.decoder.scale_outputs = config["d_model"] ** -0.5
    names = [_named(token) for token in range(config["vocab_size"])]
    spec.register_source_vocabulary(names)
    spec.register_target_vocabulary(names)
    spec.config.bos_token = spec.config.decoder_start_token = _named(config["decoder_start_token_id"])
    spec.config.eos_token, spec.config.unk_token = _named(config["eos_token_id"]), names[-1]
    spec.config.add_source_eos = False
    spec.validate()
    spec.optimize(quantization=weights)
    folder.mkdir(parents=True)
    spec.save(str(folder))


class Tensors:
    """A checkpoint's tensors in float32, by names without `.weight`."""

    def __init__(self, file: Path, config: Mapping[str, Any]) -> None:
        self._file, self.config = file, config

    def __getitem__(self, name: str) -> Any:
        import numpy as np

        with self._file.open("rb") as file:
            size = int.from_bytes(file.read(8), "little")
            entry = json.loads(file.read(size))[f"{name}.weight"]
            first, end = entry["data_offsets"]
            file.seek(8 + size + first)
            stored = file.read(end - first)
        if entry["dtype"] == "BF16":
            numbers = (np.frombuffer(stored, np.uint16).astype(np.uint32) << 16).view(np.float32)
        else:
            numbers = np.frombuffer(stored, {"F32": np.float32, "F16": np.float16}[entry["dtype"]]).astype(np.float32)
        return numbers.reshape(entry["shape"])


def _feed_forward(config: Mapping[str, Any]) -> tuple[str, bool]:
    """Return the activation and whether it is gated; "gated-gelu" is gelu_new, as in transformers."""
    name = config["feed_forward_proj"].removeprefix("gated-")
    gated = name != config["feed_forward_proj"]
    return _ACTIVATIONS["gelu_new" if gated and name == "gelu" else name], gated


def _fill_stack(spec: Any, tensors: Tensors, stack: str) -> None:
    spec.layer_norm.gamma = tensors[f"{stack}.final_layer_norm"]
    embeddings = spec.embeddings[0] if isinstance(spec.embeddings, list) else spec.embeddings
    embeddings.weight = tensors["shared"]
    spec.scale_embeddings = False
    for index, layer in enumerate(spec.layer):
        _fill_layer(layer, tensors, f"{stack}.block.{index}.layer.", has_source=stack == "decoder")
        own, first = layer.self_attention, spec.layer[0].self_attention
        if index == 0:
            import numpy as np

            bias = f"{stack}.block.0.layer.0.SelfAttention.relative_attention_bias"
            own.relative_attention_bias = tensors[bias]
            own.relative_attention_max_distance = np.int32(tensors.config["relative_attention_max_distance"])
        else:
            own.relative_attention_bias = first.relative_attention_bias
            own.relative_attention_max_distance = first.relative_attention_max_distance


def _fill_layer(layer: Any, tensors: Tensors, at: str, *, has_source: bool) -> None:
    import numpy as np

    own, q = layer.self_attention, f"{at}0.SelfAttention."
    own.queries_scale = 1.0
    own.linear[0].weight = np.concatenate([tensors[f"{q}{name}"] for name in "qkv"])
    own.linear[1].weight, own.layer_norm.gamma = tensors[f"{q}o"], tensors[f"{at}0.layer_norm"]
    if has_source:
        cross, q = layer.attention, f"{at}1.EncDecAttention."
        cross.queries_scale = 1.0
        cross.linear[0].weight = tensors[f"{q}q"]
        cross.linear[1].weight = np.concatenate([tensors[f"{q}{name}"] for name in "kv"])
        cross.linear[2].weight, cross.layer_norm.gamma = tensors[f"{q}o"], tensors[f"{at}1.layer_norm"]
    part, last = layer.ffn, f"{at}{2 if has_source else 1}."
    part.layer_norm.gamma = tensors[f"{last}layer_norm"]
    part.linear_1.weight = tensors[f"{last}DenseReluDense.wo"]
    if hasattr(part, "linear_0_noact"):
        part.linear_0.weight = tensors[f"{last}DenseReluDense.wi_0"]
        part.linear_0_noact.weight = tensors[f"{last}DenseReluDense.wi_1"]
    else:
        part.linear_0.weight = tensors[f"{last}DenseReluDense.wi"]


if __name__ == "__main__":
    convert(Path(sys.argv[1]), Path(sys.argv[2]), sys.argv[3])
