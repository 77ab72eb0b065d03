"""Starts the program with the LibTorch of the torch that this Python has."""

import importlib.util
import os
import re
import sys
from pathlib import Path

HERE = Path(__file__).resolve().parent


def find_torch(here=HERE):
    """The folder of torch: beside this one, or where Python would import it from.

    The latter is so in an environment that sees the packages of another.
    """
    if (here.parent / "torch" / "lib").is_dir():
        return here.parent / "torch"
    spec = importlib.util.find_spec("torch")
    return Path(spec.origin).parent if spec and spec.origin else None


def version_of(torch):
    """Without the part behind '+', which tells CPU and CUDA builds apart."""
    text = (torch / "version.py").read_text()
    return re.search(r"__version__ = '([^'+]*)", text)[1]


def environment_for(torch, here=HERE):
    """The environment as it is, unless the program would look for LibTorch in vain, or find another."""
    environment = dict(os.environ)
    if torch.parent != here.parent or environment.get("LD_LIBRARY_PATH"):
        paths = [str(torch / "lib"), environment.get("LD_LIBRARY_PATH")]
        environment["LD_LIBRARY_PATH"] = ":".join(filter(None, paths))
    return environment


def main(here=HERE):
    wanted = (here / "torch_version").read_text().strip()
    torch = find_torch(here)
    there = version_of(torch) if torch else "none"
    # C++ has no stable interface there: another version may start, and go wrong.
    if there != wanted:
        sys.exit(f"tessera: error: this program is for torch {wanted}, but there is {there} "
                 f"for {sys.executable}. Install it: pip install torch=={wanted}")
    program = here / "bin" / "tessera"
    os.execve(program, ["tessera", *sys.argv[1:]], environment_for(torch, here))


if __name__ == "__main__":
    main()
