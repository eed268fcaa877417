"""Entry point of ``python -m fleet.launch``; see :mod:`fleet.launch.collective`."""

import sys

from fleet.launch.collective import main

if __name__ == "__main__":
    sys.exit(main())
