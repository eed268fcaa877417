"""``python -m fleet.launch_ps``: see :mod:`fleet.launch.ps`."""

import sys

from fleet.launch.ps import main

if __name__ == "__main__":
    sys.exit(main())
