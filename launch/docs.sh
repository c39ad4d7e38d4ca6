#!/usr/bin/env bash
# Builds the environment, then the documentation as a site. A broken link, or a generated page that is stale, is an error.
#
#   bash launch/docs.sh [FOLDER]    default site
# shellcheck source-path=SCRIPTDIR source=environment.sh
source "$(dirname "${BASH_SOURCE[0]}")/environment.sh"

make_environment "[dev]"
export NO_MKDOCS_2_WARNING=1 # the theme warns of a version that constraints.txt keeps out
"$VENV/bin/python" -m mkdocs build --strict --quiet --site-dir "${1:-site}"
