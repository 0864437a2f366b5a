"""Processes that an outer launcher (torchrun) started; no torch here, every verb asks."""

from __future__ import annotations

import os
from dataclasses import dataclass


@dataclass(frozen=True)
class OuterPlace:
    """This process among those that the launcher started, as its environment says.

    Attributes:
        local_rank: number on its own machine; picks the device.
        local_size: how many are on it.
        has_board: the launcher itself keeps the board that all see.
        attempt: how often the launcher has started them anew.
    """

    rank: int
    size: int
    local_rank: int
    local_size: int
    address: str
    port: int
    has_board: bool
    attempt: int

    @classmethod
    def here(cls) -> OuterPlace | None:
        """None when there is no launcher, or one process of it alone."""
        values = os.environ
        if "RANK" not in values or int(values.get("WORLD_SIZE", "1")) < 2 or "MASTER_ADDR" not in values:
            return None
        return cls(
            rank=int(values["RANK"]),
            size=int(values["WORLD_SIZE"]),
            local_rank=int(values.get("LOCAL_RANK", values["RANK"])),
            local_size=int(values.get("LOCAL_WORLD_SIZE", values["WORLD_SIZE"])),
            address=values["MASTER_ADDR"],
            port=int(values["MASTER_PORT"]),
            has_board=values.get("TORCHELASTIC_USE_AGENT_STORE") == "True",
            attempt=int(values.get("TORCHELASTIC_RESTART_COUNT", "0")),
        )

    @property
    def first(self) -> bool:
        """Whether it does what one process would do; the others only train."""
        return self.rank == 0

    @property
    def meeting(self) -> str:
        return f"eyas/{self.attempt}"

    @property
    def go_key(self) -> str:
        """Where the first says that training begins, or that there is none."""
        return f"{self.meeting}/go"
