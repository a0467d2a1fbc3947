#!/bin/sh
# Gate a model from any shell or CI service:   sh gate.sh
# After a change that is meant:                sh gate.sh --update-baseline
# Further arguments go to `propcheck gate` as they are. PROBE, BASELINE and REPORTS name other files.
set -eu

here=$(dirname -- "$0")
probe=${PROBE:-$here/model.toml}
baseline=${BASELINE:-$here/baselines/model.parquet}
reports=${REPORTS:-propcheck-gate}

# The reports are written whether the gate passes or fails, so that the service can pick them up.
status=0
propcheck gate "$probe" --baseline "$baseline" --out "$reports/run" \
    --output "$reports/summary.md" --output "$reports/junit.xml" --output "$reports/results.sarif" "$@" || status=$?

# What each status means; it is passed on, so that a service can tell a regression from a gate that could not judge.
case $status in
    0) ;;
    1) echo "gate.sh: the model is not as $baseline was; if that is meant: sh $0 --update-baseline, and commit both files" >&2 ;;
    2) echo "gate.sh: nothing was judged; the line of propcheck above says why (no baseline yet: sh $0 --update-baseline)" >&2 ;;
    *) echo "gate.sh: propcheck ended with status $status" >&2 ;;
esac
exit "$status"
