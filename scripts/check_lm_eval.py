"""lm-eval through `local-completions` against our server, and through transformers: the same numbers?

    python -m venv lm-eval && lm-eval/bin/pip install 'lm-eval[api,hf]'
    python scripts/check_lm_eval.py MODEL --lm-eval lm-eval/bin/lm_eval

Two small tasks of our own (`scripts/lm_eval_tasks`) need no network: log-likelihoods of several endings, and greedy
continuations. The server runs in float32, as transformers does. Compared are every log-likelihood, whether an ending
was the greedy one, every text, and the tasks' metrics.
"""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any

from bench_tools import make_parser, print_table, save_json

TASKS = Path(__file__).parent / "lm_eval_tasks"
NAMES = ("jpaged_choices", "jpaged_continuations")
MOST_APART = 1e-3  # natural logarithm of an ending's probability, in float32
Found = dict[str, tuple[dict[str, float], dict[int, list]]]  # task -> metrics, answers to each document


def main() -> None:
    parser = make_parser(__doc__)
    parser.add_argument("model", help="a Hugging Face folder")
    parser.add_argument("--lm-eval", required=True, metavar="COMMAND", help="the command lm_eval of its environment")
    args = parser.parse_args()
    model = str(Path(args.model).resolve())
    ours = through_server(args.lm_eval, model)
    theirs = run(args.lm_eval, "hf", f"pretrained={model},dtype=float32", "--device", "cpu")
    rows, problems = compare(ours, theirs)
    print_table(("task", "what", "jpaged", "transformers"), rows)
    save_json(args.json, rows)
    if problems:
        raise SystemExit("\n".join(problems))


def through_server(command: str, model: str) -> Found:
    serve = [sys.executable, "-m", "jpaged", "serve", model, "--port", "0", "--dtype", "float32"]
    server = subprocess.Popen([*serve, "--served-model-name", "model"], stdout=subprocess.PIPE, text=True)
    try:
        assert server.stdout is not None
        address = next(
            (found for line in server.stdout if (found := re.match(r"Serving .* at (http\S+) ", line))), None
        )
        if address is None:
            raise SystemExit("the server did not start")
        options = f"model=model,base_url={address[1]}/v1/completions,tokenizer_backend=huggingface,tokenizer={model}"
        return run(command, "local-completions", options + ",num_concurrent=8,add_bos_token=True,max_length=512")
    finally:
        server.terminate()
        server.wait()


def run(command: str, kind: str, options: str, *more: str) -> Found:
    """What lm-eval finds with a model of this kind."""
    with tempfile.TemporaryDirectory() as folder:
        # Files of a task are looked for where lm-eval is run; hubs are not to be asked.
        options_of_all = f"--include_path . --log_samples --output_path {folder} --tasks {' '.join(NAMES)}"
        begin = [os.path.abspath(command), "run", "--model", kind, "--model_args"]
        subprocess.run(
            [*begin, *options.split(","), *more, *options_of_all.split()],
            check=True,
            cwd=TASKS,
            env={**os.environ, "HF_HUB_OFFLINE": "1", "HF_DATASETS_CACHE": folder, "TOKENIZERS_PARALLELISM": "false"},
            stdout=subprocess.DEVNULL,
        )
        (results,) = Path(folder).rglob("results_*.json")
        metrics = json.loads(results.read_text(encoding="utf-8"))["results"]
        found: Found = {}
        for name in NAMES:
            (samples,) = Path(folder).rglob(f"samples_{name}_*.jsonl")
            lines = [json.loads(line) for line in samples.read_text(encoding="utf-8").splitlines()]
            numbers = {key: value for key, value in metrics[name].items() if isinstance(value, float)}
            found[name] = numbers, {line["doc_id"]: [_plain(each) for each in line["resps"]] for line in lines}
        return found


def _plain(answer: list) -> Any:
    """(log-likelihood, whether it is the greedy ending), or a text.

    Llama 2's tokenizer drops the space where a text begins, and with transformers lm-eval decodes a continuation alone:
    spaces at its ends are not compared.
    """
    first = answer[0]
    return first.strip() if isinstance(first, str) else (float(first[0]), str(first[1]) == "True")


def compare(ours: Found, theirs: Found) -> tuple[list[tuple], list[str]]:
    """(rows of a table, what differs)."""
    rows: list[tuple] = []
    problems = []
    for name in NAMES:
        (our_metrics, our_answers), (their_metrics, their_answers) = ours[name], theirs[name]
        rows += [(name, what, value, their_metrics.get(what)) for what, value in our_metrics.items()]
        if our_metrics != their_metrics:
            problems.append(f"{name}: {our_metrics} is not {their_metrics}")
        apart = 0.0
        for number, answers in our_answers.items():
            for mine, other in zip(answers, their_answers[number], strict=True):
                if isinstance(mine, str):
                    same = mine == other
                else:
                    apart = max(apart, abs(mine[0] - other[0]))
                    same = mine[1] == other[1] and apart <= MOST_APART
                if not same:
                    problems.append(f"{name}, document {number}: {mine!r} is not {other!r}")
        rows.append((name, "answers compared", sum(map(len, our_answers.values())), ""))
        if name == NAMES[0]:
            rows.append((name, "log-likelihoods, most apart", f"{apart:.1e}", ""))
    return rows, problems


if __name__ == "__main__":
    main()
