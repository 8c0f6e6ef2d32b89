"""Where a new group is generated, and what a silent site's samples come to. docs/design/092-several-clusters.md has the reasons.

A group is whole at one site: its samples share the prompt's cache there, and it waits for one site alone.
"""

from __future__ import annotations

import heapq
from collections import Counter
from collections.abc import Iterator

from towline.buffer.presence import HOME
from towline.buffer.view import View
from towline.contract.task import TRAIN

SILENT = "site_silent"


def spread(view: View, count: int) -> list[str]:
    """A site for each of `count` new groups of lane train: the one with the fewest unfinished ones for its slots, home first
    among equals. Where nobody is heard of, home."""
    slots = {site: number for site, number in view.presence.slots.items() if number > 0 and site in (HOME, *view.rules.sites)}
    if not view.rules.sites or set(slots) <= {HOME}:
        return [HOME] * count
    groups, complete = view.state.groups, view.state.complete
    running = Counter(
        task.issued_to
        for number in view.state.open_train
        if number not in complete and (task := groups[number].task) is not None and task.lane == TRAIN
    )
    heap = [((running[site] + 1) / number, site) for site, number in slots.items()]
    heapq.heapify(heap)
    chosen = []
    for _ in range(count):
        load, site = heap[0]
        heapq.heapreplace(heap, (load + 1 / slots[site], site))
        chosen.append(site)
    return chosen


def unheard(view: View) -> Iterator[tuple[int, int]]:
    """(group, sample) of what a silent site was asked for and hasn't delivered."""
    if not view.presence.silent:
        return
    for number in view.state.open_train:
        group = view.state.groups[number]
        if group.task is None:
            continue
        for index, sample in enumerate(group.samples):
            if sample is not None and sample.scored is None and sample.site in view.presence.silent:
                yield number, index
