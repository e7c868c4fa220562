#!/usr/bin/env bash
# Installs the test extra into .venv, then checks style and types and runs the tests; and, where a newer
# Python is installed, runs the tests marked 'smoke' there too, on the newest JAX it can have. Some programs are
# compiled for a TPU and a GPU that are not here, where their compilers can be installed.
#
# usage: bash scripts/test.sh [--fast] [pytest arguments]
#   --fast             only the smoke tests, and no other environment
#   -k WORD, FILE, ... anything else goes to pytest; naming tests this way leaves out the other environments
set -euo pipefail

fast=false
arguments=()
for argument in "$@"; do
    case $argument in
    -h | --help)
        sed -n '2,/^set /{/^#/s/^# \{0,1\}//p}' "${BASH_SOURCE[0]}"
        exit 0
        ;;
    --fast) fast=true ;;
    *) arguments+=("$argument") ;;
    esac
done

cd -- "$(dirname -- "${BASH_SOURCE[0]}")/.."
# shellcheck source=scripts/venv.sh
source scripts/venv.sh

heading() { printf '\n== %s\n' "$*"; }
describe() { "$1" -c 'import sys, jax; print(f"Python {sys.version.split()[0]}, JAX {jax.__version__}")'; }

# A file of tests stays in one process (tests/conftest.py): its tests share what they compile. Each may take 3 GB.
workers=(-n auto --maxprocesses 4 --dist loadfile)

python=$(need_python)
make_env .venv '.[test]' "$python"

# Where tests are named, or are to be fast, they are all that is done.
whole=false
if ! $fast && ((${#arguments[@]} == 0)); then whole=true; fi

# check_ahead TARGET OPTION...: compiles a few programs for a machine that is not here.
check_ahead() {
    heading "compiled for $1"
    .venv-compilers/bin/python scripts/aot_check.py "$1" --smoke "${@:2}"
}
check_all_ahead() {
    check_ahead v5e
    check_ahead h200
    check_ahead h200 --triton
}

# Two things are done beside what follows, each in a group of processes of its own, which can be ended as one. What
# they say is shown when they are done.
groups=() logs=()
stop_groups() {
    local each
    for each in ${groups[@]+"${groups[@]}"}; do kill -- "-$each" 2>/dev/null || true; done
    rm -f ${logs[@]+"${logs[@]}"}
}
trap stop_groups EXIT
# beside COMMAND...: starts it so.
beside() {
    local log
    log=$(mktemp)
    logs+=("$log")
    set -m
    "$@" >"$log" 2>&1 &
    set +m
    groups+=($!)
}
# finish I: waits for the I-th and shows what it said; its status is the script's if it failed.
finish() {
    local status=0
    wait "${groups[$1]}" || status=$?
    cat "${logs[$1]}"
    if ((status)); then exit "$status"; fi
}

newer="" left_out="no Python 3.12 or newer was found"
if $whole; then
    # The compilers for machines that are not here take one core for minutes. They need no kernels for this machine, so
    # no compiler is offered to the installation.
    if CC=none CXX=none make_env .venv-compilers '.[tpu,cuda-compiler]' "$python"; then
        beside check_all_ahead
    else
        beside heading "compiled for a TPU and a GPU: left out, for the compilers could not be installed"
    fi
    if .venv/bin/python -c 'import sys; sys.exit(sys.version_info < (3, 12))'; then
        left_out=".venv has it already"
    elif newer=$(find_python 12 python3.14 python3.13 python3.12 ~/.pyenv/versions/3.1[2-9].*/bin/python); then
        beside make_env .venv-new '.[test]' "$newer"
    fi
fi

heading "style"
.venv/bin/python -m ruff check .
.venv/bin/python -m ruff format --check .
heading "types"
bash scripts/check_types.sh .venv/bin/python

if $fast; then
    heading "smoke tests: $(describe .venv/bin/python)"
    exec .venv/bin/python -m pytest "${workers[@]}" -m smoke ${arguments[@]+"${arguments[@]}"}
fi

# The other environments go first, so that the last line printed is the summary of the whole suite.
if $whole; then
    if [[ $newer ]]; then
        finish 1
        heading "smoke tests on the newest JAX: $(describe .venv-new/bin/python)"
        .venv-new/bin/python -m pytest "${workers[@]}" -m smoke
    else
        heading "smoke tests on the newest JAX: left out, $left_out"
    fi
    finish 0
fi
stop_groups

heading "tests: $(describe .venv/bin/python)"
exec .venv/bin/python -m pytest "${workers[@]}" ${arguments[@]+"${arguments[@]}"}
