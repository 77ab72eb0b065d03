"""Names the machines that the wheel is for: any Python 3 of this platform."""

import os

from setuptools import Distribution, setup
from setuptools.command.bdist_wheel import bdist_wheel


class Binary(Distribution):
    """Goes where torch goes: into the folder of packages with machine code."""

    def has_ext_modules(self):
        return True


class AnyPython(bdist_wheel):
    def get_tag(self):
        return "py3", "none", os.environ["TESSERA_PLATFORM"]


setup(distclass=Binary, cmdclass={"bdist_wheel": AnyPython})
