"""`httpx` for addresses of this machine: without certificates, whose loading takes a client 60 ms,
and patient, for on a busy machine a server may take more than the usual 5 s to answer.
"""

from functools import partial

import httpx

from tests.support.wait import wait_until

TIMEOUT_S = 60.0
get = partial(httpx.get, verify=False, timeout=TIMEOUT_S)
post = partial(httpx.post, verify=False, timeout=TIMEOUT_S)
put = partial(httpx.put, verify=False, timeout=TIMEOUT_S)
delete = partial(httpx.delete, verify=False, timeout=TIMEOUT_S)
request = partial(httpx.request, verify=False, timeout=TIMEOUT_S)
stream = partial(httpx.stream, verify=False, timeout=TIMEOUT_S)
Client = partial(httpx.Client, verify=False, timeout=TIMEOUT_S)


def ask_connect(method: str, url: str) -> httpx.Response:
    """Send a request to Kafka Connect, again while it answers 409: its workers are rebalancing."""

    def answer() -> httpx.Response | None:
        response = request(method, url)
        return None if response.status_code == 409 else response

    response = wait_until(answer, 60, "Connect's workers to have rebalanced")
    assert response
    return response.raise_for_status()
