"""`python -m dovetail.cli`."""

from dovetail.cli import main

if __name__ == "__main__":
    main()
