"""A process takes what the system lets it have."""

import subprocess
import sys

PROGRAM = """
import resource
from transport.path.descriptors import descriptor_limit, raise_descriptor_limit
hard = resource.getrlimit(resource.RLIMIT_NOFILE)[1]
resource.setrlimit(resource.RLIMIT_NOFILE, (256, hard))
assert descriptor_limit() == 256
raise_descriptor_limit()
assert descriptor_limit() == hard
"""


def test_the_limit_is_raised_to_what_the_system_allows() -> None:
    subprocess.run([sys.executable, "-c", PROGRAM], check=True)
