"""A training run from files to a model folder: prepare, train, finish."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, cast

import numpy as np
import torch
from numpy.typing import NDArray
from tokenizers import Tokenizer
from torch import Tensor

from speculant.errors import ConfigError
from speculant.lab.training.card import Outcome, model_card
from speculant.lab.training.checkpoint import FILE_NAME
from speculant.lab.training.config import TrainingConfig
from speculant.lab.training.corpus import Corpus, read_corpus, standard_library
from speculant.lab.training.evaluation import Watcher, evaluate, overlap
from speculant.lab.training.export import export_model
from speculant.lab.training.network import hf_config, new_network, parameter_count, project_embedding
from speculant.lab.training.objective import DistillObjective, TextObjective
from speculant.lab.training.optimizer import Optimizer
from speculant.lab.training.tokenizer import encode, end_of_text, line_starts, load_tokenizer, train_tokenizer
from speculant.lab.training.trainer import Trainer
from speculant.lab.training.windows import Windows, held_out_windows
from speculant.models import Decoder, load_model


@dataclass(frozen=True)
class TokenisedCorpus:
    """A tokenised corpus."""

    tokenizer: Tokenizer
    training: list[NDArray[np.int64]]  # tokens of each document, then END_OF_TEXT
    held_out: list[NDArray[np.int64]]

    @property
    def end_of_text(self) -> int:
        """The id of END_OF_TEXT."""
        return end_of_text(self.tokenizer)


def check_folder(config: TrainingConfig, resume: bool) -> None:
    """Make the run's folder. Raises ConfigError if it holds another run."""
    if not resume and (config.out / FILE_NAME).exists():
        raise ConfigError(
            f"{config.out} holds a run already", "add --resume to go on with it, or choose another --out."
        )
    try:
        config.out.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise ConfigError(f"{config.out} can't be made: {error}", "name a folder that you may write to.") from error


def read_files(config: TrainingConfig) -> Corpus:
    """Find the text files and split them."""
    return read_corpus(config.data or (standard_library(),), config.suffix)


def choose_tokenizer(config: TrainingConfig, corpus: Corpus) -> Tokenizer:
    """Load the target's, the given or the run's own tokenizer; if there is none, train and save one."""
    own = config.out / "tokenizer.json"
    given = config.distill_from or config.tokenizer or (config.out if own.exists() else None)
    if given:
        return load_tokenizer(given)
    tokenizer = train_tokenizer((document.text for document in corpus.training), config.vocab_size)
    tokenizer.save(str(own))
    return tokenizer


def tokenise(corpus: Corpus, tokenizer: Tokenizer) -> TokenisedCorpus:
    """Tokenise the corpus."""
    return TokenisedCorpus(tokenizer, encode(tokenizer, corpus.training), encode(tokenizer, corpus.held_out))


def new_trainer(config: TrainingConfig, texts: TokenisedCorpus) -> Trainer:
    """Make a model with random weights, and its trainer."""
    torch.set_flush_denormal(True)  # gradients of unlikely tokens are subnormal, which is slow
    hf = hf_config(config, texts.tokenizer.get_vocab_size())
    model = new_network(hf, config.seed)
    target = _load_target(config)
    if target:
        project_embedding(model, target)
    return Trainer(
        model=model,
        windows=_training_windows(config, texts),
        objective=DistillObjective(target) if target else TextObjective(),
        optimizer=Optimizer(model, config.matrix_lr, config.embedding_lr),
        schedule=config.schedule,
        batch_size=config.batch,
        folder=config.out,
        settings=_settings(config, hf, texts),
        save_every=60 * config.save_minutes,
    )


def finish(config: TrainingConfig, texts: TokenisedCorpus, trainer: Trainer, watch: Watcher | None = None) -> Outcome:
    """Write the model folder, evaluate the exported model, and write the card."""
    hf = trainer.settings["network"]
    export_model(config.out, trainer.model, hf, texts.tokenizer)
    outcome = measure(config, texts, trainer, watch)
    (config.out / "README.md").write_text(model_card(config, outcome), encoding="utf-8")
    return outcome


def measure(config: TrainingConfig, texts: TokenisedCorpus, trainer: Trainer, watch: Watcher | None = None) -> Outcome:
    """Evaluate the exported weights, in float32, on the held-out files."""
    model, target = load_decoder(config.out), _load_target(config)
    windows = held_out_windows(texts.held_out, config.seq, texts.end_of_text)
    return Outcome(
        parameters=parameter_count(model),
        tokens=trainer.state.step * config.batch * config.seq,
        epoch_tokens=_count(texts.training),
        steps=trainer.state.step,
        minutes=trainer.state.elapsed / 60,
        held_out_loss=evaluate(model, windows, watch),
        held_out_files=len(texts.held_out),
        held_out_tokens=_count(texts.held_out),
        overlap=overlap(target, model, windows, watch) if target else None,
    )


def load_decoder(folder: Path) -> Decoder:
    """Load an exported model to compute in float32."""
    return cast(Decoder, load_model(str(folder), "float32").model)


def _load_target(config: TrainingConfig) -> Decoder | None:
    target = load_decoder(config.distill_from) if config.distill_from else None
    if target is not None and target.config.encoder is not None:
        raise ConfigError(
            f"{config.distill_from} reads sources, which these texts lack", "use speculant train seq2seq --teacher."
        )
    return target


def _training_windows(config: TrainingConfig, texts: TokenisedCorpus) -> Windows:
    if _count(texts.training) < 3 * config.seq:
        raise ConfigError(
            f"the files hold {_count(texts.training)} tokens, too few for windows of {config.seq}",
            "add files or lower --seq.",
        )
    starts = [line_starts(texts.tokenizer, tokens) for tokens in texts.training]
    return Windows(texts.training, starts, config.seq, texts.end_of_text, config.seed)


def _settings(config: TrainingConfig, hf: dict[str, Any], texts: TokenisedCorpus) -> dict[str, Any]:
    """Return the settings that a resumed run must repeat; its length may change."""
    names = ("seed", "batch", "seq", "warmup", "matrix_lr", "embedding_lr")
    return {
        "network": hf,
        "tokens": _count(texts.training),
        "distilled": config.distill_from is not None,
        **{name: getattr(config, name) for name in names},
    }


def _count(documents: Sequence[NDArray[np.int64]] | Sequence[Tensor]) -> int:
    return sum(map(len, documents))
