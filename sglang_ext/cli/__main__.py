"""`python -m sglang_ext.cli`, where the console script is not on the path."""

from sglang_ext.cli import console

if __name__ == "__main__":
    console()
