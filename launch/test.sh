#!/usr/bin/env bash
# Builds the environment, then runs the whole suite. Safe to run again. Arguments go to pytest.
#
#   bash launch/test.sh -m "not slow"
# shellcheck source-path=SCRIPTDIR source=environment.sh
source "$(dirname "${BASH_SOURCE[0]}")/environment.sh"

make_environment "[dev]"
# Several processes run side by side in the tests: one thread each is fastest and the same everywhere.
export OMP_NUM_THREADS=${OMP_NUM_THREADS:-1}
exec "$VENV/bin/python" -m pytest "$@"
