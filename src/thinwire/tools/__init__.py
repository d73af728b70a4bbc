"""The tools behind the command `thinwire`: the lab, recipes, races, reports, benchmarks and simulations.

They need the extra `tools`; the library itself needs torch and numpy alone.
"""

import sys


def main() -> None:
    """Entry point of the installed command; says what to install if the extra `tools` is missing."""
    try:
        from thinwire.tools.cli import main as run
    except ModuleNotFoundError as error:
        if error.name is None or error.name.split(".")[0] == "thinwire":
            raise
        print(
            f"thinwire: the command needs {error.name}, which the extra 'tools' brings: "
            "install it with pip install 'PATH_OF_THE_CLONE[tools]'.",
            file=sys.stderr,
        )
        sys.exit(2)
    run()
