"""What makes a node one of a PD cluster."""

from typing import Final

from node.role import Role
from pd_cluster.admission import admit, admit_leg
from pd_cluster.converter import Converter
from pd_cluster.landings import DecodeLandings

PD: Final = Role(kind="pd", admit=admit, admit_leg=admit_leg, landings=DecodeLandings, conversions=Converter)
