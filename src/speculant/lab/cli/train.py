"""`speculant train`: trains small models, drafts and heads. A command's flags are the fields of its configuration."""

from __future__ import annotations

import dataclasses
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, get_args, get_origin, get_type_hints

import typer

from speculant.cli import (
    FlagGroup,
    accepts_flags,
    accepts_log_level,
    command_group,
    examples,
    messages,
    print_json,
    progress,
)
from speculant.errors import ConfigError
from speculant.lab.cli import train_head_tokens, train_static
from speculant.lab.cli.progress import show_training, shown_progress
from speculant.lab.training import BoostedConfig, HeadTrainingConfig, Seq2SeqConfig, TrainingConfig

if TYPE_CHECKING:
    from speculant.lab.training import DraftsRun, Show, TrainingRun

EXAMPLES = examples(
    "speculant train lm --out target --minutes 75",
    "speculant train lm --out target --minutes 75 --resume",
    "speculant train lm --out draft --distill-from target --hidden 128 --layers 2 --minutes 15",
    "speculant train lm --out poems --data ./poems --suffix .txt --steps 2000",
)
_DRAFT_EXAMPLES = examples(
    "speculant train draft --boosted 2 --target demo --out drafts --minutes 10",
    "speculant train draft --parallel 8 --target demo --start demo --out drafts --minutes 20",
    "speculant train draft --boosted 3 --target demo --start demo --out drafts --minutes 5",
    "speculant train draft --boosted 3 --target demo --start demo --out drafts --minutes 5 --resume",
    """speculant generate "def" --model demo --speculative-config """
    """'{"method": "specinfer", "model": "drafts/1", "models": ["drafts/2"]}'""",
)
_HEAD_EXAMPLES = examples(
    "speculant train head --kind eagle --target demo --out eagle-head --minutes 20",
    "speculant train head --kind eagle --target demo --out eagle-head --minutes 20 --resume",
    "speculant train head --kind eagle3 --target demo --out eagle3-head --draft-vocab 2048 --minutes 20",
    "speculant train head --kind eagle3 --target MODEL --chat --out head --draft-vocab 8192 --minutes 90",
    "speculant train head --kind medusa --target demo --out medusa-head --num-heads 4 --steps 2000",
)
_SEQ2SEQ_EXAMPLES = examples(
    "speculant train seq2seq english.txt german.txt --out target --minutes 60",
    "speculant train seq2seq english.txt german.txt --out target --minutes 60 --resume",
    "speculant train seq2seq english.txt german.txt --out draft --teacher target --hidden 128 --layers 2 --minutes 15",
)
_NEEDED = {"out": "FOLDER", "target": "demo", "kind": "KIND"}  # flags without a default, and a value to suggest

Resume = Annotated[bool, typer.Option("--resume", help="Continue the run in --out.")]
AsJson = Annotated[bool, typer.Option("--json", help="Print what was measured as JSON.")]

app = command_group(help="Train small models: a target, a draft for a target, or a head.", epilog=EXAMPLES)
app.command(epilog=train_static.EXAMPLES)(accepts_log_level(train_static.static))
app.command(epilog=train_head_tokens.EXAMPLES)(accepts_log_level(train_head_tokens.head_tokens))


@app.callback()
def train() -> None:
    """Train small models: a target, or a draft for a target."""


class RunFlags(FlagGroup):
    """The annotated fields of a run's configuration."""

    def __init_subclass__(cls) -> None:
        hints = get_type_hints(cls.sets, include_extras=True)
        every = [(field.name, hints[field.name]) for field in dataclasses.fields(cls.sets)]
        cls.__annotations__ = {name: _of_flag(hint) for name, hint in every if get_origin(hint) is Annotated}

    def config(self, **arguments: Path) -> Any:
        """Return the configuration. Raises ConfigError if a flag that must be given is missing."""
        needed = [name for name in _NEEDED if name in self.names()]
        for name in needed:
            if name not in self.given:
                problem = "there is no folder to write to" if needed == ["out"] else f"--{name} is missing"
                raise ConfigError(problem, f"add --{name} {_NEEDED[name]}.")
        values = {name: tuple(value) if isinstance(value, list) else value for name, value in self.given.items()}
        return self.sets(**values, **arguments)


