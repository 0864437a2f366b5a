"""The decision of a resume: what the store lacks, and in which batches it is captured."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from itertools import islice

import numpy as np

from eyas.base.layout import Layout
from eyas.base.progress import Progress
from eyas.store.ledger import Ledger
from eyas.store.listing import Listing, list_samples
from eyas.store.repair import repair
from eyas.store.scrub import quick
from eyas.targets.batches import BatchPlan, plan_lengths


@dataclass(frozen=True, eq=False)
class Left:
    """Samples that are captured together, and a plan of batches over all of them, done or not.

    Attributes:
        name: of the samples, for people.
    """

    name: str
    listing: Listing
    plan: BatchPlan

    @classmethod
    def of(cls, name: str, listing: Listing, batch_tokens: int, ids: Iterable[str] | None = None) -> Left:
        """Those of a listing, or of ``ids`` in it."""
        chosen = listing if ids is None else listing.only(ids)
        return cls(name, chosen, plan_lengths(chosen.lengths, batch_tokens))

    def batches(self) -> list[list[str]]:
        """Ids, batch by batch, where something is left to do."""
        chosen = self.plan.with_any(self.listing.is_left)
        names = iter(self.listing.id_texts(np.concatenate(chosen))) if chosen else iter(())
        return [list(islice(names, len(batch))) for batch in chosen]


def find_listing(layout: Layout, ledger: Ledger, progress: Progress) -> Listing:
    """Give back leases, mend what a quick look at the store finds, and list what there is and what is left.

    Reads no tokens and no states, so that a million samples take seconds.

    Raises:
        DamageFound: data/samples or the ledger is damaged.
    """
    ledger.release_leases()
    # whole segments that the ledger does not know are adopted, damaged ones set aside
    for line in repair(layout, ledger, quick(layout, ledger)):
        progress.say(line)
    return list_samples(layout, ledger)


def find_left(layout: Layout, ledger: Ledger, batch_tokens: int, progress: Progress) -> Left:
    """All that is left, in batches over all samples; raises as `find_listing`."""
    return Left.of("", find_listing(layout, ledger, progress), batch_tokens)
