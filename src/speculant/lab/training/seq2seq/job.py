"""The training of an encoder-decoder model, from files of pairs to a model folder."""

from __future__ import annotations

import json
from dataclasses import dataclass
from typing import Any

import torch
from tokenizers import Tokenizer, processors

from speculant.errors import ConfigError
from speculant.lab.training.checkpoint import FILE_NAME
from speculant.lab.training.evaluation import Overlap, Watcher
from speculant.lab.training.export import save_weights
from speculant.lab.training.network import new_network, parameter_count, project_embedding
from speculant.lab.training.optimizer import Optimizer
from speculant.lab.training.passes import load_plain
from speculant.lab.training.seq2seq.config import Seq2SeqConfig
from speculant.lab.training.seq2seq.objective import PairObjective, loss_of_pairs, overlap_of_pairs
from speculant.lab.training.seq2seq.pairs import PairBatches, Pairs, PairTexts, read_texts
from speculant.lab.training.tokenizer import END_OF_TEXT, end_of_text, load_tokenizer, train_tokenizer
from speculant.lab.training.trainer import Trainer
from speculant.models import Decoder

_WATCHED = 512  # held-out pairs that are measured during training


@dataclass(frozen=True)
class Seq2SeqData:
    """Tokenised pairs to train on, and held-out ones."""

    tokenizer: Tokenizer
    training: Pairs
    held_out: Pairs


@dataclass(frozen=True)
class Seq2SeqOutcome:
    """The measurements of a finished run. held_out_loss: in nats per token. overlap: with the teacher."""

    parameters: int
    pairs: int
    tokens: int  # of the targets of these pairs
    steps: int
    minutes: float
    held_out_pairs: int
    held_out_tokens: int
    held_out_loss: float
    overlap: Overlap | None = None


def check_folder(config: Seq2SeqConfig, resume: bool) -> None:
    """Make the run's folder. Raises ConfigError if it holds another run."""
    if not resume and (config.out / FILE_NAME).exists():
        raise ConfigError(
            f"{config.out} holds a run already", "add --resume to go on with it, or choose another --out."
        )
    config.out.mkdir(parents=True, exist_ok=True)


def read_pairs(config: Seq2SeqConfig) -> tuple[PairTexts, PairTexts]:
    """Read the pairs to train on, and the held-out ones."""
    texts = read_texts(config.sources, config.targets)
    if config.held_out_sources is None or config.held_out_targets is None:
        training, held_out = texts.split()
    else:
        training, held_out = texts, read_texts(config.held_out_sources, config.held_out_targets)
    if not held_out.sources:
        raise ConfigError(
            f"none of the {len(texts.sources)} pairs falls under the held-out rule",
            "add pairs, as one in fifty is held out, or give --held-out-sources and --held-out-targets.",
        )
    return training, held_out


def choose_tokenizer(config: Seq2SeqConfig, training: PairTexts) -> Tokenizer:
    """Load the teacher's, the given or the run's own tokenizer, or train one. It adds the end token to each text."""
    own = config.out / "tokenizer.json"
    given = config.teacher or config.tokenizer or (config.out if own.exists() else None)
    if given:
        return load_tokenizer(given)
    tokenizer = train_tokenizer((text for pair in training.pairs() for text in pair), config.vocab_size)
    tokenizer.post_processor = processors.TemplateProcessing(
        single=f"$A {END_OF_TEXT}", special_tokens=[(END_OF_TEXT, end_of_text(tokenizer))]
    )
    tokenizer.save(str(own))
    return tokenizer


def tokenise(config: Seq2SeqConfig, texts: tuple[PairTexts, PairTexts], tokenizer: Tokenizer) -> Seq2SeqData:
    """Tokenise all pairs."""
    lengths = config.source_tokens, config.target_tokens
    training, held_out = (Pairs.of(each, tokenizer, *lengths) for each in texts)
    return Seq2SeqData(tokenizer, training, held_out)


def new_trainer(config: Seq2SeqConfig, data: Seq2SeqData) -> Trainer:
    """Make a model with random weights, and its trainer."""
    torch.set_flush_denormal(True)
    hf = t5_config(config, data.tokenizer)
    model, teacher = new_network(hf, config.seed), _load_teacher(config)
    if teacher is not None:
        _check_teacher(teacher, data.tokenizer)
        project_embedding(model, teacher)
    model.to(config.device)
    return Trainer(
        model=model,
        windows=PairBatches(data.training, config.batch, config.seed),
        objective=PairObjective(data.training, teacher),
        optimizer=Optimizer(model, config.matrix_lr, config.embedding_lr),
        schedule=config.schedule,
        batch_size=config.batch,
        folder=config.out,
        settings={"network": hf, "pairs": len(data.training), **config.settings()},
        save_every=60 * config.save_minutes,
        measure=lambda: f"held-out loss {loss_of_pairs(model, data.held_out, most=_WATCHED):.3f}",
    )


