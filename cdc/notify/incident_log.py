"""The topic <pipeline>.incidents: incidents by their id, as all processes of a pipeline see them.

The order of the topic is what processes agree on: of two claims the first holds.
"""

import json
from dataclasses import asdict, replace

from cdc.kafka.records import Record
from cdc.kafka.tail import Tail
from cdc.kafka.topics import Topics
from cdc.notify.incidents import Incident, Phase, accepts


class IncidentLog:
    """Reads and writes the incidents of a pipeline. One thread uses it; every method raises
    ConnectorError.
    """

    def __init__(self, kafka: Topics, topic: str, teller: str) -> None:
        """`teller` names this process: no other has the name."""
        self._kafka, self._topic, self._teller = kafka, topic, teller
        self._incidents: dict[str, Incident] = {}
        self._tail = Tail(kafka, topic, begin=self._incidents.clear, take=self._take)

    def read(self) -> dict[str, Incident]:
        """Return the incidents by id, as of now."""
        self._tail.read()
        return dict(self._incidents)

    def claim(self, incident: Incident) -> bool:
        """Claim the telling of an incident or of its end; whether this process has it."""
        self._write(replace(incident, teller=self._teller))
        entry = self.read().get(incident.id)
        return entry is not None and (entry.phase, entry.teller) == (incident.phase, self._teller)

    def note_told(self, incident: Incident) -> None:
        """Note that this process has told an incident, or its end."""
        if incident.phase is Phase.CLOSING:
            self._kafka.write(self._topic, [(incident.id.encode(), None)])
        else:
            self._write(replace(incident, phase=Phase.OPEN, teller=self._teller))

    def _write(self, incident: Incident) -> None:
        value = json.dumps(asdict(incident)).encode()
        self._kafka.write(self._topic, [(incident.id.encode(), value)])

    def _take(self, record: Record) -> None:
        key = (record.key or b"").decode()
        if record.value is None:
            self._incidents.pop(key, None)
            return
        fields = json.loads(record.value)
        incident = Incident(**{**fields, "phase": Phase(fields["phase"])})
        if accepts(self._incidents.get(key), incident):
            self._incidents[key] = incident
