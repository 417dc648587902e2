"""`python -m prfaas`."""

import sys

from prfaas.cli import main

sys.exit(main())
