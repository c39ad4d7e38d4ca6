#!/usr/bin/env bash
# Builds the environment, then checks style and types. Silent where nothing is wrong; safe to run again.
#
#   bash launch/lint.sh
# shellcheck source-path=SCRIPTDIR source=environment.sh
source "$(dirname "${BASH_SOURCE[0]}")/environment.sh"

make_environment "[dev]"
status=0
"$VENV/bin/ruff" check -q . || status=1
"$VENV/bin/ruff" format --check -q . || status=1
"$VENV/bin/mypy" --no-error-summary || status=1
exit "$status"
