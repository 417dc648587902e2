"""`python -m planner` is `prfaas-plan`."""

import sys

from planner.cli import main

sys.exit(main())
