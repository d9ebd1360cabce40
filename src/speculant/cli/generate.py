"""`speculant generate`: one prompt in, text out."""

from __future__ import annotations

import os
import sys
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from speculant.cli.flags import (
    ChatTemplate,
    ChatVariables,
    EngineFlags,
    Model,
    Profile,
    SamplingFlags,
    accepts_flags,
    parse_mapping,
    profiling,
)
from speculant.cli.terminal import examples, messages, notice, print_json, progress, results
from speculant.config import EngineConfig
from speculant.engine import check_trace_path
from speculant.errors import RequestError

if TYPE_CHECKING:
    from speculant.engine import LLM, Prompt
    from speculant.params import SamplingParams
    from speculant.types import CompletionOutput, Logprobs, RequestOutput


EXAMPLES = examples(
    'speculant generate "def read(path):" demo --draft-model demo',
    'speculant generate "def read(path):" demo --draft-model demo --temperature 0 --max-tokens 200 --json',
    'speculant generate --chat --system "Answer in one word." "What is the capital of Peru?" ./qwen',
    "cat prompt.txt | speculant generate - ./llama --draft-model ./llama-small --spec-length 4",
    "speculant generate --prompt-file prompt.txt ./llama --speculative-config method=ngram",
    'speculant generate "def read(path):" --model demo --draft-model demo --profile trace.json',
    'speculant generate "summarize: ..." --decoder-prompt "In short," --model ./flan-t5',
    "SPECULANT_MODEL=demo speculant generate 'import os' --seed 7 --n 3",
)


@accepts_flags
def generate(
    prompt: Annotated[str | None, typer.Argument(help="The prompt; - reads it from standard input.")] = None,
    target: Model = None,
    prompt_file: Annotated[Path | None, typer.Option(help="Read the prompt from a file.")] = None,
    chat: Annotated[
        bool, typer.Option("--chat", help="Send the prompt as a message, in the model's chat format.")
    ] = False,
    system: Annotated[str | None, typer.Option(help="The system message before the prompt; needs --chat.")] = None,
    decoder_prompt: Annotated[
        str | None,
        typer.Option(help="The beginning of the output, for an encoder-decoder model, which encodes the prompt."),
    ] = None,
    chat_template: ChatTemplate = None,
    chat_variables: ChatVariables = None,
    as_json: Annotated[bool, typer.Option("--json", help="Print text, token ids, usage and metrics as JSON.")] = False,
    profile: Profile = None,
    *,
    sampling: SamplingFlags,
    engine: EngineFlags,
) -> None:
    """Complete a prompt.

    Text is printed to standard output as it is generated. Measurements follow on standard error, with
    the drafter in use, or the reason why speculation is off.

    Each option of the engine is also an environment variable: --draft-model is SPECULANT_DRAFT_MODEL, and
    --engine-seed is SPECULANT_SEED. Sampling defaults are those of the checkpoint, if it has any.
    """
    of_chats = {"--system": system, "--chat-template": chat_template, "--chat-template-kwargs": chat_variables}
    for flag, value in of_chats.items():
        if value is not None and not chat:
            raise RequestError(f"{flag} needs --chat", "add --chat.")
    if decoder_prompt is not None and chat:
        raise RequestError("--decoder-prompt has no meaning with --chat", "leave out one of them.")
    if prompt_file is not None and target is None and "model" not in engine.given:
        prompt, target = None, prompt  # the only argument is the model
    _check_order(prompt, target)
    engine.name_model(target)
    text, values, template = read_prompt(prompt, prompt_file), engine.values(), given_template(chat_template)
    variables = given_variables(chat_variables)
    sampling.params()  # checks ranges before anything is loaded
    check_trace_path(profile)
    fetch(EngineConfig.from_arguments(**values))
    with progress("Loading the models"):
        llm = load(values, template)
    if chat:
        opening = [] if system is None else [{"role": "system", "content": system}]
        asked: Prompt = llm.render_chat([*opening, {"role": "user", "content": text}], chat_template_kwargs=variables)
    else:
        asked = _prompt(llm, text, decoder_prompt)
    params = sampling.params(llm.default_params)
    show = _print_document if as_json else _stream if params.n == 1 else _list
    with profiling(llm.engine, profile):
        output = show(llm, asked, params)
    if not as_json:
        notice(figures(llm, output))
        if all(each.finish_reason == "stop" and not each.text.strip() for each in output.outputs):
            messages().print(_ended_at_once(llm, chat, output.outputs[0].stop_reason))


