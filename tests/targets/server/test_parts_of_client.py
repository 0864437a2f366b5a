"""The client's parts by themselves: names, breaker, dump reader, schedule, settings."""

from __future__ import annotations

import contextlib
import json
import os
import random
import struct
import time
from pathlib import Path
from types import SimpleNamespace
from typing import cast

import pytest
import torch
import xxhash
from safetensors.torch import save

from eyas.base.errors import UsageError
from eyas.targets.fake.faults import KINDS, Fault, fault_of, parse_fault, read_schedule
from eyas.targets.parts import TargetParts
from eyas.targets.server.breaker import Breaker
from eyas.targets.server.dump import Expected, read_dump
from eyas.targets.server.faults import FAULTS, ServerFault
from eyas.targets.server.heads import Heads
from eyas.targets.server.names import NAME, DumpNames
from eyas.targets.server.wire import FLAVOURS, Sampling

TOKENS, LAYERS, WIDTH = [5, 9, 11, 300, 7], [1, 3], 8


def dump_bytes(about: dict[str, str] | None = None, **changes: torch.Tensor) -> bytes:
    """A dump written here, with plain safetensors."""
    generator = torch.Generator().manual_seed(0)
    tensors = {
        "aux": torch.randn(len(TOKENS), len(LAYERS), WIDTH, generator=generator),
        "last": torch.randn(len(TOKENS), WIDTH, generator=generator),
        "tokens": torch.tensor(TOKENS),
        **changes,
    }
    metadata = {
        "eyas_dump": "1", "name": "ours-0001-a", "request_id": "r", "engine": "test 1", "layers": "[1, 3]",
        "last": "after-norm", "boot_id": "b", "server_started": "12.5",
    } | (about or {})  # fmt: skip
    plain = save(tensors, metadata)
    (length,) = struct.unpack("<Q", plain[:8])
    metadata.setdefault("checksum", "xxh3_128:" + xxhash.xxh3_128_hexdigest(plain[8 + length :]))
    return bytes(save(tensors, metadata))


def read(path: Path, content: bytes, sent_at: float | None = None) -> object:
    path.write_bytes(content)
    expected = Expected(
        "ours-0001-a", TOKENS, LAYERS, WIDTH, torch.float32, time.time() if sent_at is None else sent_at
    )
    return read_dump(path, expected, lambda name: "foreign")


def test_a_whole_dump_is_read_as_it_was_written(tmp_path: Path) -> None:
    dump = read(tmp_path / "d", dump_bytes())
    generator = torch.Generator().manual_seed(0)
    assert torch.equal(dump.aux, torch.randn(len(TOKENS), len(LAYERS), WIDTH, generator=generator))  # type: ignore[attr-defined]
    assert dump.instance == "b 12.5"  # type: ignore[attr-defined]
    assert dump.before_norm is False  # type: ignore[attr-defined]


def test_every_truncation_and_every_flipped_byte_is_noticed(tmp_path: Path) -> None:
    content = dump_bytes()
    path, caused = tmp_path / "d", 0
    for length in range(0, len(content), 7):
        with pytest.raises(ServerFault) as fault:
            read(path, content[:length])
        assert fault.value.code in ("torn", "damaged")
        caused += 1
    for place in range(len(content)):
        changed = bytearray(content)
        changed[place] ^= 1 << (place % 8)
        try:
            found = read(path, bytes(changed))
        except ServerFault:
            caused += 1
            continue
        # what is not covered by the checksum: text in the header that changes no meaning
        assert place < len(content) - 4 * (len(TOKENS) * (len(LAYERS) + 1) * WIDTH) - 8 * len(TOKENS)
        assert torch.equal(found.aux, read(path, content).aux)  # type: ignore[attr-defined]
    print(f"{caused} damages were caused and noticed")
    assert caused > len(content) * 0.9


@pytest.mark.parametrize(
    ("about", "code"),
    [
        ({"eyas_dump": "2"}, "damaged"),
        ({"name": "another-0001"}, "foreign"),
        ({"layers": "[1, 2]"}, "wrong_layers"),
        ({"layers": "none"}, "wrong_layers"),
        ({"last": "somewhere"}, "damaged"),
        ({"checksum": "xxh3_128:00"}, "damaged"),
        ({"checksum": "crc:00"}, "damaged"),
    ],
)
def test_wrong_metadata(about: dict[str, str], code: str, tmp_path: Path) -> None:
    with pytest.raises(ServerFault) as fault:
        read(tmp_path / "d", dump_bytes(about))
    assert fault.value.code == code


@pytest.mark.parametrize(
    ("changes", "code"),
    [
        ({"tokens": torch.tensor([5, 9, 11, 300, 8])}, "other_tokens"),
        ({"tokens": torch.tensor([9, 11, 300, 7])}, "rows"),
        ({"aux": torch.randn(4, 2, WIDTH)}, "rows"),
        ({"last": torch.randn(4, WIDTH)}, "rows"),
        ({"aux": torch.randn(5, 3, WIDTH)}, "wrong_layers"),
        ({"last": torch.randn(5, WIDTH + 1)}, "wrong_width"),
        ({"aux": torch.randn(5, 2, WIDTH).half()}, "wrong_dtype"),
        ({"aux": torch.ones(5, 2, WIDTH, dtype=torch.int32)}, "wrong_dtype"),
    ],
)
def test_wrong_tensors(changes: dict[str, torch.Tensor], code: str, tmp_path: Path) -> None:
    with pytest.raises(ServerFault) as fault:
        read(tmp_path / "d", dump_bytes(**changes))
    assert fault.value.code == code


