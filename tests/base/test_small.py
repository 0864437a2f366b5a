"""Units, recipes and errors."""

from __future__ import annotations

import inspect

import pytest

from eyas.base import errors
from eyas.base.hashing import recipe_differences, recipe_hash
from eyas.base.stop import StopFlag
from eyas.base.threads import SPINS, wait_briefly
from eyas.base.units import (
    counted,
    format_amount,
    format_bytes,
    format_count,
    format_numbers,
    format_rate,
    format_seconds,
    parse_bytes,
)


def test_counts_and_rates_carry_their_units() -> None:
    assert format_amount(6_908_076, "bytes") == "6.9 MB"
    assert format_amount(4373, "tokens") == "4,373 tokens"
    assert format_rate(210_400_000, "bytes") == "210.4 MB/s"
    assert [format_rate(rate, "tokens") for rate in (0.42, 19_916.4)] == ["0.42/s", "19,916/s"]
    assert [counted(n, "batch", "batches") for n in (0, 1, 1200)] == ["0 batches", "1 batch", "1,200 batches"]


def test_named_numbers_as_a_line() -> None:
    numbers = {
        "captured": 1479, "bytes": 216_034_912, "tokens_per_second": 9768.5, "set_aside": 0,
        "faults": {"not_a_number": 1, "reset": 12}, "equal_texts": "5 of 5", "validation_loss": 4.98101,
        "parameters": 5_129_280, "largest_difference": 2.68e-06,
    }  # fmt: skip
    assert format_numbers(numbers) == (
        "captured 1,479, 216.0 MB, 9,768 tokens/s, set aside 0, faults not a number 1 reset 12, "
        "equal texts 5 of 5, validation loss 4.981, parameters 5,129,280, largest difference 2.68e-06"
    )
    assert format_numbers({"tokens_per_second": 0.5}) == "0.50 tokens/s"


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


def test_threads_wait_briefly_unless_the_user_said_how() -> None:
    mine: dict[str, str] = {}
    wait_briefly(mine)
    assert mine == {"OMP_WAIT_POLICY": "PASSIVE", "GOMP_SPINCOUNT": str(SPINS)}
    for said in ({"OMP_WAIT_POLICY": "ACTIVE"}, {"OMP_WAIT_POLICY": "PASSIVE"}, {"GOMP_SPINCOUNT": "7"}):
        theirs = dict(said)
        wait_briefly(theirs)
        assert said.items() <= theirs.items()
        assert theirs.get("GOMP_SPINCOUNT") == said.get("GOMP_SPINCOUNT")
