# Functions to find a Python and keep a virtual environment current. Sourced by demo.sh and test.sh.
# shellcheck shell=bash

# can_make_env PYTHON MINOR: PYTHON runs, is 3.MINOR or newer, and can make a virtual environment.
can_make_env() {
    "$1" -c "import sys, venv, ensurepip; sys.exit(sys.version_info < (3, $2))" </dev/null >/dev/null 2>&1
}

# find_python MINOR CANDIDATE...: prints the first candidate that can_make_env accepts; status 1 if none.
find_python() {
    local minor=$1 candidate
    shift
    for candidate in "$@"; do
        if can_make_env "$candidate" "$minor"; then
            printf '%s\n' "$candidate"
            return 0
        fi
    done
    return 1
}

# make_env FOLDER REQUIREMENT PYTHON: a virtual environment in FOLDER, made with PYTHON unless it is there,
# with REQUIREMENT ('.' or '.[test]') installed in editable mode. Does nothing when that is already so and neither
# pyproject.toml nor what is compiled has changed since. Run it in the root of the repository.
make_env() {
    local folder=$1 requirement=$2 python=$3 started=$SECONDS
    local stamp="$folder/jpaged-installed" state output
    if ! "$folder/bin/python" -m pip --version </dev/null >/dev/null 2>&1; then
        echo "Making a virtual environment in $folder with $("$python" --version) ..."
        "$python" -m venv --clear "$folder"
    fi
    # The folder's own path is part of it: an environment that was copied or moved must be installed anew.
    state="in $PWD/$folder, made from $(cat pyproject.toml setup.py pallas_kernels/cpu/src/* | cksum)"
    if [[ -f $stamp ]] && grep -qxF -- "$requirement $state" "$stamp"; then
        return 0
    fi
    echo "Installing jpaged and what it needs into $folder (a minute or two the first time) ..."
    if ! output=$("$folder/bin/python" -m pip install --quiet --disable-pip-version-check --no-input --no-compile \
        --editable "$requirement" </dev/null 2>&1); then
        printf '%s\n' "$output" "error: the installation failed; pip's own words are above." \
            "Is this machine online?" >&2
        return 1
    fi
    # Whatever extra was installed, the plain package now is as well.
    printf '%s\n' ". $state" "$requirement $state" >"$stamp"
    echo "Installed in $((SECONDS - started)) s."
}

# need_python: prints a Python >= 3.11 that can make virtual environments, or says what is missing and fails.
need_python() {
    if find_python 11 python3 python3.13 python3.12 python3.11 python; then
        return 0
    fi
    echo "error: no Python 3.11 or newer with the venv and ensurepip modules was found" \
        "(tried python3, python3.13, python3.12, python3.11, python)." >&2
    echo "Install one; on Debian and Ubuntu: apt-get install python3 python3-venv" >&2
    return 1
}
