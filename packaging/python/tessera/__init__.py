"""The program tessera; `python -m tessera` starts it too."""
