"""``python -m gemma_convert``."""

import sys

from gemma_convert.cli import program

if __name__ == "__main__":
    sys.exit(program())
