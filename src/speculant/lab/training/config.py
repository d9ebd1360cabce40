"""The configurations of training runs: a dataclass for each kind. Its annotated fields are the flags of its command."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, fields
from pathlib import Path
from typing import Annotated, Any, ClassVar

from typing_extensions import override

from speculant.errors import ConfigError, suggest
from speculant.gguf_file import name_of

MIN_VOCABULARY = 257  # every byte, and the end of text
MOST_PARALLEL = 32
MOST_NUMBERS = 2**34  # weights of a network, or logits of a step: 64 GiB in float32
# the least and the greatest values of fields; those of whole numbers are whole
_RANGES: Mapping[str, tuple[float, float]] = {
    "steps": (1, 10**9), "minutes": (1e-6, 1e7), "save_minutes": (1e-6, 1e7), "vocab_size": (1, 10**7),
    "hidden": (1, 10**5), "intermediate": (1, 10**6), "layers": (1, 10**4), "heads": (1, 10**4),
    "kv_heads": (1, 10**4), "max_positions": (1, 10**9), "seq": (1, 10**7), "batch": (1, 10**7), "warmup": (1, 10**9),
    "seed": (0, 2**63 - 1), "matrix_lr": (1e-12, 1e3), "embedding_lr": (1e-12, 1e3), "vector_lr": (1e-12, 1e3),
    "boosted": (1, 8), "known_share": (0.0, 1.0), "tokens": (1, 10**12),
    "temperature": (0.0, 100.0), "cache_gib": (1e-6, 1e6), "num_heads": (1, 64), "num_layers": (1, 64),
    "inner": (1, 10**6), "depth": (1, 16), "draft_vocab": (1, 10**7),
}  # fmt: skip

# fields of several kinds, with the help texts of their flags
_Minutes = Annotated[float | None, "End after this many minutes of training, at a learning rate of zero."]
_Steps = Annotated[int | None, "End after this many steps; with --minutes, whichever comes first."]
_Suffix = Annotated[str, "How the text files' names end."]
_Hidden = Annotated[int, "Width of the residual stream."]
_Intermediate = Annotated[int, "Width inside the feed-forward blocks."]
_Layers = Annotated[int, "Number of layers."]
_Heads = Annotated[int, "Attention heads."]
_KvHeads = Annotated[int, "Key heads, shared among the attention heads."]
_Warmup = Annotated[int, "Steps in which the learning rate rises."]
_WrittenTokens = Annotated[int, "Tokens of texts that the target writes."]
_TextLength = Annotated[int, "Tokens in a text."]
_Texts = Annotated[int, "Texts in a step."]
_Temperature = Annotated[float, "Temperature of the target's texts."]
_Chat = Annotated[bool, "Train on conversations: the target also writes the questions."]
_CacheGib = Annotated[float, "Most space on disk for hidden states, in GiB."]
_Device = Annotated[str, "Where to train: cpu or cuda."]


@dataclass(frozen=True)
class TrainingSchedule:
    """A run ends after a number of steps or of minutes, whichever comes first.

    The rate rises over the first `warmup` steps, then falls in a straight line to zero at the end. With a time budget
    it depends on the clock, so a slow machine takes fewer steps but still ends on time and with a rate of zero.
    """

    steps: int | None
    minutes: float | None
    warmup: int = 50

    def __post_init__(self) -> None:
        if not self.steps and not self.minutes:
            raise ConfigError("a run needs an end", "give --steps, --minutes or both.")

    def progress(self, step: int, elapsed: float) -> float:
        """Return the share of the run that is over, in [0, 1], after `step` steps and `elapsed` seconds."""
        by_steps = step / self.steps if self.steps else 0.0
        by_time = elapsed / (60 * self.minutes) if self.minutes else 0.0
        return min(1.0, max(by_steps, by_time))

    def factor(self, step: int, progress: float) -> float:
        """Return the fraction of the peak rate to use for the step with this number, counted from 0."""
        return min(1.0, (step + 1) / self.warmup) * (1.0 - progress)


class RunConfig:
    """The configuration of a run of any kind."""

    out: Path
    minutes: float | None
    steps: int | None
    batch: int
    warmup: int
    matrix_lr: float
    seed: int
    save_minutes: float

    run_command: ClassVar[str]
    arguments: ClassVar[tuple[str, ...]] = ()  # fields that are arguments of the command, not flags
    changeable: ClassVar[frozenset[str]] = frozenset({"minutes", "steps", "save_minutes", "device"})  # to resume a run

    def check_numbers(self) -> None:
        """Check that numbers are of their kinds and in their ranges; NaN is in no range. Raises ConfigError."""
        for field in fields(self):  # type: ignore[arg-type]
            value = getattr(self, field.name)
            if field.name not in _RANGES or (value is None and field.default is None):
                continue
            least, most = _RANGES[field.name]
            kind = int if isinstance(least, int) else int | float
            if isinstance(value, bool) or not isinstance(value, kind) or not least <= value <= most:
                raise ConfigError(
                    f"--{field.name.replace('_', '-')} is {value}",
                    f"give a {'whole ' * (kind is int)}number from {least} to {most}, or leave it out.",
                )

    @property
    def schedule(self) -> TrainingSchedule:
        """The length and the learning rates of a run."""
        return TrainingSchedule(self.steps, self.minutes, self.warmup)

    def values(self) -> dict[str, Any]:
        """Return the fields by name."""
        return {field.name: getattr(self, field.name) for field in fields(self)}  # type: ignore[arg-type]

    def settings(self) -> dict[str, Any]:
        """Return the settings that a resumed run must repeat; files may be moved."""
        return {
            name: value
            for name, value in self.values().items()
            if name not in self.changeable and not isinstance(value, Path)
        }

    def command(self) -> str:
        """Return the command line that starts this run: flags that are not the default, paths without their folders."""
        words = [self.run_command, *(_short(getattr(self, name)) for name in self.arguments)]
        for field in fields(self):  # type: ignore[arg-type]
            value, flag = getattr(self, field.name), f"--{field.name.replace('_', '-')}"
            if value != field.default and field.name not in self.arguments:
                parts = value if isinstance(value, tuple) else (value,)
                words += [flag if part is True else f"{flag} {_short(part)}" for part in parts]
        return " ".join(words)


def _short(value: object) -> str:
    if isinstance(value, float):
        return f"{value:g}"
    is_path = isinstance(value, Path) or (isinstance(value, str) and Path(value).exists())
    return Path(str(value)).resolve().name if is_path else str(value)


@dataclass(frozen=True)
class TrainingConfig(RunConfig):
    """A language model, its data and the length of its training."""

    out: Annotated[Path, "The folder to write: the model, its card, and the checkpoint of the run."]
    minutes: _Minutes = None
    steps: _Steps = None
    data: Annotated[
        tuple[Path, ...], "A folder of text files; can be repeated. Without it, Python's standard library."
    ] = ()
    suffix: _Suffix = ".py"
    tokenizer: Annotated[Path | None, "Use the tokenizer of this folder instead of training one."] = None
    distill_from: Annotated[Path | None, "Train a draft on the distributions of the target in this folder."] = None
    vocab_size: Annotated[int, "Tokens of a new tokenizer."] = 8192
    hidden: _Hidden = 256
    intermediate: _Intermediate = 704
    layers: _Layers = 8
    heads: _Heads = 4
    kv_heads: _KvHeads = 2
    max_positions: Annotated[int, "The longest context that config.json names."] = 1024
    seq: Annotated[int, "Tokens in a window."] = 512
    batch: Annotated[int, "Windows in a step."] = 8
    warmup: _Warmup = 50
    matrix_lr: Annotated[float, "Peak learning rate of the layers' matrices (Muon)."] = 0.02
    embedding_lr: Annotated[float, "Peak learning rate of embeddings and norms (AdamW)."] = 0.004
    seed: Annotated[int, "Fixes the first weights and the order of the data."] = 1
    save_minutes: Annotated[float, "Minutes between checkpoints."] = 5.0

    run_command: ClassVar[str] = "speculant train lm"

    def __post_init__(self) -> None:
        self.check_numbers()
        _check_network(self)
        _check_memory(self)
        if self.vocab_size < MIN_VOCABULARY:
            raise ConfigError(
                f"a vocabulary of {self.vocab_size} can't hold all 256 bytes and the end of text",
                f"set --vocab-size to {MIN_VOCABULARY} or more.",
            )
        if self.tokenizer and self.distill_from:
            raise ConfigError("a distilled draft has its target's tokenizer", "leave out --tokenizer.")

    @override
    def settings(self) -> dict[str, Any]:
        names = ("seed", "batch", "seq", "warmup", "matrix_lr", "embedding_lr")
        return {"distilled": self.distill_from is not None, **{name: getattr(self, name) for name in names}}


def _check_memory(config: TrainingConfig) -> None:
    """Refuse a network, or a step's logits, with over MOST_NUMBERS numbers."""
    layer = 4 * config.hidden * config.hidden + 3 * config.hidden * config.intermediate
    weights, tokens = config.vocab_size * config.hidden + config.layers * layer, config.batch * config.seq
    for what, count, flags in (
        ("weights", weights, "--vocab-size, --hidden, --intermediate or --layers"),
        ("logits in a step", tokens * config.vocab_size, "--batch, --seq or --vocab-size"),
    ):
        if count > MOST_NUMBERS:
            raise ConfigError(f"this run has about {count:.1g} {what}, more than {MOST_NUMBERS:.1g}", f"lower {flags}.")


