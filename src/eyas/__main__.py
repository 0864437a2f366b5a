"""``python -m eyas``."""

from eyas.cli.main import main

if __name__ == "__main__":
    main()
