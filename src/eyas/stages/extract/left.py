"""The decision of a resume: what the store lacks, and in which batches it is captured."""

from __future__ import annotations

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
    """All samples, and a plan of batches over all of them: it does not depend on what is done already."""

    listing: Listing
    plan: BatchPlan

    def batches(self) -> list[list[str]]:
        """Ids, batch by batch, where something is left to do."""
        chosen = self.plan.with_any(self.listing.is_left)
        names = iter(self.listing.id_texts(np.concatenate(chosen))) if chosen else iter(())
        return [list(islice(names, len(batch))) for batch in chosen]


def find_left(layout: Layout, ledger: Ledger, batch_tokens: int, progress: Progress) -> Left:
    """Give back leases, mend what a quick look at the store finds, and list what is left.

    Reads no tokens and no states, so that a million samples take seconds.

    Raises:
        DamageFound: data/samples or the ledger is damaged.
    """
    ledger.release_leases()
    # whole segments that the ledger does not know are adopted, damaged ones set aside
    for line in repair(layout, ledger, quick(layout, ledger)):
        progress.say(line)
    listing = list_samples(layout, ledger)
    return Left(listing, plan_lengths(listing.lengths, batch_tokens))
