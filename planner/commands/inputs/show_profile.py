"""A profile's figures as text: each with where it comes from, and how far it may be off."""

from typing import Any, Final

from planner.model.profile import ModelProfile, provenance_kind

LENGTHS: Final = (8_000, 32_000, 128_000)


def off_by(error: float | None, provenance: str) -> str:
    """How far a figure may be off. What is measured is never exact, however little it varied."""
    if error is None:
        return "± not known"
    if error == 0 and provenance_kind(provenance) == "derived":
        return "exact"
    return f"±{error:.1%}" if error < 0.1 else f"±{error:.0%}"


def origin_of(profile: ModelProfile) -> dict[str, tuple[str, float | None]]:
    """Provenance and error of each part, by name."""
    found: dict[str, tuple[str, float | None]] = {}
    if profile.kv is not None:
        found["S_kv"] = (profile.kv.provenance, profile.kv.error)
    for what, parts in (("T_prefill", profile.prefill), ("decode", profile.decode), ("memory", profile.memory)):
        found |= {f"{what} {hardware}": (part.provenance, part.error) for hardware, part in parts.items()}
    return found


def origins(profile: ModelProfile) -> str:
    """A line for each part."""
    return "\n".join(f"  {what} ({off_by(error, text)}): {text}" for what, (text, error) in origin_of(profile).items())


def memory_rows(profile: ModelProfile) -> list[dict[str, Any]]:
    """Room for KVCache by hardware, and how many requests of some lengths it holds."""
    rows = []
    for hardware, memory in profile.memory.items():
        row: dict[str, Any] = {
            "hardware": hardware,
            "weights_GB_per_gpu": memory.weights_bytes / memory.gpus / 1e9,
            "HBM_GB_per_gpu": memory.hbm_bytes_per_gpu / 1e9,
            "KVCache_GB": memory.kv_bytes / 1e9,
        }
        if profile.kv is not None:
            kv, states = profile.kv, profile.kv.fixed_bytes
            row |= {f"requests of {length:,}": memory.requests_of(kv(length), states) for length in LENGTHS}
        rows.append(row)
    return rows
