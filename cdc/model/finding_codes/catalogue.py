"""All codes, by the verb that finds them, in the order of the index of runbooks."""

from collections.abc import Mapping

from cdc.model.finding_codes.audit import AUDIT
from cdc.model.finding_codes.doctor_log import CONNECTOR, TOPICS
from cdc.model.finding_codes.doctor_sinks import RUNNER, SINKS
from cdc.model.finding_codes.doctor_source import POSTGRES
from cdc.model.finding_codes.kind import Kind
from cdc.model.finding_codes.status import STATUS

DOCTOR: Mapping[str, Kind] = {**POSTGRES, **CONNECTOR, **TOPICS, **SINKS, **RUNNER}
"""What only `cdc doctor` can find."""
CODES: Mapping[str, Kind] = {**STATUS, **DOCTOR, **AUDIT}
