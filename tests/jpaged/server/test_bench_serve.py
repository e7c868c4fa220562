"""`jpaged bench serve` against the server process."""

from __future__ import annotations

import json
from urllib.parse import urlsplit

import pytest

from jpaged import cli


@pytest.mark.parametrize("rate", ["inf", "200"])
def test_the_numbers_of_a_run(server, tmp_path, capsys, rate):
    port = str(urlsplit(server.url).port)
    sizes = [
        "--num-prompts",
        "12",
        "--random-input-len",
        "20",
        "--random-output-len",
        "9",
        "--random-range-ratio",
        "0.2",
    ]
    report = ["--save-detailed", "--result-dir", str(tmp_path), "--result-filename", "r.json", "--disable-tqdm"]
    limits = ["--goodput", "ttft:60000", "--request-rate", rate, "--num-warmups", "1", "--max-concurrency", "8"]
    assert cli.main(["bench", "serve", "--port", port, *sizes, *report, *limits]) == 0
    found = json.loads((tmp_path / "r.json").read_text())
    assert found["completed"] == 12 and found["failed"] == 0 and found["model_id"] == "tiny"
    assert found["total_input_tokens"] == sum(found["input_lens"]) and len(found["ttfts"]) == 12
    assert all(16 <= length <= 24 for length in found["input_lens"])
    assert all(7 <= length <= 11 for length in found["output_lens"])
    assert found["request_goodput"] == found["request_throughput"] and found["max_concurrent_requests"] <= 8
    assert found["errors"] == [""] * 12 and found["mean_ttft_ms"] > 0
    assert "Output token throughput (tok/s):" in capsys.readouterr().out


def test_chat_with_prompts_of_a_file(server, tmp_path, capsys):
    file = tmp_path / "prompts.jsonl"
    file.write_text('{"prompt": "hello"}\n{"prompt": "you", "output_tokens": 3}\n')
    chat = [
        "--backend",
        "openai-chat",
        "--dataset-name",
        "custom",
        "--dataset-path",
        str(file),
        "--custom-output-len",
        "5",
    ]
    report = ["--save-result", "--result-dir", str(tmp_path), "--result-filename", "r.json", "--disable-tqdm"]
    assert cli.main(["bench", "serve", "--base-url", server.url, *chat, *report]) == 0
    found = json.loads((tmp_path / "r.json").read_text())
    assert found["total_output_tokens"] == 8 and found["num_prompts"] == 2
