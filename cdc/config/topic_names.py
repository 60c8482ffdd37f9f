"""The name of a pipeline, and the names of its topics, which follow from it."""

from pydantic import Field

from cdc.config.section import Section
from cdc.config.view_settings import SCHEMA

NAME = r"^[a-z][a-z0-9_]{0,47}$"


class TopicNames(Section):
    """What names a pipeline; settings besides are in `cdc.config.settings.Pipeline`."""

    pipeline: str = Field(
        pattern=NAME,
        description="a letter and up to 47 lower case letters, digits and _",
        examples=["shop"],
    )

    def topic(self, table: str) -> str:
        """The topic of a table, schema.table."""
        return f"{self.pipeline}.{table}"

    def view_topic(self, view: str) -> str:
        """The topic of a view's documents."""
        return self.topic(f"{SCHEMA}.{view}")

    @property
    def heartbeat_topic(self) -> str:
        """The topic of `cdc.heartbeat`."""
        return self.topic("cdc.heartbeat")

    @property
    def quarantine_topic(self) -> str:
        """The topic of records that can't be applied, see `cdc.quarantine`."""
        return f"{self.pipeline}.quarantine"

    @property
    def generations_topic(self) -> str:
        """The topic of the registry of generations, see `cdc.generations`."""
        return f"{self.pipeline}.generations"

    @property
    def runs_topic(self) -> str:
        """The topic of the progress of runs, see `cdc.observe.run_log`."""
        return f"{self.pipeline}.runs"

    @property
    def operations_topic(self) -> str:
        """The topic of the operation log, see `cdc.control.operations`."""
        return f"{self.pipeline}.operations"

    @property
    def message_topic(self) -> str:
        """The topic of logical messages, see `cdc.client`."""
        return f"{self.pipeline}.message"

    @property
    def registered_topic(self) -> str:
        """The topic of registrations, see `cdc.control.registrations`."""
        return f"{self.pipeline}.registered"

    @property
    def settings_topic(self) -> str:
        """The topic of the ledger: settings to restore, compactions, holes. See
        `cdc.kafka.ledger`.
        """
        return f"{self.pipeline}.settings"
