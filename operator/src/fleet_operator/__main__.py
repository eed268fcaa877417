"""The entry point of ``python -m fleet_operator``, equivalent to ``fleetjob``."""

from fleet_operator.cli import main

if __name__ == "__main__":
    main()
