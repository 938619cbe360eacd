"""``python -m ampctx_apex`` is ``ampctx-apex``."""

import sys

from ampctx_apex.cli import main

if __name__ == "__main__":
    sys.exit(main())
