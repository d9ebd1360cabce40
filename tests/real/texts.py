"""Texts: pages and sources of this repository, and a few languages; and prompts for continuations."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from pathlib import Path

ROOT = Path(__file__).parents[2]
FILES = (
    "README.md",
    "CONTRIBUTING.md",
    "docs/architecture.md",
    "docs/quickstart.md",
    "docs/serving.md",
    "docs/theory.md",
    "docs/structured.md",
    "src/speculant/engine/step.py",
    "src/speculant/kernels/native.py",
    "csrc/attention.h",
    "tests/covering.py",
)
LANGUAGES = """\
Am Morgen lag Nebel über dem Fluss, und die Fähre wartete, bis der Fährmann das andere Ufer sehen konnte. Drei Leute
standen am Steg: eine Lehrerin mit einem Korb voller Hefte, ein Tischler und ein Kind, das seine Schuhe trug.
Le train de nuit avait deux heures de retard. Dans le couloir, une femme lisait à voix haute les noms des gares, et les
voyageurs répondaient chaque fois : « pas encore ». Vers quatre heures, la neige cessa de tomber.
La panadería abre a las seis, pero a las cinco y media ya hay gente en la puerta. Quien llega primero pregunta por el
pan de centeno; quien llega el último compra lo que queda, y nadie se queja.
Il faro si accende quando il guardiano ha finito di cenare. Dalla collina si vede la luce girare sul mare, e chi torna
con la barca conta i secondi fra un lampo e l'altro per sapere dove si trova.
Ninguém sabia de quem era o relógio parado na parede da escola. Um dia a diretora deu-lhe corda, e ele bateu as horas
todas que tinha calado.
Утром библиотекарь нашёл в книге письмо без адреса. Он положил его на стол у окна и стал ждать, кто за ним придёт.
图书馆的窗边放着一封没有地址的信。每天下午都有人来看书,却没有人把它拿走。
駅前の古い時計は五分遅れている。町の人はみな知っていて、五分早く家を出る。
"""  # noqa: RUF001
SUBJECTS = (
    "The capital of France is", "To make bread you need", "Once upon a time there was a", "Water boils at",
    "The three primary colours are", "My favourite season is autumn because", "A good friend is someone who",
    "def fibonacci(n):\n", "import os\n\ndef list_files(path):\n", "SELECT name FROM users WHERE",
    "Dear Sir or Madam,\n\nI am writing to", "1, 2, 3, 4, 5, 6,", "The moon orbits the", "In 1969, astronauts",
    "Photosynthesis is the process by which", "Ingredients:\n- flour\n- sugar\n-", "Q: What is 2 + 2?\nA:",
    "The quick brown fox", "Roses are red,\nviolets are", "Monday, Tuesday, Wednesday,",
)  # fmt: skip


def pages() -> list[str]:
    """Return the pages and sources of this repository; each has more than 700 of Gemma's tokens."""
    return [(ROOT / file).read_text(encoding="utf-8") for file in FILES]


def chunks(encode: Callable[[str], list[int]], size: int, texts: Sequence[str] = ()) -> list[list[int]]:
    """Return the first `size` tokens of each text; () = all."""
    cut = [encode(text)[:size] for text in texts or (*pages(), LANGUAGES)]
    assert all(len(chunk) == size for chunk in cut), "a text is too short"
    return cut
