#!/usr/bin/env bash
# Format the code, or with --check only report. Installs nothing: pip install -e ".[dev]" does.
set -euo pipefail
cd "$(dirname "$0")"
if [ "${1:-}" = --check ]; then
  ruff format --check .
  ruff check .
else
  ruff format .
  ruff check --fix .
fi
