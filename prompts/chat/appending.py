"""Templates that only append to the text of a conversation: the text of earlier messages need not be rendered again.

    PRE · for message in messages: BODY · POST

In a template of this form, the body sees only its own message and the first. So a longer conversation renders to the
same text as before, and then the new part. The syntax tree shows that; nothing is guessed from rendered text. A
template that is not plainly of this form is refused, with the reason: it looks back or ahead, keeps counts or tells the
time.
"""

import secrets
from collections.abc import Iterator
from typing import Final, NamedTuple

from jinja2 import Environment, Template, nodes
from jinja2.visitor import NodeTransformer

MARK: Final = f"\x00{secrets.token_hex(16)}\x00"  # between the parts; no writer of a message knows it
NEW: Final = "__new_messages"
START: Final = "__number_of_the_first_new_message"
PLAIN_COUNTERS: Final = frozenset(
    {"first", "index", "index0"}
)  # of the loop; `last` and `length` change with what follows
CHANGING: Final = frozenset({"strftime_now", "cycler", "joiner", "lipsum", "self", "caller"})
STATEFUL: Final = (
    nodes.NSRef, nodes.Include, nodes.Import, nodes.FromImport, nodes.Extends, nodes.Block, nodes.Break, nodes.ExprStmt,
    nodes.ScopedEvalContextModifier,
)  # fmt: skip


class ConversationParts(NamedTuple):
    """The text of a rendered conversation."""

    before: str
    messages: str
    after: str


class NotAppending(Exception):
    """The reason why a template is not of the form, in a word for a metric."""


def in_parts(environment: Environment, source: str) -> Template:
    """`source` with marks between its parts, and of the messages the text of NEW alone; the first one has the number START.

    Raises NotAppending, or jinja2's errors.
    """
    tree = environment.parse(source)
    loops = [at for at, node in enumerate(tree.body) if isinstance(node, nodes.For) and _is_messages(node.iter)]
    if len(loops) != 1:
        raise NotAppending("no_single_loop")
    (at,) = loops
    loop = tree.body[at]
    assert isinstance(loop, nodes.For)
    if loop.test or loop.else_ or loop.recursive or not isinstance(loop.target, nodes.Name):
        raise NotAppending("loop_of_another_kind")
    _check(tree, loop)
    loop.iter = nodes.Name(NEW, "load")
    loop.body = [_Counting().visit(node) for node in loop.body]
    tree.body = [*tree.body[:at], _mark(), loop, _mark(), *tree.body[at + 1 :]]
    tree.set_environment(environment)
    tree.set_lineno(1)
    return environment.from_string(tree)


def split(text: str) -> ConversationParts | None:
    """The parts of a rendered text; None if they cannot be separated."""
    parts = text.split(MARK)
    return ConversationParts(*parts) if len(parts) == 3 else None


def _check(tree: nodes.Template, loop: nodes.For) -> None:
    for node, parent, loops_around in _walk(tree, None, 0):
        if isinstance(node, STATEFUL):
            raise NotAppending("state")
        if isinstance(node, nodes.Filter) and node.name == "random":
            raise NotAppending("chance")
        if isinstance(node, nodes.For) and node is not loop and (node.test or node.recursive):
            raise NotAppending("loop_of_another_kind")
        if not isinstance(node, nodes.Name):
            continue
        if node.name in CHANGING or node.name.startswith("__"):
            raise NotAppending("time_or_state")
        if node.name == "messages" and parent is not loop and not _is_first(parent):
            raise NotAppending("other_messages")
        of_the_loop = isinstance(parent, nodes.Getattr) and parent.attr in PLAIN_COUNTERS
        if node.name == "loop" and loops_around == 0:
            raise NotAppending("state")
        if node.name == "loop" and loops_around == 1 and not of_the_loop:
            raise NotAppending("looks_ahead")
        if node.ctx == "store" and node.name in ("loop", "messages"):
            raise NotAppending("other_messages")


def _walk(
    node: nodes.Node, parent: nodes.Node | None, loops_around: int
) -> Iterator[tuple[nodes.Node, nodes.Node | None, int]]:
    yield node, parent, loops_around
    for child in node.iter_child_nodes():
        # What a loop runs over is looked up outside of it.
        is_inside = isinstance(node, nodes.For) and child in node.body
        yield from _walk(child, node, loops_around + is_inside)


def _is_messages(node: nodes.Node) -> bool:
    return isinstance(node, nodes.Name) and node.name == "messages"


def _is_first(node: nodes.Node | None) -> bool:
    return (
        isinstance(node, nodes.Getitem)
        and isinstance(node.arg, nodes.Const)
        and type(node.arg.value) is int
        and (node.arg.value == 0)
    )


class _Counting(NodeTransformer):
    """Counters of the loop count from the first message on, whichever it begins with; those of loops inside are their own."""

    def visit_For(self, node: nodes.For) -> nodes.For:
        node.iter = self.visit(node.iter)
        node.else_ = [self.visit(each) for each in node.else_]
        return node

    def visit_Getattr(self, node: nodes.Getattr) -> nodes.Expr:
        if not (isinstance(node.node, nodes.Name) and node.node.name == "loop"):
            self.generic_visit(node)
            return node
        if node.attr == "first":
            is_first = nodes.Compare(nodes.Name(START, "load"), [nodes.Operand("eq", nodes.Const(0))])
            return nodes.And(is_first, node)
        return nodes.Add(node, nodes.Name(START, "load"))


def _mark() -> nodes.Output:
    return nodes.Output([nodes.TemplateData(MARK)])
