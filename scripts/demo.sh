#!/usr/bin/env bash
# From a fresh clone to a chat model answering eight prompts: makes .venv, installs the project into it,
# fetches SmolLM2-135M-Instruct once, and runs scripts/demo.py. Options go to demo.py (see --help).
set -euo pipefail
cd -- "$(dirname -- "${BASH_SOURCE[0]}")/.."
# shellcheck source=scripts/venv.sh
source scripts/venv.sh

python=$(need_python)
make_env .venv . "$python"
exec .venv/bin/python scripts/demo.py "$@"
