"""How many examples a property is tried with: a share of what the profile says, so that one option changes all of them."""

from typing import Final

from hypothesis import HealthCheck, settings

USUAL: Final = 100  # examples of a property in the profile that is loaded unless another one is named

PATIENT: Final = settings(
    settings.default,
    max_examples=USUAL,
    deadline=None,
    derandomize=False,  # Hypothesis would have it so in CI: the same examples for each commit
    suppress_health_check=[HealthCheck.too_slow],
)


def register_profiles() -> None:
    """`--hypothesis-profile brief` is for runs at every change: each draws other examples, by its seed."""
    settings.register_profile("patient", PATIENT)
    settings.register_profile("brief", PATIENT, max_examples=25)
    # What a hundred examples find once in weeks, in one run.
    settings.register_profile("thorough", PATIENT, max_examples=4000)
    settings.load_profile("patient")


def examples(count: int) -> int:
    """Stands for `count` of the hundred examples that the usual profile has."""
    return max(1, count * settings().max_examples // USUAL)
