"""Counts of what was read, kept and dropped; they add up to the input."""

from __future__ import annotations

from array import array
from collections import Counter
from dataclasses import dataclass, field
from typing import Any

STATISTICS_FORMAT = 1
_PERCENTILES = (1, 10, 50, 90, 99)


@dataclass
class _Group:
    """Counts of one source, one domain, or all."""

    records: int = 0
    dropped: Counter[str] = field(default_factory=Counter)
    conversations: Counter[str] = field(default_factory=Counter)
    samples: Counter[str] = field(default_factory=Counter)
    samples_dropped: Counter[str] = field(default_factory=Counter)
    tokens: int = 0
    supervised_tokens: int = 0
    prompts: int = 0
    turns: int = 0
    prompt_tokens: int = 0

    def as_dict(self) -> dict[str, Any]:
        return {
            "records": self.records,
            "kept": sum(self.conversations.values()),
            "dropped": dict(sorted(self.dropped.items())),
            "conversations": _by_split(self.conversations),
            "samples": _by_split(self.samples),
            "samples_dropped": dict(sorted(self.samples_dropped.items())),
            "tokens": self.tokens,
            "supervised_tokens": self.supervised_tokens,
            "prompts": self.prompts,
            "turns": self.turns,
            "first_prompt_tokens": self.prompt_tokens,
        }


class Tally:
    """Counts records, samples and prompts as they go by, for all, per source and per domain.

    Every record is counted once and then either dropped with a reason or kept as a conversation.
    """

    def __init__(self) -> None:
        self._all = _Group()
        self._sources: dict[str, _Group] = {}
        self._domains: dict[str, _Group] = {}
        self._lengths = array("l")
        self._notes: Counter[str] = Counter()
        self.num_truncated = 0

    @property
    def num_records(self) -> int:
        return self._all.records

    @property
    def num_samples(self) -> int:
        return sum(self._all.samples.values())

    @property
    def num_prompts(self) -> int:
        return self._all.prompts

    @property
    def dropped(self) -> dict[str, int]:
        """Records by the reason for which they were dropped."""
        return dict(self._all.dropped)

    def record(self, source: str, domain: str) -> None:
        """One record was read, readable or not."""
        for group in self._groups(source, domain):
            group.records += 1

    def drop(self, source: str, domain: str, reason: str) -> None:
        """The record gave nothing."""
        for group in self._groups(source, domain):
            group.dropped[reason] += 1

    def drop_sample(self, source: str, domain: str, reason: str) -> None:
        """One sample of a record that may have others was left out."""
        for group in self._groups(source, domain):
            group.samples_dropped[reason] += 1

    def conversation(self, source: str, domain: str, split: str) -> None:
        """The record was kept."""
        for group in self._groups(source, domain):
            group.conversations[split] += 1

    def sample(self, source: str, domain: str, split: str, num_tokens: int, num_supervised: int) -> None:
        """One sample was written."""
        for group in self._groups(source, domain):
            group.samples[split] += 1
            group.tokens += num_tokens
            group.supervised_tokens += num_supervised
        self._lengths.append(num_tokens)

    def prompt(self, source: str, domain: str, num_turns: int, num_tokens: int) -> None:
        """One dialogue waits for answers; ``num_tokens`` are of its first prompt."""
        for group in self._groups(source, domain):
            group.prompts += 1
            group.turns += num_turns
            group.prompt_tokens += num_tokens
        self._lengths.append(num_tokens)

    def notes(self, counts: Counter[str]) -> None:
        """What deserves a look but dropped nothing."""
        self._notes.update(counts)

    def as_dict(self) -> dict[str, Any]:
        """The counts as ``stats.json`` holds them; lengths are of samples and first prompts, in tokens."""
        return {
            "format": STATISTICS_FORMAT,
            **self._all.as_dict(),
            "samples_truncated": self.num_truncated,
            "lengths": length_summary(self._lengths),
            "notes": {note: count for note, count in sorted(self._notes.items()) if count},
            "sources": {name: group.as_dict() for name, group in self._sources.items()},
            "domains": {name: group.as_dict() for name, group in sorted(self._domains.items())},
        }

    def _groups(self, source: str, domain: str) -> tuple[_Group, _Group, _Group]:
        return (
            self._all,
            self._sources.setdefault(source, _Group()),
            self._domains.setdefault(domain, _Group()),
        )


def length_summary(lengths: array[int]) -> dict[str, Any]:
    """Smallest, largest, mean, percentiles (nearest rank) and a histogram in powers of two."""
    ordered = sorted(lengths)
    if not ordered:
        return {"count": 0}
    histogram: Counter[int] = Counter(1 << max(length - 1, 0).bit_length() for length in ordered)
    return {
        "count": len(ordered),
        "min": ordered[0],
        "max": ordered[-1],
        "mean": sum(ordered) / len(ordered),
        **{f"p{p}": ordered[max(0, -(-p * len(ordered) // 100) - 1)] for p in _PERCENTILES},
        "histogram": [{"up_to": edge, "count": histogram[edge]} for edge in sorted(histogram)],
    }


def _by_split(counts: Counter[str]) -> dict[str, int]:
    return {"train": counts["train"], "validation": counts["validation"]}