def _check_network(config: TrainingConfig) -> None:
    if config.hidden % (2 * config.heads):
        raise ConfigError(
            f"a hidden size of {config.hidden} can't be cut into {config.heads} heads of an even size",
            "choose --hidden as a multiple of twice --heads.",
        )
    if config.heads % config.kv_heads:
        raise ConfigError(
            f"{config.heads} heads can't share {config.kv_heads} key heads evenly",
            "choose --heads as a multiple of --kv-heads.",
        )
    if config.seq > config.max_positions:
        raise ConfigError(
            f"windows of {config.seq} tokens don't fit a model of {config.max_positions} positions",
            "lower --seq or raise --max-positions.",
        )


def _network(config: BoostedConfig | Seq2SeqConfig, **sizes: int) -> TrainingConfig:
    """Return the network of a run as the configuration of a language model, which checks its numbers."""
    own = {field.name for field in fields(TrainingConfig)} - {"data", "tokenizer", "distill_from"}
    return TrainingConfig(**{**{name: value for name, value in config.values().items() if name in own}, **sizes})


class TargetRunConfig(RunConfig):
    """A run on texts that a target writes, and the plan of these texts.

    data: folders of files to cut prompts from, none = the standard library; for conversations, files of questions.
    tokens: of the target's output and the prompts before it, in texts of `seq` tokens. cache_gib: the limit on disk for
    the hidden states of these texts; fewer texts are written if they don't fit.
    """

    target: str
    data: tuple[Path, ...]
    suffix: str
    tokens: int
    seq: int
    temperature: float
    chat: bool
    cache_gib: float

    changeable: ClassVar[frozenset[str]] = RunConfig.changeable | {"data"}

    def __post_init__(self) -> None:
        self.check_numbers()
        if self.seq < 8:
            raise ConfigError(f"texts of {self.seq} tokens are too short", "give --seq 8 or more.")

    @property
    def target_name(self) -> str:
        """The target's id, or the name of its folder or file; see `name_of`."""
        return name_of(self.target)


