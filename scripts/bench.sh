#!/bin/bash
# bench.sh [ARGS]: every table of `maru bench`, each with the reference of the same
# run beside it. `bench.sh --quick` takes under 30 s a table.
set -euo pipefail
# shellcheck source=scripts/env.sh
. "$(dirname "${BASH_SOURCE[0]}")/env.sh"
trap report_step EXIT

bash scripts/build.sh
for table in meta data rm start vllm; do
  step "bench $table" bin/maru bench "$table" "$@"
done
