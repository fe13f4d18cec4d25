#!/usr/bin/env bash
# Format the code, or with --check only report, and check its types. Installs nothing:
# pip install -e ".[dev]" does, with PyTorch and cuda-tile, whose types the check reads.
set -euo pipefail
cd "$(dirname "$0")"
if [ "${1:-}" = --check ]; then
  ruff format --check .
  ruff check .
  if ! python -c "import mypy" 2> /dev/null; then
    echo 'format.sh: mypy is not installed for this python: pip install -e ".[dev]"' >&2
    exit 1
  fi
  python -m mypy
else
  ruff format .
  ruff check --fix .
fi
