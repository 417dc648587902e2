"""What `prfaas check` says of registries."""

from membership.etcd.settings import EtcdConfig
from prfaas.commands.checking.findings import Level
from prfaas.commands.checking.member_findings import fleet_findings


def test_a_fleets_etcd_that_is_asked_in_clear_is_told_for_each_other_machine() -> None:
    clear, local = EtcdConfig(endpoints=("10.0.0.5:2379", "127.0.0.1:2379")), EtcdConfig(endpoints=("127.0.0.1:2379",))
    (found,) = fleet_findings(clear)
    assert (found.level, found.about) == (Level.WARNING, "fleet")
    assert "10.0.0.5:2379 is another machine" in found.what
    assert not [*fleet_findings(local), *fleet_findings(None)]
    assert not [*fleet_findings(EtcdConfig(endpoints=("https://10.0.0.5:2379",)))]
