"""What pyproject.toml cannot say: how the passes of ``eyas.drafter.kernels`` are compiled.

Once for any processor, and on x86 for two later generations; eyas takes the latest that the processor runs.
Without a compiler the installation goes on without them.
"""

from platform import machine

from setuptools import Extension, setup

# OpenMP is torch's own, found when a pass is loaded: nothing is linked for it
FLAGS = ["-std=c++17", "-O3", "-g0", "-fopenmp", "-fno-math-errno", "-fno-trapping-math"]
BUILDS = {"_rows": []}
if machine() in ("x86_64", "AMD64"):
    BUILDS["_rows_v3"] = ["-march=x86-64-v3"]
    BUILDS["_rows_v4"] = ["-march=x86-64-v4", "-mprefer-vector-width=512"]

setup(
    ext_modules=[
        Extension(
            f"eyas.drafter.kernels.{name}",
            ["src/eyas/drafter/kernels/rows.cpp"],
            extra_compile_args=[*FLAGS, *more],
            optional=True,
        )
        for name, more in BUILDS.items()
    ]
)
