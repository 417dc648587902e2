"""Two sites with an authority each, a third one for gateways, and the list that says which of them signs for whom."""

from dataclasses import replace
from pathlib import Path
from typing import Final

from cryptography import x509
from cryptography.hazmat.primitives import hashes, serialization
from cryptography.hazmat.primitives.asymmetric import ec

from tests.peers import HOST
from transport.control.certificates import Authority
from transport.peers.name import PeerName, PeerRole
from transport.wire.identity import Identity

HOME_NODE: Final = PeerName("prfaas", "home", PeerRole.NODE, "d0")
REMOTE_NODE: Final = PeerName("prfaas", "remote", PeerRole.PREFILL, "p0")
GATEWAY: Final = PeerName("prfaas", "any", PeerRole.GATEWAY, "g")
LIST: Final = """
home/authority.pem      home/node
remote/authority.pem    remote/prefill      # a datacenter that prefills for others
any/authority.pem       any/gateway any/planner any/operator
"""


class TwoSites:
    """Made anew for each test that changes its files."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.list = folder / "authorities"
        self._authorities = {site: Authority(folder / site, site) for site in ("home", "remote", "any")}
        self.list.write_text(LIST)
        self.home = self.issue("home", HOME_NODE)
        self.remote = self.issue("remote", REMOTE_NODE)
        self.gateway = self.issue("any", GATEWAY)

    def issue(self, site: str, name: PeerName) -> Identity:
        """What the authority of `site` signs, be it that site's or not; its holder believes in the list."""
        made = self._authorities[site].issue(name.name, [HOST], peer=name)
        return replace(made, authority=self.list)

    def behind_an_authority_of_the_same_name(self, name: PeerName) -> Identity:
        """Signed by one that calls itself as the home authority does, which no list has."""
        home = x509.load_pem_x509_certificate((self.folder / "home" / "authority.pem").read_bytes())
        made, key = self.issue("remote", name), ec.generate_private_key(ec.SECP256R1())
        had = x509.load_pem_x509_certificate(made.certificate.read_bytes())
        copy = (
            x509.CertificateBuilder(home.subject, had.subject, had.public_key(), had.serial_number)
            .not_valid_before(had.not_valid_before_utc)
            .not_valid_after(had.not_valid_after_utc)
        )
        for extension in had.extensions:
            copy = copy.add_extension(extension.value, extension.critical)
        signed = copy.sign(key, hashes.SHA256())
        made.certificate.write_bytes(signed.public_bytes(serialization.Encoding.PEM))
        return made
