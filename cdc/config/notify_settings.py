"""The section `notify` of the pipeline file: who is told of trouble, and from when on."""

from typing import Literal

from pydantic import Field

from cdc.config.section import Section, Web


class NotifySettings(Section):
    """An address that is told of each incident once, and of its end."""

    url: Web = Field(examples=["${SHOP_WEBHOOK}"])
    """Where a message is posted."""
    format: Literal["json", "slack"] = "json"
    """A document with all fields of a finding, or a text as Slack, Mattermost and others take it."""
    secret: str | None = Field(default=None, min_length=16, examples=["${SHOP_WEBHOOK_SECRET}"])
    """Signs each message (`X-Cdc-Signature`), so that its receiver can tell it from anybody
    else's.
    """
    severity: Literal["down", "degraded", "warning"] = "warning"
    """The least severity that is told. A risk is a `warning`: it is told while there is time left."""
    after_s: float = Field(default=60.0, ge=0)
    """How long a trouble has to last before it is told: short ones pass by themselves."""