def _check_order(prompt: str | None, target: str | None) -> None:
    """Refuse a model in the prompt's place with a prompt in the model's."""
    if target and " " in target and not os.path.exists(target) and (prompt == "demo" or os.path.exists(prompt or "")):
        problem = f"the prompt is {prompt!r} and the model {target!r}"
        raise RequestError(problem, "write the prompt first, and then the model.")


def _ended_at_once(llm: LLM, chat: bool, stop_reason: int | str | None) -> str:
    """Return why a text is empty, and what helps."""
    if stop_reason is not None:
        return f"the text ended at once, at {stop_reason!r}; leave out that stop"
    ended = "the text ended at once: the model's first token was its end token"
    can_chat = not chat and llm.tokenizer.chat_template is not None
    return f"{ended}; add --chat to send the prompt as a message" if can_chat else f"{ended}; change the prompt"


def read_prompt(prompt: str | None, prompt_file: Path | None) -> str:
    """Return the prompt from its argument, standard input or a file. Raises RequestError unless one is given."""
    if (prompt is None) == (prompt_file is None):
        raise RequestError(
            "there is no prompt" if prompt is None else "there are two prompts",
            "give a PROMPT, or - to read it from standard input, or --prompt-file FILE.",
        )
    if prompt_file is not None:
        return _read_file(prompt_file)
    try:
        text = sys.stdin.read() if prompt == "-" else str(prompt)
        text.encode()  # invalid bytes of an argument are surrogates
    except UnicodeError as error:
        raise RequestError(f"the prompt is not valid text: {error}", "encode it in UTF-8.") from error
    return text


def _prompt(llm: LLM, text: str, decoder_prompt: str | None) -> Prompt:
    """Return a prompt, with the beginning of an encoder-decoder model's output if it is given."""
    if decoder_prompt is None:
        return text
    if not llm.has_source:
        raise RequestError("--decoder-prompt is for encoder-decoder models", "leave it out.")
    return {"encoder_prompt": text, "decoder_prompt": decoder_prompt}


def _read_file(path: Path) -> str:
    try:
        return path.read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as error:
        raise RequestError(f"the prompt file {path} can't be read: {error}", "name a UTF-8 text file.") from error


def fetch(config: EngineConfig) -> Path:
    """Download models that are not in the local cache, and return the target's place. The downloader shows progress."""
    from speculant.models import resolve_source

    drafting = config.speculative()
    place = resolve_source(config.model, "target", config.revision, config.download_dir)
    if drafting is not None and drafting.model is not None:
        resolve_source(drafting.model, "draft", download_dir=config.download_dir)
    return place


def given_template(given: str | None) -> str | None:
    """Return the source of the template that --chat-template gives. Raises ConfigError."""
    from speculant.text import read_template

    return read_template(given)


def given_variables(given: str | None) -> dict[str, Any]:
    """Return the template's variables that --chat-template-kwargs gives. Raises ConfigError or RequestError."""
    from speculant.text import check_variables

    return dict(check_variables(parse_mapping("--chat-template-kwargs", given))) if given else {}


def load(values: dict[str, object], chat_template: str | None = None) -> LLM:
    """Make the engine."""
    from speculant.engine import LLM

    return LLM(**values, chat_template=chat_template)  # type: ignore[arg-type]


def _complete(llm: LLM, prompt: Prompt, params: SamplingParams) -> RequestOutput:
    with progress("Generating"):
        return llm.generate([prompt], params)[0]


def _print_document(llm: LLM, prompt: Prompt, params: SamplingParams) -> RequestOutput:
    """Print everything as JSON."""
    output = _complete(llm, prompt, params)
    print_json(document(llm, output))
    return output


def _stream(llm: LLM, prompt: Prompt, params: SamplingParams) -> RequestOutput:
    """Print the text while it is generated."""
    last, console = None, results()
    for piece in llm.stream(prompt, params):
        console.write(piece.text)
        last = piece.output or last
    console.write("\n")
    assert last is not None, "a stream ends with its output"
    return last


