"""patch: give the norm modules of a model tilenorm's forward, in place, with a report and undo."""

from .classes import unpatch
from .models import Left, Patched, Report, patch

__all__ = ["Left", "Patched", "Report", "patch", "unpatch"]
