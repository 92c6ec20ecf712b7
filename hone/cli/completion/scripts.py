"""The completion scripts of bash, zsh and fish: all words are in them, so that TAB starts no Python."""

from __future__ import annotations

import shlex
from collections.abc import Callable, Iterable, Iterator

from hone.base.stage import STAGES
from hone.cli.completion.known import FILES, FOLDERS, RECIPES, Option, arguments_of, options_of, stage_verb, verbs

_OF_STAGES = ("run", "plan")
"""Verbs whose options are those of stages, as STAGE.OPTION."""


def script(shell: str) -> str:
    """The script for a shell."""
    head = f"# Completion of hone in {shell}. After an update of hone print it again: hone completion {shell}"
    made: dict[str, Callable[[], str]] = {"bash": _bash, "zsh": _zsh, "fish": _fish}
    return f"#compdef hone\n{head}\n{made[shell]()}" if shell == "zsh" else f"{head}\n{made[shell]()}"


def _shown(option: Option) -> str:
    """An option as it is written, with '=' where a value follows."""
    return f"--{option.name}{'' if option.flag else '='}"


def _cases(rows: Iterable[tuple[str, str]]) -> str:
    """Branches of a shell's `case`, one for all patterns with the same body."""
    bodies: dict[str, list[str]] = {}
    for pattern, body in rows:
        bodies.setdefault(body, []).append(pattern)
    return "\n".join(f"    {'|'.join(patterns)}) {body} ;;" for body, patterns in bodies.items())


def _echo(words: Iterable[str]) -> str:
    return f"echo {shlex.quote(' '.join(words))}"


def _rows(body: Callable[[Option], str]) -> Iterator[tuple[str, str]]:
    """(pattern 'VERB OPTION', `body` of the option) where that is not empty; options of stages as those of their own verb."""
    prefixes = tuple(f"{stage}." for stage in STAGES)
    for verb in verbs():
        for one in options_of(verb):
            if body(one) and not (verb in _OF_STAGES and one.name.startswith(prefixes)):
                yield f"'{verb} --{one.name}'", body(one)


def _lookups() -> str:
    """The functions that bash and zsh share: an option's values, whether it may stand alone, and a verb's arguments."""
    stages = "\n".join(
        f'    {"|".join(f"{verb}:{stage}" for verb in _OF_STAGES)}) echo "{stage_verb(stage)} --${{name#*.}}" ;;'
        for stage in STAGES
    )
    return f"""
__hone_verb_and_option() {{
  local name=${{2#--}}
  case $1:${{name%%.*}} in
{stages}
    *) echo "$1 --$name" ;;
  esac
}}

__hone_values() {{
  case "$(__hone_verb_and_option "$1" "$2")" in
{_cases(_rows(lambda one: _echo(one.values) if one.values else ""))}
  esac
}}

__hone_stands_alone() {{
  case "$(__hone_verb_and_option "$1" "$2")" in
{_cases(_rows(lambda one: "return 0" if one.flag else ""))}
  esac
  return 1
}}

__hone_arguments() {{
  case $1 in
{_cases((verb, _echo(arguments_of(verb))) for verb in verbs())}
  esac
}}
"""


def _bash() -> str:
    options = _cases((verb, _echo(map(_shown, options_of(verb)))) for verb in verbs())
    return f"""{_lookups()}
__hone_options() {{
  case $1 in
{options}
  esac
}}

# $1: the words that may be written, $2: what is written, $3: what stands before it in a word that is not cut at '='
__hone_reply() {{
  local IFS=$'\\n' word
  case $1 in
    '{FILES}'|'{FOLDERS}'|'{RECIPES}') compopt -o filenames 2>/dev/null ;;
  esac
  case $1 in
    '{FILES}') COMPREPLY=($(compgen -P "$3" -f -- "$2")) ;;
    '{FOLDERS}') COMPREPLY=($(compgen -d -- "$2")) ;;
    '{RECIPES}')
      COMPREPLY=($(compgen -d -- "$2"))
      for word in $(compgen -f -- "$2"); do
        case $word in *.yaml|*.yml) COMPREPLY+=("$word") ;; esac
      done ;;
    *) IFS=$' \\n'; COMPREPLY=($(compgen -P "$3" -W "$1" -- "$2")) ;;
  esac
}}

_hone() {{
  local current=${{COMP_WORDS[COMP_CWORD]}} before=${{COMP_WORDS[COMP_CWORD-1]}} verb= option= place
  COMPREPLY=()
  for ((place = 1; place < COMP_CWORD; place++)); do
    case ${{COMP_WORDS[place]}} in -*) ;; *) verb=${{COMP_WORDS[place]}}; break ;; esac
  done
  if [[ -z $verb ]]; then
    case $current in
      -*) __hone_reply '--help --version' "$current" ;;
      *) __hone_reply {shlex.quote(" ".join(verbs()))} "$current" ;;
    esac
    return
  fi
  if [[ $current == = ]]; then
    option=$before current=
  elif [[ $before == = ]]; then
    option=${{COMP_WORDS[COMP_CWORD-2]}}
  elif [[ $current == --*=* ]]; then
    option=${{current%%=*}}
    __hone_reply "$(__hone_values "$verb" "$option")" "${{current#*=}}" "$option="
    return
  elif [[ $before == --* && $current != -* ]] && ! __hone_stands_alone "$verb" "$before"; then
    option=$before
  fi
  if [[ -n $option ]]; then
    __hone_reply "$(__hone_values "$verb" "$option")" "$current"
  elif [[ $current == -* ]]; then
    __hone_reply "$(__hone_options "$verb")" "$current"
    if [[ ${{#COMPREPLY[@]}} -eq 1 && ${{COMPREPLY[0]}} == *= ]]; then compopt -o nospace 2>/dev/null; fi
  else
    __hone_reply "$(__hone_arguments "$verb")" "$current"
  fi
}}
complete -F _hone hone
"""


