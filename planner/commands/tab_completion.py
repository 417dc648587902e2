"""Tab completion of a command line, as a script of bash or zsh: commands, options, and values that are words.

source <(prfaas-plan --completion bash)
"""

import argparse
from collections.abc import Iterator, Mapping, Sequence
from shlex import quote
from typing import Any, Final

SHELLS: Final = ("bash", "zsh")
ZSH_HEAD: Final = "autoload -U +X compinit bashcompinit && compinit && bashcompinit"


def script_of(parser: argparse.ArgumentParser, shell: str) -> str:
    """What the shell sources. Words that begin with - are options, others are files, where no list of them is known."""
    name, found = parser.prog, dict(_commands(parser))
    function = "_" + name.replace("-", "_")
    words = "\n".join(f"    {quote(path)}) words={quote(' '.join(_words(each)))} ;;" for path, each in found.items())
    choices = "\n".join(
        f'    {quote(f"{path} {option}")}) COMPREPLY=($(compgen -W {quote(" ".join(values))} -- "$word")); return ;;'
        for path, each in found.items()
        for option, values in _choices(each)
    )
    return f"""{ZSH_HEAD if shell == "zsh" else "#"} tab completion of {name}
{function}() {{
  local word="${{COMP_WORDS[COMP_CWORD]}}" before="${{COMP_WORDS[COMP_CWORD-1]}}" path="" words="" at
  for ((at = 1; at < COMP_CWORD; at++)); do
    case "${{COMP_WORDS[at]}}" in -*) break ;; esac
    path="${{path:+$path }}${{COMP_WORDS[at]}}"
  done
  case "$path $before" in
{choices}
  esac
  case "$path" in
{words}
  esac
  COMPREPLY=($(compgen -W "$words" -- "$word"))
  if [[ $word != -* && ${{#COMPREPLY[@]}} -eq 0 ]]; then COMPREPLY=($(compgen -f -- "$word")); fi
}}
complete -o filenames -F {function} {name}
""".replace(f"{ZSH_HEAD} tab", f"{ZSH_HEAD}  # tab")


def _commands(parser: argparse.ArgumentParser, path: str = "") -> Iterator[tuple[str, argparse.ArgumentParser]]:
    """All commands with their own parsers, by the words that lead to them."""
    yield path, parser
    for name, each in _subcommands(parser).items():
        yield from _commands(each, f"{path} {name}".strip())


def _subcommands(parser: argparse.ArgumentParser) -> Mapping[str, Any]:
    for action in _actions(parser):
        if action.nargs == argparse.PARSER:
            return dict(action.choices or {})
    return {}


def _words(parser: argparse.ArgumentParser) -> Sequence[str]:
    """Its commands or the words that it takes, and its options."""
    taken = [str(each) for action in _actions(parser) if not action.option_strings for each in action.choices or ()]
    return [*taken, *(option for action in _actions(parser) for option in action.option_strings)]


def _choices(parser: argparse.ArgumentParser) -> Iterator[tuple[str, Sequence[str]]]:
    """Options whose values are words of a list."""
    for action in _actions(parser):
        if action.choices is not None:
            for option in action.option_strings:
                yield option, [str(each) for each in action.choices]


def _actions(parser: argparse.ArgumentParser) -> Sequence[argparse.Action]:
    return parser._actions  # argparse has no other way to list them
