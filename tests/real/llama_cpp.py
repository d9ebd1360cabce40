"""llama.cpp's programs, and the file of log-probabilities that llama-perplexity compares a model with."""

from __future__ import annotations

import os
import re
import subprocess
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import torch
from torch import Tensor

PROGRAMS = ("llama-perplexity", "llama-completion")
ENDED = " [end of text]"  # printed after a text that the model ended
END = "\0"
LEAST = 16.0  # the file's log-probabilities end this far below the largest; natural logarithms
TRIES = 5  # a thread writes the log, and the program sometimes ends before the thread has written the last lines
HEAD = 4  # of a row, in uint16: its scale and its smallest log-probability, each a float32


@dataclass(frozen=True)
class LlamaCpp:
    """A folder with the programs."""

    folder: Path

    @classmethod
    def find(cls) -> LlamaCpp | None:
        """Return the programs in the folder that LLAMA_CPP names, or in its build/bin; None if they are not there."""
        named = os.environ.get("LLAMA_CPP")
        if not named:
            return None
        folders = [Path(named), Path(named) / "build" / "bin"]
        return next((cls(each) for each in folders if all((each / name).is_file() for name in PROGRAMS)), None)

    def divergence(self, model: Path, base: BaseFile) -> float:
        """Return the mean divergence of a model in llama.cpp from the log-probabilities of a file."""
        arguments = ["--kl-divergence", "--kl-divergence-base", str(base.path)]
        size = str(base.context)
        arguments += ["--override-kv", "tokenizer.ggml.add_bos_token=bool:false"]  # chunks are read as they are
        for _ in range(TRIES):
            output = self._run("llama-perplexity", model, *arguments, "-c", size, "-b", size, "-ub", size)
            if found := re.search(r"Mean\s+KLD:\s+(\S+)", output):
                return float(found[1])
        raise AssertionError(output[-2000:])

    def complete(self, model: Path, prompt: str, tokens: int) -> str:
        """Return the greedy continuation of a prompt, with END after it if the model ended it."""
        greedy = [
            "-n",
            str(tokens),
            "--temp",
            "0",
            "-no-cnv",
            "--no-display-prompt",
            "-c",
            "512",
            "--no-escape",
            "--no-warmup",
        ]
        text, ended, _ = self._run("llama-completion", model, "-p", prompt, *greedy, errors=False).partition(ENDED)
        return text + END if ended else text

    def _run(self, program: str, model: Path, *arguments: str, errors: bool = True) -> str:
        """Return the output of a program, with its messages or without."""
        command = [str(self.folder / program), "-m", str(model), "-t", str(torch.get_num_threads()), *arguments]
        done = subprocess.run(command, capture_output=True, text=True, stdin=subprocess.DEVNULL, check=True)
        return done.stdout + (done.stderr if errors else "")


class BaseFile:
    """The log-probabilities of a model on chunks of tokens, in llama-perplexity's format.

    Only the second half of a chunk is compared, without its last token. A row has 16 bits a token: steps of a scale
    from the smallest log-probability on.
    """

    def __init__(self, path: Path, chunks: Sequence[Sequence[int]], vocab_size: int) -> None:
        self.path, self.chunks, self.vocab_size = path, chunks, vocab_size
        self.context = len(chunks[0])
        self.rows = slice(self.context // 2, self.context - 1)  # of a chunk
        self._width = 2 * ((vocab_size + 1) // 2) + HEAD
        sizes = np.array([self.context, vocab_size, len(chunks)], np.int32)
        head = b"_logits_" + sizes.tobytes() + np.array(chunks, np.int32).tobytes()
        self._start = len(head)
        path.write_bytes(head)

    def write(self, logits: Tensor) -> None:
        """Append the next chunk, by its logits [context, vocabulary]."""
        own = logits[self.rows].numpy()
        largest = own.max(1, keepdims=True)
        least = np.maximum(own.min(1, keepdims=True), largest - LEAST)
        sums = np.log(np.exp(own - largest, dtype=np.float64).sum(1, keepdims=True)).astype(np.float32)
        scales = (largest - least) / np.float32(65535)
        rows = np.zeros((len(own), self._width), np.uint16)
        rows[:, :HEAD] = np.concatenate([scales, least - largest - sums], axis=1).astype(np.float32).view(np.uint16)
        steps = np.rint((own - least) / scales).clip(0, 65535)
        rows[:, HEAD : HEAD + self.vocab_size] = steps.astype(np.uint16)
        with self.path.open("ab") as file:
            rows.tofile(file)

    def log_probs(self) -> Iterator[np.ndarray]:
        """Yield the log-probabilities [rows, vocabulary] of each chunk in float32, as llama-perplexity reads them."""
        each = self.rows.stop - self.rows.start
        rows = np.memmap(self.path, np.uint16, "r", self._start).reshape(len(self.chunks), each, self._width)
        for chunk in rows:
            scales, least = np.ascontiguousarray(chunk[:, :HEAD]).view(np.float32).T[:, :, None]
            yield scales * chunk[:, HEAD : HEAD + self.vocab_size] + least


def divergence(base: np.ndarray, logits: np.ndarray) -> np.ndarray:
    """Return the divergence of rows of logits from log-probabilities, as llama-perplexity computes it."""
    own = logits.astype(np.float64)
    own -= own.max(1, keepdims=True)
    own -= np.log(np.exp(own).sum(1, keepdims=True))
    return np.where(base > -LEAST, np.exp(base) * (base - own), 0).sum(1)
