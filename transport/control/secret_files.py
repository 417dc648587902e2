"""Where secrets are: in files, among systemd's credentials, or in the environment; never in a settings file or a command line.

token_file = "plan.token"                          # relative to the settings file
token_file = "$CREDENTIALS_DIRECTORY/plan.token"   # LoadCredential= of the systemd unit
token_file = "env:PLAN_TOKEN"                      # a variable that has the secret itself
"""

import os
from collections.abc import Mapping
from pathlib import Path
from typing import Final

DIRECTORY: Final = "CREDENTIALS_DIRECTORY"
IN_DIRECTORY: Final = f"${DIRECTORY}/"
IN_ENVIRONMENT: Final = "env:"


def located(base: Path, text: str, environment: Mapping[str, str] = os.environ) -> Path:
    """The path that a settings file in `base` means. Raises ValueError where systemd gave this process no credentials."""
    if not text.startswith(IN_DIRECTORY):
        return base / text
    directory = environment.get(DIRECTORY)
    if not directory:
        raise ValueError(f"{DIRECTORY} is not set: systemd sets it for units with LoadCredential=")
    return Path(directory) / text.removeprefix(IN_DIRECTORY)


def read_secret(path: Path, environment: Mapping[str, str] = os.environ) -> str:
    """The secret that a file, or the variable that its name stands for, holds. Raises OSError."""
    if not path.name.startswith(IN_ENVIRONMENT):
        return path.read_text().strip()
    name = path.name.removeprefix(IN_ENVIRONMENT)
    try:
        return environment[name].strip()
    except KeyError:
        raise FileNotFoundError(f"the environment has no {name}") from None
