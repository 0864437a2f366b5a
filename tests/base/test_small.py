"""Units, recipes and errors."""

from __future__ import annotations

import inspect

import pytest

from eyas.base import errors
from eyas.base.hashing import recipe_differences, recipe_hash
from eyas.base.stop import StopFlag
from eyas.base.units import format_bytes, format_count, format_seconds, parse_bytes


def test_units_read_and_write() -> None:
    assert [format_bytes(n) for n in (0, 999, 1000, 2.3e12)] == ["0 B", "999 B", "1.0 kB", "2.3 TB"]
    assert [parse_bytes(t) for t in ("12", "1.5 kB", "64MiB", "2TB")] == [12, 1500, 64 << 20, 2 * 10**12]
    for wrong in ("", "GB", "12 parsecs", "-3GB"):
        with pytest.raises(ValueError, match="not a size"):
            parse_bytes(wrong)
    assert format_count(37312) == "37,312"
    assert format_count(87_793_206) == "87.8M"
    seconds = (0.84, 42, 185, 4.7 * 3600, 2 * 86400 + 3 * 3600)
    assert [format_seconds(s) for s in seconds] == ["0.8 s", "42 s", "3 min 5 s", "4 h 42 min", "2 d 3 h"]


def test_recipes_ignore_key_order_and_name_differences() -> None:
    one = {"layers": [2, 15], "dtype": "bf16", "deep": {"a": 1}}
    other = {"deep": {"a": 1}, "dtype": "bf16", "layers": [2, 15]}
    assert recipe_hash(one) == recipe_hash(other)
    changed = {"deep": {"a": 2}, "dtype": "bf16", "layers": [2, 14], "new": True}
    assert recipe_hash(one) != recipe_hash(changed)
    assert recipe_differences(one, changed) == [
        "deep.a: 1 -> 2",
        "layers: [2, 15] -> [2, 14]",
        "new: absent -> true",
    ]


def test_every_error_is_drawn_in_the_tree_with_its_exit_code() -> None:
    drawn = errors.__doc__ or ""
    for name, value in vars(errors).items():
        if inspect.isclass(value) and issubclass(value, errors.EyasError):
            assert f" {name}" in f" {drawn}".replace("\n", " "), name
    assert errors.Stopped(15).exit_code == 143
    assert errors.Stopped(2).exit_code == 130
    error = errors.DiskFull("no room", where="/data", why="1 GB free", hint="free space")
    assert error.exit_code == 12
    assert str(error) == "no room\nwhere: /data\nwhy: 1 GB free\nhint: free space"
    assert error.as_dict()["error"] == "DiskFull"


def test_a_stop_is_raised_where_it_is_looked_for() -> None:
    stop = StopFlag()
    stop.check()
    stop.request(15)
    with pytest.raises(errors.Stopped) as caught:
        stop.check()
    assert caught.value.exit_code == 143