@dataclass(frozen=True)
class BoostedConfig(TargetRunConfig):
    """Drafts of one shape for a target. minutes, steps: of each draft's training.

    start: all drafts have its shape; None = random weights of the given shape. Every draft but the first begins with
    the weights of the one before.
    """

    out: Annotated[Path, "The folder to write: a folder for each draft, and the target's texts."]
    target: Annotated[str, "The target: a folder, a Hugging Face id or demo."]
    boosted: Annotated[int, "Drafts to train, one after the other."] = 1
    parallel: Annotated[int, "Tokens that the draft predicts in one pass; above 1 it is for the method parallel."] = 1
    minutes: Annotated[
        float | None, "End each draft's training after this many minutes, which begin when its texts are written."
    ] = None
    steps: Annotated[int | None, "End each draft's training after this many steps."] = None
    start: Annotated[
        str | None, "The draft model to begin with: a folder, an id or demo. Without it, random weights."
    ] = None
    data: Annotated[
        tuple[Path, ...], "A folder of texts for prompts (default: Python's); with chat a file of questions."
    ] = ()
    suffix: _Suffix = ".py"
    known_share: Annotated[float, "Of the tokens that earlier drafts predict, the share that is trained on too."] = 0.0
    tokens: _WrittenTokens = 400_000
    seq: _TextLength = 256
    batch: _Texts = 8
    temperature: _Temperature = 0.8
    chat: _Chat = False
    cache_gib: _CacheGib = 1.0
    hidden: _Hidden = 128
    intermediate: _Intermediate = 240
    layers: _Layers = 2
    heads: _Heads = 4
    kv_heads: _KvHeads = 2
    warmup: _Warmup = 50
    matrix_lr: Annotated[float, "Peak learning rate of the layers' matrices (Muon); a quarter for trained weights."] = (
        0.02
    )
    embedding_lr: Annotated[
        float, "Peak learning rate of embeddings and norms (AdamW); a quarter for trained weights."
    ] = 0.004
    seed: Annotated[int, "Fixes the first weights, the prompts and the order of the data."] = 1
    save_minutes: Annotated[float, "Minutes between checkpoints."] = 5.0

    run_command: ClassVar[str] = "speculant train draft"
    changeable: ClassVar[frozenset[str]] = TargetRunConfig.changeable | {"boosted"}

    def __post_init__(self) -> None:
        super().__post_init__()
        most = min(MOST_PARALLEL, self.seq - 1)
        if isinstance(self.parallel, bool) or not 1 <= self.parallel <= most:
            raise ConfigError(f"parallel={self.parallel!r} is not from 1 to {most}", "change parallel or seq.")
        if self.parallel > 1 and self.boosted > 1:
            raise ConfigError(
                f"boosted={self.boosted} drafts can't be trained with parallel={self.parallel}",
                "leave one of the two out: a draft that predicts several tokens in one pass is used alone.",
            )
        _ = self.schedule, self.network()

    def network(self, max_positions: int | None = None) -> TrainingConfig:
        """Return the network of a draft as the configuration of a language model."""
        return _network(self, max_positions=max_positions or max(self.seq, 1))

    def folder(self, number: int) -> Path:
        """Return the folder of a draft; numbers begin at 1."""
        return self.out / str(number)


