"""What drafters learn outlives an engine, per salt; no file of the folder changes a text or raises an error."""

from __future__ import annotations

import asyncio
import errno
import gc
import hashlib
import json
import logging
import os
import random
import shutil
import struct
import threading
import time
from array import array
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

import pytest

from speculant import LLM, AsyncEngine, SamplingParams
from speculant.config import EngineConfig, Limits
from speculant.drafting import (
    Drafter,
    Drafters,
    FallbackDrafter,
    RecyclingOptions,
    SubDrafter,
    SuffixDrafter,
    SuffixOptions,
    TokenRecycling,
)
from speculant.engine import (
    LearnedFiles,
    Learning,
    load_tokenizer,
    target_digest,
)
from speculant.errors import DraftError
from speculant.kept_files import TEMPORARY, UnusableFileError, owner_of, salt_digest
from speculant.lab.exactness import FULL_SUPPORT, Pair, TableModel
from speculant.serving import API_KEY, USER, key_digest, salt_of
from speculant.types import CommittedRows, Ending
from tests.examples import examples, sizes
from tests.fakes import Rig, build_rig, paged
from tests.models import Checkpoints, make_request

V = 60
LENGTH = 40
PAIR = Pair(6, V, FULL_SUPPORT)
TARGET = TableModel(lambda history: PAIR.target(history[-2:]), V)  # its texts are long before they repeat themselves
LIMITS = Limits(max_model_len=64, max_num_seqs=2, max_num_batched_tokens=32)
GREEDY = SamplingParams(temperature=0, max_tokens=LENGTH, ignore_eos=True)
MAKES: dict[str, Callable[[], Drafter]] = {
    "suffix": lambda: SuffixDrafter(SuffixOptions()),
    "token_recycling": lambda: TokenRecycling(RecyclingOptions(successors=3), V),
}
every_method = pytest.mark.parametrize("method", MAKES)


def files_of(folder: Path, vocabulary: str = "of this target") -> LearnedFiles:
    return LearnedFiles(folder, vocabulary, "a model")


class Lived:
    """An engine that keeps what its drafters learn in a folder, from its start to its end."""

    def __init__(self, folder: Path, method: str, *, nested: bool = False) -> None:
        drafter = MAKES[method]()
        if nested:
            drafter = FallbackDrafter([SubDrafter.of(method, drafter, 4)], V)
        self.drafters = Drafters({"fallback" if nested else method: drafter}, "fallback" if nested else method)
        self.learning = Learning(files_of(folder), self.drafters, V)
        self.learning.start().start()
        self.rig: Rig = build_rig(TARGET, self.drafters, length=4, limits=LIMITS, learning=self.learning, cache=paged)

    def __enter__(self) -> Lived:
        return self

    def __exit__(self, *error: object) -> None:
        self.rig.engine.close()

    def run(self, salt: str = "", prompt: Sequence[int] = (3, 4)) -> tuple[list[int], int]:
        """Return the tokens of a greedy request, and how many of its drafted tokens were accepted."""
        before = self.rig.engine.metrics.accepted_tokens
        self.rig.add(prompt, GREEDY, cache_salt=salt)
        self.wait()
        outputs = self.rig.finish()
        return [
            each.token for each in outputs if each.token is not None
        ], self.rig.engine.metrics.accepted_tokens - before

    def written(self) -> list[Path]:
        """Write now, and return all files."""
        wake, self.learning._wake = self.learning._wake, threading.Event()  # its thread sleeps on
        self.learning._asked = True
        self.learning._work_all()
        self.learning._took, self.learning._wake = False, wake
        self.learning._save()
        return sorted(self.learning._files.folder.glob("*.learned"))

    def wait(self) -> None:
        """Wait until the files of the salts so far were read."""
        self.wait_for_files()
        self.learning._work_all()

    def wait_for_files(self) -> None:
        while self.learning._wanted:
            time.sleep(0.001)
        time.sleep(0.001)


