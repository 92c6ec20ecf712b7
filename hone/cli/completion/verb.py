"""The verb `completion`: prints the script for a shell."""

from __future__ import annotations

from hone.cli.options import need, only

_USAGE = """usage: hone completion bash|zsh|fish

Prints a script with which the shell completes verbs, options and their values at TAB. Write it where the shell looks:
  bash  hone completion bash > ~/.local/share/bash-completion/completions/hone   (make the folder first; needs the package
        bash-completion; without it: add `source FILE` to ~/.bashrc)
  zsh   hone completion zsh > FOLDER/_hone   (FOLDER is in $fpath before compinit)
  fish  hone completion fish > ~/.config/fish/completions/hone.fish
All words are in the script: TAB starts no Python. Print it again after an update of hone."""


def completion(words: list[str], options: dict[str, str]) -> int:
    """Prints the completion script of a shell."""
    from hone.base.errors import SpecError, did_you_mean

    if "help" in options:
        print(_USAGE)
        return 0
    only(words, options)
    shell = need(words, "SHELL")
    from hone.cli.completion.known import SHELLS
    from hone.cli.completion.scripts import script

    if shell not in SHELLS:
        raise SpecError(
            f"no completion for '{shell}'", fix=f"{did_you_mean(shell, SHELLS)}there are: {', '.join(SHELLS)}"
        )
    print(script(shell), end="")
    return 0
