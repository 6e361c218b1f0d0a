"""`ebbtide stats`: what each namespace of a disk directory holds, and what became of the rest."""

from __future__ import annotations

import json
from typing import TYPE_CHECKING, Any

from ebbtide.chosen import NAME_DIGITS, add_store
from ebbtide.cli import EXIT_DONE
from ebbtide.connectors.owner import reach_owner
from ebbtide.sizes import format_size
from ebbtide.tiers.offline import survey_directory

if TYPE_CHECKING:
    import argparse
    from collections.abc import Mapping

TIERS = ("memory", "disk")
COUNTS = {
    "hits": "hits",
    "misses": "computed and stored, because",
    "abandoned": "given up before they were stored, because",
    "failed_loads": "loads that failed",
    "drops": "dropped",
    "evicted_for_others": "evicted for another namespace's sake, from",
    "refused": "reservations cut short, because",
}
_AGES = ((86_400, "d"), (3600, "h"), (60, "min"))


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """The verb's options."""
    add_store(parser)


def run(args: argparse.Namespace) -> int:
    """Ask the store that runs on the directory; without one, read its index."""
    owner = reach_owner(args.directory)
    if owner is None:
        found = survey_directory(args.directory)
    else:
        with owner:
            found = owner.survey()
    for namespace in found["namespaces"]:
        namespace["digest"] = namespace["digest"].hex()
        namespace["name"] = namespace["digest"][:NAME_DIGITS]
    found["by_store"] = owner is not None
    if args.json:
        print(json.dumps(found))
    else:
        for line in _lines(found):
            print(line)
    return EXIT_DONE


def _lines(found: Mapping[str, Any]) -> list[str]:
    lines: list[str] = []
    for namespace in found["namespaces"]:
        fields = "  ".join(f"{name}={value}" for name, value in namespace["fields"].items())
        lines.append(f"{namespace['name']}  {fields}".rstrip())
        for tier in TIERS:
            if f"{tier}_records" in namespace:
                size = format_size(namespace[f"{tier}_bytes"])
                ages = _ages(namespace) if tier == "disk" else ""
                lines.append(f"  {tier}: {namespace[f'{tier}_records']} records, {size}{ages}")
        if namespace.get("floor") or namespace.get("cap", 1.0) < 1.0:
            lines.append(_quota(namespace))
        for name, words in COUNTS.items():
            if namespace.get(name):
                counts = sorted(namespace[name].items(), key=lambda pair: (-pair[1], pair[0]))
                lines.append(f"  {words}: " + ", ".join(f"{n} {word}" for word, n in counts))
    lines += [_tier(tier, found["store"][tier]) for tier in TIERS if tier in found["store"]]
    if not found["by_store"]:
        lines.append("No store runs on the directory: hits, misses and drops are not known")
    return lines


def _quota(namespace: Mapping[str, Any]) -> str:
    held = (f"{format_size(namespace[f'{tier}_slot_bytes'])} of {tier}" for tier in TIERS)
    return (
        f"  holds {' and '.join(held)}, slots included;"
        f" floor {namespace['floor']:.3g}, cap {namespace['cap']:.3g} of each"
    )


def _tier(tier: str, totals: Mapping[str, Any]) -> str:
    used, capacity = format_size(totals["used_bytes"]), format_size(totals["capacity_bytes"])
    words = [f"{totals['records']} records, {used} of {capacity} used"]
    words += [f"{totals[name]} {name}" for name in ("evicted", "corrupt") if totals.get(name)]
    if totals.get("quarantined_bytes"):
        words.append(f"{format_size(totals['quarantined_bytes'])} quarantined")
    if totals.get("direct_io") is False:
        words.append("no direct I/O")
    if totals.get("down"):
        words.append(f"OUT OF SERVICE: {totals['down']}")
    return f"{tier} in all: " + ", ".join(words)


def _ages(namespace: Mapping[str, Any]) -> str:
    oldest, newest = namespace["oldest_s"], namespace["newest_s"]
    if oldest is None or newest is None:
        return ", of unknown age" if namespace["disk_records"] else ""
    return f", stored between {_age(oldest)} and {_age(newest)} ago"


def _age(seconds: int) -> str:
    for size, unit in _AGES:
        if seconds >= size:
            return f"{seconds // size} {unit}"
    return "less than a minute"