@pytest.fixture(autouse=True)
def no_errors_of_threads(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    raised = list[object]()
    monkeypatch.setattr(threading, "excepthook", raised.append)
    yield
    assert not raised


@every_method
@pytest.mark.parametrize("nested", [False, True])
def test_after_a_restart_as_much_is_accepted_as_before(tmp_path: Path, method: str, nested: bool) -> None:
    with Lived(tmp_path, method, nested=nested) as first:
        runs = [first.run() for _ in range(2)]
    with Lived(tmp_path, method, nested=nested) as restarted, Lived(tmp_path / "other", method) as unbroken:
        for _ in range(2):
            unbroken.run()
        assert restarted.run() == unbroken.run()
    assert runs[0][0] == runs[1][0] == unbroken.run()[0]
    assert runs[1][1] > runs[0][1]


@every_method
def test_one_salt_has_nothing_of_another(tmp_path: Path, method: str) -> None:
    with Lived(tmp_path, method) as first:
        _, cold = first.run("one")
    with Lived(tmp_path, method) as second:
        assert second.run("two")[1] == cold
        assert second.run("")[1] == cold
        assert second.run("one")[1] > cold


@every_method
def test_what_it_yields_is_learnt_by_another_one(method: str) -> None:
    first, second = MAKES[method](), MAKES[method]()
    assert not [*first.learned()]
    request = make_request([1, 2], [3, 4, 5], seq_id=1, cache_salt="s")
    first.begin(request)
    first.observe(request, CommittedRows(0, [1, 2], [3], (), [(1, [2, 3, 4]), (2, [5, 6, 7])]))
    request.ending = Ending("stop")
    first.end(request)
    (found,) = first.learned()
    assert found[0] == "s"
    assert not [*first.learned()], "nothing was learnt since"
    for part in found[1]:
        second.learn("other", part)
    assert MAKES[method]().keeps == first.keeps
    assert all(part.typecode == "i" for part in found[1])
    again = make_request([1, 2], seq_id=2, cache_salt="other")
    second.begin(again)
    (tree,) = second.propose([again], [3])
    assert tree.token_list[0] in (3, 5)


def test_rows_of_this_engine_are_newer() -> None:
    drafter = MAKES["token_recycling"]()
    request = make_request([1], seq_id=1)
    drafter.begin(request)
    drafter.observe(request, CommittedRows(0, [], [], (), [(1, [2, 3, 4])]))
    drafter.learn("", array("i", [1, 9, 8, 7, 2, 6, 5, -1]))
    (tree,) = drafter.propose([request], [2])
    assert tree.token_list == [2, 6]


@pytest.mark.parametrize("numbers", [[1], [1, 2, 2, 3], [-1, 2, 3, 4], [1, 2, 3, V]])
def test_rows_of_another_form_are_refused(numbers: list[int]) -> None:
    with pytest.raises(DraftError):
        MAKES["token_recycling"]().learn("", array("i", numbers))


def test_the_store_keeps_its_bounds() -> None:
    drafter = SuffixDrafter(SuffixOptions(suffix_decoding_corpus_tokens=100))
    assert not [*drafter.learned()]
    for start in range(50):
        drafter.learn("a" if start % 2 else "b", array("i", range(start, start + 10)))
    kept = dict(drafter.learned())
    assert sum(len(part) for parts in kept.values() for part in parts) == drafter.store.num_tokens <= 100
    assert kept["a"][-1].tolist() == [*range(49, 59)]


# --- files


def test_files_are_for_this_user_alone_and_do_not_reveal_salts(tmp_path: Path) -> None:
    folder = tmp_path / "learned"
    with Lived(folder, "suffix") as lived:
        lived.run("secret")
    (path,) = folder.iterdir()
    assert folder.stat().st_mode & 0o777 == 0o700
    assert path.stat().st_mode & 0o777 == 0o600
    assert "secret" not in path.name
    assert b"secret" not in path.read_bytes()
    assert LearnedFiles.verify(path) == ""
    assert LearnedFiles.model_of(path) == "a model"
    (entry,) = LearnedFiles.entries(folder)
    assert (entry.path, entry.size, entry.kind) == (path, path.stat().st_size, "learned")


def test_what_a_key_taught_is_found() -> None:
    files, scope = files_of(Path("d")), {"type": "http", API_KEY: "key one"}
    paths = [files.path("suffix", "texts", salt_of(scope, own)) for own in (None, "a", "b")]
    owner = owner_of(key_digest("key one"))
    assert [LearnedFiles.belongs(path, owner, None) for path in paths] == [True] * 3
    assert [LearnedFiles.belongs(path, owner, salt_digest(salt_of(scope, "a"))) for path in paths] == [
        False,
        True,
        False,
    ]
    other = files.path("suffix", "texts", salt_of({API_KEY: "key two"}, None))
    users = [files.path("suffix", "texts", salt_of({API_KEY: "key one", USER: user}, "a")) for user in ("u", "v")]
    assert len({*users, *paths}) == 5
    assert [LearnedFiles.belongs(path, owner, salt_digest("a")) for path in users] == [True] * 2
    assert not LearnedFiles.belongs(other, owner, None)
    assert not LearnedFiles.belongs(files.path("suffix", "texts", ""), owner, None)
    assert not LearnedFiles.belongs(Path("d/x.learned"), owner, None)


def test_another_vocabulary_or_form_has_another_file(tmp_path: Path) -> None:
    path = files_of(tmp_path).path("token_recycling", "8 successors", "")
    others = [
        files_of(tmp_path, "another").path("token_recycling", "8 successors", ""),
        files_of(tmp_path).path("token_recycling", "4 successors", ""),
        files_of(tmp_path).path("suffix", "8 successors", ""),
        files_of(tmp_path).path("token_recycling", "8 successors", "a"),
    ]
    assert len({path, *others}) == 5


def test_models_of_one_vocabulary_have_other_files(tmp_path: Path, checkpoints: Checkpoints) -> None:
    tokenizer = load_tokenizer(EngineConfig(checkpoints.target), Path(checkpoints.target))
    digests = {target_digest(tmp_path / name, tokenizer, size) for name in ("one", "two") for size in (50, 60)}
    assert len(digests) == 4
    assert target_digest(tmp_path / "x" / ".." / "one", tokenizer, 50) in digests


def learned(folder: Path, method: str) -> tuple[Path, bytes, list[int], int]:
    """Return the file of the empty salt that an engine leaves, with its bytes; a text; and what drafts gain with it."""
    with Lived(folder, method) as lived:
        lived.run()
        ((path, content),) = [(each, each.read_bytes()) for each in lived.written()]
        tokens, warm = lived.run()
    path.write_bytes(content)
    return path, content, tokens, warm


def damaged(content: bytes, other: bytes, rng: random.Random) -> bytes:
    """Return a damaged file."""
    kind, place = rng.randrange(6), rng.randrange(len(content))
    if kind == 0:
        return content[:place]
    if kind == 1:
        return content[:place] + bytes([content[place] ^ 1 << rng.randrange(8)]) + content[place + 1 :]
    if kind == 2:
        return content + rng.randbytes(rng.randrange(1, 50))
    if kind == 3:
        return rng.randbytes(rng.randrange(200))
    if kind == 4:
        return content[:place] + b"\xff" * (len(content) - place)
    return other  # whole, under another name


def forged(name: str, rng: random.Random) -> bytes:
    """Return a file with a right digest and whatever in it."""
    strange = rng.random() < 0.3
    numbers = array("i", rng.choices([-7, -1, V, 2**31 - 1] if strange else range(V), k=4 * rng.randrange(10)))
    values: list[Any] = [None, "x", -1, 2**70, [], {}, [1, 2], [-3, 4], [[1]], 1.5, True]
    head: Any = {"name": name, "model": "m", "method": "suffix", "lengths": [len(numbers)]}
    if rng.random() < 0.3:
        head[rng.choice([*head])] = rng.choice(values)
    text = json.dumps(rng.choice(values) if rng.random() < 0.1 else head).encode()
    if rng.random() < 0.1:
        text = rng.choice([b"", b"{", b"[" * 9999, rng.randbytes(20)])
    length = len(text) if rng.random() < 0.9 else rng.choice([0, 3, 2**32 - 1])
    rest = struct.pack("<I", length) + text + numbers.tobytes() + (b"abc" if rng.random() < 0.1 else b"")
    return b"spec-lrn" + hashlib.blake2b(rest, digest_size=16).digest() + rest


@pytest.mark.parametrize("count", sizes(1_000, 10_000))
def test_damaged_files_are_never_read(tmp_path: Path, count: int) -> None:
    path, content, _, _ = learned(tmp_path, "suffix")
    files, rng, usable = files_of(tmp_path), random.Random(1), 0
    other_path = files.path("suffix", "texts", "another salt")
    files.write(other_path, "suffix", [array("i", [1, 2, 3])])
    other = other_path.read_bytes()
    for _ in range(count):
        path.write_bytes(bad := damaged(content, other, rng))
        assert bad != content
        with pytest.raises(UnusableFileError):
            files.read(path, V)
        assert LearnedFiles.verify(path)
    for _ in range(count // 5):
        path.write_bytes(forged(path.stem, rng))
        try:
            parts = files.read(path, V)
        except UnusableFileError:
            continue
        usable += 1
        assert all(-1 <= number < V for part in parts for number in part)
    assert usable > count / 20, "some of them have the right form"


@every_method
def test_damaged_files_change_no_text(tmp_path: Path, method: str, caplog: pytest.LogCaptureFixture) -> None:
    path, content, tokens, warm = learned(tmp_path, method)
    rng, deleted = random.Random(2), 0
    for number in range(examples(40)):
        bad = damaged(content, content[:-1], rng) if number % 2 else forged(path.stem, rng)
        path.write_bytes(bad)
        caplog.clear()
        with Lived(tmp_path, method) as lived:
            deleted += (gone := not path.exists())
            assert len(caplog.records) == gone, caplog.text
            assert lived.run()[0] == tokens
        assert "Traceback" not in caplog.text
        assert lived.rig.engine.metrics.drafter_errors == 0
    assert deleted > number / 3
    path.write_bytes(content)
    with Lived(tmp_path, method) as lived:
        assert lived.run() == (tokens, warm)


@pytest.mark.parametrize("kind", ["link", "fifo", "folder", "other user", "large"])
def test_what_is_no_file_of_this_user_is_not_read(
    tmp_path: Path, kind: str, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    folder = tmp_path / "learned"
    path, content, tokens, warm = learned(folder, "suffix")
    path.unlink()
    (tmp_path / "elsewhere").write_bytes(content)
    if kind == "link":
        path.symlink_to(tmp_path / "elsewhere")
    elif kind == "fifo":
        os.mkfifo(path)
    elif kind == "folder":
        path.mkdir()
    else:
        path.write_bytes(content)
        user = os.geteuid()
        if kind == "other user":
            monkeypatch.setattr(os, "geteuid", lambda: user + 1)
        else:
            monkeypatch.setattr("speculant.engine.learning.MOST_BYTES", len(content) - 1)
    with Lived(folder, "suffix") as lived:
        text, gained = lived.run()
    assert text == tokens
    assert gained < warm
    assert len([each for each in caplog.records if str(path) in each.getMessage() and "reading" not in each.msg]) <= 1
    assert (tmp_path / "elsewhere").read_bytes() == content


def test_the_least_recently_used_files_go_first(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path, _, _, _ = learned(tmp_path, "suffix")
    old = files_of(tmp_path).path("suffix", "texts", "old")
    old.write_bytes(bytes(10**5))
    os.utime(old, (1, 1))
    for limit in (10**6, 10**5):
        assert old.exists()
        monkeypatch.setattr("speculant.engine.learning.LIMIT_BYTES", limit)
        with Lived(tmp_path, "suffix") as lived:
            lived.run("new")
    assert not old.exists()
    assert path.exists()
    assert len([*tmp_path.iterdir()]) == 2


# --- a disk that fails


@pytest.mark.parametrize("fault", ["full", "rights", "gone", "no folder"])
def test_a_disk_that_fails_costs_a_line(
    tmp_path: Path, fault: str, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    folder = tmp_path / "learned"
    monkeypatch.setattr("speculant.engine.learning.PERIOD_S", 0.01)
    with Lived(tmp_path / "other", "suffix") as lived:
        tokens, _ = lived.run()
    if fault == "no folder":
        folder.write_text("a file")
    lived = Lived(folder, "suffix")
    with monkeypatch.context() as patch:
        if fault == "full":
            patch.setattr(os, "fsync", lambda number: raises(OSError(errno.ENOSPC, "No space left on device")))
        if fault == "rights":
            patch.setattr(Path, "mkdir", lambda *given, **named: raises(PermissionError(errno.EACCES, "denied")))
        for _ in range(5):
            if fault == "gone":
                shutil.rmtree(folder, ignore_errors=True)
            assert lived.run()[0] == tokens
            time.sleep(0.03)
        lived.rig.engine.close()
    said = [each for each in caplog.records if each.levelno >= logging.WARNING]
    assert len(said) == (0 if fault == "gone" else 1), caplog.text
    assert not [*tmp_path.rglob("*" + TEMPORARY)]
    assert folder.is_dir() == (fault in ("full", "gone"))
    assert bool([*tmp_path.glob("learned/*")]) == (fault == "gone")


def raises(error: Exception) -> Any:
    raise error


def test_a_killed_writer_leaves_its_last_file(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path, content, tokens, warm = learned(tmp_path, "suffix")
    child = os.fork()
    if not child:
        real = os.fsync

        def die(number: int) -> None:
            real(number)
            os.kill(os.getpid(), 9)

        os.fsync = die
        files_of(tmp_path).write(path, "suffix", [array("i", [1, 2, 3])])
        os._exit(0)
    assert os.waitpid(child, 0)[1] == 9
    assert path.read_bytes() == content
    assert len([*tmp_path.glob("*" + TEMPORARY)]) == 1
    with Lived(tmp_path, "suffix") as lived:
        assert lived.run() == (tokens, warm)
    assert [*tmp_path.iterdir()] == [path]


def test_engines_share_a_folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path, _, tokens, warm = learned(tmp_path, "suffix")
    monkeypatch.setattr("speculant.engine.learning.PERIOD_S", 0.002)

    def live(seed: int) -> None:
        for _ in range(10):
            with Lived(tmp_path, "suffix") as lived:
                for _ in range(2):
                    texts.append(lived.run()[0])

    texts = list[list[int]]()
    threads = [threading.Thread(target=live, args=(seed,)) for seed in range(3)]
    for thread in threads:
        thread.start()
    while any(thread.is_alive() for thread in threads):
        assert LearnedFiles.verify(path) == ""
    for thread in threads:
        thread.join()
    assert texts == [tokens] * 60
    with Lived(tmp_path, "suffix") as lived:
        assert lived.run() == (tokens, warm)


# --- the engine's end


def test_it_is_written_while_the_engine_runs(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("speculant.engine.learning.PERIOD_S", 0.01)
    with Lived(tmp_path, "suffix") as lived:
        until = time.monotonic() + 20
        while not [*tmp_path.glob("*.learned")]:
            assert time.monotonic() < until
            lived.run()
            time.sleep(0.01)


@every_method
def test_only_the_engine_s_thread_reaches_drafters(
    tmp_path: Path, method: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A garbage collection in the other thread may end a request, so that it would wait for itself."""
    learned(tmp_path, method)
    monkeypatch.setattr("speculant.engine.learning.PERIOD_S", 0.002)
    kind, threads = type(MAKES[method]()), list[threading.Thread]()
    learn, yields = kind.learn, kind.learned

    def noted(self: Any, salt: str, part: array[int]) -> None:
        threads.append(threading.current_thread())
        learn(self, salt, part)

    def noted_too(self: Any) -> Iterator[tuple[str, Sequence[array[int]]]]:
        threads.append(threading.current_thread())
        yield from yields(self)

    monkeypatch.setattr(kind, "learn", noted)
    monkeypatch.setattr(kind, "learned", noted_too)
    with Lived(tmp_path, method) as lived:
        for salt in ("", "a", "b"):
            lived.run(salt)
            time.sleep(0.01)
        assert len(threads) > 2
        assert {*threads} == {threading.current_thread()}


def test_a_request_may_end_while_the_engine_closes(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    lived, aborted = Lived(tmp_path, "suffix"), list[bool]()
    lived.run()
    lived.rig.add((3, 4), GREEDY)
    open_id = next(iter(lived.rig.engine._by_id))
    yields = SuffixDrafter.learned

    def collects(self: SuffixDrafter) -> Iterator[tuple[str, Sequence[array[int]]]]:
        lived.rig.engine.abort(open_id)
        aborted.append(lived.rig.engine.has_unfinished())
        return yields(self)

    monkeypatch.setattr(SuffixDrafter, "learned", collects)
    started = time.monotonic()
    lived.rig.engine.close()
    assert aborted == [True]
    assert time.monotonic() - started < 5
    assert len([*tmp_path.glob("*.learned")]) == 1


def test_what_could_not_be_written_is_tried_again(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    with Lived(tmp_path, "suffix") as lived:
        for salt in "ab":
            lived.run(salt)
        with monkeypatch.context() as patch:
            patch.setattr(os, "fsync", lambda number: raises(OSError(errno.ENOSPC, "No space left on device")))
            assert lived.written() == []
        assert len(lived.written()) == 2
        assert not lived.learning._taken


def test_steps_share_what_takes_long(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    files = files_of(tmp_path)
    files.write(files.path("suffix", "texts", "a"), "suffix", [array("i", range(20))] * 5)
    monkeypatch.setattr("speculant.engine.learning.SHARE_S", 0.0)
    with Lived(tmp_path, "suffix") as lived:
        drafter = lived.drafters.lasting()["suffix"]
        assert isinstance(drafter, SuffixDrafter)
        lived.learning.meet("a")
        lived.wait_for_files()
        counts = list[int]()
        while lived.learning.due:
            lived.rig.engine.step()
            counts.append(len(drafter.store.texts("a")))
    assert counts[:5] == [1, 2, 3, 4, 5]


def test_texts_are_kept_only_where_somebody_asks() -> None:
    drafter = SuffixDrafter(SuffixOptions())
    drafter.store.add("", [1, 2, 3])
    assert drafter.store.texts("") == []
    assert [*drafter.learned()] == []
    drafter.store.add("", [4, 5])
    assert [(salt, [part.tolist() for part in parts]) for salt, parts in drafter.learned()] == [("", [[4, 5]])]


def test_an_engine_that_nobody_holds_writes_too(tmp_path: Path) -> None:
    lived = Lived(tmp_path, "suffix")
    lived.run()
    thread = lived.learning._thread
    del lived
    gc.collect()
    thread.join(20)
    assert not thread.is_alive()
    assert len([*tmp_path.glob("*.learned")]) == 1


LONG = SamplingParams(temperature=0, max_tokens=80, ignore_eos=True)
FIXED = {"method": "suffix", "num_speculative_tokens": 8}


def test_an_llm_drafts_after_a_restart_as_before(tmp_path: Path, checkpoints: Checkpoints) -> None:
    passes = list[int]()
    texts = list[str]()
    for learn in (None, tmp_path, tmp_path):
        llm = LLM(checkpoints.target, speculative_config=FIXED, learn=learn)
        for _ in range(1 + (not passes)):
            before = llm.engine.metrics.sampled_passes
            texts.append(llm.generate("abc", LONG, use_tqdm=False)[0].outputs[0].text)
            passes.append(llm.engine.metrics.sampled_passes - before)
        llm.engine.close()
    cold, warm, first, restarted = passes
    assert len({*texts}) == 1
    assert first == cold > warm == restarted


def test_an_async_engine_writes_at_its_end(tmp_path: Path, checkpoints: Checkpoints) -> None:
    asyncio.run(serve_one(tmp_path, checkpoints))
    assert len([*tmp_path.glob("*.learned")]) == 1


async def serve_one(tmp_path: Path, checkpoints: Checkpoints) -> None:
    async with AsyncEngine(checkpoints.target, speculative_config=FIXED, learn=str(tmp_path)) as engine:
        await engine.generate("abc", LONG, cache_salt="a")
