"""The goals of a solver, by name. No numbers here: a command line lists these without loading any."""

from enum import StrEnum


class Objective(StrEnum):
    """What a plan maximises (or, for cost, minimises)."""

    THROUGHPUT = "throughput"
    COST = "cost"
    SLO = "slo"


class ServiceTime(StrEnum):
    """How a class of requests is turned into one service time."""

    EXACT = "exact"  # E[T(L)]
    OF_MEAN = "of_mean"  # T(E[L]), the paper's approximation; a lower bound, as T is convex


class TieBreak(StrEnum):
    """The second goal, among plans of equal rate."""

    EGRESS = "egress"
    TTFT = "ttft"


class Worst(StrEnum):
    """What is best in the worst scenario of a robust plan."""

    RATIO = "ratio"  # rate over the scenario's own optimum
    RATE = "rate"


class SplitRule(StrEnum):
    """How the controller finds a better split."""

    MODEL = "model"  # argmax of equation (6) on the observed lengths
    IMBALANCE = "imbalance"  # Mooncake's factor (mean decode load + 1) / (mean prefill load + 1), §5.1
