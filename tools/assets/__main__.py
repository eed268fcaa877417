"""Command line of ``python -m tools.assets``, which installs programs or pins their checksums."""

from __future__ import annotations

import argparse
import os
import sys

from tools.assets.ensure import ensure, say
from tools.assets.pin import pin
from tools.assets.programs import PROGRAMS, USUAL, AssetError, program


def main(arguments: list[str] | None = None) -> int:
    """Run the command line; return its exit status."""
    parser = argparse.ArgumentParser(
        prog="python -m tools.assets", description="Find the programs that tests start, or get them."
    )
    parser.add_argument(
        "names", nargs="*", metavar="NAME", help=f"{', '.join(PROGRAMS)}; {', '.join(USUAL)} if none is named"
    )
    parser.add_argument(
        "--path", action="store_true", help="print the folders that hold them, as PATH wants it"
    )
    parser.add_argument(
        "--without-go", action="store_true", help="leave out what only Go could build, where there is none"
    )
    how = parser.add_mutually_exclusive_group()
    how.add_argument("--build", action="store_true", help="build what is missing, download nothing")
    how.add_argument("--pin", action="store_true", help="write the checksums of the official files")
    given = parser.parse_args(arguments)
    names = given.names or list(USUAL)
    try:
        if given.pin:
            pin([name for name in names if program(name).download], say)
            return 0
        found = ensure(names, downloads=not given.build, without_go=given.without_go)
    except AssetError as error:
        say(str(error))
        return 1
    except KeyboardInterrupt:
        say("interrupted; what is in the cache is whole")
        return 130
    if given.path:
        print(os.pathsep.join(dict.fromkeys(str(path.parent) for path in found.values())))
    return 0


if __name__ == "__main__":
    sys.exit(main())
