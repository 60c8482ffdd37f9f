"""No login of a server gets into a message."""

import pytest

from cdc.model.address import address


@pytest.mark.parametrize(
    ("url", "shown"),
    [
        ("http://127.0.0.1:9200", "http://127.0.0.1:9200"),
        ("https://elastic:secret@es:9200/search", "https://es:9200/search"),
        ("redis://:secret@cache:6379/0", "redis://cache:6379/0"),
        ("redis://cache:6379/0?password=secret&db=1", "redis://cache:6379/0"),
        ("redis://cache/0?password=@secret", "redis://..."),
        ("redis://:se@cret@cache/0", "redis://cache/0"),
        ("redis://:se/cret@cache/0", "redis://cache/0"),
        ("redis://:secret?@cache/0", "redis://..."),
        ("redis://:secret#@cache/0", "redis://..."),
        ("http://u:se://cret@es", "http://es"),
        ("unix:///run/redis.sock?password=secret", "unix:///run/redis.sock"),
        ("unix://user:secret@/run/redis.sock", "unix:///run/redis.sock"),
        ("es:9200", "es:9200"),
        ("elastic:secret@es:9200", "es:9200"),
    ],
)
def test_a_login_is_not_shown(url: str, shown: str) -> None:
    assert address(url) == shown
