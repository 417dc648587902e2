"""A process in a container may use less than the cores that it sees."""

from pathlib import Path

import pytest

from transport.coding.cores import usable_cores


def cores(tmp_path: Path, own: str, files: dict[str, str], runs_on: int = 128) -> float:
    (tmp_path / "own").write_text(own)
    for name, text in files.items():
        (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / name).write_text(text)
    return usable_cores(runs_on, tmp_path / "own", tmp_path / "groups")


def version_1(group: str, quota: str) -> dict[str, str]:
    return {
        f"groups/{group}/cpu.cfs_quota_us": f"{quota}\n",
        f"groups/{group}/cpu.cfs_period_us": "100000\n",
    }


V1 = "5:devices:/pod\n3:cpu,cpuacct:/pod\n0::/\n"


@pytest.mark.parametrize(
    ("own", "files", "found"),
    [
        ("0::/\n", {"groups/cpu.max": "200000 100000\n"}, 2.0),
        ("0::/\n", {"groups/cpu.max": "50000 100000\n"}, 0.5),
        ("0::/\n", {"groups/cpu.max": "max 100000\n"}, 128.0),
        ("0::/slice/pod\n", {"groups/slice/pod/cpu.max": "max 100000\n", "groups/slice/cpu.max": "300000 100000\n"}, 3.0),
        (V1, version_1("cpu,cpuacct/pod", "150000"), 1.5),
        (V1, version_1("cpu", "400000"), 4.0),
        (V1, version_1("cpu", "-1"), 128.0),
        ("0::/../host\n", {}, 128.0),
        ("", {}, 128.0),
    ],
)  # fmt: skip
def test_a_container_uses_no_more_than_it_is_allowed(
    tmp_path: Path, own: str, files: dict[str, str], found: float
) -> None:
    assert cores(tmp_path, own, files) == found


def test_a_process_runs_on_no_more_cores_than_it_is_bound_to(tmp_path: Path) -> None:
    assert cores(tmp_path, "0::/\n", {"groups/cpu.max": "800000 100000\n"}, runs_on=1) == 1.0
    assert usable_cores() > 0