def _list(llm: LLM, prompt: Prompt, params: SamplingParams) -> RequestOutput:
    """Print several samples, each under its number."""
    output, console = _complete(llm, prompt, params), results()
    for sample in output.outputs:
        console.print(f"--- {sample.index + 1} of {params.n} ({sample.finish_reason})", style="bold")
        console.print(sample.text)
    return output


def document(llm: LLM, output: RequestOutput) -> dict[str, Any]:
    """Return a result as `--json` prints it. Of several samples, `outputs` lists each one with its metrics.

    `metrics` are those of all samples together.
    """
    samples = [_sample(sample) for sample in output.outputs]
    prompt_tokens = output.num_prompt_tokens
    completion_tokens = sum(len(sample.token_ids) for sample in output.outputs)
    value = {
        **samples[0],
        "usage": {
            "prompt_tokens": prompt_tokens,
            "completion_tokens": completion_tokens,
            "total_tokens": prompt_tokens + completion_tokens,
        },
        "metrics": output.metrics.to_dict(),
        "speculation": {"on": output.metrics.verification is not None, "detail": speculation(llm, output)},
    }
    if output.prompt_logprobs is not None:
        columns = zip(output.prompt_token_ids, output.prompt_logprobs, strict=True)
        value["prompt_logprobs"] = [None if entry is None else _logprob(token, entry) for token, entry in columns]
    if len(samples) > 1:
        figures_of = [None if each.metrics is None else each.metrics.to_dict() for each in output.outputs]
        value["outputs"] = [{**sample, "metrics": own} for sample, own in zip(samples, figures_of, strict=True)]
    return value


def _sample(sample: CompletionOutput) -> dict[str, Any]:
    value: dict[str, Any] = {
        "text": sample.text,
        "token_ids": sample.token_ids,
        "finish_reason": sample.finish_reason,
        "stop_reason": sample.stop_reason,
    }
    if sample.score is not None:
        value |= {"score": sample.score, "cumulative_logprob": sample.cumulative_logprob}
    if sample.logprobs is not None:
        columns = zip(sample.token_ids, sample.logprobs, strict=True)
        value["logprobs"] = [_logprob(token, entry) for token, entry in columns]
    return value


def _logprob(token: int, entry: Logprobs) -> dict[str, Any]:
    """Return the chosen token's log-probability and, in `top`, those of all reported tokens."""
    return {"token": token, **asdict(entry[token]), "top": {other: each.logprob for other, each in entry.items()}}


def speculation(llm: LLM, output: RequestOutput) -> str:
    """Return which drafter a request had, or why it had none."""
    metrics, searched = output.metrics, any(sample.score is not None for sample in output.outputs)
    if llm.speculating and searched and not llm.speculating_beams:
        return f"{llm.speculation}, but not for a beam search"
    if llm.speculating and metrics.verification is None:
        return "switched off for this request"
    if metrics.verification is None:
        return llm.speculation
    warning = "" if metrics.lossless else " (not lossless: the text may not be the target's own)"
    return f"{llm.speculation}, verified by {metrics.verification}{warning}"


def speed(tokens: int, seconds: float) -> str:
    """Return a number of tokens, their time and their speed."""
    noun = "token" if tokens == 1 else "tokens"
    return f"{tokens} {noun} in {seconds:.2f} s ({tokens / seconds if seconds else 0.0:.1f} tokens/s)"


def figures(llm: LLM, output: RequestOutput) -> str:
    """Return one line: measurements, the drafter or the reason why speculation is off, and the weights."""
    metrics, timing = output.metrics, output.metrics.timing
    tokens = sum(len(sample.token_ids) for sample in output.outputs)
    seconds = (timing.ttft_s or 0.0) + timing.decode_s
    made = speed(tokens, seconds)
    detail, weights = speculation(llm, output), ", ".join(filter(None, (llm.weight_packing, llm.weight_source)))
    weights += f"; context: {llm.context}"
    if output.metrics.verification is None:
        return f"{made}; speculation is off: {detail}; weights are {weights}"
    return (
        f"{made}; speculation is on: {detail}; {metrics.tokens_per_pass:.2f} tokens per pass, "
        f"acceptance rate {metrics.speculative_decoding.acceptance_rate:.2f}; weights are {weights}"
    )