def test_a_file_older_than_its_request_is_stale(tmp_path: Path) -> None:
    path = tmp_path / "d"
    path.write_bytes(dump_bytes())
    os.utime(path, (time.time() - 60, time.time() - 60))
    expected = Expected("ours-0001-a", TOKENS, LAYERS, WIDTH, torch.float32, time.time())
    with pytest.raises(ServerFault) as fault:
        read_dump(path, expected, lambda name: "foreign")
    assert fault.value.code == "stale"


def test_blake2b_is_known_too(tmp_path: Path) -> None:
    import hashlib

    plain = dump_bytes({"checksum": "none"})
    (length,) = struct.unpack("<Q", plain[:8])
    digest = hashlib.blake2b(plain[8 + length :], digest_size=16).hexdigest()
    read(tmp_path / "d", dump_bytes({"checksum": f"blake2b_16:{digest}"}))


def test_a_head_is_multiplied_as_often_as_tokens_pay_for_it() -> None:
    def due(num_weights: int, lengths: list[int]) -> list[bool]:
        parts = SimpleNamespace(norm_weight=torch.ones(4), head=torch.empty(num_weights, device="meta"))
        heads = Heads(cast(TargetParts, parts))
        return [heads.is_due(length) for length in lengths]

    assert due(330 * 64, [1, 1, 1]) == [True, True, True]
    # 3,000,000 weights are paid for by 100 tokens; the first dump is always judged
    assert due(3_000_000, [5, 40, 40, 40, 40, 60, 500]) == [True, False, False, True, False, True, True]


def test_a_part_of_a_large_head_judges_every_dump() -> None:
    """A choice that is no row of the sample is still compared with those that are."""
    torch.manual_seed(0)
    head = torch.randn(40_000, 32)
    parts = SimpleNamespace(norm_weight=torch.ones(32), head=head, final_softcap=None)
    heads = Heads(cast(TargetParts, parts))
    missed = 0
    for _ in range(200):
        state = torch.randn(32)
        best = int((head @ state).argmax())
        heads.check_token(state, best, torch.float32, whole=False)
        heads.check_token(state, best, torch.float32, whole=True)
        second = int((head @ state).topk(2).indices[1])
        with pytest.raises(ServerFault) as fault:  # what only the whole head can say
            heads.check_token(state, second, torch.float32, whole=True)
        assert fault.value.code == "other_token"
        other = int((head @ torch.randn(32)).argmax())  # what another state chooses
        with contextlib.suppress(ServerFault):
            heads.check_token(state, other, torch.float32, whole=False)
            missed += 1
    assert missed <= 5


def test_names_are_unique_and_tell_whose_they_are() -> None:
    names, others = DumpNames("abcdef01"), DumpNames("abcdef01")
    made = [names.new("SAMPLE/../x") for _ in range(1000)] + [others.new("s") for _ in range(1000)]
    assert len(set(made)) == 2000
    assert all(NAME.fullmatch(name) for name in made)
    assert names.kind(made[0]) == "swapped"
    names.close(made[0])
    assert names.kind(made[0]) == "stale"
    assert names.kind(made[-1]) == "stale", "of another run of this project"
    assert names.kind("0badcafe-1-2-x") == "foreign"
    assert names.of_run(made[0])
    assert not names.of_run(made[-1])


def test_the_breaker_waits_twice_as_long_each_time_with_jitter() -> None:
    breaker = Breaker(0.5, 10.0, seed=3)
    expected = random.Random(3)
    for number in range(8):
        pause = min(10.0, 0.5 * 2**number)
        assert breaker.failed() == pytest.approx(pause * expected.uniform(0.5, 1.0))
        assert breaker.open
    breaker.succeeded()
    assert not breaker.open
    assert breaker.failed() <= 0.5


def test_a_schedule(tmp_path: Path) -> None:
    assert parse_fault("nan@3") == Fault("nan", 3)
    assert parse_fault("returns@2+:1.5") == Fault("returns", 2, True, 1.5)
    lines = tmp_path / "faults.txt"
    lines.write_text("# a comment\nhang@1\n\nnan@4+  # from four on\n")
    as_json = tmp_path / "faults.json"
    as_json.write_text(json.dumps(["hang@1", "nan@4+"]))
    assert read_schedule(lines) == read_schedule(as_json) == [Fault("hang", 1), Fault("nan", 4, True)]
    schedule = read_schedule(lines)
    assert [getattr(fault_of(schedule, n), "kind", None) for n in range(1, 6)] == [
        "hang",
        None,
        None,
        "nan",
        "nan",
    ]
    for bad in ("nan", "nan@0", "nothing@1", "nan@x", "nan@1:"):
        with pytest.raises(UsageError):
            parse_fault(bad)
    with pytest.raises(UsageError):
        read_schedule(tmp_path / "missing")


def test_every_kind_of_fault_has_a_meaning() -> None:
    assert all(KINDS.values())
    assert all(meaning and scope in ("sample", "server", "busy") for scope, meaning in FAULTS.values())


@pytest.mark.parametrize("engine", ["vllm", "sglang"])
def test_an_end_token_that_an_engine_cut_off_is_put_back(engine: str) -> None:
    sampling = Sampling(8, (2, 0), 0.0, 1.0, 0)
    replies = {
        "vllm": {"choices": [{"token_ids": [7, 8], "finish_reason": "stop", "stop_reason": 2}], "model": "m"},
        "sglang": {
            "output_ids": [7, 8],
            "meta_info": {"finish_reason": {"type": "stop", "matched": 2}, "prompt_tokens": 3},
        },
    }
    assert FLAVOURS[engine].read_answer(replies[engine], sampling).tokens == [7, 8, 2]
