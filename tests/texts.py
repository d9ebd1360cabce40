"""Generated texts that are hard for tokenizers: all scripts, digits and spaces, emoji, code, added tokens inside."""

from __future__ import annotations

import random
import unicodedata
from collections import defaultdict
from collections.abc import Callable, Iterator, Sequence
from functools import cache

SPACES = [" ", "  ", "   ", "\t", "\n", "\n\n", "\r\n", "\r", " \n", "\n ", "\v", "\f", "\x85", "\xa0", "\u1680"]
SPACES += ["\u2003", "\u2028", "\u2029", "\u202f", "\u205f", "\u3000", "\u200b", "\ufeff", " " * 17, "\t\t\n \t"]
CONTRACTIONS = "'s 'S 't 'T 're 'RE 'Ve 've 'm 'LL 'll 'lL 'd 'D \u2019s '".split()
EMOJI = ["👍", "👍🏽", "👨\u200d👩\u200d👧", "🏳\ufe0f\u200d🌈", "🇩🇪", "1\ufe0f\u20e3", "❤\ufe0f", "☺", "🫠", "\ufe0f"]
CODE = ["def f(x):\n    return x**2 # ok\n", "for (int i = 0; i < 10; i++) {\n\t\t}\n", "a[0]->b::c != d && !e", "</s>"]
CODE += [
    "{'k': [1, 2.50, -3e-10]}",
    "#include <a.h>\r\n",
    "SELECT * FROM t WHERE x='it''s';",
    "$x = @{ $y };",
    "<s>",
    "`~^|",
]
CODE += [
    "https://a.b/c?d=e%20f&g=1_000",
    '<div class="a">',
    "\\n\\t\\\\",
    "camelCaseNAMEWithDigits123abc",
    "/* ... */ // ---",
]
CODE += ["====----____", "....", "!!!???", "((()))", "aaaaaaaaaaaaaaaa", "00000000000", "▁▁ ▁", "ĠĊ"]
LATIN = "the Hello WORLD naïve größer Straße ÉCOLE ПриветМир ΑΒΓαβγ ǅungla ﬁne ªº x²".split()


def texts(count: int, added: Sequence[str] = (), seed: int = 0) -> Iterator[str]:
    """Yield texts without unassigned characters. added: tokens that some texts contain."""
    chance = random.Random(seed)
    makers = [_words, _words, _digits, _spaces, _code, _contractions, _emoji, _marks, _controls, _symbols, _any, _latin]
    if added:
        makers += [lambda chance: chance.choice(added)] * 2
    while count:
        text = "".join(_part(chance, makers) for _ in range(chance.randint(1, 10)))
        if "'\u017f" not in text:  # some libraries fold the long s in "'s", others don't
            yield text
            count -= 1


def _part(chance: random.Random, makers: Sequence[Callable[[random.Random], str]]) -> str:
    return chance.choice(["", "", " ", "\n"]) + chance.choice(makers)(chance)


@cache
def _by_category() -> dict[str, list[str]]:
    found = defaultdict(list)
    for character in map(chr, range(0x110000)):
        found[unicodedata.category(character)[0]].append(character)
        found[unicodedata.category(character)].append(character)
    return found


@cache
def _scripts() -> list[list[str]]:
    """Return the letters and marks of each script, by the first word of their names."""
    found = defaultdict(list)
    for character in _by_category()["L"] + _by_category()["M"]:
        found[unicodedata.name(character, "?").split()[0]].append(character)
    return list(found.values())


def _words(chance: random.Random) -> str:
    letters = chance.choice(_scripts())
    return chance.choice(["", " "]).join(_some(chance, letters, 8) for _ in range(chance.randint(1, 4)))


def _some(chance: random.Random, characters: Sequence[str], most: int) -> str:
    return "".join(chance.choices(characters, k=chance.randint(1, most)))


def _digits(chance: random.Random) -> str:
    return _some(chance, chance.choice(["0123456789", "0123456789", _by_category()["N"]]), 9)


def _spaces(chance: random.Random) -> str:
    return _some(chance, SPACES, 3)


def _code(chance: random.Random) -> str:
    return chance.choice(CODE)


def _latin(chance: random.Random) -> str:
    return chance.choice(["", " "]).join(chance.choices(LATIN, k=chance.randint(1, 5)))


def _contractions(chance: random.Random) -> str:
    return _latin(chance) + chance.choice(CONTRACTIONS) + chance.choice(["", " ", "x", "1"])


def _emoji(chance: random.Random) -> str:
    return _some(chance, EMOJI, 3)


def _marks(chance: random.Random) -> str:
    return "".join(chance.choice("aeзक") + _some(chance, _by_category()["M"], 2) for _ in range(chance.randint(1, 3)))


def _controls(chance: random.Random) -> str:
    return _some(chance, _by_category()["Cc"] + _by_category()["Cf"] + ["\ue000"], 3)


def _symbols(chance: random.Random) -> str:
    return _some(
        chance, chance.choice(["!\"#$%&'()*+,-./:;<=>?@[\\]^_`{|}~", _by_category()["P"] + _by_category()["S"]]), 6
    )


def _any(chance: random.Random) -> str:
    return _some(chance, [each for kind in "LMNPSZ" for each in chance.choices(_by_category()[kind], k=8)], 8)
