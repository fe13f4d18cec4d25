"""What a forward imports in its first call: it reads a file."""

from pathlib import Path

TEXT = Path(__file__).read_text()
