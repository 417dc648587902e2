"""Sentences that are too long and words that readers stumble over: `python scripts/prose.py [--count] PATH …`.

Reads Markdown; of Python comments, docstrings, help texts, and the texts of errors and log lines; of TOML, YAML, shell
scripts and makefiles the comments. A sentence ends at . ! ? : or ; before a space.
"""

import argparse
import ast
import re
from collections import Counter
from collections.abc import Iterable, Iterator, Sequence
from pathlib import Path

MAX_WORDS = 25
# Arguments of argparse, whose texts a user reads.
HELP = ("help", "description", "epilog", "example")
LOG_CALLS = ("debug", "info", "warning", "error", "exception")
READ = {".md", ".py", ".toml", ".yml", ".yaml", ".sh"}  # and scripts without a suffix
STUMBLING = re.compile(
    r"\b(?:whoever|whomever|nobody|somebody|(?:of|to|by|with) whom|of which|(?:is|are) (?-i:none)"
    r"|(?-i:who) (?:has|is|asks|waits|holds|knows|may|wants))\b",  # at its start a question may ask for a person
    re.IGNORECASE,
)
_FENCE = re.compile(r"^ {0,3}(```|~~~).*?^ {0,3}\1", re.MULTILINE | re.DOTALL)
_SPAN = re.compile(r"(`+)(?!`).+?(?<!`)\1(?!`)", re.DOTALL)
_LINK = re.compile(r"!?\[([^\]]*)\]\([^)]*\)")
_ITEM = re.compile(r"\s*(?:[-*+]|\d+[.)])\s+")
_RULE = re.compile(r"[-=*|: ]+")
# Lines of drawings, and rows of columns that spaces align.
_ALIGNED = re.compile(r"[│├└─►◄═▼▲]|\S {2,}\S")
# Of Python: a string, in which # begins no comment, or a comment. The tokenizer of the library takes ten times as long.
_STRING_OR_COMMENT = re.compile(
    r'''("""|\'\'\')(?:\\.|(?!\1).)*\1|"(?:\\.|[^"\\\n])*"|'(?:\\.|[^'\\\n])*'|#[^\n]*''', re.DOTALL
)
_END = re.compile(r"[.!?:;]+[\"')\]*_»”]*(?=\s|$)")


def sentences(text: str) -> Iterator[str]:
    """The sentences of Markdown: code blocks are left out, and a heading, a list's item or a table's cell is a text."""
    for unit in _units(_FENCE.sub("\n", text)):
        plain = _LINK.sub(r"\1", _SPAN.sub(_one_word, unit))
        yield from (part.strip() for part in _END.split(plain) if part.strip())


def _units(text: str) -> Iterator[str]:
    for block in re.split(r"\n\s*\n", text):
        lines = block.splitlines()
        if all(line.startswith("    ") or not line.strip() for line in lines) and not _ITEM.match(
            lines[0] if lines else ""
        ):
            continue
        unit: list[str] = []
        for line in lines:
            if (
                line.lstrip().startswith(("|", "#"))
                or _ITEM.match(line)
                or _RULE.fullmatch(line)
                or _ALIGNED.search(line)
            ):
                yield " ".join(unit)
                unit = []
            if line.lstrip().startswith("|"):
                yield from _SPAN.sub(_one_word, line).split("|")
            elif line.lstrip().startswith("#"):
                yield line
            elif not _RULE.fullmatch(line):
                item = _ITEM.match(line)
                unit.append(line[item.end() if item else 0 :].strip())
        yield " ".join(unit)


def _one_word(span: re.Match[str]) -> str:
    return re.sub(r"\s", "␣", span[0])


def words(sentence: str) -> int:
    return sum(any(letter.isalnum() for letter in word) for word in sentence.split())


def texts_of(source: str) -> Iterator[str]:
    """Docstrings, comments, help texts and the texts of errors and log lines of a module: other strings are data."""
    for node in ast.walk(ast.parse(source)):
        told: list[ast.expr] = []
        if isinstance(node, ast.Expr) and isinstance(node.value, ast.Constant) and isinstance(node.value.value, str):
            first, _, rest = node.value.value.partition("\n")
            indent = min((len(line) - len(line.lstrip()) for line in rest.splitlines() if line.strip()), default=0)
            yield "\n".join([first, *(line[indent:] for line in rest.splitlines())])
        elif isinstance(node, ast.keyword) and node.arg in HELP:
            told = [node.value]
        elif isinstance(node, ast.Raise) and isinstance(node.exc, ast.Call) and not _is_an_error(node.exc):
            told = [*node.exc.args, *(each.value for each in node.exc.keywords)]
        elif isinstance(node, ast.Call) and (_is_an_error(node) or _is_a_line(node)):
            told = [*node.args, *(each.value for each in node.keywords)]
        yield from map(_string, told)
    yield from _comments(source)


