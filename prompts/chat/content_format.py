"""Reads from a template's syntax tree, by vLLM's rule, whether it wants a message's content as a text or as parts.

A template that runs over the content of its messages is given parts, any other one a text (`_detect_content_format` in
vLLM's renderers/hf.py, 0.32). It must be that very rule, oddities included: where the two differ, so do the tokens.
"""

from collections.abc import Iterator
from typing import Final

from jinja2 import nodes

MAX_ALIASES: Final = 1000  # of the list of messages; vLLM would go round for ever


def wants_parts(tree: nodes.Template) -> bool:
    """Whether the template runs over the content of messages, its own or as a macro is given it."""
    try:
        return next(_loops_over_content(tree), None) is not None
    except (AttributeError, TypeError):
        return False  # where vLLM's own reading fails it takes a text, too


def _loops_over_content(tree: nodes.Template) -> Iterator[nodes.For]:
    messages = _names_of_messages(tree)
    in_macros, given = _macros(tree, messages)
    for loop in tree.find_all(nodes.For):
        if any(_reaches(loop.iter, name, "content") for name in messages):
            yield loop
        elif isinstance(loop.iter, nodes.Name):
            is_given = loop.iter.name in given.get(id(loop), ())
            if is_given or (id(loop) not in in_macros and loop.iter.name == "content"):
                yield loop


def _macros(tree: nodes.Template, messages: list[str]) -> tuple[set[int], dict[int, set[str]]]:
    """Loops inside macros, and of these the macro's parameters that somewhere are given the content of a message."""
    in_macros: set[int] = set()
    given: dict[int, set[str]] = {}
    calls = list(tree.find_all(nodes.Call))
    for macro in tree.find_all(nodes.Macro):
        names = [argument.name for argument in macro.args]
        found: set[str] = set()
        for call in calls:
            if not (isinstance(call.node, nodes.Name) and call.node.name == macro.name):
                continue
            pairs = [*zip(names, call.args, strict=False), *((each.key, each.value) for each in call.kwargs)]
            for name, value in pairs:
                if name in names and any(_reaches(value, message, "content") for message in messages):
                    found.add(name)
        for loop in macro.find_all(nodes.For):
            in_macros.add(id(loop))
            if found:
                given[id(loop)] = found
    return in_macros, given


def _names_of_messages(tree: nodes.Template) -> list[str]:
    """What loops over all messages call one of them."""
    lists = _aliases(tree, "messages")
    names = []
    for loop in tree.find_all(nodes.For):
        if any(_reaches(loop.iter, name) for name in lists):
            names.append(_name(loop.target))
    return names


def _aliases(tree: nodes.Template, name: str) -> list[str]:
    found, queue = [name], [name]
    while queue:
        known = queue.pop(0)
        for assign in tree.find_all(nodes.Assign):
            if _reaches(assign.node, known):
                alias = _name(assign.target)
                if len(found) > MAX_ALIASES:
                    raise TypeError("names that go round in circles")
                found.append(alias)
                if alias != known:
                    queue.append(alias)
    return found


def _name(node: nodes.Node) -> str:
    if not isinstance(node, nodes.Name):
        raise TypeError("no plain name")
    return node.name


def _reaches(node: nodes.Node | None, name: str, key: str = "") -> bool:
    """Whether `node` is `name`, or its `key`, be it filtered, tested or sliced."""
    if isinstance(node, nodes.Filter):
        return node.node is not None and _reaches(node.node, name, key)
    if isinstance(node, nodes.Test):
        return _reaches(node.node, name, key)
    if isinstance(node, nodes.Getitem) and isinstance(node.arg, nodes.Slice):
        return _reaches(node.node, name, key)
    if not key:
        return isinstance(node, nodes.Name) and node.ctx == "load" and node.name == name
    if isinstance(node, nodes.Getitem):
        return _reaches_name(node.node, name) and isinstance(node.arg, nodes.Const) and node.arg.value == key
    return isinstance(node, nodes.Getattr) and _reaches_name(node.node, name) and node.attr == key


def _reaches_name(node: nodes.Node, name: str) -> bool:
    return isinstance(node, nodes.Name) and node.ctx == "load" and node.name == name