def finish(config: Seq2SeqConfig, data: Seq2SeqData, trainer: Trainer, watch: Watcher | None = None) -> Seq2SeqOutcome:
    """Write the model folder, measure the written model on the held-out pairs, and write its card."""
    save_weights(config.out, trainer.model, trainer.settings["network"])
    end, name = end_of_text(data.tokenizer), END_OF_TEXT
    ends = {"decoder_start_token_id": end, "pad_token_id": end, "eos_token_id": end}
    data.tokenizer.save(str(config.out / "tokenizer.json"))
    _write(config, "generation_config.json", ends)
    _write(config, "tokenizer_config.json", {
        "tokenizer_class": "PreTrainedTokenizerFast", "eos_token": name, "pad_token": name,
        "model_max_length": config.source_tokens, "clean_up_tokenization_spaces": False,
    })  # fmt: skip
    outcome = measure(config, data, trainer, watch)
    (config.out / "README.md").write_text(card(config, outcome), encoding="utf-8")
    return outcome


def measure(config: Seq2SeqConfig, data: Seq2SeqData, trainer: Trainer, watch: Watcher | None = None) -> Seq2SeqOutcome:
    """Measure the written weights, in float32, on the held-out pairs."""
    model, teacher = load_plain(str(config.out), device=config.device), _load_teacher(config)
    return Seq2SeqOutcome(
        parameters=parameter_count(model),
        pairs=len(data.training),
        tokens=data.training.num_tokens,
        steps=trainer.state.step,
        minutes=trainer.state.elapsed / 60,
        held_out_pairs=len(data.held_out),
        held_out_tokens=data.held_out.num_tokens,
        held_out_loss=loss_of_pairs(model, data.held_out, watch),
        overlap=overlap_of_pairs(teacher, model, data.held_out) if teacher else None,
    )


def t5_config(config: Seq2SeqConfig, tokenizer: Tokenizer) -> dict[str, Any]:
    """Return the config.json of a new T5 1.1: gated, with a head of its own. One token starts and ends its texts."""
    end = end_of_text(tokenizer)
    return {
        "architectures": ["T5ForConditionalGeneration"],
        "model_type": "t5",
        "is_encoder_decoder": True,
        "vocab_size": tokenizer.get_vocab_size(),
        "d_model": config.hidden,
        "d_kv": config.hidden // config.heads,
        "d_ff": config.intermediate,
        "num_layers": config.layers,
        "num_decoder_layers": config.num_decoder_layers,
        "num_heads": config.heads,
        "relative_attention_num_buckets": 32,
        "relative_attention_max_distance": 128,
        "feed_forward_proj": "gated-gelu",
        "layer_norm_epsilon": 1e-6,
        "dropout_rate": 0.0,
        "tie_word_embeddings": False,
        "decoder_start_token_id": end,
        "pad_token_id": end,
        "eos_token_id": end,
    }


def card(config: Seq2SeqConfig, outcome: Seq2SeqOutcome) -> str:
    """Return the README.md of a trained model."""
    role = "" if config.teacher is None else f", a draft for the model in {config.teacher.name}/"
    how = "the texts" if config.teacher is None else "that model's distributions on the texts"
    overlap = outcome.overlap
    rows = [f"| held-out loss, nats a token | {outcome.held_out_loss:.3f} |"]
    if overlap is not None:
        rows += [
            f"| mean of sum min(p, q) with the target at temperature 1 | {overlap.alpha:.3f} |",
            f"| tokens where both have the same likeliest token | {overlap.greedy_agreement:.3f} |",
        ]
    return "\n".join([
        "---", "library_name: speculant", "pipeline_tag: text2text-generation", "---", "",
        f"# {config.out.name}", "",
        (f"A small encoder-decoder model{role}: T5 1.1 format, {outcome.parameters:,} weights (hidden size"
         f" {config.hidden}, {config.layers} and {config.num_decoder_layers} layers), bfloat16, byte-level BPE"
         " tokenizer."), "",
        (f"Trained from random weights on {how} of {outcome.pairs:,} pairs ({outcome.tokens:,} tokens of targets) in"
         f" {outcome.steps:,} steps of {config.batch}, {outcome.minutes:.3g} minutes on"
         f" {'a CPU' if config.device == 'cpu' else 'a GPU'}, by"), "",
        f"    {config.command()}", "",
        "## Measured", "",
        (f"On the {outcome.held_out_tokens:,} tokens of the targets of {outcome.held_out_pairs:,} held-out pairs,"
         " computed in float32 from the weights of this folder."), "",
        "| | |", "| --- | --- |", *rows, "",
    ])  # fmt: skip


def _load_teacher(config: Seq2SeqConfig) -> Decoder | None:
    return load_plain(str(config.teacher), device=config.device) if config.teacher else None


def _check_teacher(teacher: Decoder, tokenizer: Tokenizer) -> None:
    if teacher.config.encoder is None or teacher.vocab_size != tokenizer.get_vocab_size():
        raise ConfigError(
            f"the teacher has {teacher.vocab_size} tokens{'' if teacher.config.encoder else ' and no encoder'};"
            f" its tokenizer has {tokenizer.get_vocab_size()}",
            "name a folder that this command wrote.",
        )


def _write(config: Seq2SeqConfig, name: str, content: dict[str, Any]) -> None:
    (config.out / name).write_text(json.dumps(content, indent=2) + "\n", encoding="utf-8")
