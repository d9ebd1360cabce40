"""A grammar in EBNF, as vLLM and llama.cpp take it, in the grammar library's dialect of Lark.

The library's parser keeps items for every level of a recursion, and looks at all of them for each token: a rule such as
`chars ::= char chars | ""` would exceed its limits after a hundred characters. So a rule that refers to itself at its
beginning or end becomes a repetition, which costs the same at every character:

    A ::= x A | A y | A z A | b        becomes        A ::= e (z e)*    with    e = x* b y*
"""

from __future__ import annotations

import re
from collections.abc import Iterator

from llguidance.gbnf_to_lark import (
    AlternativeNode,
    ASTNode,
    GrammarParser,
    RepetitionNode,
    RuleNode,
    RuleRefNode,
    SequenceNode,
    resolve,
)

Nodes = list[ASTNode]  # a sequence
_NUMBERED = re.compile(r"(?<!\\)((?:\\\\)*)\\(?:u([0-9A-Fa-f]{4})|U([0-9A-Fa-f]{8}))")  # a character
_WHOLE = "whole-of-root"


def ebnf_to_lark(text: str) -> str:
    """Return a grammar with the same texts. Raises the library's errors for one that it can't read."""
    rules = GrammarParser().parse(_plain(text))
    repeated = {name: without_recursion(rule) for name, rule in rules.items()}
    if any(repeated[name] is not rule.alternatives for name, rule in rules.items()) and "root" in rules:
        # A rule without recursion is one symbol for the library, which reads as much of the text as fits. So that a
        # repetition does not take what follows it, the whole text is one symbol if no rule is recursive.
        whole = rules[_WHOLE] = RuleNode(_WHOLE, repeated["root"], "")
        repeated |= {_WHOLE: whole.alternatives, "root": RuleRefNode(_WHOLE)}
    for name, rule in rules.items():
        rule.alternatives = repeated[name]
    resolve(rules)
    return "%llguidance {}\n\n" + "\n".join(str(rule) for rule in sorted(rules.values(), key=lambda each: each.order))


def _plain(text: str) -> str:
    """Return a grammar as the library's converter reads it: a rule in one line, no characters by number."""
    lines = list[str]()
    for line in text.splitlines():
        if line.lstrip().startswith("|") and lines and "#" not in lines[-1]:
            lines[-1] += f" {line.strip()}"
        else:
            lines.append(line)
    return _NUMBERED.sub(lambda found: found[1] + _character(int(found[2] or found[3], 16)), "\n".join(lines))


def _character(number: int) -> str:
    return f"\\x{number:02x}" if number < 128 else chr(number)


def without_recursion(rule: RuleNode) -> ASTNode:
    """Return a rule's alternatives without references to itself at the beginning or the end of a sequence.

    They are the rule's own ones if there are no such references, or nothing else.
    """
    before, after, between, rest = list[Nodes](), list[Nodes](), list[Nodes](), list[Nodes]()
    for nodes in _spread([rule.alternatives], rule.name):
        first, last = (len(nodes) > 0 and _is_rule(nodes[place], rule.name) for place in (0, -1))
        if first and last:
            between += [nodes[1:-1]] if len(nodes) > 1 else []  # a rule that is itself adds nothing
        elif first:
            after.append(nodes[1:])
        elif last:
            before.append(nodes[:-1])
        else:
            rest.append(nodes)
    if not (before or after or between) or not rest:
        return rule.alternatives
    element = [*_repeated(before), _any_of(rest), *_repeated(after)]
    further = _repeated([[_any_of(between), *element]]) if between else []
    return _any_of([element + further])


def _spread(nodes: Nodes, name: str) -> Iterator[Nodes]:
    """Yield the sequences that a sequence stands for: none has a group with the rule `name` as its first or last."""
    for place in (0, len(nodes) - 1) if nodes else ():
        if (options := _options(nodes[place])) and _mentions(nodes[place], name):
            for option in options:
                yield from _spread(nodes[:place] + option + nodes[place + 1 :], name)
            return
    yield nodes


def _options(node: ASTNode) -> list[Nodes]:
    """Return the sequences of which a node is one; none if it is no group and not optional."""
    if isinstance(node, AlternativeNode):
        return [each.nodes if isinstance(each, SequenceNode) else [each] for each in node.alternatives]
    if isinstance(node, RepetitionNode) and (node.min_times, node.max_times) == (0, 1):
        return [[], [node.node]]
    return []


def _mentions(node: ASTNode, name: str) -> bool:
    return _is_rule(node, name) or any(_mentions(child, name) for child in node.children())


def _is_rule(node: ASTNode, name: str) -> bool:
    return isinstance(node, RuleRefNode) and node.name == name


def _any_of(sequences: list[Nodes]) -> ASTNode:
    return AlternativeNode([SequenceNode(nodes) for nodes in sequences])


def _repeated(sequences: list[Nodes]) -> Nodes:
    return [RepetitionNode(_any_of(sequences), 0, None)] if sequences else []
