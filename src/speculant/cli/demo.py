"""`speculant demo`: plain and speculative decoding with the embedded pair."""

from __future__ import annotations

import time
import uuid
from collections.abc import Callable, Sequence
from contextlib import nullcontext
from dataclasses import asdict, dataclass, replace
from typing import TYPE_CHECKING, Annotated, Any

import typer
from rich.console import Console

from speculant.cli.terminal import examples, plain_table, print_json, progress, results
from speculant.errors import ConfigError
from speculant.metrics import SpeculationMetrics
from speculant.params import SamplingParams

if TYPE_CHECKING:
    from speculant.engine import LLM, StreamPiece

EXAMPLES = examples(
    "speculant demo",
    "speculant demo --spec-length 3 --max-tokens 64",
    "speculant demo --temperature 1 --top-p 1 --seed 7",
    "speculant demo --shape 1b --max-tokens 32",
    "speculant demo --method eagle",
    "speculant demo --shape 1b --method eagle",
    "speculant demo --json",
)
PROMPTS = {  # prompt -> seed, chosen so that the text reads well
    "def remove(path):\n    try:\n        os.unlink(path)\n    except OSError": 9,
    "def split_path(path):": 14,
    "try:\n    import _socket\nexcept ImportError:": 2,
    "class TestStack(unittest.TestCase):\n\n    def test_push(self):": 7,
    "class Cache:\n    def get(self, key):\n        try:": 6,
}
DTYPE, SPEC_LENGTH = "float32", 3
WARM_UP_TOKENS = 8
ACCEPTED, CHOSEN, PROMPT = "green", "bold yellow", "dim"  # styles


def demo(
    max_tokens: Annotated[int, typer.Option(help="Tokens per prompt.")] = 64,
    spec_length: Annotated[
        int | None, typer.Option(help="Tokens to draft per step [default: 3, or the method's].")
    ] = None,
    method: Annotated[
        str | None, typer.Option(help="A drafting method to use instead of the embedded draft model.")
    ] = None,
    temperature: Annotated[float, typer.Option(help="0 is greedy.")] = 0.8,
    top_p: Annotated[float, typer.Option(help="Sample among the likeliest tokens of this total probability.")] = 0.9,
    seed: Annotated[int | None, typer.Option(help="Seed of all prompts [default: each has its own].")] = None,
    shape: Annotated[
        str | None, typer.Option(help="The same texts at the cost of larger models: 1b or 3b. Needs disk space once.")
    ] = None,
    as_json: Annotated[bool, typer.Option("--json", help="Print texts and figures as JSON.")] = False,
) -> None:
    """Compare plain and speculative decoding with the embedded models.

    Each prompt is decoded twice with the same seed: a token per pass of the target, then with drafts.
    Accepted draft tokens are green; the target chose the yellow ones itself. Both texts are the same, token for token.
    """
    params = SamplingParams(temperature=temperature, top_p=top_p, max_tokens=max_tokens)
    console = Console(quiet=True) if as_json else results()
    with progress("Loading the embedded models"):
        llm = _load(spec_length, shape, method)
        _show_pair(Console(quiet=True), llm, next(iter(PROMPTS)), replace(params, max_tokens=WARM_UP_TOKENS))
    _introduce(console, llm, params, shape)
    seeds = {prompt: own if seed is None else seed for prompt, own in PROMPTS.items()}
    with progress("Decoding") if as_json else nullcontext():
        pairs = [_show_pair(console, llm, prompt, replace(params, seed=each)) for prompt, each in seeds.items()]
    figures = summary(pairs)
    if as_json:
        print_json({**figures, "speculation": llm.speculation, "pairs": [asdict(pair) for pair in pairs]})
    else:
        _conclude(console, figures)


def _load(spec_length: int | None, shape: str | None, method: str | None) -> LLM:
    """Load the embedded models. A method that needs no model gets none; a method with a head gets its embedded head."""
    from speculant.drafting import head_parts, method_facts
    from speculant.engine import LLM

    target, draft = ("demo", "demo") if shape is None else map(str, _shapes().inflated_pair(shape))
    dtype = DTYPE if shape is None else "bfloat16"
    if method is None:
        return LLM(target, draft, spec_length=spec_length or SPEC_LENGTH, dtype=dtype, max_num_seqs=1)
    config = {"method": method, "draft_length": "fixed"}
    model = draft if method_facts(method).uses_model else None
    if shape is not None and head_parts(method) is not None:
        model = str(_shapes().inflated_head(method, shape))
    return LLM(target, model, spec_length=spec_length, speculative_config=config, dtype=dtype, max_num_seqs=1)


def _shapes() -> Any:
    """Return the laboratory's module that writes the embedded models at larger shapes."""
    from importlib.metadata import entry_points

    for point in entry_points(group="speculant.demo", name="shapes"):
        return point.load()
    raise ConfigError("--shape needs the laboratory, which is not installed", "leave out --shape.")


def _introduce(console: Console, llm: LLM, params: SamplingParams, shape: str | None) -> None:
    if shape is not None:
        console.print(f"The embedded models at the shape {shape}: their own texts, at the cost of larger models.")
    sampling = "Greedy" if params.greedy else f"Sampled at temperature {params.temperature:g}, top-p {params.top_p:g}"
    console.print(f"{sampling}, plain and speculative with the same seed.")
    console.print(f"Speculation is on: {llm.speculation}. ", end="")
    console.print("Green", style=ACCEPTED, end=" tokens were drafted and accepted, ")
    console.print("yellow", style=CHOSEN, end=" ones the target chose itself.\n\n")


