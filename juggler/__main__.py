"""`python -m juggler` is the command `juggler`."""

import sys

from juggler.cli import main

sys.exit(main())
