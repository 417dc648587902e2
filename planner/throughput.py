"""The PrfaaS throughput model (paper §2.1 and §3.4.1), one function per equation.

Lengths in tokens, sizes in bytes, rates per second.
A stage without instances has no throughput; a stage without requests never limits anything (its share is 0).
"""

import numpy as np

from planner.profile import Floats


def kv_throughput(kv_bytes: Floats | float, prefill_s: Floats | float) -> Floats:
    """Φ_kv(l) = S_kv(l) / T_prefill(l), bytes/s that one instance emits while it prefills. (1)"""
    return np.asarray(np.divide(kv_bytes, prefill_s), dtype=np.float64)


def egress_demand(num_gpus: float, gpus_per_instance: float, kv_throughput_bytes_per_s: float) -> float:
    """B_out = (N/P) · Φ_kv(L_avg): egress of a cluster whose instances prefill all the time. (2)"""
    return num_gpus / gpus_per_instance * kv_throughput_bytes_per_s


def theta_prfaas(instances: float, prefill_s: float, egress_bytes_per_s: float, kv_bytes: float) -> float:
    """Θ_prfaas = min(N_prfaas / T_prefill(l_long), B_out / S_kv(l_long)): the slower of the two. (3)"""
    return min(instances / prefill_s, egress_bytes_per_s / kv_bytes)


def theta_pd_p(num_prefill: float, prefill_s: float) -> float:
    """Θ_pd-p = N_p / T_prefill(l_short), with the profile of the PD cluster's own hardware. (4)"""
    return num_prefill / prefill_s


def theta_pd_d(num_decode: float, max_running: float, step_s: float, output_tokens: float) -> float:
    """Θ_pd-d = N_d · BS_max / (T_decode · L_out). (5)"""
    return num_decode * max_running / (step_s * output_tokens)


def lambda_max(offload_fraction: float, prfaas: float, pd_p: float, pd_d: float) -> float:
    """Λ_max = min(Θ_prfaas / p, Θ_pd-p / (1 − p), Θ_pd-d). (6)"""
    p = offload_fraction
    remote = prfaas / p if p > 0 else np.inf
    local = pd_p / (1 - p) if p < 1 else np.inf
    return float(min(remote, local, pd_d))
