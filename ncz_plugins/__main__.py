"""`python -m ncz_plugins` is the `ncz` command."""

import sys

from .cli.main import main

sys.exit(main())
