"""`python -m sekv` is the `sekv` command."""

import sys

from sekv.cli import main

if __name__ == "__main__":
    sys.exit(main())
