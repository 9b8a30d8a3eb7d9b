"""`uneven completion`: the script that teaches a shell to complete verbs, options and values.

The scripts ask `uneven` itself at every press of the tab key, by the environment variable that typer reads; those of
zsh and fish are typer's. That of bash is ours, because bash breaks words at ':' and '@' and typer's would be asked for
'cuda', ':' and '0' where cuda:0 was typed.
"""

import json
from typing import Annotated

import typer

from uneven.cli.complete import one_of
from uneven.cli.verbs import NAME
from uneven.errors import InputError

SHELLS = ("bash", "zsh", "fish")
VARIABLE = f"_{NAME.upper()}_COMPLETE"
# Words that bash broke at ':', '=' and '@' are put together again; of an answer only what follows the last of these is
# given back, since that is all that bash replaces.
BASH = r"""_uneven_completion() {
    local words=() word="" last="" piece breaks='^[:=@]+$' place
    for (( place = 0; place <= COMP_CWORD; place++ )); do
        piece="${COMP_WORDS[place]}"
        if (( ${#words[@]} > 1 )) && { [[ "$piece" =~ $breaks ]] || [[ "$last" =~ $breaks ]]; }; then
            words[${#words[@]} - 1]+="$piece"
        else
            words+=("$piece")
        fi
        last="$piece"
    done
    word="${words[${#words[@]} - 1]}"
    local IFS=$'\n' kept="${word%"${word##*[:=@]}"}"
    COMPREPLY=( $( COMP_WORDS="${words[*]}" COMP_CWORD=$(( ${#words[@]} - 1 )) \
                   _UNEVEN_COMPLETE=complete_bash "$1" 2>/dev/null ) )
    COMPREPLY=( "${COMPREPLY[@]#"$kept"}" )
}
complete -o default -F _uneven_completion uneven
"""
INSTALL = {
    "bash": 'eval "$(uneven completion bash)"',
    "zsh": 'eval "$(uneven completion zsh)"',
    "fish": "uneven completion fish | source",
}


def completion(
    shell: Annotated[str, typer.Argument(help="bash, zsh or fish.", autocompletion=one_of(SHELLS))],
    as_json: Annotated[bool, typer.Option("--json", help="One JSON object.")] = False,
) -> None:
    """Print the completion script of a shell, which completes verbs, options and values such as devices and runs.

    Once it is loaded, the tab key shows what may follow. In a startup file of the shell: bash, in ~/.bashrc:
    eval "$(uneven completion bash)". zsh, in ~/.zshrc after compinit: eval "$(uneven completion zsh)". fish, in
    ~/.config/fish/config.fish: uneven completion fish | source.

    Examples:

      uneven completion bash

      uneven completion zsh

      uneven completion fish
    """
    if shell not in SHELLS:
        raise InputError(f"shell {shell!r}: allowed are {', '.join(SHELLS)}")
    script = script_of(shell)
    print(json.dumps({"shell": shell, "install": INSTALL[shell], "script": script}, indent=1) if as_json else script)


def script_of(shell: str) -> str:
    if shell == "bash":
        return BASH.rstrip()
    from typer.completion import get_completion_script  # type: ignore[attr-defined]

    return str(get_completion_script(prog_name=NAME, complete_var=VARIABLE, shell=shell))
