"""``python -m gemma_convert``."""

import sys

from gemma_convert.cli import main

if __name__ == "__main__":
    sys.exit(main())
