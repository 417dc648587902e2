"""The PrfaaS throughput model (paper §2.1 and §3.4.1), one function per equation; plans are searched with these.

Lengths in tokens, sizes in bytes, times in seconds, rates per second; numbers or arrays.

A class of requests that is a share p of all takes p·T of its stage for every request that arrives. Its stage's Θ/p is
instances over *that*. The search knows p·T of every threshold as a sum. So it gives these functions seconds and bytes
per arriving request, and gets the terms of equation (6).
"""

from typing import TypeAlias

import numpy as np

from planner.model.profile import Floats

Numbers: TypeAlias = Floats | float


def kv_throughput(kv_bytes: Numbers, prefill_s: Numbers) -> Floats:
    """Φ_kv(l) = S_kv(l) / T_prefill(l), bytes/s that one instance emits while it prefills. (1)

    Of N/P instances that prefill all the time, N/P times as much leaves. (2)
    """
    return np.asarray(np.divide(kv_bytes, prefill_s), dtype=np.float64)


def theta(instances: float, seconds: Numbers) -> Floats:
    """Requests/s of a stage: instances over the seconds that a request takes of one.

    A stage without demand limits nothing; demand without instances is never done.
    """
    seconds = np.asarray(seconds, dtype=np.float64)
    if not instances:
        return np.where(seconds > 0, 0.0, np.inf)
    with np.errstate(divide="ignore"):
        return np.asarray(instances / seconds)


def theta_prfaas(instances: float, prefill_s: Numbers, egress_bytes_per_s: float, kv_bytes: Numbers) -> Floats:
    """Θ_prfaas = min(N_prfaas / T_prefill(l_long), B_out / S_kv(l_long)): the slower of the two. (3)"""
    return np.minimum(theta(instances, prefill_s), theta(egress_bytes_per_s, kv_bytes))


def theta_pd_p(num_prefill: float, prefill_s: Numbers) -> Floats:
    """Θ_pd-p = N_p / T_prefill(l_short), with the profile of the PD cluster's own hardware. (4)"""
    return theta(num_prefill, prefill_s)


def decode_seconds(max_running: float, step_s: float, output_tokens: float) -> float:
    """T_decode · L_out / BS_max: what one request takes of a decode instance."""
    return step_s * output_tokens / max_running


def theta_pd_d(num_decode: float, decode_s: Numbers) -> Floats:
    """Θ_pd-d = N_d · BS_max / (T_decode · L_out), given `decode_seconds`. (5)"""
    return theta(num_decode, decode_s)


def lambda_max(prfaas: Numbers, pd_p: Numbers, pd_d: Numbers) -> Floats:
    """Λ_max = min(Θ_prfaas / p, Θ_pd-p / (1 − p), Θ_pd-d), the first two already over their share. (6)"""
    return np.minimum(np.minimum(prfaas, pd_p), pd_d)
