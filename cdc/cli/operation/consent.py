"""Ask a person before data is removed for good."""

import sys

import typer

from cdc.errors import SettingsError


def require_consent(warning: str, word: str, *, yes: bool) -> None:
    """Have a person type a word, unless `yes` was given on the command line.

    Raises:
        SettingsError: another word was typed, or there is no terminal to ask at.
    """
    if yes:
        return
    if not sys.stdin.isatty():
        raise SettingsError(
            f"{warning}, and there is no terminal to ask at.", hint="add --yes to the command"
        )
    if typer.prompt(f"{warning}. Type {word} to go on", err=True) != word:
        raise SettingsError(f"That isn't {word}: nothing was removed.", hint="the same command")
