"""The runner of pages notices a page that is wrong."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.docs.pages import PageFailed, first_difference, run_page, steps_of

PAGE = """# A page

```console
$ echo one; echo "two 2 kB"
one
two 31.5 MB
$ cat <<'END'
> a
>
> b
> END
a
...
$ false    # exit code 1
```

```sh
there=here
```

Not carried out:

```
$ exit 3
```

```console
$ echo $there $PLACE
here there
```
"""


def write(folder: Path, text: str) -> Path:
    path = folder / "page.md"
    path.write_text(text)
    return path


def test_commands_of_a_page() -> None:
    assert [(step.line, step.command, step.code) for step in steps_of(PAGE)] == [
        (4, 'echo one; echo "two 2 kB"', 0),
        (7, "cat <<'END'\na\n\nb\nEND", 0),
        (14, "false    # exit code 1", 1),
        (18, "there=here\n", 0),
        (28, "echo $there $PLACE", 0),
    ]


def test_a_right_page_passes(tmp_path: Path) -> None:
    assert run_page(write(tmp_path, PAGE), tmp_path, {"$PLACE": "there"}, {}) == 5


@pytest.mark.parametrize(
    ("old", "new"),
    [
        ("one\ntwo", "one\nthree"),
        ("one\ntwo 31.5 MB", "one"),
        ("# exit code 1", "# exit code 2"),
        ("a\n...", "b\n..."),
        ("here there\n", "...\nnowhere\n"),
    ],
)
def test_a_wrong_page_fails(tmp_path: Path, old: str, new: str) -> None:
    assert old in PAGE
    with pytest.raises(PageFailed):
        run_page(write(tmp_path, PAGE.replace(old, new, 1)), tmp_path, {"$PLACE": "there"}, {})


def test_what_is_replaced_has_to_be_there(tmp_path: Path) -> None:
    with pytest.raises(AssertionError, match="does not say"):
        run_page(write(tmp_path, PAGE), tmp_path, {"never said": "x"}, {})


def test_numbers_units_and_plurals_are_compared_loosely() -> None:
    real = ["store  1 segment, 24 samples, 3.5 MB in 1 min 2 s"]
    assert first_difference(("store 6 segments, 1 sample, 12 kB in 0.8 s",), real) is None
    assert first_difference(("store 6 folders, 1 sample, 12 kB in 0.8 s",), real) is not None


def test_lines_are_looked_for_behind_a_first_fit() -> None:
    real = ["begin 1", "no damage", "begin 2", "damage in 3 files", "end"]
    assert first_difference(("...", "begin 9", "damage in 1 files", "end"), real) is None
    assert first_difference(("...", "begin 9", "damage in 1 folders"), real) == "damage in 1 folders"
