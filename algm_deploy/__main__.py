"""`python -m algm_deploy` is the command line."""

import sys

from algm_deploy.cli import main

sys.exit(main())
