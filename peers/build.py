"""Build .peers/: other EAGLE-3 trainers, for the benchmarks that compare a training step.

They are imported in processes of their own, behind eyas' environment, so that all run on the same torch. It
is quick when nothing has changed. Where they cannot be installed it says why and ends well: the benchmarks
then compare with the plain step and say so.
"""

from __future__ import annotations

import hashlib
import shutil
import subprocess
import sys
from pathlib import Path

REPOSITORY = Path(__file__).resolve().parents[1]
PLACE = REPOSITORY / ".peers"
STAMP = PLACE / "installed"
PINNED = Path(__file__).with_name("pinned.txt")


def main() -> int:
    recipe = hashlib.sha256(PINNED.read_bytes()).hexdigest()
    if STAMP.is_file() and STAMP.read_text().strip() == recipe:
        return 0
    fresh = PLACE.with_name(".peers-new")
    shutil.rmtree(fresh, ignore_errors=True)
    python = REPOSITORY / ".venv" / "bin" / "python"
    # without --no-deps pip would put a second torch, and an engine, beside them
    command = [str(python), "-m", "pip", "install", "--quiet", "--disable-pip-version-check", "--no-deps"]
    try:
        subprocess.run([*command, "--target", str(fresh), "--requirement", str(PINNED)], check=True)
    except (subprocess.CalledProcessError, OSError) as error:
        shutil.rmtree(fresh, ignore_errors=True)
        print(f"peers: skipped: the installation failed: {error}", file=sys.stderr)
        return 0
    (fresh / STAMP.name).write_text(recipe + "\n")
    shutil.rmtree(PLACE, ignore_errors=True)
    fresh.rename(PLACE)
    return 0


if __name__ == "__main__":
    sys.exit(main())
