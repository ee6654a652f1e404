"""``python -m paged_ops.cli``: the command line as a module, for torchrun."""

from paged_ops.cli import main

if __name__ == "__main__":
    main()
