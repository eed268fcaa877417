"""``python -m fleet_operator`` is ``fleetjob``."""

from fleet_operator.cli import main

if __name__ == "__main__":
    main()
