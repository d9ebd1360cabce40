"""The content of windows, and their beginnings."""

from __future__ import annotations

from itertools import pairwise

import numpy as np
import torch

from speculant.lab.training.corpus import Windows, held_out_windows, line_starts, train_tokenizer

LENGTH, END = 8, 0


def documents() -> list[np.ndarray]:
    """Return 40 documents whose tokens are all different, with END after each."""
    return [np.append(np.arange(50) + 1 + 50 * i, END) for i in range(40)]


def windows(seed: int = 3) -> Windows:
    found = documents()
    return Windows(found, [np.zeros(len(d), dtype=bool) for d in found[:-1]] + [np.ones(51, dtype=bool)], 8, END, seed)


def test_windows_depend_on_seed_and_number_alone() -> None:
    ours, theirs = windows(), windows()
    late = theirs.batch(ours.per_epoch + 5, 2)  # the next epoch first
    assert torch.equal(ours.batch(4, 3), theirs.batch(4, 3))
    assert torch.equal(ours.batch(ours.per_epoch + 5, 2), late)
    assert not torch.equal(windows(4).batch(4, 3), ours.batch(4, 3))


def test_a_window_is_the_end_token_and_a_stretch_of_the_stream() -> None:
    for window in windows().batch(0, 50).tolist():
        assert window[0] == END
        assert all(b in (a + 1, END) or a == END for a, b in pairwise(window[1:]))


def test_an_epoch_covers_nearly_everything_once() -> None:
    source = windows()
    seen = source.batch(0, source.per_epoch)[:, 1:]
    tokens = seen[seen != END]
    assert tokens.unique().numel() > 0.9 * 2000
    assert source.batch(0, source.per_epoch).shape == (source.per_epoch, LENGTH + 1)


def test_windows_begin_lines_where_they_can() -> None:
    found = documents()
    begins = [np.arange(51) % 10 == 0 for _ in found]
    first = Windows(found, begins, LENGTH, END, 3).batch(0, 100)[:, 1]
    assert all((token - 1) % 50 % 10 == 0 or token == END for token in first.tolist())


def test_line_starts_follow_line_feeds_and_ends() -> None:
    tokenizer = train_tokenizer(["a\nb c\n\nd"] * 3, 300)
    ids = [0, *tokenizer.encode("a\nb c\n\nd", add_special_tokens=False).ids]
    marked = line_starts(tokenizer, np.array(ids))
    assert [tokenizer.id_to_token(i) for i, start in zip(ids, marked, strict=True) if start][1:] == ["a", "b", "Ċ", "d"]


def test_held_out_windows_score_every_token_once() -> None:
    cut = held_out_windows(documents()[:2], 20, END)
    assert [len(window) for window in cut] == [21, 21, 12] * 2
    assert all(window[0] == END for window in cut)
    assert torch.cat([window[1:] for window in cut]).tolist() == np.concatenate(documents()[:2]).tolist()
