#!/bin/bash
# vmlab.sh [GO TEST FLAGS]: the tests that need a real device-DAX, in virtual
# machines (test/vmlab). Without KVM; a boot takes seconds.
set -euo pipefail
# shellcheck source=scripts/env.sh
. "$(dirname "${BASH_SOURCE[0]}")/env.sh"

bash scripts/install.sh vmlab
go test -tags vmlab,invariants -count=1 -timeout 30m "$@" ./test/vmlab/...
