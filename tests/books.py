"""What must add up in a store's numbers: `docs/metrics.md` has the same list in words."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from ebbtide.tiers.survey import ROWS, Held, count_rows

if TYPE_CHECKING:
    from collections.abc import Mapping

    from ebbtide.tiers.store import Store

EVICTIONS = ("evicted", "over_quota")


def survey_of(store: Store) -> dict[str, Any]:
    """What `ebbtide stats --json` says of a store in this process, all of one moment."""
    held: dict[int, Held] = {}
    if store.disk is not None:
        table = store.disk.index.table
        for start in range(0, table.used, ROWS):
            count_rows(table, start, held)
    surveys = store.care.surveys
    namespaces = [surveys.report(digest, held) for digest in store.namespaces.digests()]
    return {"namespaces": namespaces, "store": store.stats()}


def imbalances(survey: Mapping[str, Any], *, at_rest: bool) -> list[str]:
    """The equations that do not hold, each with its figures.

    `survey`: of all namespaces, in one answer. `at_rest`: no load, no store, no write to disk and
    no purge is under way, so that what is on its way between two accounts is nothing.
    """
    store, spaces = survey["store"], survey["namespaces"]
    found: list[str] = []

    def equal(what: str, left: float, right: float) -> None:
        if left != right:
            found.append(f"{what}: {left} is not {right}")

    def at_most(what: str, left: float, right: float) -> None:
        if at_rest:
            equal(what, left, right)
        elif left > right:
            found.append(f"{what}: {left} is more than {right}")

    for space in spaces:
        name = f"of {space['fields'] or space['digest'].hex()}"
        _account(space, name, at_most)
    totals = _totals(spaces)
    _account(totals, "in all", at_most)
    memory, counts = store["memory"], store["counts"]
    stored = totals["stored"] + sum(totals["abandoned"].values()) + store["reservations"]
    equal("missed = stored + abandoned + being written", sum(totals["misses"].values()), stored)
    equal(
        "stored + promoted = left memory + in memory",
        totals["stored"] + totals["promoted"],
        sum(totals["left_memory"].values()) + memory["records"],
    )
    equal("stored, by namespace and in all", totals["stored"], counts.get("stored", 0))
    equal("promoted, by namespace and in all", totals["promoted"], counts.get("promoted", 0))
    evicted = sum(totals["left_memory"].get(why, 0) for why in EVICTIONS)
    equal("evicted from memory", evicted, counts.get("memory_evicted", 0))
    for why, name in (("busy", "busy"), ("over_quota", "over_quota"), ("store_shed", "shed")):
        refused = counts.get(f"reserve_{name}", 0)
        equal(f"reservations refused, {why}", totals["refused"].get(why, 0), refused)
    at_most("slot bytes of memory", totals["memory_slot_bytes"], memory["used_bytes"])
    if "disk" in store and not store["disk"]["down"]:
        _disk(store["disk"], totals, equal, at_most, at_rest)
    return found


def assert_adds_up(survey: Mapping[str, Any], *, at_rest: bool) -> None:
    """See `imbalances`."""
    found = imbalances(survey, at_rest=at_rest)
    assert not found, "\n".join(["What does not add up:", *found])


def _account(one: Mapping[str, Any], name: str, at_most: Any) -> None:
    """Of a namespace, or of all."""
    loaded = sum(one["hits"].values()) + sum(one["failed_loads"].values())
    at_most(f"restored + failed = asked {name}", loaded, one["asked"])
    stored = one["stored"] + sum(one["abandoned"].values())
    at_most(f"stored + abandoned = missed {name}", stored, sum(one["misses"].values()))
    left = sum(one["left_memory"].values())
    here = one["stored"] + one["promoted"] - left
    at_most(f"stored + promoted - left memory = in memory {name}", here, one["memory_records"])


def _disk(
    disk: Mapping[str, Any], totals: Mapping[str, Any], equal: Any, at_most: Any, at_rest: bool
) -> None:
    left = totals["left_disk"]
    held = totals["found"] + totals["written"] - sum(left.values())
    equal("found + written = left disk + on disk", held, disk["records"])
    if at_rest:  # else some may be of namespaces that were just reset
        equal("records on disk, by namespace and in all", totals["disk_records"], disk["records"])
    evicted = sum(left.get(why, 0) for why in EVICTIONS)
    equal("evicted from disk", evicted, disk["evicted"])
    slots = totals["disk_slot_bytes"] + disk["quarantined_bytes"]
    at_most("slot bytes of disk", slots, disk["used_bytes"])


def _totals(spaces: list[dict[str, Any]]) -> dict[str, Any]:
    """Every number of all namespaces added up, those by reason by their reasons."""
    found: dict[str, Any] = {}
    for space in spaces:
        for name, value in space.items():
            if isinstance(value, dict) and name != "fields":
                mine = found.setdefault(name, {})
                for word, count in value.items():
                    mine[word] = mine.get(word, 0) + count
            elif isinstance(value, int):
                found[name] = found.get(name, 0) + value
    return found
