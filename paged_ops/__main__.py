"""``paged-ops`` and ``python -m paged_ops``: the command line, or which extra it needs."""

import sys


def main() -> None:
    try:
        from paged_ops.cli import main as command
    except ModuleNotFoundError as error:
        if error.name not in ("typer", "rich"):
            raise
        remedy = "it comes with the extra cli: pip install '.[cli]' in a checkout"
        sys.exit(f"paged-ops: {error.name} is not installed; {remedy}")
    command()


if __name__ == "__main__":
    main()
