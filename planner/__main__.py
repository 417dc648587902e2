"""`python -m planner` is `prfaas-plan`."""

import sys

from planner.commands.cli import main

sys.exit(main())