def _show_pair(console: Console, llm: LLM, prompt: str, params: SamplingParams) -> ComparedPrompt:
    plain = _show_run(console, llm, prompt, replace(params, speculation=False))
    pair = ComparedPrompt(prompt, plain, _show_run(console, llm, prompt, params))
    before, after = pair.plain, pair.speculative
    console.print(
        f"{before.tokens_per_s:.0f} -> {after.tokens_per_s:.0f} tokens/s, "
        f"{before.target_passes} -> {after.target_passes} passes of the target, "
        f"{'the same tokens' if pair.identical else 'different tokens'}\n",
        style="bold",
    )
    return pair


def _show_run(console: Console, llm: LLM, prompt: str, params: SamplingParams) -> DecodedPrompt:
    drafting = params.speculation is not False
    console.print("--- speculative" if drafting else "--- plain", style="bold")
    console.print(prompt, style=PROMPT, end="")

    def show(piece: StreamPiece) -> None:
        style = "" if not drafting else ACCEPTED if piece.drafted else CHOSEN
        console.print(piece.text, style=style, end="")

    result = run(llm, prompt, params, show)
    console.print("\n")
    return result


def _conclude(console: Console, figures: dict[str, Any]) -> None:
    rows = [
        ("tokens/s", f"{figures['plain_tokens_per_s']:.0f}", f"{figures['speculative_tokens_per_s']:.0f}"),
        ("passes of the target", f"{figures['plain_target_passes']}", f"{figures['speculative_target_passes']}"),
    ]
    table = plain_table(("", "plain", "speculative"), rows, "Plain and speculative")
    console.print(table)
    console.print(f"{figures['speedup']:.2f} times as fast", style="bold")
    console.print(
        f"{figures['tokens_per_pass']:.2f} tokens per pass of the target, "
        f"acceptance rate {figures['acceptance_rate']:.2f}"
    )
    console.print(f"identical outputs: {figures['identical_outputs']} of {figures['prompts']}", end="")
    exact = figures["identical_outputs"] == figures["prompts"]
    console.print(" (speculation changed the speed and no token)" if exact else "")


@dataclass(frozen=True)
class DecodedPrompt:
    """One prompt decoded once, or several together.

    seconds: the engine's time, without the time for display. sampled_passes: see `TimingMetrics`.
    """

    text: str
    token_ids: list[int]
    seconds: float
    target_passes: int
    sampled_passes: int
    speculation: SpeculationMetrics

    @property
    def tokens_per_s(self) -> float:
        """Tokens per second, the prompt included in the time."""
        return len(self.token_ids) / self.seconds if self.seconds else 0.0

    @property
    def tokens_per_pass(self) -> float:
        """Tokens per target pass that sampled them."""
        return len(self.token_ids) / self.sampled_passes if self.sampled_passes else 0.0


@dataclass(frozen=True)
class ComparedPrompt:
    """One prompt decoded both ways."""

    prompt: str
    plain: DecodedPrompt
    speculative: DecodedPrompt

    @property
    def identical(self) -> bool:
        """Whether both gave the same tokens."""
        return self.plain.token_ids == self.speculative.token_ids


def pool(runs: Sequence[DecodedPrompt]) -> DecodedPrompt:
    """Add up runs; the texts are left out."""
    return DecodedPrompt(
        "",
        [token for run in runs for token in run.token_ids],
        sum(run.seconds for run in runs),
        sum(run.target_passes for run in runs),
        sum(run.sampled_passes for run in runs),
        SpeculationMetrics.total(run.speculation for run in runs),
    )


def run(llm: LLM, prompt: str, params: SamplingParams, show: Callable[[StreamPiece], None]) -> DecodedPrompt:
    """Decode one prompt and pass each piece to `show` when it arrives.

    Each run has its own cache salt. Otherwise the second run of a prompt would be faster: it would find the prompt in
    the cache, and drafts in the text of the first run.
    """
    stream, seconds, text = llm.stream(prompt, params, cache_salt=uuid.uuid4().hex), 0.0, ""
    while True:
        started = time.perf_counter()
        piece = next(stream, None)
        seconds += time.perf_counter() - started
        assert piece is not None, "a stream ends with its output"
        text += piece.text
        show(piece)
        if piece.output is not None:
            metrics = piece.output.metrics
            tokens = piece.output.outputs[0].token_ids
            passes = metrics.timing.target_passes, metrics.timing.sampled_passes
            return DecodedPrompt(text, tokens, seconds, *passes, metrics.speculative_decoding)


def summary(pairs: Sequence[ComparedPrompt]) -> dict[str, Any]:
    """Return the figures over all prompts."""
    plain, fast = pool([pair.plain for pair in pairs]), pool([pair.speculative for pair in pairs])
    return {
        "prompts": len(pairs),
        "tokens": len(fast.token_ids),
        "plain_tokens_per_s": plain.tokens_per_s,
        "speculative_tokens_per_s": fast.tokens_per_s,
        "speedup": fast.tokens_per_s / plain.tokens_per_s if plain.tokens_per_s else 0.0,
        "plain_target_passes": plain.target_passes,
        "speculative_target_passes": fast.target_passes,
        "tokens_per_pass": fast.tokens_per_pass,
        "mean_acceptance_length": fast.speculation.mean_acceptance_length,
        "acceptance_rate": fast.speculation.acceptance_rate,
        "draft_acceptance_rate": fast.speculation.draft_acceptance_rate,
        "identical_outputs": sum(pair.identical for pair in pairs),
    }
