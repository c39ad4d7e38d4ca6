#!/usr/bin/env bash
# Builds the environment, then runs the tests. Safe to run again.
#
#   bash launch/test.sh                      what a newcomer and every change should see, in about four minutes
#   bash launch/test.sh --all [OPTIONS]      everything but the nightly tests; OPTIONS go to pytest
#   bash launch/test.sh --nightly [OPTIONS]  the few tests of minutes, of which --all has a smaller one each
#   bash launch/test.sh ARGUMENTS            these go to pytest as they are, for instance: tests/unit/model -k softmax
#
# Which tests these are is said beside the markers in pyproject.toml. Tests that need the machine for themselves run one
# at a time, all others two at a time, a file on each.
# shellcheck source-path=SCRIPTDIR source=environment.sh
source "$(dirname "${BASH_SOURCE[0]}")/environment.sh"

make_environment "[dev]"
# Once, and not in each of some hundred processes.
"$VENV/bin/python" -m compileall -q txl_dist tests tools

QUICK="smoke or not (slow or dist)"
case ${1:-} in
    "") chosen=$QUICK ;;
    --all) chosen="not nightly" && shift ;;
    --nightly) chosen="nightly" && shift ;;
    *) exec "$VENV/bin/python" -m pytest "$@" ;;
esac

NO_TESTS=5 # pytest's exit code; it counts only where neither part has tests
status=$NO_TESTS
run() { # MARKER EXPRESSION, ARGUMENTS
    local code=0
    "$VENV/bin/python" -m pytest -m "($chosen) and $1" "${@:2}" || code=$?
    if [ "$status" = "$NO_TESTS" ] || { [ "$status" = 0 ] && [ "$code" != "$NO_TESTS" ]; }; then status=$code; fi
}
run "not alone" -n 2 --dist loadfile --no-loadscope-reorder "$@"
[ "$chosen" != "$QUICK" ] || exit "$status" # a test that needs the machine for itself is slow or dist
mapfile -t files < <(grep -rlE --include='test_*.py' 'mark\.alone' tests) # to collect the others again takes ten seconds
run "alone" "${files[@]}" "$@"
exit "$status"
