"""The order of the verbs in `cdc --help`: that in which a pipeline's life needs them."""

from typing import Any

from typer.core import TyperGroup

SECTIONS = {
    "Set up": ("init", "up", "plan", "migrate", "register", "down"),
    "Run": ("run", "pause", "resume"),
    "Look": ("status", "serve", "doctor", "verify", "chaos", "views", "operations"),
    "Rebuild": ("rebuild", "generations", "rollback"),
    "Repair": ("quarantine", "topics"),
    "Take away": ("destroy",),
}
"""By heading, the verbs below it. A verb of no section comes last, under "Other"."""
OTHER = "Other"
HEADING = {verb: heading for heading, verbs in SECTIONS.items() for verb in verbs}
ORDER = list(HEADING)


class WorkflowGroup(TyperGroup):
    """A group whose help lists its commands by section."""

    def __init__(self, **options: Any) -> None:
        super().__init__(**options)
        known = [name for name in HEADING if name in self.commands]
        self.commands = {name: self.commands[name] for name in (*known, *self.commands)}

    def format_commands(self, ctx: Any, formatter: Any) -> None:  # noqa: ARG002
        """Write a list for each section. Called once for a help text."""
        width = max(map(len, self.commands))
        rows: dict[str, list[tuple[str, str]]] = {}
        for name, command in self.commands.items():
            help_text = command.get_short_help_str(formatter.width - 6 - width)
            # As wide in each section, so that the texts of all stand below each other.
            rows.setdefault(HEADING.get(name, OTHER), []).append((name.ljust(width), help_text))
        for heading, commands in rows.items():
            with formatter.section(heading):
                formatter.write_dl(commands)
