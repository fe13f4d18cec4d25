"""What the commands of the bench have in common on the command line."""

import argparse


def parser(command: str, description: str) -> argparse.ArgumentParser:
    """A parser with the options that every command has: where the record and the tables go."""
    made = argparse.ArgumentParser(
        f"python -m bench {command}".strip(),
        description=description,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    made.add_argument("--out", metavar="FILE.jsonl", help="write the record")
    made.add_argument("--markdown", action="store_true", help="print Markdown tables")
    return made
