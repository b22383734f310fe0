"""`python -m ncz_plugins` is the `ncz` command."""

import sys

from .cli import main

sys.exit(main())