@dataclass(frozen=True)
class HeadTrainingConfig(TargetRunConfig):
    """A head and the length of its training. The target writes its texts on the CPU, whatever the device."""

    out: Annotated[Path, "The folder to write: the head, its card, texts and checkpoint of the run."]
    target: Annotated[str, "The target: a folder or GGUF file, a Hugging Face id or demo."]
    kind: Annotated[str, "The method that the head is for."]
    minutes: Annotated[float | None, "End after this many minutes of training."] = None
    steps: Annotated[int | None, "End after this many steps."] = None
    data: Annotated[
        tuple[Path, ...], "A folder of texts for prompts (default: Python's); with --chat a file of questions."
    ] = ()
    suffix: _Suffix = ".py"
    tokens: _WrittenTokens = 400_000
    seq: _TextLength = 256
    batch: _Texts = 8
    temperature: _Temperature = 0.8
    chat: _Chat = False
    cache_gib: _CacheGib = 1.0
    num_heads: Annotated[int, "Tokens to predict from one hidden state, each by its own head."] = 4
    num_layers: Annotated[int, "Residual blocks in each of these heads."] = 1
    inner: Annotated[int | None, "Width of feed-forward blocks."] = None
    depth: Annotated[int, "Tokens in a row that a layer predicts from its own states."] = 3
    draft_vocab: Annotated[
        int | None, "Tokens of an output head of its own. Without it, the head uses the target's."
    ] = None
    with_target: Annotated[
        Path | None, "Also write the target to this folder, with the head among its weights: it drafts by default."
    ] = None
    warmup: _Warmup = 50
    matrix_lr: Annotated[float, "Peak learning rate of matrices (Muon)."] = 0.02
    vector_lr: Annotated[float, "Peak learning rate of all other weights (AdamW)."] = 0.002
    seed: Annotated[int, "Fixes the first weights and the prompts."] = 1
    save_minutes: Annotated[float, "Minutes between checkpoints, and between figures on held-out texts."] = 5.0
    device: _Device = "cpu"

    run_command: ClassVar[str] = "speculant train head"

    def __post_init__(self) -> None:
        from speculant.lab.training.heads import KINDS

        if self.kind not in KINDS:
            raise ConfigError(f"there is no kind of head called {self.kind!r}", suggest(str(self.kind), KINDS))
        super().__post_init__()
        if self.draft_vocab is not None and not KINDS[self.kind].own_output_head:
            able = [name for name, kind in KINDS.items() if kind.own_output_head]
            raise ConfigError(
                f"heads of the kind {self.kind} have no output head of their own",
                f"leave out --draft-vocab, or train one of the kind {' or '.join(able)}.",
            )
        if self.with_target is not None and not KINDS[self.kind].within_target:
            able = [name for name, kind in KINDS.items() if kind.within_target]
            raise ConfigError(
                f"heads of the kind {self.kind} are not among a target's weights",
                f"leave out --with-target, or train one of the kind {' or '.join(able)}.",
            )
        _ = self.schedule


