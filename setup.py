"""Builds the native library, and makes README.md the page on PyPI. Everything else about the package is in setup.cfg.

The library is not a Python extension: it has no Python symbols, is called `libncz_cpu.so` on every Python, and ctypes
loads it. So one wheel, tagged py3-none-<platform>, serves all Python versions. Without a C++ compiler the package is
installed without the library and uses its numpy kernels.
"""

import os
import re
import runpy
import sysconfig
from glob import glob
from pathlib import Path

from setuptools import Extension, setup
from setuptools.command.bdist_wheel import bdist_wheel
from setuptools.command.build_ext import build_ext

FOLDER = "ncz_plugins/kernels/cpu"
COMMON = "ncz_plugins/kernels/common"  # headers that the CUDA kernels include, too
# No contraction: a fused multiply-add rounds differently from the reference. No errno: lets rint vectorize.
FLAGS = ["-std=c++17", "-O3", "-ffp-contract=off", "-fno-math-errno", "-fno-exceptions", "-fno-rtti"]
FLAGS += ["-fPIC", "-fvisibility=hidden", "-fno-asynchronous-unwind-tables", "-g0"]
SOURCES = {f"{FOLDER}/library.cpp": [], f"{FOLDER}/portable.cpp": []}  # and their extra flags
# The platform that is built for: where a compiler for another one is used, _PYTHON_HOST_PLATFORM names it.
if sysconfig.get_platform().endswith(("x86_64", "amd64")):
    SOURCES[f"{FOLDER}/avx2.cpp"] = ["-mavx2", "-mbmi", "-mbmi2", "-mf16c", "-mlzcnt"]

VERSION = runpy.run_path("ncz_plugins/version.py")["__version__"]
# Such as https://github.com/OWNER/NAME: the workflow that publishes the package sets it.
REPOSITORY = os.environ.get("REPOSITORY_URL", "").rstrip("/")
# What README.md names by its path: `[words](PATH)`, and files in a `<picture>`.
LINK = re.compile(r"\[([^]]+)\]\((?!https?:)([^)]+)\)")
PICTURE = re.compile("<picture>.*?</picture>", re.DOTALL)
FILE = re.compile(r'\b((?:src|srcset)=")(?!https?:)([^"]+")')


class BuildLibrary(build_ext):
    def get_ext_filename(self, fullname):
        return f"{FOLDER}/libncz_cpu.so" if "." in fullname else "libncz_cpu.so"

    def build_extension(self, extension):
        target = Path(self.get_ext_fullpath(extension.name))
        target.unlink(missing_ok=True)  # a library of other sources must not get into the wheel
        try:
            objects = []
            for source, flags in SOURCES.items():
                objects += self.compiler.compile(
                    [source],
                    output_dir=self.build_temp,
                    extra_postargs=FLAGS + flags,
                    depends=extension.depends,
                )
            self.compiler.link_shared_object(objects, str(target), extra_postargs=["-s"], target_lang="c++")
        except Exception as error:  # no compiler, or one that cannot build this
            self.warn(
                f"libncz_cpu.so could not be built ({error}). ncz_plugins will use its numpy kernels, about 100 times "
                "slower. Install a C++17 compiler (g++ or clang++) and reinstall to have the compiled ones."
            )


class PlatformWheel(bdist_wheel):
    """A wheel for one platform and any Python 3."""

    def get_tag(self):
        return "py3", "none", super().get_tag()[2]


def long_description():
    """README.md for PyPI, where no other file lies beside it.

    Links and pictures become those of this version's tag in the repository. If its address is not known, links become
    their words, and pictures go.
    """
    text = Path("README.md").read_text(encoding="utf-8")
    if not REPOSITORY:
        return PICTURE.sub("", LINK.sub(r"\1", text))
    text = LINK.sub(rf"[\1]({REPOSITORY}/blob/v{VERSION}/\2)", text)
    return FILE.sub(rf"\1{REPOSITORY}/raw/v{VERSION}/\2", text)


def project_urls():
    """What PyPI shows beside the page."""
    places = {"Source": "", "Changelog": f"/blob/v{VERSION}/CHANGELOG.md", "Issues": "/issues"}
    return {name: REPOSITORY + place for name, place in places.items()} if REPOSITORY else {}


setup(
    long_description=long_description(),
    project_urls=project_urls(),
    ext_modules=[
        Extension(
            "ncz_plugins.kernels.cpu.libncz_cpu",
            sources=list(SOURCES),
            depends=sorted([*glob(f"{FOLDER}/*.h"), *glob(f"{COMMON}/*.h")]),
            optional=True,
        )
    ],
    cmdclass={"build_ext": BuildLibrary, "bdist_wheel": PlatformWheel},
)
