"""`httpx` for addresses of this machine: without certificates, whose loading takes a client 60 ms."""

from functools import partial

import httpx

get = partial(httpx.get, verify=False)
post = partial(httpx.post, verify=False)
request = partial(httpx.request, verify=False)
stream = partial(httpx.stream, verify=False)
Client = partial(httpx.Client, verify=False)