@dataclass(frozen=True)
class Seq2SeqConfig(RunConfig):
    """An encoder-decoder model, its pairs of texts and the length of a run.

    sources, targets: files with a text for each pair, see `read_texts`. held_out_sources, held_out_targets: None = one
    pair in fifty, by a hash of its source. tokenizer: None = the teacher's, or a new one of `vocab_size` tokens.
    """

    out: Annotated[Path, "The folder to write: the model, its card, and the checkpoint of the run."]
    sources: Path
    targets: Path
    held_out_sources: Annotated[
        Path | None, "Sources of the held-out pairs. Without it, one pair in fifty is held out."
    ] = None
    held_out_targets: Annotated[Path | None, "Targets of the held-out pairs."] = None
    teacher: Annotated[Path | None, "Train a draft on the distributions of the target in this folder."] = None
    tokenizer: Annotated[Path | None, "Use the tokenizer of this folder instead of training one."] = None
    minutes: _Minutes = None
    steps: _Steps = None
    vocab_size: Annotated[int, "Tokens of a new tokenizer."] = 8192
    hidden: _Hidden = 256
    intermediate: _Intermediate = 704
    layers: Annotated[int, "Number of layers of the encoder and of the decoder."] = 4
    decoder_layers: Annotated[int | None, "Number of layers of the decoder, if that differs."] = None
    heads: _Heads = 4
    source_tokens: Annotated[int, "Longer sources are cut to this many tokens."] = 256
    target_tokens: Annotated[int, "Longer targets are cut to this many tokens."] = 64
    batch: Annotated[int, "Pairs in a step."] = 32
    warmup: _Warmup = 50
    matrix_lr: Annotated[float, "Peak learning rate of the layers' matrices (Muon)."] = 0.02
    embedding_lr: Annotated[float, "Peak learning rate of tables and norms (AdamW)."] = 0.004
    seed: Annotated[int, "Fixes the first weights and the order of the data."] = 1
    save_minutes: Annotated[float, "Minutes between checkpoints, and between figures on held-out pairs."] = 5.0
    device: _Device = "cpu"

    run_command: ClassVar[str] = "speculant train seq2seq"
    arguments: ClassVar[tuple[str, ...]] = ("sources", "targets")

    def __post_init__(self) -> None:
        if (self.held_out_sources is None) != (self.held_out_targets is None):
            raise ConfigError("held-out pairs need two files", "give --held-out-sources and --held-out-targets.")
        if self.teacher and self.tokenizer:
            raise ConfigError("a model with a teacher has its tokenizer", "leave out --tokenizer.")
        for tokens in (self.source_tokens, self.target_tokens):
            for layers in (self.layers, self.num_decoder_layers):
                _network(self, layers=layers, kv_heads=self.heads, seq=tokens, max_positions=tokens)
        _ = self.schedule

    @property
    def num_decoder_layers(self) -> int:
        """The number of the decoder's layers."""
        return self.layers if self.decoder_layers is None else self.decoder_layers

    @override
    def settings(self) -> dict[str, Any]:
        return super().settings() | {"taught": self.teacher is not None}