def _of_flag(hint: Any) -> Any:
    """Return the annotation of a flag for that of a field: a tuple is a flag that can be repeated."""
    kind, description = get_args(hint)
    return Annotated[list[get_args(kind)[0]] if get_origin(kind) is tuple else kind, description]  # type: ignore[misc]


class TrainingFlags(RunFlags):
    """The model, the data and the length of a training run."""

    sets = TrainingConfig


class BoostedFlags(RunFlags):
    """The drafts, the texts and the length of the runs."""

    sets = BoostedConfig


class HeadFlags(RunFlags):
    """The head, its texts and the length of its training."""

    sets = HeadTrainingConfig


class Seq2SeqFlags(RunFlags):
    """The model, its pairs of texts and the length of a run."""

    sets = Seq2SeqConfig


@app.command("lm", epilog=EXAMPLES)
@accepts_log_level
@accepts_flags
def lm(resume: Resume = False, as_json: AsJson = False, *, flags: TrainingFlags) -> None:
    """Train a Llama-format language model, and its tokenizer, on text files.

    When the run ends, the folder can be used as `--model` or `--draft-model`. --resume continues an
    interrupted run from its last checkpoint.
    """
    from speculant.lab.training import LanguageRun

    _carry_out(LanguageRun(flags.config(), _shown()), resume, as_json)


@app.command("draft", epilog=_DRAFT_EXAMPLES)
@accepts_log_level
@accepts_flags
def draft(resume: Resume = False, as_json: AsJson = False, *, flags: BoostedFlags) -> None:
    """Train several small drafts for one tree, or one draft that predicts several tokens in one pass.

    The target continues prompts. The first draft learns the target's distributions at every token of these texts. Each
    later draft learns them where no earlier one predicts the target's likeliest token. In the method specinfer, the
    first draft is the `model` and the others are the `models`. With --parallel, there is one draft, which also learns
    to predict further tokens from masks; it is the `model` of the method parallel (PARD, arXiv 2504.18583).
    """
    from speculant.lab.training import DraftsRun

    _carry_out(DraftsRun(flags.config(), _shown()), resume, as_json)


@app.command("seq2seq", epilog=_SEQ2SEQ_EXAMPLES)
@accepts_log_level
@accepts_flags
def seq2seq(
    sources: Annotated[Path, typer.Argument(help="A file with a source per line; in .jsonl files a JSON string.")],
    targets: Annotated[Path, typer.Argument(help="A file of the same form with the targets, in the same order.")],
    resume: Resume = False,
    as_json: AsJson = False,
    *,
    flags: Seq2SeqFlags,
) -> None:
    """Train an encoder-decoder model in T5's format (1.1), and its tokenizer, on pairs of texts.

    The encoder reads a source, and the decoder learns to write its target. Texts with line breaks are JSON strings in
    .jsonl files. With --teacher, the model is a draft: it learns the teacher's distributions and has its tokenizer.
    When the run ends, the folder can be used as `--model` or `--draft-model`.
    """
    from speculant.lab.training import Seq2SeqRun

    _carry_out(Seq2SeqRun(flags.config(sources=sources, targets=targets), _shown()), resume, as_json)


@app.command("head", epilog=_HEAD_EXAMPLES)
@accepts_log_level
@accepts_flags
def head(resume: Resume = False, as_json: AsJson = False, *, flags: HeadFlags) -> None:
    """Train a head on texts that the target itself writes.

    The target continues prompts, or with --chat writes conversations. The head learns the target's distributions from
    its hidden states, which are kept on disk. When the run ends, the folder can be used:
    --speculative-config '{"method": KIND, "model": FOLDER}'.
    """
    from speculant.lab.training import HeadRun

    _carry_out(HeadRun(flags.config(), _shown()), resume, as_json)


def _shown() -> Show:
    from speculant.lab.training import Show

    return Show(progress, shown_progress, show_training)


def _carry_out(run: TrainingRun[Any, Any] | DraftsRun, resume: bool, as_json: bool) -> None:
    """Train, and print what was measured."""
    outcome = run.carry_out(resume)
    if as_json:
        print_json(dataclasses.asdict(outcome))
    else:
        for line in run.summary(outcome):
            messages().print(line)
