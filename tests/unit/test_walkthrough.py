"""The reader of walkthroughs fails where a page isn't true."""

from pathlib import Path

import pytest

from tests.support.walkthrough import follow

PAGE = """\
Write a file:

```text title="greeting.txt"
good morning
```

```console
$ cat greeting.txt
good ...
$ echo one; \\
  echo two; echo three
one
...
three
$ cat nothing.txt
cat: nothing.txt: No such file
(exit code 1)
```
"""
ENVIRONMENT = {"PATH": "/usr/bin:/bin"}


def follow_text(text: str, folder: Path) -> None:
    page = folder / "page.md"
    page.write_text(text)
    follow(page, folder, ENVIRONMENT)


def test_a_page_that_is_true(tmp_path: Path) -> None:
    follow_text(PAGE, tmp_path)


@pytest.mark.parametrize(
    ("sentence", "instead"),
    [
        ("good ...", "bad ..."),
        ("(exit code 1)", "(exit code 2)"),
        ("one\n...\nthree", "three\n...\none"),
    ],
)
def test_a_page_that_is_not(tmp_path: Path, sentence: str, instead: str) -> None:
    with pytest.raises(AssertionError, match=r"page\.md says"):
        follow_text(PAGE.replace(sentence, instead), tmp_path)
