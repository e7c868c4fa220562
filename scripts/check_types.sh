#!/usr/bin/env bash
# Type-checks the three packages. usage: bash scripts/check_types.sh [PYTHON with mypy]
set -euo pipefail
cd -- "$(dirname -- "${BASH_SOURCE[0]}")/.."
root=$PWD
python=${1:-.venv/bin/python}
[[ $python == */* && $python != /* ]] && python=$root/$python

# mypy must see models/ under the name it is installed as, so it is run in a folder of links so named.
links=$(mktemp -d)
trap 'rm -rf -- "$links"' EXIT
ln -s "$root/jpaged" "$root/pallas_kernels" "$links"
ln -s "$root/models" "$links/jpaged_models"
cd "$links"
"$python" -m mypy --config-file "$root/pyproject.toml" --cache-dir "$root/.mypy_cache" \
    -p jpaged -p jpaged_models -p pallas_kernels
