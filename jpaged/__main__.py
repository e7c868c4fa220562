"""`python -m jpaged`: the same as the command `jpaged`."""

import sys

from jpaged.cli import main

sys.exit(main())
