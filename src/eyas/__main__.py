"""``python -m eyas``."""

from eyas.cli.main import command

if __name__ == "__main__":
    command()
