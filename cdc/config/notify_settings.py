"""The section `notify` of the pipeline file: where `cdc run` posts what it finds."""

from typing import Literal

from pydantic import Field

from cdc.config.section import Section, Web


class NotifySettings(Section):
    """An address to which is posted when a finding opens and when it closes."""

    url: Web = Field(examples=["${SHOP_WEBHOOK}"])
    """Where it is posted."""
    severity: Literal["down", "degraded", "warning"] = "warning"
    """The least severity that is posted. A risk is a `warning`: it comes while there is time left."""
    after_s: float = Field(default=60.0, ge=0)
    """How long a finding has to be there before it opens, and to be gone before it closes."""