def _is_an_error(call: ast.Call) -> bool:
    """Whether a call makes an error, by its name; `raise` finds those with other names."""
    name = getattr(call.func, "attr", getattr(call.func, "id", ""))
    return str(name).endswith("Error")


def _is_a_line(call: ast.Call) -> bool:
    """Whether a call writes a line to a log."""
    return isinstance(call.func, ast.Attribute) and call.func.attr in LOG_CALLS


def _string(node: ast.expr) -> str:
    if isinstance(node, ast.JoinedStr):
        return "".join(_string(part) if isinstance(part, ast.Constant) else "value" for part in node.values)
    if isinstance(node, ast.BinOp):
        return _string(node.left) + _string(node.right)
    if isinstance(node, ast.IfExp):
        return f"{_string(node.body)}\n\n{_string(node.orelse)}"
    return node.value if isinstance(node, ast.Constant) and isinstance(node.value, str) else ""


def _comments(source: str) -> Iterator[str]:
    """Each run of lines that are only comments as one text; a comment behind code as a text of its own."""
    run: list[str] = []
    last = line = seen = 0
    for found in _STRING_OR_COMMENT.finditer(source):
        if not found[0].startswith("#"):
            continue
        line += source.count("\n", seen, found.start())
        seen = found.start()
        alone = not source[source.rfind("\n", 0, seen) + 1 : seen].strip()
        if not (alone and run and line == last + 1):
            yield "\n".join(run)
            run = []
        run.append(found[0].lstrip("#! "))
        last = line if alone else -1
    yield "\n".join(run)


def comments_of(source: str) -> Iterator[str]:
    """The comments of TOML, YAML, a shell script or a makefile, as `_comments`; what looks like one in a string is one."""
    run: list[str] = []
    for line in source.splitlines():
        code, sign, text = f" {line}".partition(" #")
        if code.strip() or not sign:
            yield "\n".join(run)
            run = []
        if sign and not text.startswith("!"):
            run.append(text.lstrip("# "))
            if code.strip():
                yield "\n".join(run)
                run = []
    yield "\n".join(run)


def texts(path: Path) -> list[str]:
    """What a reader reads in a file."""
    text = path.read_text()
    if path.suffix == ".md":
        return [text]
    return list(texts_of(text) if path.suffix == ".py" else comments_of(text))


def long_sentences(path: Path) -> list[str]:
    return _long(texts(path))


def _long(read: Iterable[str]) -> list[str]:
    return [each for text in read for each in sentences(text) if words(each) > MAX_WORDS]


def findings(path: Path) -> list[str]:
    """Long sentences, each with its number of words, and stumbling words."""
    read = texts(path)
    return [*(f"{words(each)} words: {each}" for each in _long(read)), *STUMBLING.findall("\n\n".join(read))]


def files(paths: Iterable[Path]) -> Iterator[Path]:
    for path in paths:
        inside = (each for each in sorted(path.rglob("*")) if _is_read(each)) if path.is_dir() else [path]
        yield from (each for each in inside if "_pb2" not in each.name)


def _is_read(path: Path) -> bool:
    if path.suffix or not path.is_file():
        return path.suffix in READ
    with path.open("rb") as file:
        return file.read(2) == b"#!"


def main(argv: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(prog="scripts/prose.py", description="Long sentences and stumbling words.")
    parser.add_argument("--count", action="store_true", help="one line a path instead of each finding")
    parser.add_argument("paths", nargs="+", type=Path)
    args = parser.parse_args(argv)
    found: Counter[Path] = Counter()
    for root in args.paths:
        for path in files([root]):
            for each in findings(path):
                found[root] += 1
                if not args.count:
                    print(f"{path}: {each}")
    if args.count:
        for root in args.paths:
            print(f"{found[root]:>6} {root}")
    return 1 if found else 0


if __name__ == "__main__":
    raise SystemExit(main())
