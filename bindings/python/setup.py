"""Builds tessera_torch with the project's CMake, against the torch installed here.

TESSERA_TORCH=FOLDER      another torch: the folder with include/ and lib/
TESSERA_BUILD_DIR=FOLDER  a build folder of the project to use, as it is configured
"""

import os
import re
import shutil
import site
import subprocess
import sys
import sysconfig
from pathlib import Path

from setuptools import Extension, setup
from setuptools.command.build_ext import build_ext

HERE = Path(__file__).resolve().parent
ROOT = HERE.parents[1]
# What the build leaves lies with the project's other builds.
SCRATCH = ROOT / "build" / "python"


def site_folders():
    """Where packages may be installed for this interpreter.

    pip hides them from a build that it isolates, but the paths are the same.
    """
    yield from sys.path
    for base in (sys.prefix, sys.base_prefix):
        yield sysconfig.get_path("platlib", vars={"base": base, "platbase": base})
    yield from site.getsitepackages()
    yield site.getusersitepackages()


def torch_folder():
    named = os.environ.get("TESSERA_TORCH")
    candidates = [named] if named else [Path(p, "torch") for p in site_folders() if p]
    for folder in map(Path, candidates):
        if (folder / "lib" / "libtorch_python.so").is_file():
            return folder.resolve()
    sys.exit(f"tessera-torch: found no torch for {sys.executable}"
             + (f" in TESSERA_TORCH={named}" if named else "")
             + ". Install it first (pip install torch==2.13.0), or set TESSERA_TORCH.")


def torch_version(folder):
    text = (folder / "version.py").read_text()
    return re.search(r"__version__ = '([^'+]*)", text)[1]


def project_version():
    text = (ROOT / "CMakeLists.txt").read_text()
    return re.search(r"project\(Tessera VERSION (\S+)", text)[1]


class CMakeBuild(build_ext):
    def build_extension(self, extension):
        given = os.environ.get("TESSERA_BUILD_DIR")
        build = Path(given or Path(self.build_temp).resolve() / "cmake").resolve()
        if not given:
            self.configure(build)
        subprocess.run(["cmake", "--build", build, "--target", "tessera_torch"],
                       check=True)
        target = Path(self.get_ext_fullpath(extension.name)).resolve()
        built = build / "bindings" / "python" / "tessera_torch" / target.name
        if not built.is_file():
            sys.exit(f"tessera-torch: {build} did not build {target.name}: it is "
                     "configured for another Python. Leave TESSERA_BUILD_DIR out.")
        target.parent.mkdir(parents=True, exist_ok=True)
        shutil.copy2(built, target)

    def configure(self, build):
        # In an isolated build the JSON library is where setuptools is.
        json = [Path(p, "nlohmann_json", "include") for p in sys.path if p]
        json = [p for p in json if (p / "nlohmann" / "json.hpp").is_file()]
        subprocess.run(
            ["cmake", "-S", ROOT, "-B", build, "-G", "Ninja",
             "-DCMAKE_BUILD_TYPE=Release", f"-DTESSERA_TORCH={torch_folder()}",
             f"-DTESSERA_PYTHON_EXECUTABLE={sys.executable}",
             "-DTESSERA_PYTHON=ON", "-DTESSERA_TESTS=OFF", "-DTESSERA_CLI=OFF",
             "-DTESSERA_EXAMPLES=OFF", "-DTESSERA_BENCH=OFF",
             *(f"-DTESSERA_JSON_INCLUDE={p}" for p in json[:1])], check=True)


SCRATCH.mkdir(parents=True, exist_ok=True)
setup(
    options={"build": {"build_base": str(SCRATCH)}, "egg_info": {"egg_base": str(SCRATCH)}},
    version=project_version(),
    # Exactly what it was compiled against: C++ has no stable interface there.
    install_requires=[f"torch=={torch_version(torch_folder())}"],
    packages=["tessera_torch"],
    ext_modules=[Extension("tessera_torch._C", sources=[])],
    cmdclass={"build_ext": CMakeBuild},
)