def _zsh() -> str:
    def told(word: str, about: str) -> str:
        return shlex.quote(f"{word.replace(':', chr(92) + ':')}:{about}")

    named = "\n    ".join(told(verb, about) for verb, about in verbs().items())
    rows = []
    for verb in verbs():
        alone = " ".join(told(_shown(one), one.about) for one in options_of(verb) if one.flag)
        valued = " ".join(told(_shown(one), one.about) for one in options_of(verb) if not one.flag)
        rows.append((verb, f"alone=({alone}); valued=({valued})"))
    return f"""{_lookups()}
__hone_reply() {{
  case $1 in
    '{FILES}') _files ;;
    '{FOLDERS}') _files -/ ;;
    '{RECIPES}') _files -g '*.(yaml|yml)(-.)' ;;
    *) compadd -- ${{=1}} ;;
  esac
}}

_hone() {{
  local verb= option= word
  local -a named alone valued
  named=(
    {named}
  )
  for word in ${{words[2,CURRENT-1]}}; do
    case $word in -*) ;; *) verb=$word; break ;; esac
  done
  if [[ -z $verb ]]; then
    _describe 'verb' named
    return
  fi
  case $verb in
{_cases(rows)}
  esac
  if [[ $PREFIX == --*=* ]]; then
    option=${{PREFIX%%=*}}
    compset -P '*='
  elif [[ $PREFIX != -* && ${{words[CURRENT-1]}} == --* && ${{words[CURRENT-1]}} != *=* ]] &&
    ! __hone_stands_alone $verb ${{words[CURRENT-1]}}; then
    option=${{words[CURRENT-1]}}
  fi
  if [[ -n $option ]]; then
    __hone_reply "$(__hone_values $verb $option)"
  elif [[ $PREFIX == -* ]]; then
    _describe -o 'option' alone -- valued -S ''
  else
    __hone_reply "$(__hone_arguments $verb)"
  fi
}}

if [[ ${{funcstack[1]}} == _hone ]]; then _hone "$@"; else compdef _hone hone; fi
"""


_FISH_PATHS = {
    FILES: ("-F", ""),
    FOLDERS: ("", " -a '(__fish_complete_directories)'"),
    RECIPES: ("-F", ""),
}


def _fish() -> str:
    lines = ["complete -c hone -f", "complete -c hone -n __fish_use_subcommand -l version -d 'Print the version.'"]
    for verb, about in verbs().items():
        lines.append(f"complete -c hone -n __fish_use_subcommand -a {verb} -d {_fish_text(about)}")
        inside = f"complete -c hone -n '__fish_seen_subcommand_from {verb}'"
        for word in arguments_of(verb):
            how, words = _FISH_PATHS.get(word, ("", f" -a {_fish_text(word)}"))
            lines.append(f"{inside} {how}{words}".rstrip())
        for one in options_of(verb):
            takes = "" if one.flag else " -r -F" if one.values == (FILES,) else " -x"
            words = "" if one.values in ((), (FILES,)) or one.flag else f" -a {_fish_text(' '.join(one.values))}"
            lines.append(f"{inside} -l {one.name}{takes}{words} -d {_fish_text(one.about)}")
    return "\n".join(lines) + "\n"


def _fish_text(text: str) -> str:
    """A quoted word: within fish's single quotes \\\\ and \\' are escapes."""
    escaped = text.replace("\\", "\\\\").replace("'", "\\'")
    return f"'{escaped}'"
