"""setuptools' build backend, which fetches CMake and Ninja only where they lack.

torch is not fetched: what is installed is what the extension must fit. See
setup.py for how it is found.
"""

import shutil

from setuptools import build_meta
from setuptools.build_meta import *  # noqa: F401,F403  the other hooks


def _missing_tools():
    tools = {"cmake": "cmake>=3.25", "ninja": "ninja"}
    return [what for tool, what in tools.items() if not shutil.which(tool)]


def get_requires_for_build_wheel(config_settings=None):
    return build_meta.get_requires_for_build_wheel(config_settings) + _missing_tools()


def get_requires_for_build_editable(config_settings=None):
    return (build_meta.get_requires_for_build_editable(config_settings)
            + _missing_tools())
