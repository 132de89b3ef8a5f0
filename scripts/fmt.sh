#!/bin/bash
# fmt.sh: formats the Go and the Python of the tree.
set -euo pipefail
# shellcheck source=scripts/env.sh
. "$(dirname "${BASH_SOURCE[0]}")/env.sh"

bash scripts/install.sh python
sources '*.go' | xargs -0 -r gofmt -w
if [[ -d python ]]; then
  "$PY_VENV/bin/ruff" check --fix-only --quiet python
  "$PY_VENV/bin/ruff" format --quiet python
fi
